#pragma once
// Line charts as SVG text, and the one palette of all pages and plots: scales with round ticks, panels side
// by side, a fixed colour per method. Sizes are in the drawing's own units, about CSS pixels at full width.
// Pointing at a panel shows the values there, by <title> alone. Text and grid take their colours from the
// page's style (lab/predict/page.h), light or dark.

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace topknot {

// "#rrggbb" of a compressor by its name. One that is not listed has a colour chosen by its name.
std::string method_colour(std::string_view method);
// The colour of a part of a step: "data", "forward", "exposed communication", ... Throws Error for any other.
std::string part_colour(std::string_view part);

// WCAG 2.2's relative luminance of "#rrggbb", 0 to 1.
double luminance(const std::string& colour);

// The colour of text on an area of colour "#rrggbb".
const char* ink_on(const std::string& colour);

// Shapes of dots: circle, square, triangle, diamond, cross, and the first four open.
inline constexpr std::size_t kMarkers = 9;

// Colours of areas that must be told apart: the method's, and for more areas of one method lighter and darker ones.
std::vector<std::string> area_colours(const std::vector<std::string>& methods);

struct LineStyle {
  std::string colour;
  std::string dash;  // stroke-dasharray, "" for a whole line
  // The marker of the line's dots, if lines are told apart by them; the legend shows it.
  std::optional<std::size_t> marker = {};
};

// The meaning of a line: a method, and what tells the lines of one method apart, such as the merge plan.
struct PlannedMethod {
  std::string method, plan;
};
// The styles of the lines of one page: the method's colour, and if a method has several lines a dash for
// each. A plan has the same dash under all such methods where that is free.
std::vector<LineStyle> line_styles(const std::vector<PlannedMethod>& lines);

struct Point {
  double x = 0, y = 0;
};

struct Tick {
  double value = 0;
  std::string label;
};

enum class Unit { plain, percent, bytes };

// Maps values to positions; `logarithmic` needs lo > 0.
struct Scale {
  double lo = 0, hi = 1;
  bool logarithmic = false;
  double from = 0, to = 1;  // positions of lo and hi
  std::vector<Tick> ticks;
  std::string label;        // of an x axis: a second line after '\n'
  Unit unit = Unit::plain;  // of the values that pointing shows
  double operator()(double value) const;
};

// Round ticks at 1, 2, 2.5 or 5 times a power of ten, about `count` of them, inside [lo, hi].
std::vector<Tick> linear_ticks(double lo, double hi, int count, Unit unit);
// Powers of ten (every n-th if there are many), with 2 and 5 or 3 between if there are few.
std::vector<Tick> log_ticks(double lo, double hi, Unit unit);
std::string tick_text(double value, double step, Unit unit);

// The colour of text, on the page's background.
inline constexpr const char* kInk = "currentColor";

struct Line {
  std::vector<Point> points;
  std::string colour;
  double width = 2;
  double opacity = 1;
  std::string dash;                        // stroke-dasharray, "" for a whole line
  bool dots = false;                       // a dot at every point
  bool cross_at_end = false;               // where an incomplete run stopped
  std::string title;                       // its name when pointed at; "": not shown
  std::optional<std::size_t> marker = {};  // of kMarkers, the shape of its dots; none: a small circle
};

Line line_of(const LineStyle& style, const std::string& title);

struct Band {
  std::vector<Point> upper, lower;
  std::string colour;
};

// A filled rectangle of a map, with a short text in it.
struct Field {
  Point top_left, bottom_right;
  std::string colour, text;
  std::string title;  // when pointed at
};

struct Panel {
  Scale x, y;
  std::vector<Field> fields;
  std::vector<Band> bands;
  std::vector<Line> lines;
  std::vector<std::pair<Point, std::string>> marks;  // ringed points, with colour
  double reference = 0;                              // a dotted horizontal line at this value
  std::string reference_label;                       // "": none
};

// The panels for a page, each an <svg>: side by side, or below each other if the page is narrow. `id` is
// unique in the page.
std::string panel_figure(const std::vector<Panel>& panels, const std::string& id,
                         const std::string& description);

struct LegendEntry {
  std::string name;
  LineStyle style;
};
std::string swatch(const LineStyle& style);  // a piece of the line, as HTML
std::string legend_html(const std::vector<LegendEntry>& entries, const std::vector<std::string>& notes = {});

// A plot as an SVG file that stands by itself: a legend in as many lines as it needs, above a row of panels
// with one y axis (each panel's y scale must be the same).
std::string stand_alone_plot(const std::vector<Panel>& panels, const std::vector<LegendEntry>& legend,
                             const std::string& description);

// Text for HTML and SVG.
std::string escape(const std::string& text);
// At most `count` points: each the mean of a run of neighbours, so that a short peak leaves a trace.
std::vector<Point> thin_out(const std::vector<Point>& points, std::size_t count);
// Centred moving average of y over `window` points, narrower at the ends.
std::vector<Point> smooth(const std::vector<Point>& points, std::size_t window);

}  // namespace topknot

#include "lab/predict/chart.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <set>

#include "nn/base/check.h"
#include "nn/base/text.h"

namespace topknot {
namespace {

struct Named {
  std::string_view name;
  const char* colour;
};

// The colours of all pages and plots. Every method's colour has a contrast of 3 or more on a white and on a
// dark page, and the first ones differ for colour-blind readers too. Those without a name are for methods
// that are not listed, chosen by their names.
constexpr Named kMethods[] = {
    {"dense", "#7d848b"},
    {"topk", "#0072b2"},
    {"gaussiank", "#d55e00"},
    {"dgc", "#009e73"},
    {"regtopk", "#c80080"},
    {"powersgd", "#8830f8"},
    {"randk", "#a09800"},
    {"mstopk", "#00a0c8"},
    {"sidco", "#a858c0"},
    {"redsync", "#607000"},
    {"gaussiank_calibrated", "#985850"},
    {"trimmed_topk", "#8888f8"},
    {"threshold", "#c08870"},
    {"gradient_dropping", "#007870"},
    {"lags", "#f060a8"},
    {"acpsgd", "#786090"},
    {"signsgd", "#d01800"},
    {"qsgd", "#f80058"},
    {"terngrad", "#009800"},
    {"sparseloco", "#4890c0"},
    {"chunk_topk", "#489048"},
    {"demo", "#d818c0"},
    {"PyTorch DDP", "#b07000"},
    {"PyTorch DDP fp16", "#d85878"},
    {"PyTorch DDP PowerSGD", "#b068d8"},
    {"", "#1870f8"},
    {"", "#c06080"},
    {"", "#a888c0"},
    {"", "#f800f8"},
};
constexpr Named kParts[] = {
    {"data", "#bbbbbb"},
    {"forward", "#4477aa"},
    {"backward", "#9ad2ee"},
    {"encode", "#228833"},
    {"exposed communication", "#ee6677"},
    {"decode", "#aa3377"},
    {"update", "#ddcc55"},
    {"other", "#e4e4e4"},
};

constexpr const char* kDashes[] = {"", "8 4", "2 3", "10 3 2 3", "16 4", "5 2 1 2 1 2"};

// The same hue, darker in odd rounds and lighter in even ones: for more lines of one method than there are
// dashes.
std::string shade(const std::string& colour, std::size_t round) {
  if (round == 0) return colour;
  std::string result = "#";
  for (const std::size_t at : {1u, 3u, 5u}) {
    const int value = std::stoi(colour.substr(at, 2), nullptr, 16);
    const int keep = 20 - 5 * static_cast<int>(std::min<std::size_t>((round + 1) / 2, 3));  // of 20
    result += fmt::format("{:02x}", value * keep / 20 + (round % 2 == 1 ? 0 : 255 * (20 - keep) / 20));
  }
  return result;
}

constexpr double kRowWidth = 1140, kRowHeight = 292;
constexpr double kLeft = 78, kRight = 20, kTop = 12, kBottom = 50, kGap = 26;

// A page's panel by itself. If it is alone in its figure it is wider.
constexpr double kPanelWidth = 380, kLonePanelWidth = 480, kPanelLeft = 76, kPanelRight = 12;
constexpr double kNoteLine = 16;  // a second line below the x axis

// A plot that stands by itself: the legend's height with one line, and a further line's.
constexpr int kLegendHeight = 34, kLegendLine = 20;

constexpr int kStrips = 32;  // places along x where pointing shows values

// The classes that a panel uses, as a page has them.
constexpr const char* kPlotStyle =
    "<style>svg{fill:#3b434a;color:#1c2126;font-family:system-ui,sans-serif}text{font-size:12.5px}"
    ".label{font-size:13px;fill:#1c2126}.note{font-size:12px;fill:#59626b}.paper{fill:#fff}"
    ".grid{stroke:#e4e7ea;stroke-width:1}.axis{stroke:#59626b;stroke-width:1}"
    ".reference{stroke:#1c2126;stroke-width:1;stroke-dasharray:1.5 3}"
    ".strip{fill:currentColor;fill-opacity:0}.strip:hover{fill-opacity:.08}"
    "@media(prefers-color-scheme:dark){svg{fill:#c3cad1;color:#e8ebee}.label{fill:#e8ebee}.note{fill:#a3adb6}"
    ".paper{fill:#14181c}.grid{stroke:#2c343b}.axis{stroke:#a3adb6}.reference{stroke:#e8ebee}}</style>";

// With one decimal, none if that is 0.
std::string num(double value) {
  std::string text = fmt::format("{:.1f}", value);
  if (text.ends_with(".0")) text.resize(text.size() - 2);
  return text == "-0" ? "0" : text;
}

double round_step(double range, int count) {
  const double rough = range / std::max(1, count);
  const double power = std::pow(10.0, std::floor(std::log10(rough)));
  for (const double nice : {1.0, 2.0, 2.5, 5.0})
    if (rough <= nice * power * 1.0001) return nice * power;
  return 10 * power;
}

std::string text_at(double x, double y, const std::string& anchor, const std::string& text,
                    const std::string& more = "") {
  return fmt::format(R"(<text x="{}" y="{}" text-anchor="{}"{}>{}</text>)", num(x), num(y), anchor, more,
                     escape(text));
}

std::string segment(double x1, double y1, double x2, double y2, const char* cls) {
  return fmt::format(R"(<line x1="{}" y1="{}" x2="{}" y2="{}" class="{}"/>)", num(x1), num(y1), num(x2),
                     num(y2), cls);
}

std::string path_of(const Panel& panel, const std::vector<Point>& points, bool start = true) {
  std::string path;
  bool pen_down = !start;
  for (const Point& p : points) {
    if (!std::isfinite(p.x) || !std::isfinite(p.y)) {
      pen_down = false;  // a gap, such as a step that was not finite
      continue;
    }
    path += fmt::format("{}{} {}", pen_down ? "L" : "M", num(panel.x(p.x)), num(panel.y(p.y)));
    pen_down = true;
  }
  return path;
}

// A dot that is large enough for its shape to be seen.
std::string marker_at(double x, double y, std::size_t marker, const std::string& colour) {
  constexpr const char* kPaths[] = {"m-4.2 0a4.2 4.2 0 1 0 8.4 0a4.2 4.2 0 1 0 -8.4 0z",
                                    "m-3.8 -3.8h7.6v7.6h-7.6z", "m0 -5l4.8 8.4h-9.6z",
                                    "m0 -5.4l4.6 5.4l-4.6 5.4l-4.6 -5.4z", "m-4 -4l8 8m0 -8l-8 8"};
  constexpr std::size_t kCross = std::size(kPaths) - 1;
  const char* path = kPaths[marker <= kCross ? marker : marker - std::size(kPaths)];
  const std::string fill = marker < kCross    ? "fill=\"" + colour + "\""
                           : marker == kCross ? "fill=\"none\""
                                              : "class=\"paper\"";
  return fmt::format(R"(<path {} stroke="{}" stroke-width="{}" d="M{} {}{}"/>)", fill, colour,
                     marker < kCross ? "0" : "1.8", num(x), num(y), path);
}

std::string draw_line(const Panel& panel, const Line& line) {
  if (line.points.empty()) return "";
  std::string svg = fmt::format(R"(<g stroke="{}" stroke-width="{}"{}>)", line.colour, num(line.width),
                                line.opacity < 1 ? fmt::format(R"( opacity="{}")", num(line.opacity)) : "");
  svg += fmt::format(R"(<path fill="none" stroke-linejoin="round"{} d="{}"/>)",
                     line.dash.empty() ? "" : fmt::format(R"( stroke-dasharray="{}")", line.dash),
                     path_of(panel, line.points));
  // One point alone makes no line.
  if (line.dots || line.points.size() == 1)
    for (const Point& p : line.points)
      if (std::isfinite(p.x) && std::isfinite(p.y))
        svg += line.marker ? marker_at(panel.x(p.x), panel.y(p.y), *line.marker, line.colour)
                           : fmt::format(R"(<circle cx="{}" cy="{}" r="2.6" fill="{}" stroke="none"/>)",
                                         num(panel.x(p.x)), num(panel.y(p.y)), line.colour);
  if (line.cross_at_end) {
    const double x = panel.x(line.points.back().x), y = panel.y(line.points.back().y);
    svg += fmt::format(R"(<path d="M{0} {1}L{2} {3}M{0} {3}L{2} {1}"/>)", num(x - 4), num(y - 4), num(x + 4),
                       num(y + 4));
  }
  return svg + "</g>";
}

std::string draw_field(const Panel& panel, const Field& field) {
  const double left = panel.x(field.top_left.x), right = panel.x(field.bottom_right.x);
  const double top = panel.y(field.top_left.y), bottom = panel.y(field.bottom_right.y);
  return fmt::format(R"(<g><title>{}</title><rect x="{}" y="{}" width="{}" height="{}" fill="{}"/>)",
                     escape(field.title), num(left), num(top), num(right - left), num(bottom - top),
                     field.colour) +
         text_at((left + right) / 2, (top + bottom) / 2 + 4, "middle", field.text,
                 fmt::format(R"( style="fill:{};font-size:11px")", ink_on(field.colour))) +
         "</g>";
}

std::string value_text(double value, Unit unit) {
  if (unit == Unit::bytes) return tick_text(value, 1, unit);
  return unit == Unit::percent ? fmt::format("{:.4g} %", 100 * value) : fmt::format("{:.4g}", value);
}

// Invisible strips from left to right, whose titles are the lines' nearest values.
std::string value_strips(const Panel& panel) {
  std::string svg;
  const double width = (panel.x.to - panel.x.from) / kStrips;
  const std::string axis = panel.x.label.substr(0, panel.x.label.find('\n'));
  for (int i = 0; i < kStrips; ++i) {
    const double left = panel.x.from + i * width;
    std::string text;
    for (const Line& line : panel.lines) {
      const Point* nearest = nullptr;
      const auto distance = [&](const Point& p) { return std::fabs(panel.x(p.x) - left - width / 2); };
      for (const Point& p : line.points)
        if (std::isfinite(p.x) && std::isfinite(100 * p.y) && (!nearest || distance(p) < distance(*nearest)))
          nearest = &p;
      if (nearest && !line.title.empty())
        text += fmt::format("\n{}: {} at {}", line.title, value_text(nearest->y, panel.y.unit),
                            value_text(nearest->x, panel.x.unit));
    }
    if (!text.empty())
      svg += fmt::format(
          R"(<rect class="strip" x="{}" y="{}" width="{}" height="{}"><title>{}</title></rect>)", num(left),
          num(panel.y.to), num(width), num(panel.y.from - panel.y.to), escape(axis + text));
  }
  return svg;
}

// `labels`: those of the y axis, too.
std::string draw_panel(const Panel& panel, const std::string& clip, bool labels) {
  const double left = panel.x.from, right = panel.x.to, bottom = panel.y.from, top = panel.y.to;
  std::string svg =
      fmt::format(R"(<clipPath id="{}"><rect x="{}" y="{}" width="{}" height="{}"/></clipPath>)", clip,
                  num(left), num(top - 5), num(right - left + 5), num(bottom - top + 6));
  for (const Tick& tick : panel.y.ticks) {
    const double y = panel.y(tick.value);
    svg += segment(left, y, right, y, "grid");
    if (labels) svg += text_at(left - 8, y + 4, "end", tick.label);
  }
  for (const Tick& tick : panel.x.ticks) {
    const double x = panel.x(tick.value);
    svg += segment(x, bottom, x, bottom + 4, "axis") + text_at(x, bottom + 18, "middle", tick.label);
  }
  svg += segment(left, bottom, right, bottom, "axis");
  const auto second = panel.x.label.find('\n');
  svg +=
      text_at((left + right) / 2, bottom + 38, "middle", panel.x.label.substr(0, second), " class=\"label\"");
  if (second != std::string::npos)
    svg += text_at((left + right) / 2, bottom + 38 + kNoteLine, "middle", panel.x.label.substr(second + 1),
                   " class=\"note\"");
  svg += fmt::format("<g clip-path=\"url(#{})\">", clip);
  for (const Field& field : panel.fields) svg += draw_field(panel, field);
  for (const Band& band : panel.bands) {
    std::vector<Point> back(band.lower.rbegin(), band.lower.rend());
    svg += fmt::format(R"(<path fill="{}" opacity="0.18" d="{}{}Z"/>)", band.colour,
                       path_of(panel, band.upper), path_of(panel, back, false));
  }
  for (const Line& line : panel.lines) svg += draw_line(panel, line);
  for (const auto& [point, colour] : panel.marks)
    svg += fmt::format(R"(<circle class="paper" cx="{}" cy="{}" r="5.5" stroke="{}" stroke-width="2.2"/>)",
                       num(panel.x(point.x)), num(panel.y(point.y)), colour);
  svg += "</g>";
  if (!panel.reference_label.empty()) {
    const double y = panel.y(panel.reference);
    svg += segment(left, y, right, y, "reference");
    // On the side of it where fewer lines end.
    const auto under = std::ranges::count_if(panel.lines, [&](const Line& line) {
      return !line.points.empty() && panel.y(line.points.back().y) > y;
    });
    const double beside = 2 * under > std::ssize(panel.lines) ? y - 3 : y + 14;
    if (labels) svg += text_at(right - 3, beside, "end", panel.reference_label, " class=\"note\"");
  }
  if (labels) {
    const double middle = (top + bottom) / 2;
    svg += text_at(11, middle, "middle", panel.y.label,
                   fmt::format(R"x( class="label" transform="rotate(-90 11 {})")x", num(middle)));
  }
  return svg + value_strips(panel);
}

double note_room(const std::vector<Panel>& panels) {
  const bool noted = std::any_of(panels.begin(), panels.end(), [](const Panel& panel) {
    return panel.x.label.find('\n') != std::string::npos;
  });
  return noted ? kNoteLine : 0;
}

void place(Panel& panel, double left, double right) {
  panel.x.from = left;
  panel.x.to = right;
  panel.y.from = kRowHeight - kBottom;
  panel.y.to = kTop;
}

}  // namespace

std::string method_colour(std::string_view method) {
  std::vector<const char*> others;
  for (const Named& known : kMethods) {
    if (!method.empty() && known.name == method) return known.colour;
    if (known.name.empty()) others.push_back(known.colour);
  }
  std::uint32_t hash = 2166136261u;  // FNV-1a
  for (const char c : method) hash = (hash ^ static_cast<unsigned char>(c)) * 16777619u;
  return others[hash % others.size()];
}

std::vector<std::string> area_colours(const std::vector<std::string>& methods) {
  constexpr std::size_t kRounds[] = {0, 4, 3, 6, 5, 2, 1};  // the most different first
  std::map<std::string, std::size_t> used;
  std::vector<std::string> colours;
  for (const std::string& method : methods)
    colours.push_back(shade(method_colour(method), kRounds[used[method]++ % std::size(kRounds)]));
  return colours;
}

std::string part_colour(std::string_view part) {
  const auto* const found = std::find_if(std::begin(kParts), std::end(kParts),
                                         [&](const Named& known) { return known.name == part; });
  TOPKNOT_CHECK(found != std::end(kParts), "no colour for this part of a step");
  return found->colour;
}

double luminance(const std::string& colour) {
  double result = 0;
  const double weights[] = {0.2126, 0.7152, 0.0722};
  for (std::size_t i = 0; i < 3; ++i) {
    const double value = std::stoi(colour.substr(1 + 2 * i, 2), nullptr, 16) / 255.0;
    result += weights[i] * (value <= 0.04045 ? value / 12.92 : std::pow((value + 0.055) / 1.055, 2.4));
  }
  return result;
}

const char* ink_on(const std::string& colour) {
  return luminance(colour) > 0.18 ? "#111111" : "#ffffff";
}

std::vector<LineStyle> line_styles(const std::vector<PlannedMethod>& lines) {
  std::map<std::string, int> count;  // lines by colour
  for (const auto& line : lines) ++count[method_colour(line.method)];
  std::vector<std::string> plans;
  std::map<std::string, std::set<std::size_t>> used;
  std::vector<LineStyle> styles;
  for (const auto& line : lines) {
    const std::string colour = method_colour(line.method);
    std::size_t place = 0;
    if (count[colour] > 1) {
      place = static_cast<std::size_t>(std::find(plans.begin(), plans.end(), line.plan) - plans.begin());
      if (place == plans.size()) plans.push_back(line.plan);
      while (!used[colour].insert(place).second) ++place;
    }
    const std::size_t dashes = std::size(kDashes);
    styles.push_back({shade(colour, place / dashes), kDashes[place % dashes], {}});
  }
  return styles;
}

Line line_of(const LineStyle& style, const std::string& title) {
  Line line;
  line.colour = style.colour;
  line.dash = style.dash;
  line.title = title;
  line.marker = style.marker;
  return line;
}

double Scale::operator()(double value) const {
  const auto raw = [&](double v) { return logarithmic ? std::log10(std::max(v, lo * 1e-3)) : v; };
  const double range = raw(hi) - raw(lo);
  const double share = range > 0 ? (raw(value) - raw(lo)) / range : 0.5;
  // Far outside of the panel is far enough, and no coordinate is infinite or not a number.
  constexpr double kFar = 100;
  return from + (to - from) * (std::isnan(share) ? 0.5 : std::clamp(share, -kFar, kFar));
}

std::string tick_text(double value, double step, Unit unit) {
  if (unit == Unit::bytes) {
    const char* units[] = {"B", "kB", "MB", "GB", "TB", "PB"};
    int power = 0;
    while (std::fabs(value) >= 999.5 && power < 5) value /= 1000, ++power;
    return fmt::format("{:.4g} {}", value, units[power]);
  }
  if (unit == Unit::percent) value *= 100, step *= 100;
  const char* sign = unit == Unit::percent ? " %" : "";
  if (step >= 1 && std::fabs(value) >= 10000)
    return fmt::format("{:.{}f}k{}", value / 1000, std::fmod(step, 1000) < 0.5 ? 0 : 1, sign);
  // The step's decimals: 2.5 has one more than 2.
  int decimals = 0;
  for (double s = step; decimals < 9 && std::fabs(s - std::round(s)) > 1e-6 * s; s *= 10) ++decimals;
  return fmt::format("{:.{}f}{}", value, decimals, sign);
}

std::vector<Tick> linear_ticks(double lo, double hi, int count, Unit unit) {
  std::vector<Tick> ticks;
  if (!(hi > lo)) return {{lo, tick_text(lo, 1, unit)}};
  const double step = round_step(hi - lo, count);
  if (!std::isfinite(step)) return ticks;
  const double first = std::ceil(lo / step - 1e-9);
  // Counted: if the ends are equal but for their last digits, `first + i` may be `first`.
  for (int i = 0; i <= 2 * count + 2; ++i) {
    const double value = (first + i) * step + 0.0;  // + 0.0: no "-0"
    if (!(value <= hi + 1e-9 * step)) break;
    ticks.push_back({value, tick_text(value, step, unit)});
  }
  return ticks;
}

std::vector<Tick> log_ticks(double lo, double hi, Unit unit) {
  std::vector<Tick> ticks;
  if (!(lo > 0 && hi >= lo && std::isfinite(hi))) return ticks;
  const int first = static_cast<int>(std::floor(std::log10(lo))),
            last = static_cast<int>(std::ceil(std::log10(hi)));
  const int stride = std::max(1, (last - first + 5) / 6);
  const std::vector<double> between = last - first <= 2   ? std::vector<double>{1, 2, 5}
                                      : last - first <= 3 ? std::vector<double>{1, 3}
                                                          : std::vector<double>{1};
  for (int e = first; e <= last; e += stride)
    for (const double factor : between) {
      const double value = factor * std::pow(10.0, e);
      if (value >= lo * 0.999 && value <= hi * 1.001)
        ticks.push_back({value, unit == Unit::bytes ? tick_text(value, 1, unit) : short_text(value)});
    }
  return ticks;
}

std::string panel_figure(const std::vector<Panel>& panels, const std::string& id,
                         const std::string& description) {
  const bool alone = panels.size() == 1;
  const double width = alone ? kLonePanelWidth : kPanelWidth;
  std::string html = fmt::format(R"(<div class="panels{}">)", alone ? " lone" : "");
  for (std::size_t i = 0; i < panels.size(); ++i) {
    Panel panel = panels[i];
    place(panel, kPanelLeft, width - kPanelRight);
    html += fmt::format(R"(<svg viewBox="0 0 {} {}" role="img" aria-label="{}">{}</svg>)", num(width),
                        num(kRowHeight + note_room(panels)),
                        escape(description + ", by " + panel.x.label.substr(0, panel.x.label.find('\n'))),
                        draw_panel(panel, id + std::to_string(i), true));
  }
  return html + "</div>";
}

std::string swatch(const LineStyle& style) {
  return fmt::format(
      R"(<svg class="swatch" viewBox="0 0 28 8" overflow="visible" aria-hidden="true"><path stroke="{}" stroke-width="3"{} d="M0 4h28"/>{}</svg>)",
      style.colour, style.dash.empty() ? "" : fmt::format(R"( stroke-dasharray="{}")", style.dash),
      style.marker ? marker_at(14, 4, *style.marker, style.colour) : "");
}

std::string legend_html(const std::vector<LegendEntry>& entries, const std::vector<std::string>& notes) {
  std::string html = R"(<div class="legend">)";
  for (const auto& [name, style] : entries) html += "<span>" + swatch(style) + escape(name) + "</span>";
  for (const auto& note : notes) html += "<span>" + escape(note) + "</span>";
  return html + "</div>";
}

std::string stand_alone_plot(const std::vector<Panel>& panels, const std::vector<LegendEntry>& legend,
                             const std::string& description) {
  std::string entries;
  const int left = static_cast<int>(kLeft), right = static_cast<int>(kRowWidth);
  double x = left;
  int y = 18;
  for (const auto& [name, style] : legend) {
    const double length = 31 + 7.2 * static_cast<double>(name.size());
    if (x > left && x + length > right) x = left, y += kLegendLine;
    entries += fmt::format(
        R"(<path stroke="{}" stroke-width="3"{} d="M{} {}h24"/><text x="{}" y="{}">{}</text>)", style.colour,
        style.dash.empty() ? "" : fmt::format(R"( stroke-dasharray="{}")", style.dash), static_cast<int>(x),
        y, static_cast<int>(x + 31), y + 4, escape(name));
    if (style.marker) entries += marker_at(x + 12, y, *style.marker, style.colour);
    x += length + 24;
  }
  const int top = kLegendHeight + y - 18, height = static_cast<int>(kRowHeight + note_room(panels)) + top;
  std::string svg = fmt::format(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {0} {1}\" width=\"{0}\" height=\"{1}\" "
      "role=\"img\" "
      "aria-label=\"{2}\">{3}<rect class=\"paper\" width=\"{0}\" height=\"{1}\"/>\n{4}\n<g "
      "transform=\"translate(0 "
      "{5})\">",
      right, height, escape(description), kPlotStyle, entries, top);
  const double count = static_cast<double>(panels.size());
  const double width = (kRowWidth - kLeft - kRight - kGap * (count - 1)) / count;
  for (std::size_t i = 0; i < panels.size(); ++i) {
    Panel panel = panels[i];
    const double from = kLeft + static_cast<double>(i) * (width + kGap);
    place(panel, from, from + width);
    svg += draw_panel(panel, "panel" + std::to_string(i), i == 0);
  }
  return svg + "</g></svg>\n";
}

std::string escape(const std::string& text) {
  std::string result;
  for (const char c : printable(text, std::string::npos)) switch (c) {
      case '&':
        result += "&amp;";
        break;
      case '<':
        result += "&lt;";
        break;
      case '>':
        result += "&gt;";
        break;
      case '"':
        result += "&quot;";
        break;
      default:
        result += c;
    }
  return result;
}

std::vector<Point> thin_out(const std::vector<Point>& points, std::size_t count) {
  if (points.size() <= count || count == 0) return points;
  std::vector<Point> result;
  for (std::size_t bin = 0; bin < count; ++bin) {
    const std::size_t begin = bin * points.size() / count, end = (bin + 1) * points.size() / count;
    Point mean;
    double used = 0;
    for (std::size_t i = begin; i < end; ++i)
      if (std::isfinite(points[i].y)) mean.x += points[i].x, mean.y += points[i].y, ++used;
    if (used > 0) result.push_back({mean.x / used, mean.y / used});
  }
  // The ends stay where they are, or a curve would stop short of its axis.
  if (!result.empty() && std::isfinite(points.back().y)) result.push_back(points.back());
  return result;
}

std::vector<Point> smooth(const std::vector<Point>& points, std::size_t window) {
  std::vector<Point> result = points;
  const std::size_t half = window / 2;
  for (std::size_t i = 0; i < points.size(); ++i) {
    const std::size_t begin = i - std::min(half, i), end = std::min(i + half + 1, points.size());
    double sum = 0, used = 0;
    for (std::size_t j = begin; j < end; ++j)
      if (std::isfinite(points[j].y)) sum += points[j].y, ++used;
    result[i].y = used > 0 ? sum / used : points[i].y;
  }
  return result;
}

}  // namespace topknot

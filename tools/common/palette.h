#pragma once
// The one palette of all pages and plots: a fixed colour per method, whatever it stands beside.

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace topknot {

// "#rrggbb" of a compressor by its name. One that is not listed in palette.cpp has a colour chosen by its name.
std::string method_colour(std::string_view method);
// Of a part of a step: "data", "forward", "exposed communication", ... Throws Error for any other.
std::string part_colour(std::string_view part);

// WCAG 2.2's relative luminance of "#rrggbb", 0 to 1.
double luminance(const std::string& colour);

// Shapes of dots: circle, square, triangle, diamond, cross, and the first four open.
inline constexpr std::size_t kMarkers = 9;

struct LineStyle {
  std::string colour;
  std::string dash;  // stroke-dasharray, "" for a whole line
  // Where lines are told apart by their dots, by which a single point is known: the legend shows it.
  std::optional<std::size_t> marker = {};
};

// What a line stands for: a method, and what tells the lines of one method apart, such as the merge plan.
struct PlannedMethod {
  std::string method, plan;
};
// The styles of the lines of one page: the method's colour, and where a method has several lines a dash for each. A plan
// has the same dash under all such methods where that is free.
std::vector<LineStyle> line_styles(const std::vector<PlannedMethod>& lines);

}  // namespace topknot

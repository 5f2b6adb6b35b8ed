#include "tools/common/palette.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <set>

#include "nn/base/check.h"

namespace topknot {
namespace {

struct Named {
  std::string_view name;
  const char* colour;
};

// The colours of all pages and plots. Every method's colour has a contrast of 3 or more on a white and on a dark page, and
// the first ones differ for colour-blind readers too. Those without a name are for methods that are not listed, chosen by
// their names.
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

// The same hue, darker in odd rounds and lighter in even ones: for more lines of one method than there are dashes.
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

}  // namespace topknot

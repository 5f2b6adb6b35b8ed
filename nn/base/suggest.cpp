#include "nn/base/suggest.h"

#include <algorithm>
#include <cctype>

namespace topknot {
namespace {

// Damerau-Levenshtein distance, restricted to adjacent swaps.
std::size_t edit_distance(const std::string& a, const std::string& b) {
  std::vector<std::vector<std::size_t>> d(a.size() + 1, std::vector<std::size_t>(b.size() + 1));
  for (std::size_t i = 0; i <= a.size(); ++i) d[i][0] = i;
  for (std::size_t j = 0; j <= b.size(); ++j) d[0][j] = j;
  for (std::size_t i = 1; i <= a.size(); ++i)
    for (std::size_t j = 1; j <= b.size(); ++j) {
      d[i][j] = std::min({d[i - 1][j] + 1, d[i][j - 1] + 1, d[i - 1][j - 1] + (a[i - 1] != b[j - 1])});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1])
        d[i][j] = std::min(d[i][j], d[i - 2][j - 2] + 1);
    }
  return d[a.size()][b.size()];
}

std::string lower(std::string text) {
  for (char& c : text) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  return text;
}

// "resnet" of "resnet20": names that differ in a number alone are one family.
std::string family(const std::string& name) {
  return lower(name.substr(0, name.find_last_not_of("0123456789") + 1));
}

// The known names that begin with `name`, or else that are of its family, shortest first; at most kMost of them.
std::vector<std::string> relatives(const std::string& name, const std::vector<std::string>& known) {
  constexpr std::size_t kLeastLetters = 2, kMost = 8;
  const std::string start = lower(name), kin = family(name);
  std::vector<std::string> begin, same;
  for (const auto& candidate : known) {
    if (start.size() >= kLeastLetters && lower(candidate).rfind(start, 0) == 0) begin.push_back(candidate);
    if (kin.size() >= kLeastLetters && kin.size() < candidate.size() && family(candidate) == kin)
      same.push_back(candidate);
  }
  std::vector<std::string>& found = begin.empty() ? same : begin;
  std::stable_sort(found.begin(), found.end(),
                   [](const auto& a, const auto& b) { return a.size() < b.size(); });
  found.resize(std::min(found.size(), kMost));
  return found;
}

}  // namespace

std::string nearest_name(const std::string& name, const std::vector<std::string>& known) {
  if (const auto found = relatives(name, known); !found.empty()) return found.front();
  std::size_t best = std::max<std::size_t>(2, name.size() / 3) + 1;
  std::string nearest;
  for (const auto& candidate : known) {
    // At least as many edits; a name of a million letters is compared with nothing.
    const auto [less, more] = std::minmax({name.size(), candidate.size()});
    if (more - less >= best) continue;
    if (const auto distance = edit_distance(name, candidate); distance < best) {
      best = distance;
      nearest = candidate;
    }
  }
  return nearest;
}

std::string unknown_name_message(const std::string& kind, const std::string& name,
                                 const std::vector<std::string>& known) {
  std::string text = "unknown " + kind + " '" + name + "'";
  std::vector<std::string> meant = relatives(name, known);
  if (const std::string nearest = nearest_name(name, known); meant.empty() && !nearest.empty())
    meant = {nearest};
  for (std::size_t i = 0; i < meant.size(); ++i)
    text += (i == 0 ? "; did you mean '" : i + 1 == meant.size() ? "' or '" : "', '") + meant[i];
  text += meant.empty() ? "; known: " : "'? known: ";
  for (std::size_t i = 0; i < known.size(); ++i) text += (i ? ", " : "") + known[i];
  return text;
}

}  // namespace topknot

#include "nn/core/base/suggest.h"

#include <algorithm>

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

}  // namespace

std::string nearest_name(const std::string& name, const std::vector<std::string>& known) {
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
  const std::string nearest = nearest_name(name, known);
  text += nearest.empty() ? "; known: " : "; did you mean '" + nearest + "'? known: ";
  for (std::size_t i = 0; i < known.size(); ++i) text += (i ? ", " : "") + known[i];
  return text;
}

}  // namespace topknot

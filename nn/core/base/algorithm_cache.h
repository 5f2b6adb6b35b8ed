#pragma once
// Algorithms that were chosen by timing, kept in a text file, so that later processes choose the same ones without timing.
// A line per choice, "KEY = NUMBER...;", appended by one write, so that processes can share the file. Of two lines with one
// key the first counts. All else in the file is passed over, lines that were cut off too. The file may be
// deleted at any time.

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace topknot {

class AlgorithmCache {
 public:
  using Numbers = std::vector<std::int64_t>;

  AlgorithmCache() = default;  // keeps nothing
  // Reads the file; none there: empty. Where it cannot be read: a warning, and nothing is kept.
  explicit AlgorithmCache(std::string file);

  // What was kept first for this key.
  std::optional<Numbers> find(const std::string& key) const;
  // Appends to the file, whose folder it makes; nothing where the key was kept before. A key is one line of text without
  // " = ". Where it cannot be written: a warning, once.
  void keep(const std::string& key, const Numbers& choice);

 private:
  void give_up(const std::string& why);

  std::string file_;  // "": nothing is written
  std::map<std::string, Numbers> choices_;
};

// The folder of a setting: "auto": $XDG_CACHE_HOME/topknot, or $HOME/.cache/topknot, or "" where neither is an absolute
// path; "none": ""; else the setting itself.
std::string algorithm_cache_folder(const std::string& setting);

}  // namespace topknot

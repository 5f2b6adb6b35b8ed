#pragma once
// Algorithms that were chosen by timing, kept in a text file, so that later processes choose the same ones
// without timing. A line per choice, "KEY = CHOICE;", appended by one write, so that processes of one host
// can share the file; over NFS lines may be lost. Of two lines with one key the first counts, until the file
// is deleted, which is allowed at any time. All else in the file is passed over, lines that were cut off too.

#include <map>
#include <optional>
#include <string>

namespace topknot {

class AlgorithmCache {
 public:
  AlgorithmCache() = default;  // keeps nothing
  // Reads the file; none there: empty. If it cannot be read: a line in the log, and nothing is kept.
  explicit AlgorithmCache(std::string file);

  // The choice that was kept first for this key. Reads the file again if none is known.
  std::optional<std::string> find(const std::string& key);
  // Appends to the file, whose folder it makes; nothing if the key was kept before. A key and a choice are
  // lines of text without " = ", a choice without ';' too. Where the file cannot be written: a line in the
  // log, once. A file of 16 MiB is full, and stays as it is.
  void keep(const std::string& key, const std::string& choice);

 private:
  void read();
  void give_up(const std::string& why);

  std::string file_;  // "": nothing is written
  std::map<std::string, std::string> choices_;
};

// The folder of a setting: "auto": $XDG_CACHE_HOME/topknot, or $HOME/.cache/topknot, or "" if neither is an
// absolute path; "none": ""; else the setting itself.
std::string algorithm_cache_folder(const std::string& setting);

}  // namespace topknot

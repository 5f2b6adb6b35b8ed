#pragma once
// config.yaml of a run directory as keys and texts, for programs that show and compare configurations:
// without the table of keys, so that files of other versions can be read.

#include <string>
#include <utility>
#include <vector>

namespace topknot {

class RunConfig {
 public:
  struct Entry {
    std::string key;    // "optimizer.lr"
    std::string text;   // the value as the file has it: 0.1, [1, 2], "", none
    bool given = true;  // false: the default value. A run marks the others by a comment with their origin
  };

  RunConfig() = default;
  // Throws UserError with path and line: no such file, or a line that is not as a run writes it.
  explicit RunConfig(const std::string& path);
  // Takes keys that are known already; messages name `path` as their source.
  RunConfig(std::string path, std::vector<Entry> entries)
      : path_(std::move(path)), entries_(std::move(entries)) {}

  const std::vector<Entry>& entries() const { return entries_; }  // in the file's order
  const Entry* find(const std::string& key) const;                // null if the file does not have it
  // A value without its quotes; "" if the file does not have the key.
  std::string text(const std::string& key) const;
  // Throw UserError with the path and the key: absent, or no such number.
  double number(const std::string& key) const;
  std::vector<double> numbers(const std::string& key) const;  // of a list [1, 2]

 private:
  std::string path_;
  std::vector<Entry> entries_;
};

}  // namespace topknot

#pragma once
// Configuration values to and from text: what the parser, the dump and the help share.

#include <optional>
#include <string>
#include <vector>

#include "nn/base/text.h"
#include "train/config/config.h"

namespace topknot {

// A value as it was written, in a YAML file or on the command line.
struct RawValue {
  bool list = false;
  std::vector<std::string> items;  // one where it is no list
  std::string shown() const;       // 3, [1, 2]
};

// "3" or "[1,2]" or, for a list key, "1,2". nullopt where a bracket is missing.
std::optional<RawValue> parse_raw(const std::string& text, bool list_key);

inline constexpr const char* kEmptyText = "\"\"";  // key_value() of a text that is empty

bool is_list(const Key& key);

// "optimizer" of "optimizer.lr"; "" of "seed".
inline std::string section_of(const std::string& key) {
  const auto dot = key.find('.');
  return dot == std::string::npos ? "" : key.substr(0, dot);
}
// "lr" of "optimizer.lr".
inline std::string last_part(const std::string& key) {
  return key.substr(key.find('.') + 1);
}

// Writes the value into config; returns "" or what is wrong with it ("needs a number, not 'fast'").
std::string set_key(const Key& key, const RawValue& value, Config& config);

// As a YAML scalar: quoted where plain text would mean something else.
std::string yaml_string(const std::string& text);

}  // namespace topknot

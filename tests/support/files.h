#pragma once
// Files that programs leave behind, as text and as JSON lines.

#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>
#include <vector>

#include "tests/support/text.h"

namespace topknot {

inline std::string text_of(const std::string& path) {
  std::ostringstream text;
  text << std::ifstream(path, std::ios::binary).rdbuf();
  return text.str();
}

inline std::vector<nlohmann::json> json_lines_of(const std::string& path) {
  std::vector<nlohmann::json> lines;
  std::ifstream stream(path);
  for (std::string line; std::getline(stream, line);) lines.push_back(nlohmann::json::parse(line));
  return lines;
}

}  // namespace topknot

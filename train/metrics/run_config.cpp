#include "train/metrics/run_config.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <sstream>

#include "nn/base/check.h"
#include "nn/base/file.h"

namespace topknot {
namespace {

std::string trimmed(const std::string& text) {
  const auto begin = text.find_first_not_of(" \t\r");
  return begin == std::string::npos ? "" : text.substr(begin, text.find_last_not_of(" \t\r") + 1 - begin);
}

// The end of a value: after its closing quote, or at a comment.
std::size_t value_end(const std::string& text, std::size_t begin) {
  if (text[begin] != '"') return std::min(text.find(" #", begin), text.size());
  std::size_t at = begin + 1;
  while (at < text.size() && text[at] != '"') at += text[at] == '\\' ? 2 : 1;
  return std::min(at + 1, text.size());
}

}  // namespace

RunConfig::RunConfig(const std::string& path) : path_(path) {
  constexpr std::size_t kMostBytes = 1 << 20;
  std::istringstream file(read_text_file(path, kMostBytes));
  std::string section;
  int number = 0;
  for (std::string line; std::getline(file, line);) {
    ++number;
    const std::string text = trimmed(line);
    if (text.empty() || text[0] == '#') continue;
    const auto colon = text.find(':');
    if (colon == std::string::npos || colon == 0)
      throw UserError(fmt::format("{}:{}: not 'key: value', as a run writes it", path, number));
    const bool indented = line[0] == ' ';
    if (!indented) section.clear();
    const std::string name = text.substr(0, colon);
    const auto begin = text.find_first_not_of(' ', colon + 1);
    if (begin == std::string::npos || text[begin] == '#') {
      section = name + ".";
      continue;
    }
    const auto end = value_end(text, begin);
    const bool given = text.find('#', end) != std::string::npos;
    entries_.push_back({(indented ? section : "") + name, trimmed(text.substr(begin, end - begin)), given});
  }
}

const RunConfig::Entry* RunConfig::find(const std::string& key) const {
  const auto it =
      std::find_if(entries_.begin(), entries_.end(), [&](const Entry& entry) { return entry.key == key; });
  return it == entries_.end() ? nullptr : &*it;
}

std::string RunConfig::text(const std::string& key) const {
  const Entry* entry = find(key);
  if (!entry || entry->text.size() < 2 || entry->text[0] != '"') return entry ? entry->text : "";
  std::string plain;
  for (std::size_t i = 1; i + 1 < entry->text.size(); ++i) {
    const bool escaped = entry->text[i] == '\\' && i + 2 < entry->text.size();
    const char c = entry->text[i += escaped];
    plain += escaped && c == 'n' ? '\n' : escaped && c == 't' ? '\t' : c;
  }
  return plain;
}

double RunConfig::number(const std::string& key) const {
  const std::string value = text(key);
  double result = 0;
  const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), result);
  if (error != std::errc{} || end != value.data() + value.size())
    throw UserError(fmt::format("{}: {} is '{}', no number", path_, key, value));
  return result;
}

std::vector<double> RunConfig::numbers(const std::string& key) const {
  const std::string list = text(key);
  std::vector<double> result;
  const char *at = list.data(), *end = at + list.size();
  while (at < end) {
    double value = 0;
    const auto [next, error] = std::from_chars(at, end, value);
    if (error == std::errc{}) result.push_back(value);
    at = std::max(next, at + 1);
  }
  return result;
}

}  // namespace topknot

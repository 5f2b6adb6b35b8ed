#include "nn/base/terminal.h"

#include <fmt/format.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <sstream>
#include <string_view>

namespace topknot {
namespace {

// Columns of UTF-8 text, one for each character.
int columns_of(std::string_view text) {
  return static_cast<int>(std::count_if(text.begin(), text.end(), [](char c) { return (c & 0xc0) != 0x80; }));
}

}  // namespace

bool is_terminal(int fd) {
  return isatty(fd) == 1;
}

int terminal_columns(int fd) {
  constexpr int kDefault = 80;
  winsize size{};
  return ioctl(fd, TIOCGWINSZ, &size) == 0 && size.ws_col > 0 ? size.ws_col : kDefault;
}

std::string coloured(const std::string& text, Colour colour, int fd) {
  const auto variable = [](const char* name) {
    const char* value = std::getenv(name);
    return std::string_view(value ? value : "");
  };
  if (!is_terminal(fd) || !variable("NO_COLOR").empty() || variable("TERM") == "dumb") return text;
  return fmt::format("\033[1;{}m{}\033[0m", static_cast<int>(colour), text);
}

std::string wrapped(const std::string& text, int width, int indent, int column) {
  std::string result;
  int at = column;
  bool first = true;  // word of its line
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    if (!result.empty()) result += "\n" + std::string(static_cast<std::size_t>(indent), ' '), at = indent;
    first = true;
    std::istringstream words(line);
    for (std::string word; words >> word;) {
      const int columns = columns_of(word);
      if (!first && at + 1 + columns > width) {
        result += "\n" + std::string(static_cast<std::size_t>(indent), ' ');
        at = indent, first = true;
      }
      result += (first ? "" : " ") + word;
      at += columns + (first ? 0 : 1);
      first = false;
    }
  }
  return result;
}

std::string wrapped_row(const std::string& name, const std::string& text, int column, int width) {
  constexpr int kGap = 2, kLeastText = 24;
  // A narrow terminal has no room for two columns.
  const int indent = width - column < kLeastText ? 6 : column;
  const bool beside = columns_of(name) + kGap <= indent;
  const std::string start =
      beside ? fmt::format("{:<{}}", name, indent) : fmt::format("{}\n{:{}}", name, "", indent);
  return start + wrapped(text, width, indent, indent) + "\n";
}

std::string reflowed(const std::string& page, int width) {
  constexpr std::size_t kFilled = 60, kNone = std::string::npos;  // so long a line goes on in the next one
  std::string result, name, words;                                // of the row or paragraph under way
  std::size_t column = 0, last = 0;
  const auto flush = [&] {
    if (!name.empty())
      result += wrapped_row(name, words, static_cast<int>(column), width);
    else if (!words.empty())
      result += wrapped(words, width) + "\n";
    name.clear(), words.clear(), column = 0;
  };
  std::istringstream lines(page);
  for (std::string line; std::getline(lines, line); last = line.size()) {
    const std::size_t indent = line.find_first_not_of(' ');
    const std::size_t gap = indent == kNone ? kNone : line.find("  ", indent);
    if (gap != kNone) {
      flush();
      name = line.substr(0, gap);
      column = line.find_first_not_of(' ', gap);
      words = line.substr(column);
    } else if (indent != kNone && indent == column && !words.empty() && (column > 0 || last >= kFilled)) {
      words += " " + line.substr(indent);
    } else {
      flush();
      if (indent == 0)
        words = line;
      else
        result += line + "\n";
    }
  }
  flush();
  return result;
}

}  // namespace topknot

#pragma once
// JSON lines with long lists of numbers, written as they come. Numbers are the shortest text that reads back
// to the same double; a float is written as the double it equals, so that readers of doubles get it exactly.

#include <charconv>
#include <cmath>
#include <cstdio>
#include <string>
#include <string_view>
#include <type_traits>

namespace topknot {

// One object. Names are plain words.
class JsonLine {
 public:
  template <class V>
  JsonLine& number(std::string_view name, V value) {
    key(name);
    put(value);
    return *this;
  }
  template <class List>
  JsonLine& list(std::string_view name, const List& values) {
    key(name);
    text_ += '[';
    bool first = true;
    for (const auto value : values) {
      if (!first) text_ += ',';
      first = false;
      put(value);
    }
    text_ += ']';
    return *this;
  }
  JsonLine& flag(std::string_view name) {
    key(name);
    text_ += "true";
    return *this;
  }
  JsonLine& null(std::string_view name) {
    key(name);
    text_ += "null";
    return *this;
  }
  std::string finish() { return std::move(text_) + "}\n"; }

 private:
  void key(std::string_view name) {
    text_ += text_.empty() ? "{\"" : ",\"";
    text_ += name;
    text_ += "\":";
  }
  template <class V>
  void put(V value) {
    char buffer[32];
    if constexpr (std::is_floating_point_v<V>) {
      if (!std::isfinite(value)) {  // JSON has no infinity
        text_ += "null";
        return;
      }
      text_.append(buffer, std::to_chars(buffer, buffer + sizeof buffer, static_cast<double>(value)).ptr);
    } else {
      text_.append(buffer, std::to_chars(buffer, buffer + sizeof buffer, value).ptr);
    }
  }
  std::string text_;
};

// A file of them, or standard output for "-". A plain file appears under its name at close(), whole, and not
// at all where close() is not reached. Throws UserError with path and reason where it cannot be written.
class JsonLines {
 public:
  explicit JsonLines(const std::string& path);
  JsonLines(const JsonLines&) = delete;
  ~JsonLines();
  void write(JsonLine& line);
  void close();

 private:
  [[noreturn]] void fail(int error) const;
  std::string path_, target_, temporary_;  // temporary_: "" where the file is written in place
  std::FILE* file_ = nullptr;
};

}  // namespace topknot

#include "nn/core/base/text.h"

#include <charconv>
#include <cstdio>

namespace topknot {

std::string short_text(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%g", value);
  return text;
}

std::string format_number(double value) {
  char buffer[32];
  const auto result = std::to_chars(buffer, buffer + sizeof buffer, value);
  std::string text(buffer, result.ptr);
  // 1e-04 -> 1e-4, 1e+06 -> 1e6
  if (const auto e = text.find('e'); e != std::string::npos) {
    const bool minus = text[e + 1] == '-';
    auto digits = text.find_first_not_of("+-0", e + 1);
    if (digits == std::string::npos) digits = text.size() - 1;
    text = text.substr(0, e + 1) + (minus ? "-" : "") + text.substr(digits);
  }
  return text;
}

}  // namespace topknot

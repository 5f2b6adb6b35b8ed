#include "nn/base/text.h"

#include <unistd.h>

#include <fmt/format.h>
#include <cerrno>
#include <cstring>

#include <algorithm>
#include <charconv>
#include <cmath>

namespace topknot {

bool next_line(std::string_view& rest, std::string_view& line) {
  if (rest.empty()) return false;
  const std::size_t end = rest.find('\n');
  line = rest.substr(0, end);
  rest.remove_prefix(end == rest.npos ? rest.size() : end + 1);
  if (line.ends_with('\r')) line.remove_suffix(1);
  return true;
}

std::string host_name() {
  char name[256] = "";
  return gethostname(name, sizeof name - 1) == 0 && *name ? name : "unknown";
}

std::string errno_text() {
  return std::strerror(errno ? errno : EIO);
}

namespace {

std::string escaped(std::string_view text, std::size_t longest, bool lines) {
  const bool cut = text.size() > longest;
  text = text.substr(0, longest);
  std::string result;
  const auto byte = [&](std::size_t i) { return i < text.size() ? static_cast<unsigned char>(text[i]) : 0u; };
  for (std::size_t i = 0; i < text.size();) {
    const unsigned first = byte(i);
    std::size_t length = first < 0x80                    ? 1
                         : first >= 0xc2 && first < 0xe0 ? 2
                         : first >= 0xe0 && first < 0xf0 ? 3
                         : first >= 0xf0 && first < 0xf5 ? 4
                                                         : 0;
    for (std::size_t k = 1; k < length; ++k)
      if ((byte(i + k) & 0xc0) != 0x80) length = 0;
    // C0 and DEL; C1, which U+0080 to U+009F are.
    const bool layout = first == '\n' || first == '\t';
    const bool control =
        (first < 0x20 && !layout) || first == 0x7f || (length == 2 && first == 0xc2 && byte(i + 1) < 0xa0);
    if (layout && !lines) {
      result += first == '\n' ? "\\n" : "\\t";
      ++i;
    } else if (length > 0 && !control) {
      result += text.substr(i, length);
      i += length;
    } else {
      result += fmt::format("\\x{:02x}", first);
      ++i;
    }
  }
  return cut ? result + "..." : result;
}

}  // namespace

std::string printable(std::string_view text, std::size_t longest) {
  return escaped(text, longest, true);
}

std::string one_line(std::string_view text, std::size_t longest) {
  return escaped(text, longest, false);
}

std::string short_text(double value) {
  return fmt::format("{:g}", value);
}

std::string count_text(std::int64_t count, const std::string& what) {
  return fmt::format("{} {}{}", count, what, count == 1 ? "" : "s");
}

std::string format_duration(double seconds) {
  const auto total = static_cast<std::int64_t>(std::llround(std::max(0.0, std::min(seconds, 3.6e9))));
  const auto minutes = total / 60;
  if (total < 3600) return fmt::format("{}:{:02}", minutes, total % 60);
  return fmt::format("{}:{:02}:{:02}", minutes / 60, minutes % 60, total % 60);
}

std::string format_bytes(double bytes) {
  const char* units[] = {"B", "kB", "MB", "GB", "TB", "PB"};
  int unit = 0;
  while (std::fabs(bytes) >= 999.5 && unit < 5) bytes /= 1000, ++unit;
  return unit == 0 || bytes >= 99.95 ? fmt::format("{:.0f} {}", bytes, units[unit])
                                     : fmt::format("{:.3g} {}", bytes, units[unit]);
}

std::string compared_bytes(double bytes, double dense) {
  const double ratio = bytes > dense ? bytes / dense : dense / bytes;
  if (ratio < 1.05) return "as much as";
  return fmt::format("{:.1f} times {} than", ratio, bytes > dense ? "more" : "less");
}

double quantile(std::vector<double> values, double q) {
  if (values.empty()) return 0;
  const double position = q * static_cast<double>(values.size() - 1);
  const auto below = values.begin() + static_cast<std::ptrdiff_t>(position);
  std::nth_element(values.begin(), below, values.end());
  const double share = position - std::floor(position);
  if (share == 0) return *below;  // of what lies between, nothing: it may be infinite
  return *below + share * (*std::min_element(below + 1, values.end()) - *below);
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

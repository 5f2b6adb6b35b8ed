#include "nn/base/text.h"

#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <cstring>

namespace topknot {
namespace {

// printf's format; libtopknot has no library for it. Of at most 63 characters.
template <class... Values>
std::string formatted(const char* format, Values... values) {
  char text[64];
  std::snprintf(text, sizeof text, format, values...);
  return text;
}

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
      result += formatted("\\x%02x", first);
      ++i;
    }
  }
  return cut ? result + "..." : result;
}

// Damerau-Levenshtein distance, restricted to adjacent swaps.
std::size_t edit_distance(const std::string& a, const std::string& b) {
  std::vector<std::vector<std::size_t>> d(a.size() + 1, std::vector<std::size_t>(b.size() + 1));
  for (std::size_t i = 0; i <= a.size(); ++i) d[i][0] = i;
  for (std::size_t j = 0; j <= b.size(); ++j) d[0][j] = j;
  for (std::size_t i = 1; i <= a.size(); ++i)
    for (std::size_t j = 1; j <= b.size(); ++j) {
      d[i][j] = std::min({d[i - 1][j] + 1, d[i][j - 1] + 1, d[i - 1][j - 1] + (a[i - 1] != b[j - 1])});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1])
        d[i][j] = std::min(d[i][j], d[i - 2][j - 2] + 1);
    }
  return d[a.size()][b.size()];
}

std::string lower(std::string text) {
  for (char& c : text) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  return text;
}

// "resnet" of "resnet20": names that differ in a number alone are one family.
std::string family(const std::string& name) {
  return lower(name.substr(0, name.find_last_not_of("0123456789") + 1));
}

// At most kMost known names that begin with `name`, or else are of its family, shortest first.
std::vector<std::string> relatives(const std::string& name, const std::vector<std::string>& known) {
  constexpr std::size_t kLeastLetters = 2, kMost = 8;
  const std::string start = lower(name), kin = family(name);
  std::vector<std::string> begin, same;
  for (const auto& candidate : known) {
    if (start.size() >= kLeastLetters && lower(candidate).rfind(start, 0) == 0) begin.push_back(candidate);
    if (kin.size() >= kLeastLetters && kin.size() < candidate.size() && family(candidate) == kin)
      same.push_back(candidate);
  }
  std::vector<std::string>& found = begin.empty() ? same : begin;
  std::stable_sort(found.begin(), found.end(),
                   [](const auto& a, const auto& b) { return a.size() < b.size(); });
  found.resize(std::min(found.size(), kMost));
  return found;
}

}  // namespace

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

std::string printable(std::string_view text, std::size_t longest) {
  return escaped(text, longest, true);
}

std::string one_line(std::string_view text, std::size_t longest) {
  return escaped(text, longest, false);
}

std::string short_text(double value) {
  return formatted("%g", value);
}

std::string count_text(std::int64_t count, const std::string& what) {
  return std::to_string(count) + " " + what + (count == 1 ? "" : "s");
}

std::string format_duration(double seconds) {
  const long long total = std::llround(std::max(0.0, std::min(seconds, 3.6e9)));
  const long long minutes = total / 60;
  if (total < 3600) return formatted("%lld:%02lld", minutes, total % 60);
  return formatted("%lld:%02lld:%02lld", minutes / 60, minutes % 60, total % 60);
}

std::string format_bytes(double bytes) {
  const char* units[] = {"B", "kB", "MB", "GB", "TB", "PB"};
  int unit = 0;
  while (std::fabs(bytes) >= 999.5 && unit < 5) bytes /= 1000, ++unit;
  return unit == 0 || bytes >= 99.95 ? formatted("%.0f %s", bytes, units[unit])
                                     : formatted("%.3g %s", bytes, units[unit]);
}

std::string compared_bytes(double bytes, double dense) {
  const double ratio = bytes > dense ? bytes / dense : dense / bytes;
  if (ratio < 1.05) return "as much as";
  return formatted("%.1f times %s than", ratio, bytes > dense ? "more" : "less");
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

std::string nearest_name(const std::string& name, const std::vector<std::string>& known) {
  if (const auto found = relatives(name, known); !found.empty()) return found.front();
  std::size_t best = std::max<std::size_t>(2, name.size() / 3) + 1;
  std::string nearest;
  for (const auto& candidate : known) {
    // At least as many edits; a name of a million letters is compared with nothing.
    const auto [less, more] = std::minmax({name.size(), candidate.size()});
    if (more - less >= best) continue;
    if (const auto distance = edit_distance(name, candidate); distance < best) {
      best = distance;
      nearest = candidate;
    }
  }
  return nearest;
}

std::string unknown_name_message(const std::string& kind, const std::string& name,
                                 const std::vector<std::string>& known) {
  std::string text = "unknown " + kind + " '" + name + "'";
  std::vector<std::string> meant = relatives(name, known);
  if (const std::string nearest = nearest_name(name, known); meant.empty() && !nearest.empty())
    meant = {nearest};
  for (std::size_t i = 0; i < meant.size(); ++i)
    text += (i == 0 ? "; did you mean '" : i + 1 == meant.size() ? "' or '" : "', '") + meant[i];
  text += meant.empty() ? "; known: " : "'? known: ";
  for (std::size_t i = 0; i < known.size(); ++i) text += (i ? ", " : "") + known[i];
  return text;
}

}  // namespace topknot

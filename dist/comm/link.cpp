#include "dist/comm/link.h"

#include <fmt/format.h>

#include <cctype>
#include <charconv>
#include <optional>
#include <span>
#include <utility>

#include "nn/base/check.h"

namespace topknot {
namespace {

using Unit = std::pair<const char*, double>;

std::optional<double> parse_quantity(const std::string& text, std::span<const Unit> units) {
  double value = 0;
  const char* end = text.data() + text.size();
  const auto [rest, error] = std::from_chars(text.data(), end, value);
  if (error != std::errc{}) return std::nullopt;
  std::string written(rest, end);
  for (char& c : written) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  for (const auto& [unit, factor] : units)
    if (written == unit) return value * factor;
  return std::nullopt;
}

}  // namespace

double parse_rate(const std::string& key, const std::string& text) {
  static constexpr Unit units[] = {{"", 1.0}, {"kbit", 1e3}, {"mbit", 1e6}, {"gbit", 1e9}};
  const auto rate = parse_quantity(text, units);
  if (!rate || !(*rate >= 1 && *rate <= 1e15))
    throw UserError(fmt::format(
        "{}: '{}' is no rate of 1 to 1e15 bits per second; write 100mbit, 1gbit, 10gbit, or bits per second",
        key, text));
  return *rate;
}

double parse_latency(const std::string& key, const std::string& text) {
  static constexpr Unit units[] = {{"", 1.0}, {"us", 1e-6}, {"ms", 1e-3}, {"s", 1.0}};
  const auto latency = parse_quantity(text, units);
  if (!latency || !(*latency >= 0 && *latency <= 10))
    throw UserError(
        fmt::format("{}: '{}' is no time of 0 to 10 seconds; write 50us, 0.2ms, or seconds", key, text));
  return *latency;
}

}  // namespace topknot

#include "dist/comm/link.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
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

// Messages of `bytes` to each of the others at once, and as many from them.
double to_all_others(const Link& link, int ranks, double bytes) {
  return link.alpha + (ranks - 2) * link.overhead + (ranks - 1) * bytes * link.beta;
}

double one_message(const Link& link, double bytes) {
  return link.alpha + bytes * link.beta;
}

// ceil(log2(ranks)).
int tree_rounds(int ranks) {
  return std::bit_width(static_cast<unsigned>(ranks - 1));
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

double all_gather_cost(const Link& link, int ranks, double bytes) {
  return ranks < 2 ? 0 : to_all_others(link, ranks, bytes);
}

double ring_all_reduce_cost(const Link& link, int ranks, double bytes) {
  return ranks < 2 ? 0 : 2 * (ranks - 1) * one_message(link, bytes / ranks);
}

double ordered_all_reduce_cost(const Link& link, int ranks, double bytes) {
  return ranks < 2 ? 0 : 2 * to_all_others(link, ranks, bytes / ranks);
}

double broadcast_cost(const Link& link, int ranks, double bytes) {
  return ranks < 2 ? 0 : tree_rounds(ranks) * one_message(link, bytes);
}

EmulatedLink make_emulated_link(const std::string& rate, const std::string& latency, int ranks_per_host) {
  const double alpha = parse_latency("dist.link.latency", latency);
  const double beta = 8 / (kTcpEfficiency * parse_rate("dist.link.rate", rate));
  return {
      {alpha, beta, alpha}, fmt::format("emulated link {}, {}", rate, latency), std::max(1, ranks_per_host)};
}

}  // namespace topknot

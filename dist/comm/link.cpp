#include "dist/comm/link.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cctype>
#include <charconv>
#include <optional>
#include <span>
#include <sstream>

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
  const int rounds = std::bit_width(static_cast<unsigned>(ranks - 1));  // ceil(log2(ranks))
  return ranks < 2 ? 0 : rounds * one_message(link, bytes);
}

EmulatedLink make_emulated_link(const std::string& rate, const std::string& latency, int ranks_per_host) {
  const double alpha = parse_latency("dist.link.latency", latency);
  EmulatedLink link;
  link.text = fmt::format("emulated link {}, {}", rate, latency);
  link.ranks_per_host = std::max(1, ranks_per_host);
  static constexpr Unit kSeconds[] = {{"", 1.0}, {"s", 1.0}};
  double last = 0;
  std::istringstream changes(rate.empty() || rate.back() == ',' ? rate + " " : rate);
  for (std::string change; std::getline(changes, change, ',');) {
    const auto at = change.find('@');
    const double beta = 8 / (kTcpEfficiency * parse_rate("dist.link.rate", change.substr(0, at)));
    const Link changed{alpha, beta, alpha};
    if (link.link.beta == 0 && at == change.npos) {
      link.link = changed;
      continue;
    }
    const double seconds =
        at == change.npos ? 0 : parse_quantity(change.substr(at + 1), kSeconds).value_or(0);
    if (link.link.beta == 0 || !(seconds > last && seconds <= 1e9))
      throw UserError(
          fmt::format("dist.link.rate: '{}' is no rate that changes; write a rate, or "
                      "1gbit,50mbit@20,1gbit@40 with rising seconds",
                      rate));
    link.later.emplace_back(last = seconds, changed);
  }
  return link;
}

const Link& EmulatedLink::at(double seconds) const {
  const Link* now = &link;
  for (const auto& [from, changed] : later)
    if (seconds >= from) now = &changed;
  return *now;
}

}  // namespace topknot

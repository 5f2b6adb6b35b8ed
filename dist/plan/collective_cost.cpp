#include "dist/plan/collective_cost.h"

#include <bit>
#include <cmath>

#include "nn/core/base/check.h"

namespace topknot {
namespace {

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

double gtopk_cost(const Link& link, int ranks, double k, double bytes_per_entry) {
  return 2 * broadcast_cost(link, ranks, k * bytes_per_entry);
}

double oktopk_cost(const Link& link, int ranks, double k, double bytes_per_entry) {
  return ranks < 2 ? 0 : 2 * to_all_others(link, ranks, k * bytes_per_entry / ranks);
}

double oktopk_bound(const Link& link, int ranks, double k, double bytes_per_entry) {
  if (ranks < 2) return 0;
  const double word = bytes_per_entry / 2;
  return (2 * ranks + 2 * std::log2(ranks)) * link.alpha + 6 * k * word * (ranks - 1) / ranks * link.beta;
}

std::string cheapest_collective(const Link& link, int ranks, double k, double bytes_per_entry) {
  std::string name = "all_gather";
  double least = all_gather_cost(link, ranks, k * bytes_per_entry);
  const auto offer = [&](const char* other, double seconds) {
    if (seconds >= least) return;
    least = seconds;
    name = other;
  };
  offer("gtopk", gtopk_cost(link, ranks, k, bytes_per_entry));
  offer("oktopk", oktopk_cost(link, ranks, k, bytes_per_entry));
  return name;
}

LinearFit fit_line(std::span<const double> bytes, std::span<const double> seconds) {
  const std::size_t count = bytes.size();
  TOPKNOT_CHECK(count >= 2 && seconds.size() == count, "a line needs two points, and a time for each size");
  double x_mean = 0, y_mean = 0, x_square = 0, xy = 0;
  for (std::size_t i = 0; i < count; ++i) {
    TOPKNOT_CHECK(std::isfinite(bytes[i]) && bytes[i] >= 0 && std::isfinite(seconds[i]) && seconds[i] >= 0,
                  "sizes and times must be finite and not negative");
    x_mean += bytes[i] / count;
    y_mean += seconds[i] / count;
    x_square += bytes[i] * bytes[i];
    xy += bytes[i] * seconds[i];
  }
  double variance = 0, covariance = 0;
  for (std::size_t i = 0; i < count; ++i) {
    variance += (bytes[i] - x_mean) * (bytes[i] - x_mean);
    covariance += (bytes[i] - x_mean) * (seconds[i] - y_mean);
  }
  // Relative to rounding of the mean: sizes that are all alike.
  if (variance <= 1e-24 * x_square || covariance <= 0) return {y_mean, 0};
  const double beta = covariance / variance, alpha = y_mean - beta * x_mean;
  if (alpha < 0) return {0, xy / x_square};
  return {alpha, beta};
}

}  // namespace topknot

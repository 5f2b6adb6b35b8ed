#include "train/plan/network_times.h"

#include <algorithm>
#include <cmath>
#include <functional>

#include "dist/sparse/coded_sum.h"
#include "nn/base/check.h"
#include "nn/base/clock.h"
#include "nn/base/text.h"
#include "nn/core/rng.h"
#include "train/metrics/metrics.h"

namespace topknot {
namespace {

constexpr std::size_t kMostNoise = std::size_t{1} << 22;
constexpr std::size_t kSmallest = 64;          // bytes
constexpr std::size_t kStep = 4;               // from size to size
constexpr std::int64_t kMost = 9, kLeast = 3;  // repetitions of one size, the first is not counted
constexpr double kBudget = 0.4;                // seconds for one operation, all sizes
constexpr int kRoundTrips = 20;
// A link is known by messages of this size: shorter ones may still fit into buffers on their way.
constexpr std::size_t kLinkBytes = std::size_t{1} << 20;

struct Course {
  LinearFit fit;
  double slope = 0;  // seconds a byte from the last but one to the last size
};

// Times `once` at rising sizes and fits those up to `fitted` bytes; `prepare`, if given, goes before each and is not
// timed. How often, and whether at all, rank 0 decides for all.
template <class Once>
Course measure(CollectiveQueue& queue, std::size_t largest, std::size_t fitted, const Once& once,
               const std::function<void(std::size_t bytes)>& prepare = {}) {
  const bool root = queue.communicator().rank() == 0;
  std::vector<double> sizes, times;
  const auto begin = Clock::now();
  double expected = 0;  // seconds of one call of this size
  for (std::size_t bytes = kSmallest;; bytes = std::min(bytes * kStep, largest)) {
    std::int64_t repetitions = kMost;
    const double left = kBudget - seconds_since(begin);
    if (expected * static_cast<double>(kMost) > left) repetitions = kLeast;
    if (!sizes.empty() && expected * static_cast<double>(kLeast) > left) repetitions = 0;
    std::vector<double> taken;
    queue.run([&](Communicator& c) {
      c.broadcast(std::as_writable_bytes(std::span(&repetitions, 1)), 0);
      for (std::int64_t i = 0; i < repetitions; ++i) {
        if (prepare) prepare(bytes);
        c.barrier();
        const auto start = Clock::now();
        once(c, bytes);
        if (i > 0) taken.push_back(std::max(seconds_since(start), 1e-9));
      }
    });
    if (repetitions == 0) break;
    sizes.push_back(static_cast<double>(bytes));
    times.push_back(quantile(taken, 0.5));
    expected = times.back() * static_cast<double>(kStep);
    if (bytes >= largest) break;
  }
  if (!root) return {};
  Course course;
  const std::size_t last = sizes.size() - 1;
  if (last > 0)
    course.slope = std::max(0.0, (times[last] - times[last - 1]) / (sizes[last] - sizes[last - 1]));
  const auto count = static_cast<std::size_t>(
      std::upper_bound(sizes.begin(), sizes.end(), static_cast<double>(fitted)) - sizes.begin());
  course.fit = fit_network(std::span(sizes).first(count), std::span(times).first(count));
  return course;
}

double one_way(CollectiveQueue& queue) {
  std::vector<double> taken;
  queue.run([&](Communicator& c) {
    const std::vector<std::byte> mine(8);
    std::vector<std::byte> theirs;
    const int rank = c.rank();
    c.barrier();
    for (int i = 0; i < kRoundTrips; ++i) {
      const auto start = Clock::now();
      c.send_receive(rank == 0 ? 1 : -1, mine, rank == 1 ? 0 : -1, theirs);
      c.send_receive(rank == 1 ? 0 : -1, mine, rank == 0 ? 1 : -1, theirs);
      taken.push_back(seconds_since(start) / 2);
    }
  });
  return quantile(taken, 0.5);
}

}  // namespace

Noise::Noise(std::size_t size) : values_(std::min(size, kMostNoise)) {
  const CounterRng rng(1, RngUse::test);
  for (std::size_t i = 0; i < values_.size(); ++i) values_[i] = 0.01f * rng.normal(i);
}

void Noise::fill(std::span<float> to, int round) const {
  std::size_t from = (static_cast<std::size_t>(round) * 1000003) % values_.size();
  for (std::size_t done = 0; done < to.size();) {
    const std::size_t count = std::min(to.size() - done, values_.size() - from);
    const float scale = 1 + 1e-3f * static_cast<float>(done / values_.size());
    for (std::size_t i = 0; i < count; ++i) to[done + i] = scale * values_[from + i];
    done += count;
    from = 0;
  }
}

LinearFit fit_network(std::span<const double> bytes, std::span<const double> seconds) {
  TOPKNOT_CHECK(!bytes.empty() && bytes.size() == seconds.size(), "a fit needs a time for each size");
  // Both sides of alpha + bytes beta = time, divided by the root of the time: p alpha + q beta = root.
  double pp = 0, pq = 0, qq = 0, p_sum = 0, q_sum = 0;
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    TOPKNOT_CHECK(seconds[i] > 0 && bytes[i] >= 0, "a fit needs sizes and times above 0");
    const double root = std::sqrt(seconds[i]), p = 1 / root, q = bytes[i] / root;
    pp += p * p, pq += p * q, qq += q * q, p_sum += p * root, q_sum += q * root;
  }
  const double determinant = pp * qq - pq * pq;
  LinearFit fit;
  if (determinant > 1e-12 * pp * qq) {
    fit.alpha = (p_sum * qq - q_sum * pq) / determinant;
    fit.beta = (q_sum * pp - p_sum * pq) / determinant;
  } else {
    fit.alpha = p_sum / pp;
  }
  if (fit.beta < 0) fit = {p_sum / pp, 0};
  if (fit.alpha < 0) fit = {0, q_sum / qq};
  return fit;
}

NetworkTimes measure_network(CollectiveQueue& queue, std::size_t gather_bytes, std::size_t reduce_bytes,
                             SumOrder order) {
  NetworkTimes times;
  const int ranks = queue.communicator().size();
  times.gather.ranks = times.reduce.ranks = ranks;
  if (ranks == 1) return times;
  // A rank's own sizes come from its own rounds, whose number its clock decides.
  std::uint64_t sizes[] = {gather_bytes, reduce_bytes};
  queue.run([&](Communicator& c) { c.broadcast(std::as_writable_bytes(std::span(sizes)), 0); });
  gather_bytes = std::max<std::size_t>(sizes[0], kSmallest), reduce_bytes = sizes[1];
  const std::vector<std::byte> block(std::max(gather_bytes, kLinkBytes));
  std::vector<std::vector<std::byte>> all;
  const auto gather_once = [&](Communicator& c, std::size_t bytes) {
    c.all_gather(std::span(block).first(bytes), all);
  };
  const auto [gather, slope] = measure(queue, block.size(), gather_bytes, gather_once);
  std::vector<float> floats(std::max(reduce_bytes, kSmallest) / sizeof(float));
  const auto reduce_once = [&](Communicator& c, std::size_t bytes) {
    c.all_reduce(std::span(floats).first(bytes / sizeof(float)), order);
  };
  const std::size_t reduced = floats.size() * sizeof(float);
  const LinearFit reduce = measure(queue, reduced, reduced, reduce_once).fit;
  times.gather.alpha = gather.alpha, times.gather.beta = gather.beta;
  times.reduce.alpha = reduce.alpha, times.reduce.beta = reduce.beta;
  times.link.alpha = one_way(queue);
  times.link.beta = slope / (ranks - 1);
  if (ranks > 2) times.link.overhead = std::max(0.0, (gather.alpha - times.link.alpha) / (ranks - 2));
  return times;
}

double least_gather_seconds(CollectiveQueue& queue, std::size_t bytes) {
  constexpr int kTimes = 4;
  constexpr double kEnough = 0.25;  // seconds, after which no other one follows
  const std::vector<std::byte> block(bytes);
  std::vector<std::vector<std::byte>> all;
  double least = 0, total = 0;
  queue.run([&](Communicator& c) {
    for (int i = 0; i < kTimes; ++i) {
      std::uint8_t more = total < kEnough;  // rank 0 decides
      c.broadcast(std::as_writable_bytes(std::span(&more, 1)), 0);
      if (!more) break;
      c.barrier();
      const auto begin = Clock::now();
      c.all_gather(block, all);
      const double taken = seconds_since(begin);
      total += taken;
      least = i <= 1 ? taken : std::min(least, taken);  // the first may still fit into buffers on its way
    }
  });
  return least;
}

ExchangeProfile::Fit measure_coded_sum(CollectiveQueue& queue, std::size_t bytes, bool bfloat16) {
  ExchangeProfile::Fit fit;
  fit.ranks = queue.communicator().size();
  if (fit.ranks == 1) return fit;
  std::uint64_t size = bytes;  // as in measure_network()
  queue.run([&](Communicator& c) { c.broadcast(std::as_writable_bytes(std::span(&size, 1)), 0); });
  size = std::max<std::uint64_t>(size, kSmallest);
  CodedSum coded;
  std::vector<float> floats(size / (bfloat16 ? sizeof(BFloat16) : sizeof(float)));
  std::vector<BFloat16> narrow(bfloat16 ? floats.size() : 0);
  const Noise noise(floats.size());
  int round = 0;
  // The sum that is left there would be another one's summand.
  const auto prepare = [&](std::size_t of) {
    const auto values = std::span(floats).first(of / (bfloat16 ? sizeof(BFloat16) : sizeof(float)));
    noise.fill(values, round++);
    if (bfloat16) to_bfloat16(values.data(), values.size(), narrow.data());
  };
  const auto once = [&](Communicator& c, std::size_t of) {
    if (bfloat16)
      coded.sum(c, std::span(narrow).first(of / sizeof(BFloat16)));
    else
      coded.sum(c, std::span(floats).first(of / sizeof(float)));
  };
  const LinearFit line = measure(queue, size, size, once, prepare).fit;
  fit.alpha = line.alpha, fit.beta = line.beta;
  return fit;
}

}  // namespace topknot

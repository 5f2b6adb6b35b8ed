#include "data/sampler.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <numeric>

#include "nn/base/check.h"
#include "nn/core/rng.h"

namespace topknot {
namespace {

// Numbers from `first` on, so that several shuffles can share one stream.
void shuffle(std::vector<std::int64_t>& items, const CounterRng& rng, std::uint64_t first) {
  for (std::size_t i = items.size(); i > 1; --i)
    std::swap(items[i - 1], items[rng.below(first + i, static_cast<std::uint32_t>(i))]);
}

// ranks + 1 cut positions of `size` samples; shard r is proportional to share(r).
std::vector<std::int64_t> cut(std::int64_t size, const std::vector<double>& shares) {
  const double total = std::accumulate(shares.begin(), shares.end(), 0.0);
  std::vector<std::int64_t> starts = {0};
  double sum = 0;
  for (const double share : shares) {
    sum += share;
    starts.push_back(std::llround(static_cast<double>(size) * (sum / total)));
  }
  starts.back() = size;
  return starts;
}

}  // namespace

ShardRule parse_shard_rule(const std::string& text) {
  if (text == "even") return {ShardRule::Kind::even, 1};
  if (text == "by_label") return {ShardRule::Kind::by_label, 1};
  if (text.starts_with("uneven:")) {
    const std::string number = text.substr(7);
    char* end = nullptr;
    const double ratio = std::strtod(number.c_str(), &end);
    if (!number.empty() && *end == '\0' && ratio >= 1 && std::isfinite(ratio))
      return {ShardRule::Kind::uneven, ratio};
    throw UserError("data.shard: '" + text +
                    "': RATIO in uneven:RATIO is a number from 1 up, such as uneven:4");
  }
  throw UserError("data.shard: '" + text + "' is not known; give even, uneven:RATIO or by_label");
}

std::vector<std::int64_t> epoch_permutation(std::int64_t n, std::uint64_t seed, std::int64_t epoch) {
  std::vector<std::int64_t> order(static_cast<std::size_t>(n));
  std::iota(order.begin(), order.end(), std::int64_t{0});
  shuffle(order, CounterRng(seed, RngUse::shuffle, static_cast<std::uint32_t>(epoch), 0), 0);
  return order;
}

TrainSampler::TrainSampler(std::int64_t size, std::vector<std::int32_t> labels, const ShardRule& rule,
                           int ranks, std::int64_t batch, std::uint64_t seed)
    : labels_(std::move(labels)), rule_(rule), size_(size), batch_(batch), seed_(seed) {
  TOPKNOT_CHECK(ranks >= 1, "no ranks");
  if (batch < 1) throw UserError(fmt::format("data.batch_size: {} is not at least 1", batch));
  const auto r = static_cast<std::size_t>(ranks);
  if (rule.kind == ShardRule::Kind::even) {
    for (std::int64_t i = 0; i <= ranks; ++i) starts_.push_back(i * (size / ranks));
  } else {
    std::vector<double> shares(r, 1.0);
    if (rule.kind == ShardRule::Kind::uneven && ranks > 1)
      for (std::size_t i = 0; i < r; ++i)
        shares[i] = std::pow(rule.ratio, 1.0 - static_cast<double>(i) / static_cast<double>(r - 1));
    starts_ = cut(size, shares);
  }
  if (rule.kind == ShardRule::Kind::by_label) {
    if (labels_.empty())
      throw UserError("data.shard: by_label needs a data set with classes; give even or uneven:RATIO");
    TOPKNOT_CHECK(static_cast<std::int64_t>(labels_.size()) == size, "one label per sample");
  }
  std::int64_t largest = 0;
  for (int i = 0; i < ranks; ++i) {
    if (shard_size(i) < 1)
      throw UserError(fmt::format(
          "data.shard: {} training samples do not give each of {} ranks a share; use fewer ranks, "
          "more samples or a smaller ratio",
          size, ranks));
    largest = std::max(largest, shard_size(i));
  }
  steps_ = std::max<std::int64_t>(1, largest / batch);
}

std::int64_t TrainSampler::shard_size(int rank) const {
  const auto r = static_cast<std::size_t>(rank);
  return starts_[r + 1] - starts_[r];
}

std::vector<float> TrainSampler::weights() const {
  const auto ranks = static_cast<int>(starts_.size()) - 1;
  std::vector<float> result;
  for (int r = 0; r < ranks; ++r)
    result.push_back(static_cast<float>(static_cast<double>(ranks) * static_cast<double>(shard_size(r)) /
                                        static_cast<double>(starts_.back())));
  return result;
}

TrainSampler::Epoch TrainSampler::epoch(std::int64_t number, int rank) const {
  std::vector<std::int64_t> order = epoch_permutation(size_, seed_, number);
  if (rule_.kind == ShardRule::Kind::by_label)
    std::stable_sort(order.begin(), order.end(), [&](std::int64_t a, std::int64_t b) {
      return labels_[static_cast<std::size_t>(a)] < labels_[static_cast<std::size_t>(b)];
    });
  Epoch epoch;
  const auto r = static_cast<std::size_t>(rank);
  epoch.shard_.assign(order.begin() + starts_[r], order.begin() + starts_[r + 1]);
  epoch.batch_ = batch_;
  epoch.seed_ = seed_;
  epoch.epoch_ = static_cast<std::uint32_t>(number);
  epoch.rank_ = static_cast<std::uint32_t>(rank);
  // A piece of the sorted order would come class after class.
  if (rule_.kind == ShardRule::Kind::by_label) epoch.shard_ = epoch.round_order(0);
  return epoch;
}

std::vector<std::int64_t> TrainSampler::Epoch::round_order(std::int64_t round) const {
  std::vector<std::int64_t> order = shard_;
  shuffle(order, CounterRng(seed_, RngUse::shuffle, epoch_, rank_ + 1),
          static_cast<std::uint64_t>(round) << 32);
  return order;
}

std::vector<std::int64_t> TrainSampler::Epoch::batch(std::int64_t step) const {
  const auto size = static_cast<std::int64_t>(shard_.size());
  std::vector<std::int64_t> result;
  result.reserve(static_cast<std::size_t>(batch_));
  std::int64_t position = step * batch_;
  while (static_cast<std::int64_t>(result.size()) < batch_) {
    const std::int64_t round = position / size, from = position % size;
    const std::int64_t count = std::min(size - from, batch_ - static_cast<std::int64_t>(result.size()));
    const auto append = [&](const std::vector<std::int64_t>& order) {
      result.insert(result.end(), order.begin() + from, order.begin() + from + count);
    };
    if (round == 0)
      append(shard_);
    else
      append(round_order(round));
    position += count;
  }
  return result;
}

EvalSampler::EvalSampler(std::int64_t size, int ranks, std::int64_t batch)
    : size_(size), ranks_(ranks), batch_(batch) {
  TOPKNOT_CHECK(ranks >= 1, "no ranks");
  if (batch < 1) throw UserError(fmt::format("data.batch_size: {} is not at least 1", batch));
}

std::vector<std::int64_t> EvalSampler::batch(int rank, std::int64_t step) const {
  const std::int64_t from = begin(rank) + step * batch_;
  const std::int64_t count = std::clamp<std::int64_t>(begin(rank + 1) - from, 0, batch_);
  std::vector<std::int64_t> result(static_cast<std::size_t>(count));
  std::iota(result.begin(), result.end(), from);
  return result;
}

}  // namespace topknot

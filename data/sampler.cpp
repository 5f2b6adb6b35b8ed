#include "data/sampler.h"

#include <fmt/format.h>

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

// Uniform in [0, below). 53 bits, the most that a double has: a stream may have more than 2^32 tokens.
std::int64_t drawn(const CounterRng& rng, std::int64_t row, std::int64_t below) {
  const auto i = 2 * static_cast<std::uint64_t>(row);
  const std::uint64_t bits = std::uint64_t{rng.bits(i)} << 32 | rng.bits(i + 1);
  return static_cast<std::int64_t>(static_cast<double>(bits >> 11) * 0x1p-53 * static_cast<double>(below));
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

Sampler::Sampler(int ranks, std::int64_t batch) : ranks_(ranks), batch_(batch) {
  TOPKNOT_CHECK(ranks >= 1, "no ranks");
  if (batch < 1) throw UserError(fmt::format("data.batch_size: {} is not at least 1", batch));
}

TrainSampler::TrainSampler(std::int64_t size, std::vector<std::int32_t> labels, const ShardRule& rule,
                           int ranks, std::int64_t batch, std::uint64_t seed)
    : Sampler(ranks, batch), labels_(std::move(labels)), rule_(rule), size_(size), seed_(seed) {
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
      throw UserError(
          fmt::format("data.shard: {} training samples do not give each of {} ranks a share; use fewer "
                      "ranks, more samples or a smaller ratio",
                      size, ranks));
    largest = std::max(largest, shard_size(i));
  }
  steps_ = std::max<std::int64_t>(1, largest / batch);
}

std::vector<float> TrainSampler::weights() const {
  std::vector<float> result;
  for (int r = 0; r < ranks_; ++r)
    result.push_back(static_cast<float>(static_cast<double>(ranks_) * static_cast<double>(shard_size(r)) /
                                        static_cast<double>(starts_.back())));
  return result;
}

std::vector<std::int64_t> TrainSampler::shard(std::int64_t epoch, int rank) const {
  std::vector<std::int64_t> order = epoch_permutation(size_, seed_, epoch);
  const bool by_label = rule_.kind == ShardRule::Kind::by_label;
  if (by_label)
    std::stable_sort(order.begin(), order.end(), [&](std::int64_t a, std::int64_t b) {
      return labels_[static_cast<std::size_t>(a)] < labels_[static_cast<std::size_t>(b)];
    });
  const auto r = static_cast<std::size_t>(rank);
  const std::vector<std::int64_t> shard(order.begin() + starts_[r], order.begin() + starts_[r + 1]);
  // A piece of the sorted order would come class after class.
  return by_label ? round_order(shard, epoch, rank, 0) : shard;
}

std::vector<std::int64_t> TrainSampler::round_order(std::vector<std::int64_t> shard, std::int64_t epoch,
                                                    int rank, std::int64_t round) const {
  shuffle(shard,
          CounterRng(seed_, RngUse::shuffle, static_cast<std::uint32_t>(epoch),
                     static_cast<std::uint32_t>(rank) + 1),
          static_cast<std::uint64_t>(round) << 32);
  return shard;
}

std::int64_t TrainSampler::enter(std::int64_t number, const std::vector<Dealt>& dealt) {
  entered_ = -1;
  if (dealt.empty()) return steps_;
  if (rule_.kind != ShardRule::Kind::even) return Sampler::enter(number, dealt);
  left_ = epoch_permutation(size_, seed_, number);
  for (const Dealt& part : dealt) {
    std::vector<std::int64_t> left;
    const std::int64_t shard = static_cast<std::int64_t>(left_.size()) / part.ranks,
                       taken = std::min(shard, part.batches * batch_);
    for (int rank = 0; rank < part.ranks; ++rank)
      left.insert(left.end(), left_.begin() + rank * shard + taken, left_.begin() + (rank + 1) * shard);
    left.insert(left.end(), left_.begin() + part.ranks * shard, left_.end());
    left_ = std::move(left);
  }
  entered_ = number;
  return static_cast<std::int64_t>(left_.size()) / (ranks_ * batch_);
}

EpochOrder TrainSampler::epoch(std::int64_t number, int rank) const {
  if (number == entered_) {
    const std::int64_t size = static_cast<std::int64_t>(left_.size()) / ranks_,
                       first = steps_ - size / batch_;
    return [this, first, from = rank * size](std::int64_t step) {
      const auto begin = left_.begin() + from + (step - first) * batch_;
      return std::vector<std::int64_t>(begin, begin + batch_);
    };
  }
  return [this, number, rank, shard = shard(number, rank)](std::int64_t step) {
    const auto size = static_cast<std::int64_t>(shard.size());
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
        append(shard);
      else
        append(round_order(shard, number, rank, round));
      position += count;
    }
    return result;
  };
}

GlobalBatchSampler::GlobalBatchSampler(std::int64_t samples, std::int64_t starts, std::int64_t size,
                                       int ranks, std::int64_t batch, std::uint64_t seed)
    : Sampler(ranks, batch), samples_(samples), starts_(starts), size_(size), seed_(seed) {
  if (size < ranks || samples < size)
    throw UserError(
        fmt::format("data.batch_size: {} samples do not fill a step of {} of {} ranks; lower it, "
                    "train.accumulate or dist.ranks, or give elastic.batch=rank",
                    samples, size, ranks));
  const std::int64_t most = (size + ranks - 1) / ranks;
  batches_ = std::min((most + batch - 1) / batch, size / ranks);
}

std::vector<float> global_batch_weights(std::int64_t size, int ranks) {
  std::vector<float> result;
  for (int r = 0; r < ranks; ++r)
    result.push_back(
        static_cast<float>(static_cast<double>(ranks * (size * (r + 1) / ranks - size * r / ranks)) /
                           static_cast<double>(size)));
  return result;
}

float GlobalBatchSampler::share(int rank, int part, int /*count*/) const {
  return static_cast<float>(begin(rank, part + 1) - begin(rank, part)) /
         static_cast<float>(begin(rank + 1) - begin(rank));
}

EpochOrder GlobalBatchSampler::epoch(std::int64_t number, int rank) const {
  const CounterRng rng(seed_, RngUse::shuffle, static_cast<std::uint32_t>(number), 1);
  return [this, rank, rng,
          order = epoch_permutation(starts_ > 0 ? 0 : samples_, seed_, number)](std::int64_t batch) {
    const std::int64_t step = batch / batches_, part = batch % batches_;
    std::vector<std::int64_t> result;
    for (std::int64_t i = step * size_ + begin(rank, part); i < step * size_ + begin(rank, part + 1); ++i)
      result.push_back(starts_ > 0 ? drawn(rng, i, starts_) : order[static_cast<std::size_t>(i)]);
    return result;
  };
}

std::int64_t GlobalBatchSampler::enter(std::int64_t /*number*/, const std::vector<Dealt>& dealt) {
  std::int64_t taken = 0;
  for (const Dealt& part : dealt) taken += part.ranks * part.batches;
  return std::max<std::int64_t>(0, samples_ / size_ - (taken + size_ - 1) / size_) * batches_;
}

EpochOrder EvalSampler::epoch(std::int64_t /*number*/, int rank) const {
  return [this, rank](std::int64_t step) {
    const std::int64_t from = begin(rank) + step * batch_;
    const std::int64_t count = std::clamp<std::int64_t>(begin(rank + 1) - from, 0, batch_);
    std::vector<std::int64_t> result(static_cast<std::size_t>(count));
    std::iota(result.begin(), result.end(), from);
    return result;
  };
}

LengthSampler::LengthSampler(std::int64_t size, int ranks, std::int64_t batch, std::uint64_t seed)
    : Sampler(ranks, batch), size_(size), seed_(seed) {
  if (steps(0) == 0)
    throw UserError(
        fmt::format("data.batch_size: {} samples do not fill a step of {} ranks with {} each; give fewer",
                    size, ranks, batch));
}

std::vector<std::int64_t> LengthSampler::samples(std::int64_t epoch) const {
  const std::int64_t step = ranks_ * batch_, count = steps(0);
  std::vector<std::int64_t> ascending = epoch_permutation(size_, seed_, epoch);
  ascending.resize(static_cast<std::size_t>(count * step));
  std::sort(ascending.begin(), ascending.end());
  if (epoch == 0) return ascending;
  std::vector<std::int64_t> samples;
  samples.reserve(ascending.size());
  for (const std::int64_t at : epoch_permutation(count, seed_, epoch))
    samples.insert(samples.end(), ascending.begin() + at * step, ascending.begin() + (at + 1) * step);
  return samples;
}

EpochOrder LengthSampler::epoch(std::int64_t number, int rank) const {
  return [this, rank, samples = samples(number)](std::int64_t step) {
    std::vector<std::int64_t> batch;
    for (std::int64_t i = 0; i < batch_; ++i)
      batch.push_back(samples[static_cast<std::size_t>((step * batch_ + i) * ranks_ + rank)]);
    return batch;
  };
}

StreamSampler::StreamSampler(std::int64_t tokens, std::int64_t window, int ranks, std::int64_t batch,
                             bool train)
    : Sampler(ranks, batch),
      window_(window),
      columns_(train ? ranks * batch : std::max<std::int64_t>(ranks, batch)) {
  TOPKNOT_CHECK(window >= 1, "no window");
  if (!train) {
    windows_ = (std::max<std::int64_t>(0, tokens - 1) + window - 1) / window;
    return;
  }
  stride_ = tokens / columns_;
  windows_ = std::max<std::int64_t>(0, stride_ - 1) / window * columns_;
  if (windows_ == 0)
    throw UserError(
        fmt::format("data.batch_size: {} tokens in {} columns ({} ranks x batch {}) are {} each, which hold "
                    "no window of {} (data.sequence_length) and the token after it; lower one of these",
                    tokens, columns_, ranks, batch, stride_, window));
}

EpochOrder StreamSampler::epoch(std::int64_t /*number*/, int rank) const {
  return [this, rank](std::int64_t step) {
    std::vector<std::int64_t> offsets;
    for (std::int64_t c = first_column(rank); c < first_column(rank + 1) && step < length(c); ++c)
      offsets.push_back(begin(c) + step * window_);
    return offsets;
  };
}

RandomWindowSampler::RandomWindowSampler(std::int64_t starts, std::int64_t window, int ranks,
                                         std::int64_t batch, std::uint64_t seed, std::int64_t multiple)
    : Sampler(ranks, batch), starts_(starts), seed_(seed) {
  TOPKNOT_CHECK(starts >= 1 && window >= 1 && multiple >= 1, "no window");
  steps_ = std::max<std::int64_t>(1, (starts + window) / (ranks * batch * window * multiple)) * multiple;
}

EpochOrder RandomWindowSampler::epoch(std::int64_t number, int rank) const {
  const CounterRng rng(seed_, RngUse::shuffle, static_cast<std::uint32_t>(number),
                       static_cast<std::uint32_t>(rank) + 1);
  return [this, rng](std::int64_t step) {
    std::vector<std::int64_t> offsets;
    for (std::int64_t row = step * batch_; row < (step + 1) * batch_; ++row)
      offsets.push_back(drawn(rng, row, starts_));
    return offsets;
  };
}

}  // namespace topknot

#include "data/stream_sampler.h"

#include <fmt/format.h>

#include <algorithm>

#include "nn/base/check.h"

namespace topknot {

StreamSampler::StreamSampler(std::int64_t tokens, std::int64_t window, int ranks, std::int64_t batch,
                             bool train)
    : window_(window), ranks_(ranks), columns_(train ? ranks * batch : std::max<std::int64_t>(ranks, batch)) {
  TOPKNOT_CHECK(ranks >= 1 && window >= 1, "no ranks, or no window");
  if (batch < 1) throw UserError(fmt::format("data.batch_size: {} is not at least 1", batch));
  if (!train) {
    windows_ = (std::max<std::int64_t>(0, tokens - 1) + window - 1) / window;
    return;
  }
  stride_ = tokens / columns_;
  windows_ = std::max<std::int64_t>(0, stride_ - 1) / window * columns_;
  if (windows_ == 0)
    throw UserError(
        fmt::format("data.batch_size: {} tokens in {} columns ({} ranks x batch {}) are {} each, which hold "
                    "no window of {} "
                    "(data.sequence_length) and the token after it; lower one of these",
                    tokens, columns_, ranks, batch, stride_, window));
}

std::int64_t StreamSampler::steps(int rank) const {
  return first_column(rank) < first_column(rank + 1) ? length(first_column(rank)) : 0;
}

std::int64_t StreamSampler::windows(int rank) const {
  std::int64_t sum = 0;
  for (std::int64_t c = first_column(rank); c < first_column(rank + 1); ++c) sum += length(c);
  return sum;
}

std::int64_t StreamSampler::begin(std::int64_t c) const {
  if (stride_ > 0) return c * stride_;
  return (windows_ / columns_ * c + std::min(c, windows_ % columns_)) * window_;
}

std::vector<std::int64_t> StreamSampler::batch(int rank, std::int64_t step) const {
  std::vector<std::int64_t> offsets;
  for (std::int64_t c = first_column(rank); c < first_column(rank + 1) && step < length(c); ++c)
    offsets.push_back(begin(c) + step * window_);
  return offsets;
}

}  // namespace topknot

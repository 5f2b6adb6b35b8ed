#include "data/length_sampler.h"

#include <fmt/format.h>

#include <algorithm>

#include "data/sampler.h"
#include "nn/base/check.h"

namespace topknot {

LengthSampler::LengthSampler(std::int64_t size, int ranks, std::int64_t batch, std::uint64_t seed)
    : size_(size), ranks_(ranks), batch_(batch), seed_(seed) {
  if (steps_per_epoch() == 0)
    throw UserError(
        fmt::format("data.batch_size: {} samples do not fill a step of {} ranks with {} each; give fewer",
                    size, ranks, batch));
}

std::vector<std::int64_t> LengthSampler::epoch(std::int64_t number) const {
  const std::int64_t step = ranks_ * batch_, steps = steps_per_epoch();
  std::vector<std::int64_t> ascending = epoch_permutation(size_, seed_, number);
  ascending.resize(static_cast<std::size_t>(steps * step));
  std::sort(ascending.begin(), ascending.end());
  if (number == 0) return ascending;
  std::vector<std::int64_t> samples;
  samples.reserve(ascending.size());
  for (const std::int64_t at : epoch_permutation(steps, seed_, number))
    samples.insert(samples.end(), ascending.begin() + at * step, ascending.begin() + (at + 1) * step);
  return samples;
}

std::vector<std::int64_t> LengthSampler::batch(const std::vector<std::int64_t>& epoch, std::int64_t step,
                                               int rank) const {
  std::vector<std::int64_t> samples;
  for (std::int64_t i = 0; i < batch_; ++i)
    samples.push_back(epoch[static_cast<std::size_t>((step * batch_ + i) * ranks_ + rank)]);
  return samples;
}

}  // namespace topknot

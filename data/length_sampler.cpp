#include "data/length_sampler.h"

#include <fmt/format.h>

#include <numeric>

#include "data/sampler.h"
#include "nn/core/base/check.h"
#include "nn/core/rng.h"

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
  const CounterRng rng(seed_, RngUse::shuffle, static_cast<std::uint32_t>(number), 1);
  const std::int64_t begin = rng.below(0, static_cast<std::uint32_t>(size_ - steps * step + 1));
  std::vector<std::int64_t> firsts = epoch_permutation(steps, seed_, number);
  if (number == 0) std::iota(firsts.begin(), firsts.end(), std::int64_t{0});
  for (std::int64_t& first : firsts) first = begin + first * step;
  return firsts;
}

std::vector<std::int64_t> LengthSampler::batch(std::int64_t first, int rank) const {
  std::vector<std::int64_t> samples;
  for (std::int64_t i = 0; i < batch_; ++i) samples.push_back(first + i * ranks_ + rank);
  return samples;
}

}  // namespace topknot

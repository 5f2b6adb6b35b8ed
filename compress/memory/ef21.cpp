#include "compress/memory/ef21.h"

#include <fmt/format.h>

#include <algorithm>

#include "compress/parallel.h"
#include "compress/state.h"
#include "nn/base/check.h"

namespace topknot {

FeedbackInput Ef21Memory::input(std::span<float> gradient, std::span<const float> spare) {
  TOPKNOT_CHECK(spare.size() == gradient.size(), "ef21 needs a residual as long as the gradient");
  if (!first_ && estimate_.size() != gradient.size())
    StateReader::fail(
        fmt::format("has an estimate of {} values where {} are needed", estimate_.size(), gradient.size()));
  return spare;
}

void Ef21Memory::commit(std::span<float>, std::span<float> spare, std::span<const std::uint32_t> indices,
                        std::span<const float> sent, std::span<const std::uint32_t> rejected) {
  std::vector<std::uint32_t> kept(rejected.begin(), rejected.end());
  std::sort(kept.begin(), kept.end());
  constexpr std::size_t ahead = 24;  // what costs is the wait for memory
  for (std::size_t i = 0; i < indices.size(); ++i) {
    if (i + ahead < indices.size()) __builtin_prefetch(&spare[indices[i + ahead]], 1);
    if (!kept.empty() && std::binary_search(kept.begin(), kept.end(), indices[i])) continue;
    spare[indices[i]] -= sent[i];
  }
  first_ = false;
}

void Ef21Memory::finish(std::span<float> average) {
  estimate_.resize(average.size());
  for_parts(average.size(), part_count(average.size()), [&](std::size_t, std::size_t begin, std::size_t end) {
    float* const estimate = estimate_.data();
    float* const mean = average.data();
    for (std::size_t i = begin; i < end; ++i) {
      estimate[i] += mean[i];
      mean[i] = estimate[i];
    }
  });
}

void Ef21Memory::save(StateWriter& writer) const {
  writer.put<std::uint8_t>(first_);
  writer.put_list(estimate_);
}

void Ef21Memory::load(StateReader& reader) {
  const auto first = reader.get<std::uint8_t>();
  estimate_ = reader.get_list<float>();
  if (first > 1 || (first == 1 && !estimate_.empty())) StateReader::fail("is not ef21's");
  first_ = first == 1;
}

namespace {

const bool ef21_registered = [] {
  add_memory<Ef21Memory>("ef21",
                         "differences to an estimate of the gradient are sent; the estimate is stepped along",
                         {.sends_differences = true, .depends_on_lr = "the estimate of the gradient"});
  return true;
}();

}  // namespace
}  // namespace topknot

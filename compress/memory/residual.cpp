#include "compress/memory/residual.h"

#include <algorithm>
#include <vector>

#include "compress/parallel.h"
#include "nn/base/check.h"

namespace topknot {

FeedbackInput ResidualMemory::input(std::span<float> gradient, std::span<const float> spare) {
  TOPKNOT_CHECK(spare.size() == gradient.size(), "error feedback needs a residual as long as the gradient");
  return spare;
}

void ResidualMemory::commit(std::span<float> u, std::span<float>, std::span<const std::uint32_t> indices,
                            std::span<const float> sent, std::span<const std::uint32_t> rejected) {
  // u - sent is +0 where values are sent exactly, else the coding error. The entries lie a page apart or so:
  // what costs is the wait for memory, so addresses are asked for ahead.
  const auto subtract = [&](std::size_t begin, std::size_t end) {
    constexpr std::size_t ahead = 24;
    for (std::size_t i = begin; i < end; ++i) {
      if (i + ahead < end) __builtin_prefetch(&u[indices[i + ahead]], 1);
      u[indices[i]] -= sent[i];
    }
  };
  if (rejected.empty()) {
    const std::size_t parts = std::min<std::size_t>(part_count(u.size()), indices.size() / 1024 + 1);
#pragma omp parallel for num_threads(static_cast <int>(parts)) schedule(static, 1) if (parts > 1)
    for (std::size_t part = 0; part < parts; ++part)
      subtract(indices.size() * part / parts, indices.size() * (part + 1) / parts);
    return;
  }
  std::vector<std::uint32_t> kept(rejected.begin(), rejected.end());
  std::sort(kept.begin(), kept.end());
  for (std::size_t i = 0; i < indices.size(); ++i)
    if (!std::binary_search(kept.begin(), kept.end(), indices[i])) u[indices[i]] -= sent[i];
}

namespace {

const bool residual_registered = [] {
  add_memory<ResidualMemory>("residual", "error feedback: what is not sent is added to the next gradient");
  return true;
}();

}  // namespace
}  // namespace topknot

#include "train/checksum.h"

#include <fmt/format.h>

#include <cstring>

#include "nn/base/check.h"

namespace topknot {

std::string checksum_hex(std::span<const float> weights) {
  return fmt::format("{:016x}", parameter_checksum(weights));
}

void check_same_parameters(ParameterArena& arena, CollectiveQueue& queue, const Communicator& communicator,
                           const std::string& when) {
  if (communicator.size() == 1) return;
  std::vector<const Parameter*> parameters(arena.parameters().begin(), arena.parameters().end());
  parameters.insert(parameters.end(), arena.frozen().begin(), arena.frozen().end());
  std::vector<std::span<const float>> slices;  // one per parameter, so that a difference can be named
  for (const Parameter* p : parameters) slices.emplace_back(p->value(), p->numel());
  const std::vector<std::uint64_t> mine = backend(arena.device()).checksums(slices);
  std::vector<std::vector<std::byte>> all;
  queue.run([&](Communicator& c) { c.all_gather(std::as_bytes(std::span(mine)), all); });
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    TOPKNOT_CHECK(all[rank].size() == all[0].size(),
                  fmt::format("rank {} has another model than rank 0", rank));
    for (std::size_t i = 0; i < mine.size(); ++i)
      TOPKNOT_CHECK(!std::memcmp(all[rank].data() + 8 * i, all[0].data() + 8 * i, 8),
                    fmt::format("the ranks' parameters differ {}: {} on rank {} is not rank 0's", when,
                                parameters[i]->name(), rank));
  }
}

}  // namespace topknot

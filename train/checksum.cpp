#include "train/checksum.h"

#include <cinttypes>
#include <cstdio>
#include <cstring>

#include "nn/core/base/check.h"

namespace topknot {

std::string checksum_hex(std::span<const float> weights) {
  char text[17];
  std::snprintf(text, sizeof text, "%016" PRIx64, parameter_checksum(weights));
  return text;
}

void check_same_parameters(ParameterArena& arena, CollectiveQueue& queue, const Communicator& communicator,
                           const std::string& when) {
  if (communicator.size() == 1) return;
  std::vector<std::uint64_t> mine;  // one per parameter, so that a difference can be named
  std::vector<float> copy;
  if (arena.device().kind != DeviceKind::cpu) copy = arena.host_weights();
  const float* weights = copy.empty() ? arena.weights().data() : copy.data();
  for (const Parameter* p : arena.parameters())
    mine.push_back(parameter_checksum({weights + p->offset(), p->numel()}));
  std::vector<std::vector<std::byte>> all;
  queue.run([&](Communicator& c) { c.all_gather(std::as_bytes(std::span(mine)), all); });
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    TOPKNOT_CHECK(all[rank].size() == all[0].size(),
                  "rank " + std::to_string(rank) + " has another model than rank 0");
    for (std::size_t i = 0; i < mine.size(); ++i)
      TOPKNOT_CHECK(!std::memcmp(all[rank].data() + 8 * i, all[0].data() + 8 * i, 8),
                    "the ranks' parameters differ " + when + ": " + arena.parameters()[i]->name() +
                        " on rank " + std::to_string(rank) + " is not rank 0's");
  }
}

}  // namespace topknot

#pragma once
// What the parts of GlooCollectives have in common.

#include <cstddef>
#include <cstdint>

namespace topknot {

enum GlooSlot : std::uint64_t {
  slot_eager = 1,
  slot_block,
  slot_slice,
  slot_sum,
  slot_ring,
  slot_broadcast,
  slot_forward  // and up, one a step
};

// Long messages that a rank has on their way at a time where each rank sends to all others. Were all sent at once,
// each rank's link would get P - 1 of them together and drop what its queue cannot hold.
constexpr int kInFlight = 3;

}  // namespace topknot

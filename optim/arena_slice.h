#pragma once
// A slice of the arena that an update rule changes, and which of its elements decay.

#include <cstddef>
#include <cstdint>

#include "nn/base/host_device.h"

namespace topknot {

// The elements [offset, offset + n) of the arena. `boundaries`: where decaying elements begin to follow others, or the
// other way round, ascending, in the arena's memory; before the first one elements decay if `first_decays`.
struct ArenaSlice {
  std::size_t offset, n;
  float* weights;         // of the slice
  const float* gradient;  // of the slice
  const std::uint64_t* boundaries;
  std::uint32_t boundary_count;
  bool first_decays;
};

// Which run of the arena an element lies in; runs that decay and runs that do not take turns.
class DecayRuns {
 public:
  TOPKNOT_HOST_DEVICE DecayRuns(const ArenaSlice& s, std::size_t element) : s_(s) {
    std::uint32_t end = s.boundary_count;
    while (run_ < end) {
      const std::uint32_t middle = (run_ + end) / 2;
      if (s.boundaries[middle] <= element)
        run_ = middle + 1;
      else
        end = middle;
    }
  }
  // For this element or a later one than the last.
  TOPKNOT_HOST_DEVICE bool decays(std::size_t element) {
    while (run_ < s_.boundary_count && s_.boundaries[run_] <= element) ++run_;
    return s_.first_decays != (run_ % 2 == 1);
  }
  // Where the run of the last element ends, or the slice.
  std::size_t end() const {
    const std::size_t last = s_.offset + s_.n;
    return run_ < s_.boundary_count && s_.boundaries[run_] < last ? s_.boundaries[run_] : last;
  }

 private:
  const ArenaSlice& s_;
  std::uint32_t run_ = 0;
};

// On the host: update(begin, end, decays) for each run of the slice, as positions in it.
template <class Update>
void for_decay_runs(const ArenaSlice& s, const Update& update) {
  DecayRuns runs(s, s.offset);
  for (std::size_t begin = 0; begin < s.n;) {
    const bool decays = runs.decays(s.offset + begin);
    const std::size_t end = runs.end() - s.offset;
    update(begin, end, decays);
    begin = end;
  }
}

}  // namespace topknot

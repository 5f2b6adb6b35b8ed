#pragma once
// The inner loops of the passes (compress/select/passes/passes.h): one thread's range or one chunk of a
// vector, compiled for several instruction sets. None of them throws or allocates.

#include <cstddef>
#include <cstdint>

#include "compress/select/passes/keys.h"
#include "compress/select/passes/passes.h"

namespace topknot::pass {

inline constexpr std::size_t kGroup = 64;  // elements looked at between two tests for candidates

// The output of a pass over one part, ascending by index, with room for `limit` entries and kGroup more.
struct Sink {
  std::uint32_t* index;
  float* value;
  std::size_t limit;
  std::size_t count = 0;
  MagnitudeKey largest = 0;  // over all candidates, kept or not
  bool complete = true;      // false: more than `limit` were found, and the list was dropped
};

// Adds to elements [begin, end) of u, or takes them as they are (collect_part); those whose key exceeds
// `above`, at most kLargestFinite, go to the sink.
void accumulate_part(float* u, const FeedbackInput& input, std::size_t begin, std::size_t end,
                     MagnitudeKey above, Sink& sink);
void collect_part(const float* u, std::size_t begin, std::size_t end, MagnitudeKey above, Sink& sink);

// Makes u[begin, end) and returns null if there is a velocity. Else returns what to add to u; null: nothing.
const float* add_velocity(std::span<float> u, const FeedbackInput& input, std::size_t begin, std::size_t end);

// Sums of x - shift and of its square; whether all x are zero.
struct ChunkSums {
  double sum = 0, squares = 0;
  bool zero = true;
};
// u += addend, if that is not null, and the sums of the result, over the chunk [begin, end); what exceeds
// `above` goes to the sink, as in collect_part().
ChunkSums moments_chunk(float* u, const float* addend, std::size_t begin, std::size_t end, double shift,
                        MagnitudeKey above, Sink& sink);

}  // namespace topknot::pass

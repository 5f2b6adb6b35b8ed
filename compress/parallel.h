#pragma once
// How compression's loops are cut for threads: contiguous ranges of whole chunks, one per thread. Results
// must not depend on the number of parts; sums are therefore made by chunk, of fixed size.

#include <omp.h>

#include <algorithm>
#include <cstddef>
#include <span>

#include "nn/core/simd.h"

namespace topknot {

inline constexpr std::size_t kChunk = 16384;  // elements: two float streams of it fit the second-level cache

// The number of threads, or fewer if waking a thread would cost more than its part of the work.
inline std::size_t part_count(std::size_t n) {
  return std::clamp<std::size_t>(n / (4 * kChunk), 1,
                                 static_cast<std::size_t>(std::max(1, omp_get_max_threads())));
}

// Calls body(part, begin, end), which may not throw, for each of `parts` ranges that cover [0, n) in order.
void for_parts(std::size_t n, std::size_t parts, auto&& body) {
  if (parts <= 1) {
    body(std::size_t{0}, std::size_t{0}, n);
    return;
  }
  const std::size_t chunks = (n + kChunk - 1) / kChunk;
#pragma omp parallel for num_threads(static_cast <int>(parts)) schedule(static, 1)
  for (std::size_t part = 0; part < parts; ++part)
    body(part, std::min(n, chunks * part / parts * kChunk),
         std::min(n, chunks * (part + 1) / parts * kChunk));
}

inline void multiply_all(std::span<float> x, float factor) {
  if (factor == 1.0f) return;
  for_parts(x.size(), part_count(x.size()), [&](std::size_t, std::size_t begin, std::size_t end) {
    multiply(x.data() + begin, end - begin, factor);
  });
}

// Calls body(block), which may not throw, for each block, on threads if each gets `per_thread` of them.
void for_each_block(std::size_t blocks, std::size_t per_thread, auto&& body) {
  const int threads = std::min(static_cast<int>(blocks / per_thread), omp_get_max_threads());
  if (threads <= 1) {
    for (std::size_t block = 0; block < blocks; ++block) body(block);
    return;
  }
#pragma omp parallel for num_threads(threads) schedule(static)
  for (std::size_t block = 0; block < blocks; ++block) body(block);
}

}  // namespace topknot

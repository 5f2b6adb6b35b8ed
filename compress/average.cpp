#include "compress/average.h"

#include <algorithm>
#include <vector>

#include "compress/parallel.h"
#include "nn/core/simd.h"

namespace topknot {
namespace {

// Filled, added and multiplied while it is in the first-level cache.
constexpr std::size_t kTile = 4096;

}  // namespace

template <class T>
void average_sparse(std::span<const Contribution<T>> contributions, std::span<T> average) {
  const T factor = T{1} / static_cast<T>(contributions.size());
  const std::size_t parts = part_count(average.size());
  // Where each rank's list stands, by part; made here because the loop must not throw.
  std::vector<std::size_t> cursors(parts * contributions.size());
  for_parts(average.size(), parts, [&](std::size_t part, std::size_t begin, std::size_t end) {
    std::size_t* cursor = cursors.data() + part * contributions.size();
    for (std::size_t r = 0; r < contributions.size(); ++r) {
      const auto& indices = contributions[r].indices;
      cursor[r] =
          static_cast<std::size_t>(std::lower_bound(indices.begin(), indices.end(), begin) - indices.begin());
    }
    for (std::size_t tile = begin; tile < end; tile += kTile) {
      const std::size_t tile_end = std::min(tile + kTile, end);
      std::fill(average.data() + tile, average.data() + tile_end, T{0});
      bool touched = false;
      for (std::size_t r = 0; r < contributions.size(); ++r) {
        const Contribution<T>& from = contributions[r];
        std::size_t i = cursor[r];
        touched |= i < from.indices.size() && from.indices[i] < tile_end;
        if (from.weight == T{1}) {
          for (; i < from.indices.size() && from.indices[i] < tile_end; ++i)
            average[from.indices[i]] += from.values[i];
        } else {
          for (; i < from.indices.size() && from.indices[i] < tile_end; ++i)
            average[from.indices[i]] += from.weight * from.values[i];
        }
        cursor[r] = i;
      }
      if (touched && contributions.size() > 1) multiply(average.data() + tile, tile_end - tile, factor);
    }
  });
}

template void average_sparse(std::span<const Contribution<float>>, std::span<float>);
template void average_sparse(std::span<const Contribution<double>>, std::span<double>);

}  // namespace topknot

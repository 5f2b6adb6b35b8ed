#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "data/image.h"
#include "nn/core/simd.h"

namespace topknot {
namespace {

constexpr int kWeightBits = 22;  // of a weight's fraction: 255 times all of them stays below 2^31
constexpr int kRounding = 1 << (kWeightBits - 1);

// Which pixels make up each output pixel, with which weights.
struct Filter {
  struct Taps {
    int first, count;
  };
  std::vector<Taps> taps;
  std::vector<int> weights;  // `most` per output pixel
  int most;
  const int* of(int i) const {
    return weights.data() + static_cast<std::size_t>(i) * static_cast<std::size_t>(most);
  }

  // `size` pixels in all, of which [begin, end) becomes `side` pixels.
  Filter(double begin, double end, int size, int side) : taps(static_cast<std::size_t>(side)) {
    const double step = (end - begin) / side, reach = std::max(step, 1.0);
    most = 2 * static_cast<int>(std::ceil(reach)) + 1;
    weights.resize(taps.size() * static_cast<std::size_t>(most));
    std::vector<double> exact(static_cast<std::size_t>(most));
    for (int i = 0; i < side; ++i) {
      const double centre = begin + (i + 0.5) * step;
      const int first = std::clamp(static_cast<int>(std::floor(centre - reach + 0.5)), 0, size - 1),
                last = std::clamp(static_cast<int>(std::floor(centre + reach + 0.5)), first + 1, size);
      double sum = 0;
      for (int j = first; j < last; ++j)
        sum += exact[static_cast<std::size_t>(j - first)] =
            std::max(0.0, 1 - std::abs(j + 0.5 - centre) / reach);
      int* weight = weights.data() + i * most;
      for (int j = 0; j < last - first; ++j)
        weight[j] = static_cast<int>(
            std::lround((sum > 0 ? exact[static_cast<std::size_t>(j)] / sum : 1.0 / (last - first)) *
                        (1 << kWeightBits)));
      taps[static_cast<std::size_t>(i)] = {first, last - first};
    }
  }
};

std::uint8_t byte_of(int sum) {
  return static_cast<std::uint8_t>(std::clamp(sum >> kWeightBits, 0, 255));
}

// A pixel in vectors of 16 bytes: its four bytes first, or widened to four numbers of 32 bits. By shuffles,
// which are one instruction each way; conversions of such short vectors are not.
typedef std::uint8_t Bytes16 __attribute__((vector_size(16)));
typedef int Ints4 __attribute__((vector_size(16)));

TOPKNOT_INLINE Ints4 load_pixel(const std::uint8_t* from) {
  Bytes16 bytes = {}, zero = {};
  std::memcpy(&bytes, from, 4);
  return reinterpret_cast<Ints4>(
      __builtin_shufflevector(bytes, zero, 0, 16, 16, 16, 1, 16, 16, 16, 2, 16, 16, 16, 3, 16, 16, 16));
}
TOPKNOT_INLINE void store_pixel(Ints4 sum, std::uint8_t* to) {
  sum >>= kWeightBits;
  sum = sum < 0 ? Ints4{} : sum;
  sum = sum > 255 ? Ints4{} + 255 : sum;
  const Bytes16 bytes = reinterpret_cast<Bytes16>(sum);
  const Bytes16 packed =
      __builtin_shufflevector(bytes, bytes, 0, 4, 8, 12, 0, 4, 8, 12, 0, 4, 8, 12, 0, 4, 8, 12);
  std::memcpy(to, &packed, 4);
}

// One row, of 4 bytes per pixel.
TOPKNOT_MULTIVERSION void filter_row(const std::uint8_t* row, const Filter& filter, std::uint8_t* out) {
  const int* weights = filter.weights.data();
  for (const auto [first, count] : filter.taps) {
    const std::uint8_t* from = row + 4 * static_cast<std::size_t>(first);
    Ints4 sum = Ints4{} + kRounding;
    for (int j = 0; j < count; ++j) sum += weights[j] * load_pixel(from + 4 * j);
    store_pixel(sum, out);
    weights += filter.most;
    out += 4;
  }
}

// sums[i] = the weighted sum over `count` rows.
TOPKNOT_MULTIVERSION void filter_column(const std::uint8_t* rows, std::size_t stride, const int* weights,
                                        int count, std::size_t n, int* sums) {
  std::fill_n(sums, n, kRounding);
  for (int j = 0; j < count; ++j, rows += stride) {
    const int weight = weights[j];
    for (std::size_t i = 0; i < n; ++i) sums[i] += weight * rows[i];
  }
}

}  // namespace

void resample(const Picture& picture, const PixelBox& box, int side, bool flip, std::uint8_t* out) {
  const double by = 1.0 / picture.shrink;
  const Filter across(box.left * by - picture.left, box.right * by - picture.left, picture.width, side);
  const Filter down(box.top * by - picture.top, box.bottom * by - picture.top, picture.height, side);
  const auto pixels = static_cast<std::size_t>(side);
  const int first = down.taps.front().first, last = down.taps.back().first + down.taps.back().count;
  const std::size_t stride = 4 * pixels;
  std::vector<std::uint8_t> rows(static_cast<std::size_t>(last - first) * stride);
  for (int y = first; y < last; ++y)
    filter_row(picture.pixels + static_cast<std::size_t>(y) * picture.stride, across,
               rows.data() + static_cast<std::size_t>(y - first) * stride);
  std::vector<int> sums(stride);
  for (std::size_t y = 0; y < pixels; ++y) {
    const auto [from, count] = down.taps[y];
    filter_column(rows.data() + static_cast<std::size_t>(from - first) * stride, stride,
                  down.of(static_cast<int>(y)), count, stride, sums.data());
    for (std::size_t x = 0; x < pixels; ++x)
      for (std::size_t c = 0; c < 3; ++c)
        out[(c * pixels + y) * pixels + (flip ? pixels - 1 - x : x)] = byte_of(sums[4 * x + c]);
  }
}

}  // namespace topknot

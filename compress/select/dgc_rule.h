#pragma once
// The numbers of DGC's sampled selection (compress/select/dgc_sampled.cpp), for CPUs and kernels.

#include <cmath>
#include <cstddef>

#include "nn/base/host_device.h"

namespace topknot {

struct CompressOptions;

// How a vector is sampled. stride == 1 means that all of it is.
struct SampleGeometry {
  std::size_t stride = 1;   // distance of sampled elements; 1 modulo 8 where the code's loop makes it so
  std::size_t samples = 1;  // numel / stride, which is one fewer than a sample that starts early enough has
  std::size_t top_samples = 1;  // t is the magnitude of this rank in the sample
  std::size_t selects = 1;      // k, the most that is sent
};

namespace dgc {

inline constexpr double kUpper = 1.3, kLower = 0.8;  // bounds of the count over k, and factors of t
inline constexpr int kAdaptations = 10;

TOPKNOT_HOST_DEVICE std::size_t ceil_of(double x) {
  return static_cast<std::size_t>(::ceil(x));
}

// ceil(density * d), at least 1 and at most d.
TOPKNOT_HOST_DEVICE std::size_t selected_count(double density, std::size_t d) {
  if (density >= 1) return d;
  const std::size_t most = d > 1 ? d : 1, count = ceil_of(density * static_cast<double>(d));
  return count < 1 ? 1 : count > most ? most : count;
}

TOPKNOT_HOST_DEVICE bool far_too_many(std::size_t count, std::size_t k) {
  return static_cast<double>(count) > kUpper * static_cast<double>(k);
}
TOPKNOT_HOST_DEVICE bool far_too_few(std::size_t count, std::size_t k) {
  return static_cast<double>(count) < kLower * static_cast<double>(k);
}

// The threshold after one that far too many (else far too few) reach; `largest`: the largest finite number.
TOPKNOT_HOST_DEVICE float moved_threshold(float t, bool many, float largest) {
  const float moved = t * static_cast<float>(many ? kUpper : kLower);
  return moved < largest ? moved : largest;
}

TOPKNOT_HOST_DEVICE SampleGeometry geometry_of(std::size_t numel, double density, double sample_ratio) {
  SampleGeometry g;
  const double d = static_cast<double>(numel);
  const std::size_t floor_of_samples = ceil_of(2 / density);
  g.samples = numel;
  if (numel > floor_of_samples) {
    std::size_t needed = ceil_of(d * sample_ratio);
    if (needed < floor_of_samples) needed = floor_of_samples;
    if (needed > numel) needed = numel;
    g.stride = ceil_of(d / static_cast<double>(needed) / 32) * 32 + 1;
    while (g.samples = numel / g.stride, g.samples < needed) g.stride -= 8;
  }
  g.top_samples = selected_count(density, g.samples);
  g.selects = selected_count(density, numel);
  return g;
}

}  // namespace dgc

// geometry_of() for numel >= 1, density and sample_ratio in (0, 1]; else throws Error. The sample has at
// least max(ceil(numel * sample_ratio), ceil(2 / density)) elements.
SampleGeometry sample_geometry(std::size_t numel, double density, double sample_ratio);

// compress.sample_ratio, .resample and .truncate. Throws UserError for values outside their ranges.
struct DgcSampledOptions {
  double sample_ratio;
  bool resample, lowest;
};
DgcSampledOptions dgc_sampled_options(const CompressOptions& options);
}  // namespace topknot

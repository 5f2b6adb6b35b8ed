#include "data/spectrogram.h"

#include <array>
#include <cmath>
#include <numbers>
#include <vector>

#include "nn/base/check.h"
#include "nn/core/simd.h"

namespace topknot {
namespace {

constexpr auto kBins = static_cast<std::size_t>(kSpectrumBins);
constexpr auto kHalf = static_cast<std::size_t>(kWindow / 2);
using Spectrum = std::array<float, kBins>;

// window[n], and cosines and sines of 2 pi n k / kWindow for n up to half a window: the other half mirrors them.
struct SpectrumTables {
  std::array<float, 2 * kHalf> window;
  std::vector<Spectrum> cosine, sine;

  SpectrumTables() : cosine(kHalf + 1), sine(kHalf + 1) {
    constexpr double turn = 2 * std::numbers::pi;
    for (std::size_t n = 0; n < window.size(); ++n)
      window[n] = static_cast<float>(
          0.54 - 0.46 * std::cos(turn * static_cast<double>(n) / static_cast<double>(window.size() - 1)));
    for (std::size_t n = 0; n <= kHalf; ++n)
      for (std::size_t k = 0; k < kBins; ++k) {
        const double angle = turn * static_cast<double>(n * k % (2 * kHalf)) / (2 * kHalf);
        cosine[n][k] = static_cast<float>(std::cos(angle));
        sine[n][k] = static_cast<float>(std::sin(angle));
      }
  }
};

// The real and the imaginary part of the transform of a windowed frame x.
TOPKNOT_MULTIVERSION void transform_frame(const SpectrumTables& tables, const float* x, Spectrum& real,
                                          Spectrum& imaginary) {
  for (std::size_t k = 0; k < kBins; ++k) {
    real[k] = x[0] + x[kHalf] * tables.cosine[kHalf][k];
    imaginary[k] = 0;
  }
  for (std::size_t n = 1; n < kHalf; ++n) {
    const float even = x[n] + x[2 * kHalf - n], odd = x[n] - x[2 * kHalf - n];
    const Spectrum &cosine = tables.cosine[n], &sine = tables.sine[n];
    for (std::size_t k = 0; k < kBins; ++k) {
      real[k] += even * cosine[k];
      imaginary[k] -= odd * sine[k];
    }
  }
}

}  // namespace

void log_spectrogram(std::span<const float> samples, float* out, std::int64_t stride) {
  static const SpectrumTables tables;
  const auto n = static_cast<std::int64_t>(samples.size());
  TOPKNOT_CHECK(n > kWindow / 2, "a recording of half a window or less");
  const std::int64_t frames = spectrogram_frames(n);
  std::array<float, 2 * kHalf> x;
  Spectrum real, imaginary;
  double sum = 0, squares = 0;
  for (std::int64_t t = 0; t < frames; ++t) {
    for (std::int64_t i = 0; i < kWindow; ++i) {
      std::int64_t at = t * kHop + i - kWindow / 2;
      if (at < 0) at = -at;
      if (at >= n) at = 2 * (n - 1) - at;
      x[static_cast<std::size_t>(i)] =
          samples[static_cast<std::size_t>(at)] * tables.window[static_cast<std::size_t>(i)];
    }
    transform_frame(tables, x.data(), real, imaginary);
    for (std::size_t k = 0; k < kBins; ++k) {
      const float magnitude = std::sqrt(real[k] * real[k] + imaginary[k] * imaginary[k]);
      const float value = std::log1p(magnitude);
      out[static_cast<std::int64_t>(k) * stride + t] = value;
      sum += value;
      squares += static_cast<double>(value) * value;
    }
  }
  const double count = static_cast<double>(frames * kSpectrumBins), mean = sum / count;
  const double deviation = std::sqrt(std::max(squares - sum * mean, 0.0) / (count - 1));
  for (std::int64_t k = 0; k < kSpectrumBins; ++k)
    for (std::int64_t t = 0; t < frames; ++t) {
      float& value = out[k * stride + t];
      value = deviation == 0 ? 0.0f : static_cast<float>((value - mean) / deviation);
    }
}

}  // namespace topknot

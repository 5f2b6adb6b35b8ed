#include "data/spectrogram.h"

#include <cmath>
#include <complex>
#include <limits>
#include <numbers>
#include <vector>

#include "tests/support/catch.h"

using namespace topknot;

namespace {

// By the definition, in double: bin k of frame t at [k * frames + t].
std::vector<double> plain_spectrogram(const std::vector<float>& x) {
  const auto n = static_cast<std::int64_t>(x.size());
  const std::int64_t frames = 1 + n / 160;
  std::vector<double> out(static_cast<std::size_t>(161 * frames));
  double mean = 0, variance = 0;
  for (std::int64_t t = 0; t < frames; ++t)
    for (std::int64_t k = 0; k < 161; ++k) {
      std::complex<double> sum = 0;
      for (std::int64_t i = 0; i < 320; ++i) {
        std::int64_t at = 160 * t - 160 + i;
        at = at < 0 ? -at : at > n - 1 ? 2 * n - 2 - at : at;
        const double window = 0.54 - 0.46 * std::cos(2 * std::numbers::pi * static_cast<double>(i) / 319);
        sum += window * x[static_cast<std::size_t>(at)] *
               std::polar(1.0, -2 * std::numbers::pi * static_cast<double>(i * k) / 320);
      }
      out[static_cast<std::size_t>(k * frames + t)] = std::log(1 + std::abs(sum));
    }
  for (const double v : out) mean += v / static_cast<double>(out.size());
  for (const double v : out) variance += (v - mean) * (v - mean) / static_cast<double>(out.size() - 1);
  for (double& v : out) v = (v - mean) / std::sqrt(variance);
  return out;
}

}  // namespace

TEST_CASE("a log spectrogram is that of the definition, also where its rows are padded") {
  for (const std::size_t n : {161u, 320u, 1601u, 3999u}) {
    std::vector<float> x(n);
    for (std::size_t i = 0; i < n; ++i) {
      const auto s = static_cast<double>(i);
      x[i] = static_cast<float>(0.4 * std::sin(s * 0.3) + 0.2 * std::sin(s * s * 1e-4) + 0.01);
    }
    const auto expected = plain_spectrogram(x);
    const std::int64_t frames = spectrogram_frames(static_cast<std::int64_t>(n)), stride = frames + 3;
    std::vector<float> out(static_cast<std::size_t>(kSpectrumBins * stride), -7.0f);
    log_spectrogram(x, out.data(), stride);
    INFO(n << " samples");
    double worst = 0;
    for (std::int64_t k = 0; k < kSpectrumBins; ++k) {
      for (std::int64_t t = 0; t < frames; ++t)
        worst = std::max(worst, std::abs(out[static_cast<std::size_t>(k * stride + t)] -
                                         expected[static_cast<std::size_t>(k * frames + t)]));
      CHECK(out[static_cast<std::size_t>(k * stride + frames)] == -7.0f);
    }
    CHECK(worst < 2e-5);
  }
}

TEST_CASE("the spectrogram of silence is zero") {
  const std::vector<float> silence(800);
  std::vector<float> out(static_cast<std::size_t>(kSpectrumBins * 6), 1.0f);
  log_spectrogram(silence, out.data(), 6);
  CHECK(out == std::vector<float>(out.size(), 0.0f));
}

TEST_CASE("the spectrogram of what is no sound is not silence") {
  std::vector<float> samples(800, 0.1f), out(static_cast<std::size_t>(kSpectrumBins * 6));
  samples[400] = std::numeric_limits<float>::quiet_NaN();
  log_spectrogram(samples, out.data(), 6);
  CHECK(std::isnan(out[0]));
}

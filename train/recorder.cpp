#include "train/recorder.h"

#include <fmt/format.h>

#include <cmath>
#include <exception>
#include <filesystem>

#include "compress/compressor.h"
#include "nn/base/check.h"
#include "nn/base/log.h"
#include "nn/base/text.h"
#include "train/checkpoint/safetensors.h"

namespace topknot {
namespace {

// Summed apart from the k largest, so that a small rest keeps its digits.
double contraction_of(std::vector<float>& values, std::size_t k) {
  const auto by_magnitude = [](float a, float b) { return std::fabs(a) > std::fabs(b); };
  const auto rest = values.begin() + static_cast<std::ptrdiff_t>(k);
  if (rest != values.end()) std::nth_element(values.begin(), rest, values.end(), by_magnitude);
  double kept = 0, left = 0;
  for (auto it = values.begin(); it != values.end(); ++it)
    (it < rest ? kept : left) += static_cast<double>(*it) * *it;
  return kept + left > 0 ? left / (kept + left) : 0;
}

void count(std::span<const float> u, DistributionRecord& record) {
  record.histogram.assign(kHistogramBins, 0);
  record.least_exponent = kLeastExponent;
  record.magnitudes.assign(kGreatestExponent - kLeastExponent + 1, 0);
  const double scale = record.deviation > 0 ? kHistogramBins / (2 * kHistogramReach * record.deviation) : 0;
  for (const float value : u) {
    const double place = (value - record.mean) * scale + 0.5 * kHistogramBins;
    if (place < 0)
      ++record.below;
    else if (place >= kHistogramBins)
      ++record.above;
    else
      ++record.histogram[static_cast<std::size_t>(place)];
    if (value == 0) {
      ++record.zeros;
      continue;
    }
    const int exponent = std::clamp(std::ilogb(value), kLeastExponent, kGreatestExponent);
    ++record.magnitudes[static_cast<std::size_t>(exponent - kLeastExponent)];
  }
}

}  // namespace

DistributionRecord distribution_of(std::span<const float> u, double density) {
  TOPKNOT_CHECK(!u.empty() && density > 0 && density <= 1, "nothing to look at");
  DistributionRecord record;
  record.density = density;
  record.size = static_cast<std::int64_t>(u.size());
  const double n = static_cast<double>(u.size());
  double sum = 0;
  for (const float value : u) sum += value;
  TOPKNOT_CHECK(std::isfinite(sum), "a value that is not finite");
  record.mean = sum / n;
  double squares = 0;
  for (const float value : u) squares += (value - record.mean) * (value - record.mean);
  record.deviation = u.size() > 1 ? std::sqrt(squares / (n - 1)) : 0;

  std::vector<float> copy(u.begin(), u.end());
  record.median = quantile({u.begin(), u.end()}, 0.5);
  double distances = 0;
  for (const float value : u) distances += std::fabs(value - record.median);
  record.laplace_scale = distances / n;
  count(u, record);

  const std::size_t k = target_count(density, u.size());
  record.k = static_cast<std::int64_t>(k);
  record.contraction = contraction_of(copy, k);
  const double left = 1 - static_cast<double>(k) / n;
  record.bound = left;
  record.bell_bound = left * left;
  return record;
}

Recorder::Recorder(const Config& config, const RunDirectory& folder, const ParameterArena& arena,
                   Exchange* exchange, bool root)
    : from_(config.train.record_gradients.size() > 1 ? config.train.record_gradients[1] : 0),
      steps_(root && asks_for_steps(config.train.record_gradients) ? config.train.record_gradients[0] : 0),
      every_(root ? config.train.distribution_every : 0),
      local_(makes_local_steps(config)),
      method_(config.compress.name),
      device_(arena.device()) {
  if (steps_ > 0) folder.check_gradients();
  if (steps_ > 0 && !std::filesystem::exists(folder.gradients_safetensors())) {
    gradient_.resize(arena.size());
    file_ = std::make_unique<GradientsWriter>(folder.gradients_safetensors(), arena.size());
  }
  if (every_ > 0) {
    accumulated_.resize(arena.compressible_size());
    TOPKNOT_CHECK(exchange, "distributions are looked at in the exchange");
    exchange->observe(
        [this](const Group& group, std::span<const float> accumulated) { observe(group, accumulated); });
  }
}

Recorder::~Recorder() {
  // A run that failed leaves the steps it has.
  try {
    finish();
  } catch (const std::exception& error) {
    log_warning(error.what());
  }
}

void Recorder::begin_step(std::int64_t step) {
  record_gradient_ = file_ && step == from_ + recorded_;
  record_distribution_ = every_ > 0 && (step + 1) % every_ == 0;
  observed_ = 0;
  // Parameters that no backward pass writes to have gradient zero.
  if (record_gradient_) std::fill(gradient_.begin(), gradient_.end(), 0.0f);
}

void Recorder::end_step(const StepRecord& record, MetricsWriter& metrics) {
  if (record_gradient_) {
    file_->append(gradient_);
    ++recorded_;
    if (recorded_ == steps_) finish();
  }
  if (!record_distribution_ || record.skipped || (local_ && observed_ == 0)) return;
  if (observed_ < accumulated_.size() || accumulated_.empty()) {
    if (!warned_)
      log_warning("train.distribution_every: " + method_ + " has no accumulated gradient to look at");
    warned_ = true;
    return;
  }
  DistributionRecord distribution = distribution_of(accumulated_, record.density);
  distribution.step = record.step;
  distribution.epoch = record.epoch;
  metrics.write(distribution);
}

void Recorder::finish() {
  if (file_) {
    if (recorded_ > 0) file_->close();
    if (recorded_ < steps_)
      log_warning(fmt::format(
          "recorded {} of the {} steps of train.record_gradients: this start made no more of them", recorded_,
          steps_));
  }
  file_.reset();
  record_gradient_ = false;
}

}  // namespace topknot

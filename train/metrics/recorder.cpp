#include "train/metrics/recorder.h"

#include <algorithm>
#include <exception>

#include "nn/core/base/check.h"
#include "nn/core/base/log.h"
#include "train/metrics/distribution.h"
#include "train/metrics/npy.h"

namespace topknot {

Recorder::Recorder(const Config& config, const RunDirectory& folder, const ParameterArena& arena,
                   Exchange* exchange, bool root)
    : from_(config.train.record_from),
      steps_(root ? config.train.record_gradients : 0),
      every_(root ? config.train.distribution_every : 0),
      method_(config.compress.name),
      device_(arena.device()) {
  if (steps_ > 0) {
    gradient_.resize(arena.size());
    file_ = std::make_unique<NpyWriter>(folder.gradients_npy(), std::vector<std::size_t>{arena.size()});
  }
  if (every_ > 0) {
    accumulated_.resize(arena.compressible_size());
    TOPKNOT_CHECK(exchange, "distributions are looked at in the exchange");
    exchange->observe(
        [this](const Group& group, std::span<const float> accumulated) { look(group, accumulated); });
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
  record_gradient_ = file_ && step >= from_ && step - from_ < steps_;
  record_distribution_ = every_ > 0 && (step + 1) % every_ == 0;
  looked_at_ = 0;
  // What no backward pass writes to is zero.
  if (record_gradient_) std::fill(gradient_.begin(), gradient_.end(), 0.0f);
}

void Recorder::take(const Parameter& parameter) {
  if (record_gradient_)
    backend(device_).to_host(gradient_.data() + parameter.offset(), parameter.gradient(), parameter.numel());
}

void Recorder::look(const Group& group, std::span<const float> accumulated) {
  if (!record_distribution_) return;
  std::copy(accumulated.begin(), accumulated.end(), accumulated_.data() + group.begin);
  looked_at_ += accumulated.size();
}

void Recorder::end_step(const StepRecord& record, MetricsWriter& metrics) {
  if (record_gradient_) {
    file_->append(gradient_);
    ++recorded_;
    if (record.step == from_ + steps_) finish();
  }
  if (!record_distribution_ || record.skipped) return;
  if (looked_at_ < accumulated_.size() || accumulated_.empty()) {
    if (!told_)
      log_warning("train.distribution_every: " + method_ + " has no accumulated gradient to look at");
    told_ = true;
    return;
  }
  DistributionRecord distribution = distribution_of(accumulated_, record.density);
  distribution.step = record.step;
  distribution.epoch = record.epoch;
  metrics.write(distribution);
}

void Recorder::finish() {
  if (file_) {
    file_->close();
    if (recorded_ < steps_)
      log_warning("gradients.npy has " + std::to_string(recorded_) +
                  " of train.record_gradients=" + std::to_string(steps_) + " steps: the run ended before");
  }
  file_.reset();
  record_gradient_ = false;
}

}  // namespace topknot

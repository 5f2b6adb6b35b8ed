#include "train/reporter.h"

#include <omp.h>

#include <algorithm>
#include <cstdio>
#include <numeric>

#include "nn/core/base/log.h"

namespace topknot {
namespace {

double seconds_since(Reporter::Clock::time_point start) {
  return std::chrono::duration<double>(Reporter::Clock::now() - start).count();
}

std::string plural(std::int64_t n, const std::string& what) {
  return std::to_string(n) + " " + what + (n == 1 ? "" : "s");
}

}  // namespace

Reporter::Reporter(const RunInputs& inputs, const Plan& plan, const Communicator& communicator)
    : config_(inputs.config),
      folder_(inputs.folder),
      plan_(plan),
      ranks_(communicator.size()),
      root_(communicator.rank() == 0),
      progress_({plan.total_steps, inputs.config.train.log_every, inputs.quiet || !root_}),
      program_start_(inputs.program_start) {
  if (root_) metrics_ = std::make_unique<MetricsWriter>(folder_.metrics_jsonl());
}

std::int64_t Reporter::images_a_step() const {
  return static_cast<std::int64_t>(config_.data.batch_size) * config_.train.accumulate * ranks_;
}

double Reporter::epochs(std::int64_t step) const {
  return static_cast<double>(step) / static_cast<double>(plan_.steps_per_epoch);
}

void Reporter::announce(const Communicator& communicator, const Engine& engine) const {
  const std::int64_t micro_batches = engine.train_loader().steps_per_epoch();
  const std::string compute =
      engine.device() == "cpu" ? plural(omp_get_max_threads(), "thread") + " a rank" : engine.device();
  log_info(config_.model.name + " (" + std::to_string(engine.arena().size()) + " parameters) on " +
           config_.data.name + ", " + plural(ranks_, "rank") + " by " + communicator.backend() + ", " +
           compute + "; global batch " + std::to_string(images_a_step()) + ", learning rate " +
           key_value(*find_key("optimizer.lr"), config_) + ", " + std::to_string(plan_.steps_per_epoch) +
           " steps an epoch, " + std::to_string(plan_.total_steps) + " in all; " + config_.compress.name +
           "; writing to " + folder_.path);
  if (root_)
    for (const Group& group : engine.groups())
      log_debug(std::string(group.compressed ? "compressed" : "dense") + " group of " +
                std::to_string(group.numel()) + " elements: " + group.parameters.front()->name() + " to " +
                group.parameters.back()->name());
  const auto& train = config_.train;
  if ((config_.compress.clip > 0 || train.clip_local > 0) && train.clip_local_scope == "model" && ranks_ > 1)
    log_info("local clipping over the whole model waits for the whole backward pass: overlap is off");
  if (const auto left = micro_batches % train.accumulate; left != 0)
    log_info("the last " + std::to_string(left) +
             " micro-batches of an epoch do not fill a step and are left out");
}

void Reporter::begin() {
  startup_seconds_ = seconds_since(program_start_);
  first_step_ = Clock::now();
}

template <class Record>
void Reporter::put_bytes(const ByteCount& bytes, Record& record) const {
  const double ranks = ranks_;
  record.bytes_sent = static_cast<double>(bytes.upload) / ranks;
  record.bytes_received = static_cast<double>(bytes.download) / ranks;
  record.bytes_dense = static_cast<double>(bytes.dense) / ranks;
  record.bytes_ratio = bytes.ratio();
}

void Reporter::complete(StepRecord& record, const ByteCount& bytes, double seconds) {
  record.epoch = epochs(record.step);
  put_bytes(bytes, record);
  bytes_ += bytes;
  seconds_.push_back(
      {seconds, record.encode_s, record.communicate_s, record.exposed_s, record.decode_s, record.makespan_s});
  train_seconds_ = seconds_since(first_step_) - eval_seconds_;
  record.time_s = train_seconds_;
  record.images_per_second = static_cast<double>(images_a_step()) / seconds;
}

void Reporter::step(const StepRecord& record, double seconds) {
  progress_.step(record.step, record.epoch, record.loss, record.lr, images_a_step(), seconds);
  if (metrics_) metrics_->write(record);
}

void Reporter::epoch(std::int64_t step, double train_loss) {
  if (metrics_) metrics_->write(EpochRecord{epochs(step), step, train_seconds_, train_loss});
}

void Reporter::evaluation(std::int64_t step, const Evaluation& evaluation, double seconds, bool accuracy) {
  last_ = evaluation;
  eval_seconds_ += seconds;
  best_accuracy_ = std::max(best_accuracy_, evaluation.accuracy);
  if (!metrics_) return;
  metrics_->write(
      EvalRecord{step, epochs(step), train_seconds_, evaluation.loss, evaluation.accuracy, seconds});
  char text[160];
  if (accuracy)
    std::snprintf(text, sizeof text, "epoch %.4g: test accuracy %.2f %%, test loss %.4f", epochs(step),
                  100 * evaluation.accuracy, evaluation.loss);
  else
    std::snprintf(text, sizeof text, "epoch %.4g: test loss %.6g", epochs(step), evaluation.loss);
  progress_.note(text);
}

void Reporter::end(std::int64_t steps, std::int64_t skipped, const std::string& parameter_checksum,
                   double modelled_makespan) {
  if (!metrics_) return;
  EndRecord end;
  end.test_accuracy = last_.accuracy;
  end.best_test_accuracy = best_accuracy_;
  end.test_loss = last_.loss;
  end.wall_seconds = train_seconds_;
  end.eval_seconds = eval_seconds_;
  end.startup_seconds = startup_seconds_;
  const std::size_t warm_up = seconds_.size() > kWarmUpSteps ? kWarmUpSteps : 0;
  const auto steady_steps = [&](double Seconds::*figure) {
    std::vector<double> values;
    for (std::size_t i = warm_up; i < seconds_.size(); ++i) values.push_back(seconds_[i].*figure);
    return values;
  };
  const std::vector<double> steady = steady_steps(&Seconds::step);
  const double total = std::accumulate(steady.begin(), steady.end(), 0.0);
  const double images = static_cast<double>(images_a_step()) * static_cast<double>(steady.size());
  end.images_per_second = total > 0 ? images / total : 0;
  put_bytes(bytes_, end);
  end.parameter_checksum = parameter_checksum;
  end.steps = steps;
  end.skipped_steps = skipped;
  end.step_p50_s = quantile(steady, 0.5);
  end.step_p95_s = quantile(steady, 0.95);
  end.encode_p50_s = quantile(steady_steps(&Seconds::encode), 0.5);
  end.communicate_p50_s = quantile(steady_steps(&Seconds::communicate), 0.5);
  end.exposed_p50_s = quantile(steady_steps(&Seconds::exposed), 0.5);
  end.decode_p50_s = quantile(steady_steps(&Seconds::decode), 0.5);
  end.makespan_p50_s = quantile(steady_steps(&Seconds::makespan), 0.5);
  end.modelled_makespan_s = modelled_makespan;
  metrics_->write(end);
  write_metrics_csv(read_metrics(folder_.metrics_jsonl()), folder_.metrics_csv());
  char text[200];
  if (modelled_makespan > 0 && end.makespan_p50_s > 0) {
    std::snprintf(text, sizeof text,
                  "exchange: modelled makespan %.3g ms, measured %.3g ms (median of %zu steps)",
                  1e3 * modelled_makespan, 1e3 * end.makespan_p50_s, steady.size());
    log_info(text);
  }
  std::snprintf(text, sizeof text, "done: %lld steps in %s, %.0f images/s, sent %s a rank (dense: %s)",
                static_cast<long long>(steps), format_duration(train_seconds_).c_str(), end.images_per_second,
                format_bytes(end.bytes_sent).c_str(), format_bytes(end.bytes_dense).c_str());
  log_info(text);
}

void Reporter::note(const std::string& text) {
  if (root_) progress_.note(text);
}

void Reporter::finish() {
  progress_.finish();
}

}  // namespace topknot

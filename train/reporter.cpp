#include "train/reporter.h"

#include <fmt/format.h>
#include <omp.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <numbers>
#include <numeric>

#include "compress/sparse.h"
#include "nn/base/clock.h"
#include "nn/base/log.h"
#include "nn/base/program.h"
#include "nn/base/terminal.h"
#include "nn/base/text.h"
#include "nn/core/threads.h"

namespace topknot {
namespace {

constexpr double kRedrawSeconds = 0.1;
constexpr double kPlainSeconds = 10;  // between plain lines about an evaluation
constexpr std::size_t kBarWidth = 24, kLeastBarWidth = 8;
constexpr std::int64_t kWindowSteps = 65536;  // of which, at least, the end record's quantiles are

std::string left_text(double seconds) {
  return "left " + format_duration(seconds);
}

// A fixed threshold goes by no density.
bool goes_by_density(const Config& config) {
  const auto pieces = pieces_of(compress_options(config));
  return pieces && pieces->select != "threshold";
}

// "topk at density 0.016, 0.004 from epoch 1, 0.001 from epoch 2"; epochs count as in progress, from 0.
std::string method_text(const Config& config, const Plan& plan) {
  constexpr std::size_t kMostPhases = 8;
  std::string text = config.compress.name;
  if (!goes_by_density(config)) return text;
  std::vector<DensityPhase> phases = density_phases(config);
  const std::int64_t last_epoch = plan.epoch(std::max<std::int64_t>(0, plan.total_steps - 1));
  while (phases.back().first > last_epoch) phases.pop_back();
  text += " at density " + short_text(phases.front().density);
  for (std::size_t i = 1; i < phases.size(); ++i) {
    const bool last = i + 1 == phases.size();
    if (i < kMostPhases || last)
      text += fmt::format(", {} from epoch {}", short_text(phases[i].density), phases[i].first);
    else if (i == kMostPhases)
      text += ", ...";
  }
  return text;
}

Metric metric_of(const Dataset& data) {
  const Task task = data.task();
  return task == Task::classification  ? Metric::accuracy()
         : task == Task::regression    ? Metric::squared_error()
         : task == Task::transcription ? Metric::word_errors()
                                       : Metric::perplexity(data.token_name());
}

// The length of a text's windows is no part of the task: perplexities compare across it.
std::string task_of(const Dataset& data) {
  if (data.task() == Task::language_model)
    return fmt::format("{}, {}", data.name(), count_text(data.classes(), data.token_name()));
  if (data.task() == Task::transcription) return data.name() + ", characters";
  return data.name() + ", " +
         (data.classes() > 0 ? fmt::format("{} classes", data.classes())
                             : count_text(data.targets(), "target")) +
         ", samples " + data.sample_shape().str();
}

// "50000 training and 10000 test samples, 10 classes", of the start line.
std::string data_text(const RunData& data) {
  const Dataset &train = *data.train, &test = *data.test;
  const bool text = train.task() == Task::language_model;
  // The size of a text is its words, the last of which begin no window.
  const auto size = [&](const Dataset& set) { return set.size() + (text ? set.labels_per_sample() : 0); };
  std::string line = fmt::format("{} training and {} {}", size(train), size(test),
                                 text ? "validation " + train.token_name() + "s"
                                 : train.task() == Task::transcription ? "test recordings"
                                                                       : "test samples");
  if (train.classes() > 0) line += fmt::format(", {} {}", train.classes(), text ? "different" : "classes");
  return line;
}

}  // namespace

Progress::Progress(ProgressOptions options) : options_(options), terminal_(is_terminal(STDERR_FILENO)) {}

Progress::~Progress() {
  finish();
}

void Progress::show(std::vector<ProgressField> fields, double done) {
  if (options_.quiet) return;
  if (!terminal_) return log_info(progress_line(std::move(fields)));
  // A character in the last column makes some terminals begin a new line.
  set_status_line(progress_line(std::move(fields), terminal_columns(STDERR_FILENO) - 1, done));
}

void Progress::step(std::int64_t step, double epoch, double loss, double lr, std::int64_t images,
                    double step_seconds, double evaluation_seconds) {
  evaluation_shown_ = 0;
  round_seconds_ += step_seconds, ++round_steps_;
  if (round_steps_ == std::max<std::int64_t>(1, options_.every)) {
    // The first round of a start pays for set-up and is left out of the average once there is a second one.
    const double round = static_cast<double>(round_steps_);
    const double share = ++rounds_ <= 2 ? 1.0 : 1 - std::pow(0.95, round);
    seconds_per_step_ += share * (round_seconds_ / round - seconds_per_step_);
    round_seconds_ = 0, round_steps_ = 0;
  }
  // Before the first round ends, its steps without their exchange.
  const double each = rounds_ > 0 ? seconds_per_step_ : round_seconds_ / static_cast<double>(round_steps_);
  const double image_rate = each > 0 ? static_cast<double>(images) / each : 0;
  since_drawn_ += step_seconds;
  const bool last = options_.total_steps > 0 && step >= options_.total_steps;
  const bool due = terminal_ ? since_drawn_ >= kRedrawSeconds : step % std::max(1, options_.log_every) == 0;
  if (!due && !last) return;
  since_drawn_ = 0;
  const double total = static_cast<double>(options_.total_steps), made = static_cast<double>(step);
  const double left =
      total > 0 && rounds_ > 0 ? std::max(0.0, total - made) * seconds_per_step_ + evaluation_seconds : -1;
  auto fields =
      step_fields(step, options_.total_steps, epoch, loss, lr, image_rate, left, options_.rate_unit);
  if (!options_.network.empty()) fields.push_back({options_.network, 1});
  show(std::move(fields), total > 0 ? made / total : 0);
}

void Progress::evaluation(std::int64_t done, std::int64_t batches, double seconds, double later_seconds) {
  if (seconds < evaluation_shown_ + (terminal_ ? kRedrawSeconds : kPlainSeconds)) return;
  evaluation_shown_ = seconds;
  std::vector<ProgressField> fields{{fmt::format("evaluating, batch {}/{}", done, batches), 0}};
  const double made = static_cast<double>(done), all = static_cast<double>(batches);
  if (done > 0) fields.push_back({left_text(seconds / made * (all - made) + later_seconds), 1});
  show(std::move(fields), made / std::max(1.0, all));
}

void Progress::note(const std::string& text) {
  if (!options_.quiet) log_info(text);
}

void Progress::finish() {
  if (terminal_ && !options_.quiet) set_status_line("");
}

std::vector<ProgressField> step_fields(std::int64_t step, std::int64_t total, double epoch, double loss,
                                       double lr, double images_per_second, double seconds_left,
                                       const char* rate_unit) {
  std::vector<ProgressField> fields{
      {fmt::format("step {}", step) + (total > 0 ? fmt::format("/{}", total) : ""), 0},
      {fmt::format("epoch {:.2f}", epoch), 3},
      {fmt::format("loss {:.4f}", loss), 1},
      {fmt::format("lr {:.4g}", lr), 5},
      {images_per_second < 99.5 ? fmt::format("{:.3g} {}", images_per_second, rate_unit)
                                : fmt::format("{:.0f} {}", images_per_second, rate_unit),
       4}};
  if (seconds_left >= 0) fields.push_back({left_text(seconds_left), 2});
  return fields;
}

std::string progress_line(std::vector<ProgressField> fields, int columns, std::optional<double> done) {
  const auto joined = [&] {
    std::string line;
    for (const ProgressField& field : fields) line += (line.empty() ? "" : "  ") + field.text;
    return line;
  };
  std::string line = joined();
  if (columns <= 0) return line;
  const auto width = static_cast<std::size_t>(columns);
  while (line.size() > width && fields.size() > 1) {
    fields.erase(std::max_element(fields.begin(), fields.end(),
                                  [](const auto& a, const auto& b) { return a.rank < b.rank; }));
    line = joined();
  }
  constexpr std::size_t kFrame = 3;  // "[] "
  if (!done || line.size() + kFrame + kLeastBarWidth > width) return line.substr(0, width);
  const std::size_t bar = std::min(kBarWidth, width - line.size() - kFrame);
  const auto filled = static_cast<std::size_t>(std::clamp(*done, 0.0, 1.0) * static_cast<double>(bar));
  return fmt::format("[{:<{}}] {}", std::string(filled, '='), bar, line);
}

Reporter::Reporter(const RunInputs& inputs, const Plan& plan, const Communicator& communicator)
    : config_(inputs.config),
      folder_(inputs.folder),
      plan_(plan),
      ranks_(communicator.size()),
      backend_(communicator.network()),
      root_(communicator.rank() == 0),
      task_(task_of(*inputs.data.test)),
      metric_(metric_of(*inputs.data.test)),
      top5_(counts_top5(*inputs.data.test)),
      bytes_per_token_(inputs.data.test->bytes_per_token()),
      labels_per_sample_(inputs.data.test->labels_per_sample()),
      test_batches_(evaluation_batches(config_, *inputs.data.test, ranks_)),
      progress_({plan.total_steps, inputs.config.train.log_every, inputs.quiet || !root_,
                 inputs.config.dist.link_rate.empty() ? "" : "emulated link", metric_.rate_unit(),
                 inputs.config.exchange.every}),
      program_start_(inputs.program_start),
      window_(whole_rounds(kWindowSteps, config_.exchange.every)) {}

void Reporter::open(const Manifest& resumed) {
  if (!root_) return;
  // A checkpoint of an earlier version has no totals: they are the sums over all records.
  const std::size_t window = resumed.totals.train_seconds > 0 ? window_ : kAllSteps;
  if (resumed.position.step > 0) restore_totals(read_metrics(folder_.metrics_jsonl(), window), resumed);
  metrics_ = std::make_unique<MetricsWriter>(folder_.metrics_jsonl(), 0, folder_.check());
  if (config_.output.tensorboard)
    tensorboard_ = std::make_unique<TensorBoardWriter>(folder_.path, resumed.position.step);
}

// Restores the sums over earlier starts' steps: the checkpoint's totals, and times from its last records.
void Reporter::restore_totals(const Metrics& metrics, const Manifest& resumed) {
  const auto total = [&](double per_rank) {
    return static_cast<std::uint64_t>(std::llround(per_rank * ranks_));
  };
  double before = 0;
  for (const StepRecord& step : metrics.steps) {
    count(step, {total(step.bytes_sent), total(step.bytes_received), total(step.bytes_dense)},
          static_cast<double>(images_in_step(step.step)) / step.images_per_second);
    before = step.time_s;
  }
  for (const EvalRecord& eval : metrics.evals) {
    last_ = {eval.test.loss, eval.test.accuracy.value_or(0), metric_.second_value(eval.test).value_or(0)};
    note_best(last_);
    eval_seconds_ += eval.eval_seconds;
    last_eval_seconds_ = eval.eval_seconds;
  }
  train_seconds_ = before;
  if (resumed.totals.train_seconds > 0) {
    bytes_ = resumed.totals.bytes;
    train_seconds_ = resumed.totals.train_seconds, eval_seconds_ = resumed.totals.eval_seconds;
  }
}

void Reporter::count(const StepRecord& record, const ByteCount& bytes, double seconds) {
  bytes_ += bytes;
  if (!root_) return;
  seconds_.push_back({record, seconds});
  keep_last(seconds_, window_);
}

std::int64_t Reporter::images_in_step(std::int64_t step) const {
  return plan_.in_epoch(step) == 0 && plan_.last_batches < plan_.batches
             ? images_per_step() / plan_.batches * plan_.last_batches
             : images_per_step();
}

void Reporter::announce(const Step& step, const RunData& data, std::int64_t made) const {
  const std::string compute =
      step.device() == "cpu" ? count_text(omp_get_max_threads(), "thread") + " per rank" : step.device();
  log_info(fmt::format("{} ({} parameters) on {} ({}), {} by {}, {}", config_.model.name, step.arena().size(),
                       config_.data.name, data_text(data), count_text(ranks_, "rank"), backend_, compute));
  log_info(fmt::format("{}; global batch {}{}, learning rate {}, {} steps per epoch, {} in all",
                       method_text(config_, plan_), images_per_step(),
                       labels_per_sample_ > 1 ? " tokens" : "", key_value(*find_key("optimizer.lr"), config_),
                       plan_.steps_per_epoch, plan_.total_steps));
  log_info("writing to " + folder_.path);
  for (const Dataset* set : {data.train.get(), data.test.get()})
    if (root_)
      for (const std::string& line : set->warnings()) log_warning(line);
  if (root_)
    log_debug("waiting threads " +
              (spin_limit().empty() ? "spin unless others want the cores" : "by " + spin_limit()));
  if (root_)
    for (const Group& group : step.groups())
      log_debug(fmt::format("{} group of {} elements: {} to {}", group.compressed ? "compressed" : "dense",
                            group.numel(), group.parameters.front()->name(),
                            group.parameters.back()->name()));
  const auto& train = config_.train;
  if ((config_.compress.clip > 0 || train.clip_local > 0) && train.clip_local_scope == "model" && ranks_ > 1)
    log_info("local clipping over the whole model waits for the whole backward pass: overlap is off");
  if (plan_.last_batches != plan_.batches)
    log_info(fmt::format("the last step of an epoch has {} of {} micro-batches", plan_.last_batches,
                         plan_.batches));
  if (made > 0 && made < plan_.total_steps)
    log_info(fmt::format("resumed after step {} of {}", made, plan_.total_steps));
  if (made > 0 && made >= plan_.total_steps)
    log_info(
        fmt::format("all {} steps have been made; a longer train.epochs or train.max_steps goes on", made));
}

void Reporter::warn_of_more_than_dense(const StepRecord& record, const ByteCount& bytes) {
  const double sent = static_cast<double>(bytes.upload), dense = static_cast<double>(bytes.dense);
  if (record.density == warned_density_ || sent < kMoreThanDense * dense) return;
  warned_density_ = record.density;
  log_warning(fmt::format("step {}: at density {} a rank sends {}, {} the {} of a dense gradient",
                          record.step, short_text(record.density), format_bytes(sent / ranks_),
                          compared_bytes(sent, dense), format_bytes(dense / ranks_)));
}

void Reporter::begin(std::int64_t step, const std::string& view) {
  if (metrics_)
    metrics_->write(StartRecord{step, plan_.total_steps, plan_.steps_per_epoch, now_utc(), backend_, task_,
                                metric_, program_revision(), view});
  startup_seconds_ = seconds_since(program_start_);
  first_step_ = Clock::now() - std::chrono::duration_cast<Clock::duration>(
                                   std::chrono::duration<double>(train_seconds_ + eval_seconds_));
}

void Reporter::put_bytes(const ByteCount& bytes, auto& record) const {
  const double ranks = ranks_;
  record.bytes_sent = static_cast<double>(bytes.upload) / ranks;
  record.bytes_received = static_cast<double>(bytes.download) / ranks;
  record.bytes_dense = static_cast<double>(bytes.dense) / ranks;
  record.bytes_ratio = bytes.ratio();
}

void Reporter::complete(StepRecord& record, const ByteCount& bytes, double seconds, Clock::time_point end) {
  record.epoch = epochs(record.step);
  put_bytes(bytes, record);
  count(record, bytes, seconds);
  train_seconds_ = std::chrono::duration<double>(end - first_step_).count() - eval_seconds_;
  record.time_s = train_seconds_;
  record.images_per_second = static_cast<double>(images_in_step(record.step)) / seconds;
}

double Reporter::evaluation_seconds(std::int64_t step) const {
  // Before the first evaluation: a forward pass takes about a third of a training step.
  constexpr double kForwardShare = 1.0 / 3;
  const double once = last_eval_seconds_ > 0
                          ? last_eval_seconds_
                          : static_cast<double>(test_batches_) * kForwardShare *
                                progress_.seconds_per_step() / static_cast<double>(plan_.batches);
  return once * static_cast<double>(evaluations_left(plan_, config_.train.eval_every, step));
}

void Reporter::step(const StepRecord& record, double seconds) {
  if (density_ && *density_ != record.density && goes_by_density(config_))
    note(fmt::format("epoch {:.4g}: density {} from here on", epochs(record.step - 1),
                     short_text(record.density)));
  density_ = record.density;
  progress_.step(record.step, record.epoch, record.loss, record.lr, images_in_step(record.step), seconds,
                 evaluation_seconds(record.step - 1));  // one that is due after this step is still to come
  if (metrics_) metrics_->write(record);
  if (tensorboard_)
    tensorboard_->write(record.step, {{"train/loss", record.loss},
                                      {"train/learning_rate", record.lr},
                                      {"train/density", record.density},
                                      {"train/bytes_sent", record.bytes_sent},
                                      {"train/images_per_second", record.images_per_second}});
}

void Reporter::evaluating(std::int64_t step, std::int64_t done, std::int64_t batches, double seconds) {
  const double steps_left = static_cast<double>(plan_.total_steps - step);
  progress_.evaluation(done, batches, seconds,
                       steps_left * progress_.seconds_per_step() + evaluation_seconds(step));
}

std::string Reporter::evaluation_text() const {
  std::string text = metric_.title() + " " + metric_.text(metric_.value(last_.loss, last_.accuracy));
  if (last_.second > 0) text += fmt::format(", {} {}", metric_.second(), metric_.text(last_.second));
  return metric_.name == "loss" ? text : text + fmt::format(", {} loss {:.4f}", metric_.set, last_.loss);
}

void Reporter::evaluation(std::int64_t step, const Evaluation& evaluation, double seconds) {
  last_ = evaluation;
  if (metric_.name == "perplexity") last_.second = figures(evaluation).bits_per_byte.value_or(0);
  last_eval_seconds_ = seconds;
  eval_seconds_ += seconds;
  note_best(evaluation);
  if (!metrics_) return;
  metrics_->write(EvalRecord{step, epochs(step), train_seconds_, figures(evaluation), seconds});
  if (tensorboard_) {
    TensorBoardWriter::Scalars scalars = {{metric_.set + "/loss", evaluation.loss}};
    if (metric_.name != "loss")
      scalars.emplace_back(metric_.set + "/" + metric_.name,
                           metric_.value(evaluation.loss, evaluation.accuracy));
    if (last_.second > 0) scalars.emplace_back(metric_.set + "/" + metric_.second(), last_.second);
    tensorboard_->write(step, scalars);
  }
  note(fmt::format("epoch {:.4g}: {}", epochs(step), evaluation_text()));
}

TestFigures Reporter::figures(const Evaluation& evaluation) const {
  TestFigures test{.loss = evaluation.loss};
  const double value = metric_.value(evaluation.loss, evaluation.accuracy);
  if (metric_ == Metric::accuracy()) {
    test.accuracy = evaluation.accuracy;
    if (top5_) test.top5_accuracy = evaluation.second;
  } else if (metric_ == Metric::word_errors()) {
    test.accuracy = evaluation.accuracy;
    test.word_error_rate = value, test.character_error_rate = evaluation.second;
  } else if (metric_.name == "perplexity") {
    test.perplexity = value;
    if (bytes_per_token_ > 0) test.bits_per_byte = evaluation.loss / std::numbers::ln2 / bytes_per_token_;
  }
  return test;
}

std::string Reporter::divergence(const TrainingPosition& position) const {
  const auto finite = [&](const Evaluation& e) {
    return std::isfinite(e.loss) && std::isfinite(metric_.value(e.loss, e.accuracy));
  };
  const std::string text = "training has diverged: ";
  if (!finite(position.evaluation) || (held_out_ && !finite(*held_out_)))
    return text + "the last evaluation was not finite";
  if (position.skips_in_a_row > 0) return text + "the last step was not finite";
  if (position.skipped <= config_.train.max_skips) return "";
  return text +
         fmt::format("{} of {} steps were not finite and skipped, more than train.max_skips ({}) in all",
                     position.skipped, position.step, config_.train.max_skips);
}

std::string Reporter::end(std::int64_t steps, std::int64_t skipped, const std::string& parameter_checksum,
                          const std::string& failure, double modelled_makespan, double flops) {
  if (!metrics_) return "";
  EndRecord end;
  end.test = figures(last_);
  if (end.test.accuracy) end.best_test_accuracy = best_.accuracy;
  if (held_out_)
    end.held_out_loss = held_out_->loss, end.held_out_perplexity = figures(*held_out_).perplexity;
  end.wall_seconds = train_seconds_;
  end.eval_seconds = eval_seconds_;
  end.startup_seconds = startup_seconds_;
  const auto by_step = [&](double Seconds::*figure) {
    std::vector<double> values;
    for (const Seconds& step : seconds_) values.push_back(step.*figure);
    return values;
  };
  const std::vector<double> steady = without_warm_up(by_step(&Seconds::step_s), 0);
  const double total = std::accumulate(steady.begin(), steady.end(), 0.0);
  const auto steady_steps = static_cast<std::int64_t>(steady.size());
  const std::int64_t last_of_epochs = plan_.epoch(steps) - plan_.epoch(steps - steady_steps);
  const auto images =
      static_cast<double>(images_per_step() * (steady_steps - last_of_epochs) +
                          images_in_step(plan_.steps_per_epoch - plan_.shift) * last_of_epochs);
  end.images_per_second = total > 0 ? images / total : 0;
  const double peak = config_.train.peak_tflops;
  if (total > 0) end.model_tflops = 1e-12 * flops * ranks_ * static_cast<double>(steady.size()) / total;
  if (peak > 0 && end.model_tflops > 0) end.flops_utilisation = end.model_tflops / (ranks_ * peak);
  put_bytes(bytes_, end);
  end.bits_per_parameter_step = bytes_.bits_per_parameter();
  end.parameter_checksum = parameter_checksum;
  end.steps = steps;
  end.skipped_steps = skipped;
  end.failed = !failure.empty(), end.reason = failure;
  const std::int64_t every = config_.exchange.every;
  const auto median = [&](double Seconds::*figure) { return steady_median(by_step(figure), every); };
  end.step_p50_s = median(&Seconds::step_s);
  end.step_p95_s = quantile(without_warm_up(by_step(&Seconds::step_s), every), 0.95);
  end.encode_p50_s = median(&Seconds::encode_s);
  end.communicate_p50_s = median(&Seconds::communicate_s);
  end.exposed_p50_s = median(&Seconds::exposed_s);
  end.decode_p50_s = median(&Seconds::decode_s);
  end.makespan_p50_s = median(&Seconds::makespan_s);
  end.modelled_makespan_s = modelled_makespan;
  metrics_->write(end);
  ended_ = true;
  write_metrics_csv(folder_.metrics_jsonl(), folder_.metrics_csv());
  if (modelled_makespan > 0 && end.makespan_p50_s > 0)
    log_info(fmt::format("exchange: modelled makespan {:.3g} ms, measured {:.3g} ms (median of {} steps)",
                         1e3 * modelled_makespan, 1e3 * end.makespan_p50_s,
                         without_warm_up(by_step(&Seconds::makespan_s), 0).size()));
  const std::string best = metric_.name == "loss"
                               ? ""
                               : fmt::format(", best {} {}", metric_.name,
                                             metric_.text(metric_.value(best_.loss, best_.accuracy)));
  const std::string held_out =
      held_out_ ? fmt::format("; test {} {}", metric_.name,
                              metric_.text(metric_.value(held_out_->loss, held_out_->accuracy)))
                : "";
  std::string speed = fmt::format("{:.0f} {}", end.images_per_second, metric_.rate_unit());
  if (end.model_tflops > 0 && (metric_.name == "perplexity" || peak > 0))
    speed += fmt::format(
        " ({:.3g} TFLOP/s{})", end.model_tflops,
        end.flops_utilisation ? fmt::format(", {:.3g} % of the peak", 100 * *end.flops_utilisation) : "");
  const std::string by = config_.dist.link_rate.empty() ? "" : " by " + backend_;
  return fmt::format(
      "done: {} steps in {}, {}{}, sent {} per rank (dense: {}), {:.3g} bits per parameter and step\n{}{}{}: "
      "{}",
      steps, format_duration(train_seconds_), speed, by, format_bytes(end.bytes_sent),
      format_bytes(end.bytes_dense), end.bits_per_parameter_step, evaluation_text(), best, held_out,
      folder_.path);
}

void Reporter::stop(std::int64_t step, bool failed, const std::string& reason) {
  if (!metrics_ || ended_) return;
  metrics_->write(StopRecord{step, failed, reason, now_utc()});
  write_metrics_csv(folder_.metrics_jsonl(), folder_.metrics_csv());
}

}  // namespace topknot

// run_rank() (train/start.h): one rank's loop over epochs and steps; what a step does is train/step.cpp.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <optional>
#include <utility>
#include <vector>

#include "nn/base/check.h"
#include "nn/base/clock.h"
#include "nn/base/log.h"
#include "nn/base/program.h"
#include "nn/base/text.h"
#include "train/checkpoint/checkpointer.h"
#include "train/checks.h"
#include "train/elastic.h"
#include "train/metrics/metrics.h"
#include "train/plan/choose.h"
#include "train/report_sums.h"
#include "train/reporter.h"
#include "train/start.h"
#include "train/step.h"

namespace topknot {
namespace {

constexpr const char* kWhatHelps = "lower optimizer.lr, or clip with train.clip_global";

// One rank's loop over epochs and steps, and what is reported of them.
class Trainer {
 public:
  // `resumed`: null for a new run. `data`, and the compute threads by rank: for the checkpoints. `automatic`:
  // null if the run's method is given; may change `inputs`. `memory`: of an elastic run, which `resumed` is of.
  Trainer(RunInputs& inputs, Communicator& communicator, const ResumedRun* resumed, DataFingerprint data,
          std::vector<int> threads, AutoMethod* automatic, const RunInMemory* memory = nullptr)
      : inputs_(inputs),
        automatic_(automatic),
        data_(std::move(data)),
        threads_(std::move(threads)),
        config_(inputs.config),
        communicator_(communicator),
        root_(communicator.rank() == 0),
        step_(inputs, communicator),
        schedule_(make_schedule(config_.schedule, config_.optimizer.lr)),
        plan_(resumed ? resume_plan(resumed->manifest, config_, *inputs.data.train, communicator.size(),
                                    step_, position_)
                      : plan_steps(config_, step_.train_loader())),
        weights_(step_.train_loader().weights()),
        share_(1.0 * weights_[static_cast<std::size_t>(communicator.rank())] / communicator.size()),
        reporter_(inputs, plan_, communicator) {
    step_.begin_run(plan_.total_steps);
    if (resumed) {
      if (root_) warn_of_other_rate(resumed->manifest, config_, *inputs.data.train, plan_);
      step_.load_state(memory ? memory->state : resumed->state(step_.store()));
      // With other ranks the epoch begins at another step.
      if (resumed->manifest.ranks != communicator.size() && !memory) position_.epoch_loss_steps = 0;
      if (position_.epoch_loss_steps == 0) position_.epoch_loss = 0;
      schedule_->load_state(position_.plateau);
      first_step_ = stop_from_ = saved_step_ = position_.step;
      inside_epoch_ = !position_.dealt.empty();
    }
    if (memory) go_on_from(*memory);
    // Every rank has what it needs, or all of them end here and the run's files are as they were.
    check_parameters("at the start");
    open_files(resumed);
  }

  RunOutcome run() {
    if (note_.empty())
      reporter_.announce(step_, inputs_.data, step());
    else
      reporter_.note(note_);
    reporter_.begin(step() - std::ssize(pending_), note_);
    last_report_ = Clock::now();
    int signal = 0;
    bool stopped = false;
    if (!pending_.empty()) {  // a step that was made with ranks that are gone
      step_end_ = last_report_;
      signal = report(std::vector(last_.reports));
      stopped = signal != 0 || stop_after_reached();
      after_report(signal, stopped);
    } else if (step() > 0) {
      // For this number of ranks nothing may be left of the epoch.
      if (at_border() && position_.epoch_loss_steps > 0) end_epoch();
      last_.position = position_;
      if (!position_.evaluated && evaluation_due()) {
        signal = run_evaluation();
        last_.position = position_, stopped = signal != 0;
        if (checkpointer_ && position_.evaluated)
          checkpointer_->evaluated(position_, reporter_.metrics_bytes());
      }
    }
    while (step() < plan_.total_steps && !stopped && !target_reached()) {
      signal = begin_epoch();
      if (stopped = signal != 0; stopped) break;
      make_step();
      if (!report_due()) continue;
      if (step() < plan_.total_steps && !stop_after_reached()) await_data();
      signal = report(settle_due() ? pending_.size() : step_.reported_of(pending_.size()));
      stopped = signal != 0 || stop_after_reached();
      if (stopped && !pending_.empty()) report(pending_.size());
      if (!stopped && pending_.empty() && step() < plan_.total_steps) follow();
      after_report(signal, stopped);
      if (view_ends_ && !stopped && pending_.empty() && agreed()) end_view();
    }
    if (signal == 0 && step() > 0 && position_.skipped == step())
      throw Diverged(fmt::format(
          "no step of the run counted: all {} were not finite and skipped, and the weights are the "
          "first ones; look at the data, and at model.init_from",
          step()));
    if (inputs_.data.held_out && !stopped) {
      signal = run_evaluation(Split::held_out);
      stopped = signal != 0;
    }
    check_parameters("at the end");
    const bool saved = finish_checkpoints();
    step_.finish();
    reporter_.finish();
    const std::string failure =
        saved ? reporter_.divergence(position_) : "the last checkpoint could not be written";
    RunOutcome outcome{signal,           stopped, position_.evaluation.accuracy, position_.evaluation.loss,
                       step_.checksum(), ""};
    if (stopped) {
      const std::string reason = signal ? signal_name(signal) : "train.stop_after";
      const std::string left =
          checkpointer_
              ? fmt::format("'train --resume {}' goes on from there", inputs_.folder.path)
              : inputs_.folder.path + " has the steps so far, and no checkpoint (train.checkpoint_keep=0)";
      log_info(fmt::format("stopped by {} after step {}; {}", reason, step(), left));
      reporter_.stop(step(), false, reason);
    } else {
      outcome.result = reporter_.end(step(), position_.skipped, outcome.parameter_checksum, failure,
                                     step_.modelled_makespan(), step_.flops());
    }
    if (inputs_.rejoin.join) {
      if (!outcome.result.empty()) std::puts(std::exchange(outcome.result, "").c_str()), std::fflush(stdout);
      agreed_signal();  // rank 0 has told and written all; if it dies before, another one does
    }
    if (!saved) throw UserError(failure + ", see the warnings above");
    if (!stopped && !failure.empty()) {
      agreed_signal();  // rank 0 has written its records, for which others would not wait long
      throw Diverged(
          fmt::format("{}; {}; what it wrote stays in {}", failure, kWhatHelps, inputs_.folder.path));
    }
    return outcome;
  }

  // What this rank of an elastic run goes on from, after run() has thrown. The step under way is undone.
  RunInMemory memory() {
    return {step_, std::move(last_), communicator_.size(), share_, stop_from_, handed_over_};
  }
  Step& stepper() { return step_; }

  // After run() has thrown.
  void failed(const std::exception& error) {
    if (!leaves_) try {
        reporter_.stop(step(), true, error.what());
      } catch (const std::exception&) {  // the first error is the one to report
      }
  }

 private:
  void go_on_from(const RunInMemory& memory) {
    // What is left of steps weighs as it did in them.
    step_.scale_memory(static_cast<float>(memory.share / share_));
    saved_step_ = -1;
    stop_from_ = memory.first_step;
    note_ = memory.note;
    last_ = memory.last;
    last_.position = position_;  // of this number of ranks
    pending_ = last_.records, pending_seconds_ = last_.seconds;
    keep_state();
  }

  // Nothing that a resumed run has is changed before.
  void open_files(const ResumedRun* resumed) {
    const CheckpointStore store(inputs_.folder.checkpoints());
    if (resumed) store.set_aside_after(step());
    if (resumed && root_) {
      truncate_metrics(inputs_.folder.metrics_jsonl(), resumed->manifest.metrics_bytes);
      keep_config_effective(inputs_.folder, config_, inputs_.origins);
    }
    reporter_.open(resumed ? resumed->manifest : Manifest());
    if (config_.train.checkpoint_keep > 0)
      checkpointer_.emplace(store, inputs_.folder.metrics_jsonl(), step_, communicator_.rank(),
                            communicator_.size(), config_.train.checkpoint_keep,
                            resumed ? resumed->saved : std::vector<SavedCheckpoint>(),
                            inputs_.folder.check());
  }

  std::int64_t step() const { return position_.step; }  // steps made, of which pending_ are not reported
  // Of an epoch that other ranks have begun, as many steps may be left as a whole one has.
  bool at_border() const { return plan_.in_epoch(step()) == 0 && !(inside_epoch_ && step() == first_step_); }
  bool epoch_ends() const { return at_border() || step() == plan_.total_steps; }

  // Whether an interval of `epochs` epochs, maybe a fraction, ended with the last step; never if it is 0.
  bool completes(double epochs) const {
    const double every = epochs * static_cast<double>(plan_.steps_per_epoch);
    if (every <= 0 || (plan_.in_epoch(step()) == 0 && !at_border())) return false;
    const double done = static_cast<double>(step() + plan_.shift);
    return std::floor(done / every) > std::floor((done - 1) / every);
  }
  bool evaluation_due() const { return completes(config_.train.eval_every) || step() == plan_.total_steps; }
  bool checkpoint_due() const { return completes(config_.train.checkpoint_every); }
  bool check_due() const { return config_.train.check_every > 0 && step() % config_.train.check_every == 0; }
  bool stop_after_reached() const {
    return config_.train.stop_after > 0 && step() - stop_from_ >= config_.train.stop_after &&
           step() < plan_.total_steps;
  }
  // Whether what follows needs the end of all steps.
  bool settle_due() const {
    return check_due() || evaluation_due() || checkpoint_due() || epoch_ends() || stop_after_reached();
  }
  bool report_due() const {
    return settle_due() || agreed() || std::ssize(pending_) >= step_.steps_per_report(steps_in_patience_);
  }

  // A run that stops leaves its evaluation to the start that resumes it; a signal may end that.
  void after_report(int& signal, bool& stopped) {
    if (check_due()) check_parameters("during training");
    if (epoch_ends()) end_epoch();
    const int ended = evaluation_due() && !stopped ? run_evaluation() : 0;
    if (stopped || evaluation_due() || checkpoint_due()) save();
    if (ended != 0) signal = ended, stopped = true;
  }

  void end_epoch() {
    reporter_.epoch(step(), position_.epoch_loss / static_cast<double>(position_.epoch_loss_steps));
    if (!at_border()) return;  // a longer run may go on from the middle of an epoch
    position_.epoch_loss = 0, position_.epoch_loss_steps = 0;
    position_.dealt.clear();
  }

  // The same on all ranks, as the evaluation is.
  bool target_reached() const {
    return config_.train.target_accuracy > 0 &&
           position_.evaluation.accuracy >= config_.train.target_accuracy;
  }

  void save() {
    if (!checkpointer_) return;
    Manifest manifest;
    manifest.position = position_;
    manifest.ranks = communicator_.size(), manifest.global_batch = global_batch(config_);
    manifest.program = program_version();
    manifest.config = config_values(step_.effective_config());
    manifest.data = data_;
    manifest.threads = threads_;
    manifest.totals = reporter_.totals();
    manifest.metrics_bytes = reporter_.metrics_bytes();
    checkpointer_->save(std::move(manifest));
    saved_step_ = step();
  }

  bool finish_checkpoints() {
    if (!checkpointer_) return true;
    if (saved_step_ != step()) save();
    return checkpointer_->finish();
  }

  // Begins an epoch if the next step is its first. Returns the signal that a rank has received until its
  // first batch is there, the same on every rank, or 0.
  int begin_epoch() {
    if (plan_.in_epoch(step()) != 0 && step() != first_step_) return 0;
    step_.start_epoch(plan_.epoch(step()), plan_.in_epoch(step()));
    await_data();
    return agreed_signal();
  }

  void make_step() {
    if (pending_.empty()) {
      last_report_ = last_step_ = Clock::now() - std::exchange(awaited_, {});
      step_end_ = std::max(step_end_, last_report_);
    }
    StepRecord record;
    record.lr = plan_.lr(config_, *schedule_, step());
    record.density = config_.compress.name == "dense"
                         ? 1.0
                         : density_at_epoch(config_, static_cast<int>(plan_.epoch(step())));
    if (next_) record.density = 1.0;
    step_.make({.step = step(), .density = record.density, .weights = weights_, .lr = record.lr});
    record.step = ++position_.step;
    position_.evaluated = false;
    pending_.push_back(record);
    pending_seconds_.push_back(seconds_since(last_step_));
    last_step_ = Clock::now();
  }

  // While this rank waits for its next batch, the others wait for it in report(), where all agree on a stop
  // signal: they can end after this step, however long the data take. The wait counts as the next step's.
  void await_data() {
    const Clock::time_point begin = Clock::now();
    step_.await_batch();
    awaited_ = Clock::now() - begin;
    last_report_ += awaited_;
  }

  // Reports the oldest `count` steps that were not. One small sum over the ranks for all of them: their
  // metrics, how many ranks have done their part of a checkpoint, and how many have received each of the
  // signals that ask for a stop. Returns the highest of these signals, the same on every rank, or 0.
  int report(std::size_t count) {
    std::vector<StepReport> reports = step_.reports(count);
    TOPKNOT_CHECK(reports.size() == count, "one report per step");
    if (agreed()) {
      last_ = {position_, reporter_.totals(), pending_, pending_seconds_, reports};
      if (at_border()) last_.position.dealt.clear();  // of an epoch that is over
      keep_state();
    }
    return report(reports);
  }

  int report(const std::vector<StepReport>& reports) {
    // The loss counts as the rank's gradient does, by the weight of its shard.
    const double weight = weights_[static_cast<std::size_t>(communicator_.rank())];
    ReportSums sums;
    for (const StepReport& step : reports)
      sums.steps.push_back(ReportSums::own(step, communicator_.rank(), weight));
    leaves_ = leaves_alone(inputs_);
    (leaves_ ? sums.leaving : sums.signals).add_own();
    sums.next_view = root_ && inputs_.next_view && inputs_.next_view() ? 1 : 0;
    if (checkpointer_) sums.checkpoint_ready = checkpointer_->ready();
    sums.step_seconds = seconds_since(last_report_) / static_cast<double>(reports.size());
    sums.choose_again = automatic_ && root_ && !next_ && automatic_->due() ? 1 : 0;
    sums.all_reduce(step_);
    // Ranks with local steps hear of a stop signal by reports alone.
    constexpr double kPatience = 2;  // seconds
    steps_in_patience_ = std::llround(
        std::clamp(kPatience * communicator_.size() / std::max(sums.step_seconds, 1e-6), 1.0, 1e6));
    const Clock::time_point now = Clock::now();
    const std::vector<double> seconds = reported_seconds(
        reports, pending_seconds_, std::chrono::duration<double>(now - last_report_).count());
    last_report_ = last_step_ = now;
    const double ranks = communicator_.size();
    for (std::size_t i = 0; i < reports.size(); ++i) {
      const ReportSums::OfStep& sum = sums.steps[i];
      StepRecord record = pending_[i];
      const ByteCount bytes = complete(record, reports[i], sum, communicator_.size(), step_.arena().size());
      step_end_ += std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds[i]));
      reporter_.complete(record, bytes, seconds[i], step_end_);
      if (root_ && !automatic_) reporter_.warn_of_more_than_dense(record, bytes);
      note_skip(record.step, reports[i], sum);
      reporter_.step(record, seconds[i]);
      step_.end_step(record, root_ ? reporter_.metrics() : nullptr);
      position_.epoch_loss += record.loss, ++position_.epoch_loss_steps;
      if (automatic_) automatic_->add(seconds[i], record.communicate_s);
    }
    pending_.erase(pending_.begin(), pending_.begin() + std::ssize(reports));
    pending_seconds_.erase(pending_seconds_.begin(), pending_seconds_.begin() + std::ssize(reports));
    if (checkpointer_ && sums.checkpoint_ready == ranks) checkpointer_->advance();
    choose_again_ = sums.choose_again > 0;
    handed_over_ = static_cast<int>(sums.leaving.ranks());
    view_ends_ = handed_over_ > 0 || sums.next_view > 0;
    const bool too_few = communicator_.size() - handed_over_ < config_.elastic.min_ranks;
    return std::max(sums.signals.highest(), too_few ? sums.leaving.highest() : 0);
  }

  // Of an elastic run: whether the last step counts for all ranks, unless it is undone.
  bool agreed() const { return inputs_.rejoin.join && step_.agrees_after(step() - 1); }
  // A local step counts once its sync does: ranks that go on without another begin again after the last one.
  void keep_state() {
    if (makes_local_steps(config_)) step_.state(last_.kept.emplace(), true);
  }

  // All ranks have reported the same steps. Throws ViewEnds, and Interrupted on ranks that leave.
  void end_view() {
    last_ = {position_, reporter_.totals(), {}, {}, {}};
    if (handed_over_ > 0) hand_over(step_, communicator_.rank(), leaves_, weights_), keep_state();
    if (leaves_)
      throw Interrupted(fmt::format("left by {} after step {}", signal_name(stop_signal()), step()), 0);
    throw ViewEnds("the view has ended");
  }

  // After a step, on all ranks: another method, if rank 0 has asked for one. Before dense, which carries
  // nothing on, a step of density 1 sends what is still owed.
  void follow() {
    if (next_) {
      if (position_.skips_in_a_row == 0) exchange_by(*std::exchange(next_, std::nullopt));
      return;
    }
    if (!std::exchange(choose_again_, false)) return;
    std::optional<AutoMethod::Choice> choice =
        automatic_->choose(*inputs_.data.train, communicator_, inputs_.folder, inputs_.origins, step());
    if (!choice) return;
    if (!compresses(config_) || compresses(choice->config)) return exchange_by(*std::move(choice));
    ExchangeOptions all = exchange_options(config_);
    if (all.compress.name != "dense") all.compress.values.clear();  // whose rounding would be owed again
    step_.exchange_by(all);
    next_ = std::move(choice);
  }

  void exchange_by(AutoMethod::Choice choice) {
    inputs_.config = std::move(choice.config), inputs_.origins = std::move(choice.origins);
    step_.exchange_by(exchange_options(config_));
    if (root_) rewrite_config(inputs_.folder, config_, inputs_.origins);
  }

  void note_skip(std::int64_t step, const StepReport& report, const ReportSums::OfStep& sum) {
    if (sum.bad_ranks == 0) {
      position_.skips_in_a_row = 0;
      return;
    }
    ++position_.skipped, ++position_.skips_in_a_row;
    const SkipText text(sum, communicator_.size(), config_.exchange.ranks_per_host, step_.arena());
    if (report.status.bad_rank == communicator_.rank() && !root_)  // in the log of its host too
      log_warning(fmt::format("step {} is not finite here{}", step, text.where));
    reporter_.note(fmt::format("step {} {}: NaN or infinity{}", step, text.who, text.where));
    if (position_.skips_in_a_row >= config_.train.max_skips)
      throw Diverged(
          fmt::format("training has diverged: {} steps in a row were not finite, the last at step "
                      "{}{}; {} (train.max_skips sets this limit)",
                      position_.skips_in_a_row, step, text.place, kWhatHelps));
  }

  // The highest signal that a rank has received, the same on every rank, or 0.
  int agreed_signal() {
    SignalSums signals;
    if (!leaves_alone(inputs_)) signals.add_own();
    step_.all_reduce(signals.of);
    return signals.highest();
  }

  // Returns the signal that ended it, the same on every rank, or 0.
  int run_evaluation(Split split = Split::test) {
    constexpr std::int64_t kBatchesBetween = 4;  // agreements: one is a message's latency
    const Clock::time_point start = Clock::now();
    const Dataset& data = split == Split::test ? *inputs_.data.test : *inputs_.data.held_out;
    const std::int64_t most = evaluation_batches(config_, data, communicator_.size());
    int signal = 0;
    const auto evaluation = step_.evaluate(split, [&](std::int64_t done, std::int64_t batches) {
      reporter_.evaluating(step(), done, batches, seconds_since(start));
      if (done < most && done % kBatchesBetween == 0) signal = agreed_signal();
      return signal == 0;
    });
    if (!evaluation) return signal;
    if (split == Split::held_out) {
      reporter_.held_out(*evaluation, seconds_since(start));
      return 0;
    }
    position_.evaluation = *evaluation, position_.evaluated = true;
    schedule_->evaluated(evaluation->loss);
    position_.plateau = schedule_->state();
    reporter_.evaluation(step(), *evaluation, seconds_since(start));
    return 0;
  }

  void check_parameters(const std::string& when) {
    step_.check_parameters(when + ", step " + std::to_string(step()));
  }

  RunInputs& inputs_;
  AutoMethod* const automatic_;
  bool choose_again_ = false;               // the same on all ranks
  std::optional<AutoMethod::Choice> next_;  // from after a step that has sent all
  const DataFingerprint data_;
  const std::vector<int> threads_;
  const Config& config_;
  Communicator& communicator_;
  const bool root_;
  Step step_;
  std::unique_ptr<Schedule> schedule_;
  TrainingPosition position_;
  const Plan plan_;
  const std::vector<float> weights_;  // of all ranks
  const double share_;                // of this one in an average
  Reporter reporter_;

  std::int64_t first_step_ = 0;   // steps made before this start, or in other views of it
  bool inside_epoch_ = false;     // after first_step_, which other ranks began
  std::int64_t stop_from_ = 0;    // before this start
  std::string note_;              // RunInMemory
  int handed_over_ = 0;           // RunInMemory
  bool view_ends_ = false;        // after the step
  bool leaves_ = false;           // this rank, as the others know
  UnreportedStep last_;           // of an elastic run: the last step that the ranks agreed on
  std::int64_t saved_step_ = -1;  // of the last checkpoint
  std::vector<StepRecord> pending_;
  std::vector<double> pending_seconds_;  // which they took on the host
  std::int64_t steps_in_patience_ = 1;   // by the last report, the same on all ranks
  Clock::time_point last_report_;        // or when the first pending step began
  Clock::time_point step_end_;           // of the last step that was reported, or when the next one began
  Clock::time_point last_step_;          // when it ended, or the report after it
  Clock::duration awaited_{};            // in await_data(), for the next step
  std::optional<Checkpointer> checkpointer_;
};

// After a stop signal.
constexpr std::chrono::seconds kLongestStart{10}, kLongestEnd{5};

}  // namespace

RunOutcome run_rank(const RunInputs& given, Communicator& first) {
  set_log_rank(first.rank(), first.size());
  RunInputs inputs = given;
  Views views(inputs.rejoin, first, inputs.view);
  std::optional<RunInMemory> memory;
  std::optional<DataFingerprint> data;
  std::optional<AutoMethod> automatic;
  std::optional<EndAfterSignal> guard;  // outlives the trainer, whose threads may hang in a file system
  std::optional<Trainer> trainer;
  const auto last_words = [&](const std::string& text) {
    Communicator& communicator = views.communicator();
    set_log_rank(communicator.rank(), communicator.size());  // of the thread that calls this
    communicator.abort(text);
  };
  bool first_view = inputs.view.number == 1;
  inputs.next_view = [&] { return views.announced(); };
  const auto longest_end = stop_patience(inputs.config, kLongestEnd);

  const auto make_trainer = [&](Communicator& communicator) {
    const CheckpointStore store(inputs.folder.checkpoints());
    if (memory) {
      memory->run.saved = shared_checkpoints(store, communicator, memory->last.position.step);
      trainer.emplace(inputs, communicator, &memory->run, *data, settle_threads(communicator, inputs.config),
                      nullptr, &*memory);
      memory.reset();
      return;
    }
    check_same_configuration(communicator, inputs.config);
    const bool compared = communicator.size() > 1 || inputs.resume || inputs.config.train.checkpoint_keep > 0;
    if (!data) data = compared ? data_fingerprint(inputs.data) : DataFingerprint();
    check_same_data(communicator, *data);
    if (inputs.resume) {
      std::string choices = communicator.rank() == 0 ? choices_of(inputs.folder) : "";
      share(communicator, choices);
      if (!choices.empty() && inputs.config.resume.method == "choose")
        automatic.emplace(AutoMethod::resumed(inputs.config, choices));
      // It is as large as the run's state, and released before the first step.
      const ResumedRun resumed = read_checkpoint(store, communicator, inputs.config, *data);
      trainer.emplace(inputs, communicator, &resumed, *data,
                      settle_threads(communicator, inputs.config, resumed.threads()),
                      automatic ? &*automatic : nullptr);
    } else {
      const std::vector<int> threads = settle_threads(communicator, inputs.config);
      if (chooses_method(inputs.config)) {
        automatic.emplace(inputs.config);
        AutoMethod::Choice choice =
            automatic->choose(*inputs.data.train, communicator, inputs.folder, inputs.origins, 0).value();
        inputs.config = std::move(choice.config), inputs.origins = std::move(choice.origins);
        if (communicator.rank() == 0) rewrite_config(inputs.folder, inputs.config, inputs.origins);
      }
      trainer.emplace(inputs, communicator, nullptr, *data, threads, automatic ? &*automatic : nullptr);
    }
  };

  // After a collective over `used` has failed, in an elastic run. False if the run ends.
  const auto go_on = [&](const Communicator& used) {
    guard.reset();
    if (!views.join_next(used, trainer ? trainer->stepper().last_agreement() : views.agreed())) return false;
    if (trainer && views.agreed().step > 0) memory = trainer->memory();
    trainer.reset();  // without memory the run begins anew: no step was made
    first_view = false;
    return true;
  };

  for (;;) {
    Communicator& used = views.communicator();
    std::exception_ptr caught;
    bool collective = false;
    try {
      guard.emplace("while the run started", stop_patience(inputs.config, kLongestStart), last_words);
      if (!first_view) {
        if (!data) data = data_fingerprint(inputs.data);
        views.prepare(memory, inputs);
      }
      make_trainer(used);
      if (views.elastic())
        trainer->stepper().when_agreement_fails(
            views.agreement_source(used, trainer->stepper().last_agreement()));
      guard.reset();
      RunOutcome outcome = trainer->run();
      guard.emplace("while a thread hung in the system", longest_end, last_words);
      return outcome;
    } catch (const std::exception& error) {
      caught = std::current_exception();
      collective = peer_failed(error);
    }
    if (collective && views.elastic()) try {
        if (go_on(used)) continue;
      } catch (const std::exception&) {
        caught = std::current_exception();
      }
    try {
      std::rethrow_exception(caught);
    } catch (const std::exception& error) {
      // The others learn the reason before the trainer ends its groups and waits for its files.
      used.abort(explain(error));
      guard.emplace("while a thread hung in the system; first error: " + explain(error), longest_end,
                    last_words);
      if (trainer) trainer->failed(error);
      throw;
    }
  }
}

}  // namespace topknot

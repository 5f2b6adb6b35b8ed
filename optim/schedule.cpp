#include "optim/schedule.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numbers>
#include <vector>

#include "nn/base/check.h"
#include "nn/base/text.h"

namespace topknot {
namespace {

using Epochs = std::vector<double>;

const Option kMilestones{"milestones", Epochs(), "epochs where the rate drops", 0, 1e6, /*above=*/true};
const Option kFactors{"factors",
                      std::vector<double>(),
                      "the rate from each milestone on, over optimizer.lr, in place of schedule.gamma",
                      0,
                      1,
                      /*above=*/true};
const Option kGamma{"gamma",
                    0.1,
                    "factor at each milestone, in each epoch, or where the test loss has not fallen",
                    0,
                    1,
                    /*above=*/true};
const Option kDecayFrom{"decay_from", 1, "the first epoch, from 0, whose rate is multiplied", 0, 1e6};
const Option kPatience{"patience", 0, "evaluations without a lower test loss that change nothing", 0, 1e6};
const Option kMinLr{"min_lr", 0.0, "the rate at the end, the least rate", 0, 1e6};

// The warm-up, shared by all; a schedule gives what follows it.
class WarmedUp : public Schedule {
 public:
  WarmedUp(const ScheduleOptions& options, double base) : options_(options), base_(base) {}

  double lr(std::int64_t step, std::int64_t steps_per_epoch, std::int64_t total_steps) const final {
    TOPKNOT_CHECK(step >= 0 && steps_per_epoch > 0, "a schedule needs step >= 0 and steps_per_epoch > 0");
    if (step < options_.warmup_steps)
      return base_ * (static_cast<double>(step + 1) / static_cast<double>(options_.warmup_steps + 1));
    const std::int64_t warmup =
        options_.warmup_steps > 0 ? options_.warmup_steps : in_steps(options_.warmup_epochs, steps_per_epoch);
    if (step < warmup) {
      const double first = base_ / static_cast<double>(warmup);
      return first + (base_ - first) / static_cast<double>(warmup) * static_cast<double>(step);
    }
    return after_warmup(step, warmup, steps_per_epoch, total_steps);
  }

 protected:
  virtual double after_warmup(std::int64_t step, std::int64_t warmup, std::int64_t steps_per_epoch,
                              std::int64_t total_steps) const = 0;
  static std::int64_t in_steps(double epochs, std::int64_t steps_per_epoch) {
    return std::llround(epochs * static_cast<double>(steps_per_epoch));
  }
  ScheduleOptions options_;
  double base_;
};

class Constant : public WarmedUp {
 public:
  using WarmedUp::WarmedUp;

 protected:
  double after_warmup(std::int64_t, std::int64_t, std::int64_t, std::int64_t) const override { return base_; }
};

class MultiStep : public WarmedUp {
 public:
  MultiStep(const ScheduleOptions& options, double base)
      : WarmedUp(options, base),
        milestones_(options.get<Epochs>(kMilestones)),
        factors_(options.get<std::vector<double>>(kFactors)),
        gamma_(options.get<double>(kGamma)) {
    check_milestones(options);
    for (std::size_t i = 0; i < milestones_.size(); ++i) {
      if (i > 0 && milestones_[i] == milestones_[i - 1])
        throw UserError("schedule.milestones: " + short_text(milestones_[i]) + " stands twice");
      if (milestones_[i] < options.warmup_epochs)
        throw UserError("schedule.milestones: epoch " + short_text(milestones_[i]) +
                        " lies within the warm-up; move it, or shorten schedule.warmup_epochs (" +
                        short_text(options.warmup_epochs) + ")");
    }
    if (!factors_.empty() && factors_.size() != milestones_.size())
      throw UserError(
          fmt::format("schedule.factors: {} of them for {} of schedule.milestones; give one for each",
                      factors_.size(), milestones_.size()));
  }

 protected:
  double after_warmup(std::int64_t step, std::int64_t, std::int64_t steps_per_epoch,
                      std::int64_t) const override {
    double rate = base_;
    for (std::size_t i = 0; i < milestones_.size(); ++i)
      if (step >= in_steps(milestones_[i], steps_per_epoch))
        rate = factors_.empty() ? rate * gamma_ : base_ * factors_[i];
    return rate;
  }

 private:
  const Epochs milestones_;
  const std::vector<double> factors_;
  const double gamma_;
};

// base * gamma^n, where n epochs from decay_from on have begun.
class Exponential : public WarmedUp {
 public:
  Exponential(const ScheduleOptions& options, double base)
      : WarmedUp(options, base),
        gamma_(options.get<double>(kGamma)),
        decay_from_(options.get<int>(kDecayFrom)) {}

 protected:
  double after_warmup(std::int64_t step, std::int64_t, std::int64_t steps_per_epoch,
                      std::int64_t) const override {
    const std::int64_t epoch = step / steps_per_epoch;
    return base_ * std::pow(gamma_, static_cast<double>(std::max<std::int64_t>(0, epoch + 1 - decay_from_)));
  }

 private:
  const double gamma_;
  const int decay_from_;
};

// The rate drops if an evaluation's loss is not below the best one's, patience + 1 of them in a row.
class Plateau : public WarmedUp {
 public:
  Plateau(const ScheduleOptions& options, double base)
      : WarmedUp(options, base),
        gamma_(options.get<double>(kGamma)),
        patience_(options.get<int>(kPatience)),
        least_(options.get<double>(kMinLr)) {}

  void evaluated(double loss) override {
    if (loss < state_.best || (!state_.any && !std::isnan(loss))) {
      state_.best = loss, state_.any = true, state_.waited = 0;
      return;
    }
    if (++state_.waited <= patience_) return;
    state_.factor *= gamma_;
    state_.waited = 0;
  }
  PlateauState state() const override { return state_; }
  void load_state(const PlateauState& state) override { state_ = state; }

 protected:
  double after_warmup(std::int64_t, std::int64_t, std::int64_t, std::int64_t) const override {
    return std::max(least_, base_ * state_.factor);
  }

 private:
  const double gamma_;
  const int patience_;
  const double least_;
  PlateauState state_;
};

// From base at the end of the warm-up down to min_lr after decay_steps, or at the end of the run (Loshchilov
// and Hutter, SGDR, without restarts).
class Cosine : public WarmedUp {
 public:
  Cosine(const ScheduleOptions& options, double base)
      : WarmedUp(options, base),
        decay_steps_(options.get<std::int64_t>(option::decay_steps)),
        last_(options.get<double>(kMinLr)) {}

 protected:
  double after_warmup(std::int64_t step, std::int64_t warmup, std::int64_t,
                      std::int64_t total_steps) const override {
    const std::int64_t end = decay_steps_ > 0 ? decay_steps_ : total_steps;
    if (end <= warmup) return base_;
    const double done = static_cast<double>(std::min(step, end) - warmup) / static_cast<double>(end - warmup);
    return last_ + (base_ - last_) * 0.5 * (1.0 + std::cos(std::numbers::pi * done));
  }

 private:
  const std::int64_t decay_steps_;
  const double last_;
};

const bool schedule_registered[] = {
    schedules().add("constant", "the base rate throughout", make_as<Schedule, Constant>),
    schedules().add("multistep", "times schedule.gamma, or schedule.factors, at each of schedule.milestones",
                    make_as<Schedule, MultiStep>, {kMilestones, kFactors, kGamma}),
    schedules().add("exponential", "times schedule.gamma in each epoch from schedule.decay_from on",
                    make_as<Schedule, Exponential>, {kGamma, kDecayFrom}),
    schedules().add("plateau", "times schedule.gamma where the test loss has not fallen",
                    make_as<Schedule, Plateau>, {kGamma, kPatience, kMinLr}),
    schedules().add("cosine", "half a cosine from the base rate to schedule.min_lr at the end",
                    make_as<Schedule, Cosine>, {option::decay_steps, kMinLr})};

}  // namespace

Registry<ScheduleFactory>& schedules() {
  static Registry<ScheduleFactory> registry("schedule");
  return registry;
}

void check_milestones(const ScheduleOptions& options) {
  const Epochs milestones = options.get<Epochs>(kMilestones);
  if (options.name == "multistep" && milestones.empty())
    throw UserError(
        "schedule.milestones: schedule.name=multistep needs the epochs where the rate drops, such as [81, "
        "122]");
  if (!std::ranges::is_sorted(milestones)) throw UserError("schedule.milestones: must rise");
}

void check_warmup_steps(const ScheduleOptions& options, std::int64_t steps_per_epoch) {
  const Epochs milestones = options.get<Epochs>(kMilestones);
  if (options.name != "multistep" || milestones.empty()) return;
  const double epoch = milestones.front(), first = epoch * static_cast<double>(steps_per_epoch);
  if (first < static_cast<double>(options.warmup_steps))
    throw UserError(
        fmt::format("schedule.milestones: epoch {} is step {:.0f} and lies within the warm-up; move it, or "
                    "shorten schedule.warmup_steps ({})",
                    short_text(epoch), first, options.warmup_steps));
}

void check_min_lr(const ScheduleOptions& options, double base_lr) {
  if (!(options.get<double>(kMinLr) <= base_lr))
    throw UserError("schedule.min_lr: must not exceed optimizer.lr");
}

std::unique_ptr<Schedule> make_schedule(const ScheduleOptions& options, double base_lr) {
  const ScheduleFactory factory = schedules().find(options.name);
  if (!(base_lr > 0) || !std::isfinite(base_lr))
    throw UserError("optimizer.lr must be greater than 0, not " + short_text(base_lr));
  if (!(options.warmup_epochs >= 0) || !std::isfinite(options.warmup_epochs))
    throw UserError("schedule.warmup_epochs must be 0 or greater, not " + short_text(options.warmup_epochs));
  if (options.warmup_steps < 0)
    throw UserError(fmt::format("schedule.warmup_steps must be 0 or greater, not {}", options.warmup_steps));
  if (options.warmup_steps > 0 && options.warmup_epochs > 0)
    throw UserError(
        fmt::format("schedule.warmup_steps: {}, and schedule.warmup_epochs is {}; give one of them",
                    options.warmup_steps, short_text(options.warmup_epochs)));
  check_min_lr(options, base_lr);
  return factory(options, base_lr);
}

}  // namespace topknot

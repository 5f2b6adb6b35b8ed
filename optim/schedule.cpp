#include "optim/schedule.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numbers>

#include "nn/base/check.h"
#include "nn/base/text.h"

namespace topknot {
namespace {

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
  using WarmedUp::WarmedUp;

 protected:
  double after_warmup(std::int64_t step, std::int64_t, std::int64_t steps_per_epoch,
                      std::int64_t) const override {
    double rate = base_;
    for (std::size_t i = 0; i < options_.milestones.size(); ++i)
      if (step >= in_steps(options_.milestones[i], steps_per_epoch))
        rate = options_.factors.empty() ? rate * options_.gamma : base_ * options_.factors[i];
    return rate;
  }
};

// base * gamma^n, where n epochs from decay_from on have begun.
class Exponential : public WarmedUp {
 public:
  using WarmedUp::WarmedUp;

 protected:
  double after_warmup(std::int64_t step, std::int64_t, std::int64_t steps_per_epoch,
                      std::int64_t) const override {
    const std::int64_t epoch = step / steps_per_epoch;
    return base_ * std::pow(options_.gamma,
                            static_cast<double>(std::max<std::int64_t>(0, epoch + 1 - options_.decay_from)));
  }
};

// The rate drops if an evaluation's loss is not below the best one's, patience + 1 of them in a row.
class Plateau : public WarmedUp {
 public:
  using WarmedUp::WarmedUp;

  void evaluated(double loss) override {
    if (loss < state_.best || (!state_.any && !std::isnan(loss))) {
      state_.best = loss, state_.any = true, state_.waited = 0;
      return;
    }
    if (++state_.waited <= options_.patience) return;
    state_.factor *= options_.gamma;
    state_.waited = 0;
  }
  PlateauState state() const override { return state_; }
  void load_state(const PlateauState& state) override { state_ = state; }

 protected:
  double after_warmup(std::int64_t, std::int64_t, std::int64_t, std::int64_t) const override {
    return std::max(options_.min_lr, base_ * state_.factor);
  }

 private:
  PlateauState state_;
};

// From base at the end of the warm-up down to min_lr after decay_steps, or at the end of the run (Loshchilov
// and Hutter, SGDR, without restarts).
class Cosine : public WarmedUp {
 public:
  using WarmedUp::WarmedUp;

 protected:
  double after_warmup(std::int64_t step, std::int64_t warmup, std::int64_t,
                      std::int64_t total_steps) const override {
    const std::int64_t end = options_.decay_steps > 0 ? options_.decay_steps : total_steps;
    if (end <= warmup) return base_;
    const double done = static_cast<double>(std::min(step, end) - warmup) / static_cast<double>(end - warmup);
    return options_.min_lr + (base_ - options_.min_lr) * 0.5 * (1.0 + std::cos(std::numbers::pi * done));
  }
};

template <class Kind>
std::unique_ptr<Schedule> make(const ScheduleOptions& options, double base_lr) {
  return std::make_unique<Kind>(options, base_lr);
}

// Checks multistep's own conditions, beyond check_milestones().
void check_steps(const ScheduleOptions& options) {
  double last = 0;
  for (double milestone : options.milestones) {
    if (!(milestone > last) || !std::isfinite(milestone))
      throw UserError("schedule.milestones must be ascending epochs above 0; " + short_text(milestone) +
                      " follows " + short_text(last));
    if (milestone < options.warmup_epochs)
      throw UserError("schedule.milestones: epoch " + short_text(milestone) +
                      " lies within the warm-up; move it, or shorten " + "schedule.warmup_epochs (" +
                      short_text(options.warmup_epochs) + ")");
    last = milestone;
  }
  if (!options.factors.empty() && options.factors.size() != options.milestones.size())
    throw UserError(
        fmt::format("schedule.factors: {} of them for {} of schedule.milestones; give one for each",
                    options.factors.size(), options.milestones.size()));
  for (double factor : options.factors)
    if (!(factor > 0 && factor <= 1))
      throw UserError("schedule.factors must be in (0, 1], not " + short_text(factor));
}

}  // namespace

Registry<ScheduleFactory>& schedules() {
  static Registry<ScheduleFactory> registry("schedule");
  return registry;
}

void check_milestones(const ScheduleOptions& options) {
  if (options.name == "multistep" && options.milestones.empty())
    throw UserError(
        "schedule.milestones: schedule.name=multistep needs the epochs where the rate drops, such as [81, "
        "122]");
  if (!std::is_sorted(options.milestones.begin(), options.milestones.end()))
    throw UserError("schedule.milestones: must rise");
}

void check_warmup_steps(const ScheduleOptions& options, std::int64_t steps_per_epoch) {
  if (options.name != "multistep" || options.milestones.empty()) return;
  const double first = options.milestones.front() * static_cast<double>(steps_per_epoch);
  if (first < static_cast<double>(options.warmup_steps))
    throw UserError(
        fmt::format("schedule.milestones: epoch {} is step {:.0f} and lies within the warm-up; move it, or "
                    "shorten schedule.warmup_steps ({})",
                    short_text(options.milestones.front()), first, options.warmup_steps));
}

void check_min_lr(const ScheduleOptions& options, double base_lr) {
  if (!(options.min_lr <= base_lr)) throw UserError("schedule.min_lr: must not exceed optimizer.lr");
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
  if (!(options.gamma > 0 && options.gamma <= 1))
    throw UserError("schedule.gamma must be in (0, 1], not " + short_text(options.gamma));
  if (!(options.min_lr >= 0))
    throw UserError("schedule.min_lr must be 0 or greater, not " + short_text(options.min_lr));
  check_min_lr(options, base_lr);
  if (options.decay_from < 0)
    throw UserError(fmt::format("schedule.decay_from must be 0 or greater, not {}", options.decay_from));
  if (options.decay_steps < 0)
    throw UserError(fmt::format("schedule.decay_steps must be 0 or greater, not {}", options.decay_steps));
  if (options.patience < 0)
    throw UserError(fmt::format("schedule.patience must be 0 or greater, not {}", options.patience));
  check_milestones(options);
  if (options.name == "multistep") check_steps(options);
  return factory(options, base_lr);
}

namespace {
const bool schedule_registered =
    (schedules().add("constant", "the base rate throughout", make<Constant>),
     schedules().add("multistep", "times schedule.gamma, or schedule.factors, at each of schedule.milestones",
                     make<MultiStep>),
     schedules().add("exponential", "times schedule.gamma in each epoch from schedule.decay_from on",
                     make<Exponential>),
     schedules().add("plateau", "times schedule.gamma where the test loss has not fallen", make<Plateau>),
     schedules().add("cosine", "half a cosine from the base rate to schedule.min_lr at the end",
                     make<Cosine>),
     true);
}  // namespace

}  // namespace topknot

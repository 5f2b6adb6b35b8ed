#include "optim/schedule.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <numbers>
#include <utility>
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

// A step of a run, and how many of its steps are the warm-up.
struct Place {
  std::int64_t step, warmup, steps_per_epoch, total_steps;
};
using Rate = std::function<double(const Place& at)>;  // after the warm-up

std::int64_t in_steps(double epochs, std::int64_t steps_per_epoch) {
  return std::llround(epochs * static_cast<double>(steps_per_epoch));
}

// The warm-up, shared by all, and then `rate`.
class WarmedUp : public Schedule {
 public:
  WarmedUp(const ScheduleOptions& options, double base, Rate rate)
      : options_(options), base_(base), rate_(std::move(rate)) {}

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
    return rate_({step, warmup, steps_per_epoch, total_steps});
  }

 private:
  const ScheduleOptions options_;
  const double base_;

 protected:
  Rate rate_;
};

template <Rate (*rate)(const ScheduleOptions& options, double base)>
std::unique_ptr<Schedule> make_warmed_up(const ScheduleOptions& options, double base) {
  return std::make_unique<WarmedUp>(options, base, rate(options, base));
}

Rate constant(const ScheduleOptions&, double base) {
  return [=](const Place&) { return base; };
}

Rate multi_step(const ScheduleOptions& options, double base) {
  const auto milestones = options.get<Epochs>(kMilestones);
  const auto factors = options.get<std::vector<double>>(kFactors);
  check_milestones(options);
  for (std::size_t i = 0; i < milestones.size(); ++i) {
    if (i > 0 && milestones[i] == milestones[i - 1])
      throw UserError("schedule.milestones: " + short_text(milestones[i]) + " stands twice");
    if (milestones[i] < options.warmup_epochs)
      throw UserError("schedule.milestones: epoch " + short_text(milestones[i]) +
                      " lies within the warm-up; move it, or shorten schedule.warmup_epochs (" +
                      short_text(options.warmup_epochs) + ")");
  }
  if (!factors.empty() && factors.size() != milestones.size())
    throw UserError(
        fmt::format("schedule.factors: {} of them for {} of schedule.milestones; give one for each",
                    factors.size(), milestones.size()));
  return [=, gamma = options.get<double>(kGamma)](const Place& at) {
    double rate = base;
    for (std::size_t i = 0; i < milestones.size(); ++i)
      if (at.step >= in_steps(milestones[i], at.steps_per_epoch))
        rate = factors.empty() ? rate * gamma : base * factors[i];
    return rate;
  };
}

// base * gamma^n, where n epochs from decay_from on have begun.
Rate exponential(const ScheduleOptions& options, double base) {
  return [base, gamma = options.get<double>(kGamma), from = options.get<int>(kDecayFrom)](const Place& at) {
    const std::int64_t epoch = at.step / at.steps_per_epoch;
    return base * std::pow(gamma, static_cast<double>(std::max<std::int64_t>(0, epoch + 1 - from)));
  };
}

// From base after the warm-up to min_lr after decay_steps, or at the end (Loshchilov, Hutter, SGDR).
Rate cosine(const ScheduleOptions& options, double base) {
  return [base, last = options.get<double>(kMinLr),
          steps = options.get<std::int64_t>(option::decay_steps)](const Place& at) {
    const std::int64_t end = steps > 0 ? steps : at.total_steps;
    if (end <= at.warmup) return base;
    const double done =
        static_cast<double>(std::min(at.step, end) - at.warmup) / static_cast<double>(end - at.warmup);
    return last + (base - last) * 0.5 * (1.0 + std::cos(std::numbers::pi * done));
  };
}

// The rate drops if an evaluation's loss is not below the best one's, patience + 1 of them in a row.
class Plateau final : public WarmedUp {
 public:
  Plateau(const ScheduleOptions& options, double base)
      : WarmedUp(options, base, Rate()),
        gamma_(options.get<double>(kGamma)),
        patience_(options.get<int>(kPatience)) {
    rate_ = [this, base, least = options.get<double>(kMinLr)](const Place&) {
      return std::max(least, base * state_.factor);
    };
  }

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

 private:
  const double gamma_;
  const int patience_;
  PlateauState state_;
};

const bool schedule_registered[] = {
    schedules().add("constant", "the base rate throughout", make_warmed_up<constant>),
    schedules().add("multistep", "times schedule.gamma, or schedule.factors, at each of schedule.milestones",
                    make_warmed_up<multi_step>, {kMilestones, kFactors, kGamma}),
    schedules().add("exponential", "times schedule.gamma in each epoch from schedule.decay_from on",
                    make_warmed_up<exponential>, {kGamma, kDecayFrom}),
    schedules().add("plateau", "times schedule.gamma where the test loss has not fallen",
                    make_as<Schedule, Plateau>, {kGamma, kPatience, kMinLr}),
    schedules().add("cosine", "half a cosine from the base rate to schedule.min_lr at the end",
                    make_warmed_up<cosine>, {option::decay_steps, kMinLr})};

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

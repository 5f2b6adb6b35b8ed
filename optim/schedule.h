#pragma once
// Learning-rate schedules: functions of the step, and for `plateau` of the evaluations so far, whose state is
// saved with checkpoints: a resumed run has the rate of an uninterrupted one.
//
// Linear warm-up, of every schedule, over W = round(warmup_epochs * steps_per_epoch) steps, as the code of
// Shi et al., GaussianK-SGD, does it: lr(step) = base/W + (base - base/W)/W * step, which rises from base/W
// and reaches base at W. With warmup_steps, W of them, lr(step) = base (step + 1) / (W + 1), as nanoGPT has
// it.

#include <cstdint>
#include <memory>
#include <string>

#include "nn/base/registry.h"

namespace topknot {

// The keys of section `schedule`. A schedule declares those of its own where it is registered.
struct ScheduleOptions : OptionValues {
  ScheduleOptions() : OptionValues("schedule") {}
  std::string name = "constant";
  // >= 0; the schedule proper counts from step 0 all the same, cosine from the end of the warm-up
  double warmup_epochs = 0.0;
  std::int64_t warmup_steps = 0;  // >= 0; in place of warmup_epochs
};

namespace option {
inline const Option decay_steps{"decay_steps", std::int64_t{0},
                                "steps after which the rate is schedule.min_lr; 0: those of the run", 0,
                                1e12};
}  // namespace option

// State of `plateau` after the evaluations so far.
struct PlateauState {
  double factor = 1;  // of the rate
  double best = 0;    // loss of the best evaluation, where there is one
  bool any = false;
  std::int64_t waited = 0;  // evaluations since then, or since the last drop
};

class Schedule {
 public:
  virtual ~Schedule() = default;
  // After each evaluation, with its loss: the same on all ranks.
  virtual void evaluated(double /*loss*/) {}
  virtual PlateauState state() const { return {}; }
  virtual void load_state(const PlateauState&) {}
  // step: 0-based optimizer step. total_steps: of the whole run; steps beyond it keep the last rate.
  virtual double lr(std::int64_t step, std::int64_t steps_per_epoch, std::int64_t total_steps) const = 0;
};

using ScheduleFactory = std::unique_ptr<Schedule> (*)(const ScheduleOptions& options, double base_lr);
Registry<ScheduleFactory>& schedules();

// UserError, naming the key, for milestones that are missing or fall, and for a min_lr above the base rate.
void check_milestones(const ScheduleOptions& options);
// UserError for a milestone within schedule.warmup_steps, once the steps of an epoch are known.
void check_warmup_steps(const ScheduleOptions& options, std::int64_t steps_per_epoch);
void check_min_lr(const ScheduleOptions& options, double base_lr);
// Throws UserError, naming the key, for an unknown name or a value out of range.
std::unique_ptr<Schedule> make_schedule(const ScheduleOptions& options, double base_lr);

}  // namespace topknot

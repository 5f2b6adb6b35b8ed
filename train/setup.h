#pragma once
// From a configuration to the objects of a run.

#include <memory>

#include "data/dataset.h"
#include "data/loader.h"
#include "dist/exchange/exchange.h"
#include "nn/layers/module.h"
#include "nn/models/model.h"
#include "optim/optimizer.h"
#include "optim/schedule.h"
#include "train/config/config.h"

namespace topknot {

// The data of a run, shared by the ranks of one process. Throws UserError: missing or damaged files.
struct RunData {
  std::unique_ptr<Dataset> train, test;
};
RunData load_data(const Config& config);

// A model with its parameters laid out and set: by the seed, or from model.init_from. The same bits on every rank.
// Throws UserError: a file that cannot be read or does not fit, a pattern of model.freeze or model.reinit that matches
// nothing. `first_weights` false: model.init_from is not read, for a run that goes on from a checkpoint.
struct BuiltModel {
  explicit BuiltModel(Device device = {}) : store(device) {}
  ParameterStore store;
  ModulePtr module;
};
std::unique_ptr<BuiltModel> build_model(const Config& config, const Dataset& data, Device device = {},
                                        bool first_weights = true);

ExchangeOptions exchange_options(const Config& config);
// With the densities of a file that compress.layer_density names; those of `auto` are not known yet and left
// out. Throws UserError as read_layer_density (train/plan/layer_density.h).
ExchangeOptions exchange_options(const Config& config, const ParameterArena& arena);
// Whether exchange.merge wants a plan from measured times and there is none.
bool needs_plan(const ExchangeOptions& options);
// For looking at a run without running it: one group a parameter stands in for a plan, and all_gather for a
// collective, that only a run measures.
ExchangeOptions stand_in_options(const Config& config, const ParameterArena& arena);
OptimizerOptions optimizer_options(const Config& config);
ScheduleOptions schedule_options(const Config& config);
LoaderOptions loader_options(const Config& config, const Dataset& data, bool train, int rank, int ranks);

// Everything that can be wrong with a configuration once its data is there, found before a run directory is
// made. Throws UserError. `first_weights` as in build_model().
void check_run(const Config& config, const RunData& data, bool first_weights = true);

// Optimizer steps of an epoch and of the run.
struct Plan {
  std::int64_t steps_per_epoch = 0, total_steps = 0;
};
Plan plan_steps(const Config& config, const Loader& loader);
// Evaluations that come after `step` steps, with train.eval_every as `every`.
std::int64_t evaluations_left(const Plan& plan, double every, std::int64_t step);

// --dry-run: the parameter table, the groups, bytes per step and memory, on standard output.
void print_dry_run(const Config& config);

}  // namespace topknot

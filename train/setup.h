#pragma once
// From a configuration to the objects of a run.

#include <chrono>
#include <cmath>
#include <functional>
#include <initializer_list>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "data/loader.h"
#include "dist/exchange/exchange.h"
#include "dist/launch/views.h"
#include "nn/layers/layers.h"
#include "optim/schedule.h"
#include "train/batches.h"
#include "train/config/config.h"
#include "train/run_directory.h"

namespace topknot {

// Throws UserError if the run's device cannot be used, or not with train.precision or dist.link.
void check_device(const Config& config);

// The data of a run, shared by the ranks of one process. Throws UserError: missing or damaged files.
struct RunData {
  std::unique_ptr<Dataset> train, test;
  std::unique_ptr<Dataset> held_out = nullptr;  // if the set has one: evaluated once, at the end of the run
};
RunData load_data(const Config& config);
DatasetOptions dataset_options(const Config& config);

// Inputs that all ranks of a process share.
struct RunInputs {
  Config config;
  const RunData& data;
  RunDirectory folder;  // written by rank 0 only
  bool quiet = false;
  std::chrono::steady_clock::time_point program_start;
  std::map<std::string, Origin> origins = {};  // of the configuration's keys, for config.yaml
  bool resume = false;                         // from the newest checkpoint of `folder`
  int gpu = 0;                                 // index of this process's GPU, where train.device is cuda
  Rejoin rejoin = {};                          // of an elastic run
  View view = {};                              // in which a rank joins a run that goes on
  bool coordinated = false;                    // by `train --coordinate`: no launcher holds the run directory
  std::function<bool()> next_view = {};        // of an elastic run: whether there is one
};

// A model with its parameters laid out and set: by the seed, or from model.init_from. The same bits on every
// rank. Throws UserError: a file that cannot be read or does not fit, a pattern of model.freeze or
// model.reinit that matches nothing. `first_weights` false: model.init_from is not read, for a run that goes
// on from a checkpoint.
struct BuiltModel {
  explicit BuiltModel(Device device = {}) : store(device) {}
  // Images as a loader gives them, cast to `activations`; or activations on a GPU.
  Variable forward(const Tensor& images, const ForwardContext& context) const;
  // A batch's loss: batch_loss() of what forward() gives; of a language model Module::loss().
  Variable loss(const BatchView& batch, const ForwardContext& context, double label_smoothing = 0) const;

  ParameterStore store;
  ModulePtr module;
  DType activations = DType::f32;  // on a CPU, by train.precision; a GPU's are its context's
};
// `initialise` false: as ParameterStore::build(), for looking at the model without running it.
std::unique_ptr<BuiltModel> build_model(const Config& config, const Dataset& data, Device device = {},
                                        bool first_weights = true, bool initialise = true);
// The same with its parameters registered, and none of them in memory.
std::unique_ptr<BuiltModel> register_model(const Config& config, const Dataset& data, Device device = {});

ExchangeOptions exchange_options(const Config& config);
// With the densities of a file that compress.layer_density names; those of `auto` are not known yet and left
// out. Throws UserError as read_layer_density (train/plan/plan.h).
ExchangeOptions exchange_options(const Config& config, const ParameterArena& arena);
// Whether exchange.merge wants a plan from measured times and there is none.
bool needs_plan(const ExchangeOptions& options);
// For looking at a run without running it: one group a parameter stands in for a plan, and all_gather for a
// collective, that only a run measures.
ExchangeOptions unplanned_options(const Config& config, const ParameterArena& arena);
LoaderOptions loader_options(const Config& config, const Dataset& data, bool train, int rank, int ranks);
// How long a rank that has a stop signal waits for what hangs: `most`, or half of dist.timeout_s, so that it
// says why it ends before the ranks that wait for it give up.
std::chrono::milliseconds stop_patience(const Config& config, std::chrono::milliseconds most);

// The densities of a run: `density` holds from epoch `first` until the next phase begins.
struct DensityPhase {
  int first = 0;
  double density = 1;
};
// In order, neighbours differ; one phase of density 1 for a method that selects no entries.
std::vector<DensityPhase> density_phases(const Config& config);

// From so many times the gradient's own bytes on, a run warns of what it sends.
inline constexpr double kMoreThanDense = 1.05;

// Problems and warnings that show once the data is loaded, found before a run directory is made.
struct RunCheck {
  std::vector<Problem> problems;      // the run cannot begin
  std::vector<std::string> warnings;  // it can, but hardly does what was meant
};
// `first_weights` as in build_model(). `known`: problems found before; what depends on a key of theirs is
// left out.
RunCheck check_run(const Config& config, const RunData& data, bool first_weights = true,
                   std::vector<Problem> known = {});

// Whether one of the problems is about a key that begins with one of `prefixes`, or about an unknown key of
// their sections: then a check that rests on these keys means nothing.
bool depends_on_invalid_key(const std::vector<Problem>& problems,
                            std::initializer_list<std::string> prefixes);
// Runs a check and adds what it throws as UserError to `problems`, with the first prefix as its key.
// Does nothing if depends_on_invalid_key() says so of the prefixes.
void add_problem(std::vector<Problem>& problems, std::initializer_list<std::string> prefixes,
                 const std::function<void()>& check);

// The samples of a step of all ranks, however many are left, with elastic.batch=global; else 0.
std::int64_t global_batch(const Config& config);

// Optimizer steps of an epoch and of the run: of `batches` on each rank, an epoch's last one of `last_batches`, which are
// fewer if the epoch's do not divide; and the samples of a step of all ranks.
struct Plan {
  std::int64_t steps_per_epoch = 0, total_steps = 0, batches = 1, last_batches = 1, step_samples = 0;
  // Added to the steps made, the place in epochs; 0 unless earlier starts of the run had other numbers of ranks.
  std::int64_t shift = 0;

  std::int64_t epoch(std::int64_t step) const { return (step + shift) / steps_per_epoch; }
  std::int64_t in_epoch(std::int64_t step) const { return (step + shift) % steps_per_epoch; }
  double epochs(std::int64_t step) const {
    return static_cast<double>(step + shift) / static_cast<double>(steps_per_epoch);
  }
  // The rate of the step made after `step`: by epochs, but by steps if train.max_steps alone ends it; scaled (elastic).
  double lr(const Config& config, const Schedule& schedule, std::int64_t step) const {
    const std::int64_t by = config.train.epochs > 0 ? shift : 0;
    const double all = 1.0 * config.data.batch_size * config.train.accumulate * config.dist.ranks;
    const std::string& rule = config.elastic.batch;
    const double share = rule.starts_with("rank_") ? static_cast<double>(step_samples) / all : 1;
    return schedule.lr(step + by, steps_per_epoch, total_steps + by) *
           (rule == "rank_sqrt" ? std::sqrt(share) : share);
  }
};
Plan plan_steps(const Config& config, const Loader& loader, std::int64_t shift = 0);
// Batches of an evaluation on the rank that has most of them; others have one less at the most.
std::int64_t evaluation_batches(const Config& config, const Dataset& data, int ranks);
// Evaluations that come after `step` steps, with train.eval_every as `every`.
std::int64_t evaluations_left(const Plan& plan, double every, std::int64_t step);

// A step's cost for each rank in memory and computation, counted in a step of a few samples.
struct StepCost {
  double forward_flops = 0, backward_flops = 0;  // of a step, PassCost::flops()
  double activations = 0;  // bytes of tensors at the peak of a pass over one batch, as on a CPU in fp32
  double optimizer = 0;    // bytes of the optimizer's buffers
  double method = 0;       // bytes that a method carries from step to step, besides the residual
};

// Makes a step of a few samples with `model`, whose weights stay as they are; activations and operations are
// extrapolated to data.batch_size. `options`: as unplanned_options().
StepCost count_step_cost(const Config& config, const Dataset& data, BuiltModel& model,
                         const ExchangeOptions& options);

// --dry-run: the parameter table, the groups, bytes, memory and operations per step, on standard output.
// Throws UserError as a run would, but for a GPU that is not there.
void print_dry_run(const LoadedConfig& loaded);

}  // namespace topknot

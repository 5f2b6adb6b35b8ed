#pragma once
// One rank's model, exchange and optimizer on its device. The trainer (train/trainer.h) says which step to make, with
// which rates. On a GPU the host is ahead: the outcome of a step is known some steps later.

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "data/loader.h"
#include "dist/comm/communicator.h"
#include "dist/exchange/exchange.h"
#include "train/checkpoint/run_state.h"
#include "train/evaluate.h"
#include "train/metrics/metrics.h"

namespace topknot {

struct RunInputs;

struct StepRequest {
  std::int64_t step = 0;  // steps done before
  double density = 1, lr = 0;
};

// What this rank knows of a step that was made.
struct StepStats {
  double loss = 0;         // the mean over its micro-batches
  bool committed = true;   // the same on all ranks, as bad_rank
  int bad_rank = -1;       // as StepResult::bad_rank
  int bad_parameter = -1;  // of a step that was not committed: first_bad_parameter(), here
  std::uint64_t bytes_sent = 0, bytes_received = 0, selected = 0;
  double threshold = 0;
  StepRecord times;  // only its times, as far as they are known
};

class Engine {
 public:
  virtual ~Engine() = default;

  virtual const ParameterArena& arena() const = 0;
  virtual const ParameterStore& store() const = 0;
  virtual const std::vector<Group>& groups() const = 0;
  virtual const Loader& train_loader() const = 0;
  virtual std::string device() const = 0;  // "cpu", or the GPU's name
  // The configuration with what this run has measured: exchange.groups, exchange.collective.
  virtual Config effective_config() const = 0;
  virtual double modelled_makespan() const = 0;  // by the run's profile; 0 where there is none

  // `first_step`: of the epoch, where a resumed run enters it.
  virtual void start_epoch(std::int64_t epoch, std::int64_t first_step) = 0;
  // Waits until the next step's data are there, or until a stop signal, and counts the time in that step's. On a GPU it
  // returns at once.
  virtual void await_batch() {}
  // Steps that may be made whose statistics were not asked for; the same on all ranks.
  virtual std::int64_t steps_ahead() const = 0;
  virtual void step(const StepRequest& request) = 0;
  // Of the oldest `count` steps whose statistics were not asked for, in order; waits for these steps alone.
  virtual std::vector<StepStats> stats(std::size_t count) = 0;
  // Once the trainer has reported a step.
  virtual void end_step(const StepRecord& record, MetricsWriter* metrics) = 0;

  // All of these are collective.
  virtual void all_reduce(std::span<double> sums) = 0;
  // Of the test set or, where the run has one, the held-out set. None where the hook ended it, which it must do on all
  // ranks alike.
  virtual std::optional<Evaluation> evaluate(Split split, const EvaluationHook& hook) = 0;
  virtual void check_parameters(const std::string& when) = 0;

  // Where all statistics were asked for. state() copies what this rank has, weights and optimizer on rank 0
  // only; it reuses the memory of `state`, which is complete once what it returns has been called: by any thread, beside
  // further steps, before the next state(). A GPU's copy to the host waits until then; empty where nothing does.
  // load_state() takes both from there on every rank; throws UserError where it does not fit the model or the method.
  virtual std::function<void()> state(RunState& state) = 0;
  virtual void load_state(const RunState& state) = 0;

  virtual std::string checksum() = 0;  // of the weights, 16 hexadecimal digits
  virtual void finish() = 0;           // closes what the engine writes
};

std::unique_ptr<Engine> make_cpu_engine(const RunInputs& inputs, Communicator& communicator);
// Throws UserError where the GPU, or what the configuration asks of it, cannot be had; in a build without CUDA
// always.
std::unique_ptr<Engine> make_cuda_engine(const RunInputs& inputs, Communicator& communicator);

// The index in arena.parameters() of the first whose gradient holds NaN or infinity; -1 where none does. On a CPU.
int first_bad_parameter(const ParameterArena& arena);

// The greatest norm of a rank's gradient before compression; 0: no clipping. compress.clip is thr_G of Lin et
// al., "Deep Gradient Compression", section 3.3, which clips gradients that are divided by N already at
// N^-1/2 thr_G; here they are means, hence N^1/2.
double local_clip(const Config& config, int ranks);

}  // namespace topknot

#pragma once
// Runs whose ranks go on without those that were killed (elastic.min_ranks), from memory. Ranks of a run are a view
// (dist/launch/launch.h). When a collective fails, each rank that is left joins the next view, and all tell each other
// the last step whose flags they have: the latest of these steps counts for all.

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "dist/exchange/exchange.h"
#include "dist/launch/views.h"
#include "train/checkpoint/checkpointer.h"
#include "train/metrics/metrics.h"

namespace topknot {

// A step that was made, as it was before the ranks reported it.
struct UnreportedStep {
  TrainingPosition position;  // after it
  RunTotals totals;           // before it
  std::vector<StepRecord> records;
  std::vector<double> seconds;
  std::vector<StepReport> reports;    // this rank's
  std::optional<RunState> kept = {};  // the rank's state after it, if it has made local steps since
};

// All ranks go over to the next view after the same step: others join, or leave.
struct ViewEnds : CollectiveError {
  using CollectiveError::CollectiveError;
};

// Whether it is what a rank of an elastic run sees when another dies, or leaves in the middle of a step or a start.
bool peer_failed(const std::exception& error);

// Whether a stop signal came to this rank alone, which the others are to go on without. Not if a launcher passed it on; nor,
// of a run on several hosts, if the coordinator did, or if it is SIGINT: there a launcher may well stop one rank only.
bool leaves_alone(const RunInputs& inputs);

// What ranks that leave have not sent goes to the ranks behind them, the last one's to the first: their residuals;
// thresholds and momenta end with them. A rank that leaves gathers this, the others nothing.
std::vector<std::byte> residual_block(const RunState& state);
// Adds those right before `rank`, which does not leave itself, to its own, by the ranks' weights. `all`: the blocks by rank.
void take_residuals(const std::vector<std::vector<std::byte>>& all, int rank,
                    const std::vector<float>& weights, RunState& state);
// Both, between two steps. Collective; the ranks that leave may end the view after it.
void hand_over(Step& step, int rank, bool leaves, const std::vector<float>& weights);

// What a rank goes on from in the next view.
struct RunInMemory {
  RunInMemory() = default;
  // After a step of `ranks` ranks, of which `handed_over` left since, with this `share`. What was made after it is undone.
  RunInMemory(Step& step, UnreportedStep last, int ranks, double share, std::int64_t first_step,
              int handed_over);

  ResumedRun run;  // without files
  RunState state;  // with weights and optimizer on every rank
  Config config;   // Step::effective_config()
  UnreportedStep last;
  double share = 1;             // of this rank in the average of the steps so far
  std::int64_t first_step = 0;  // steps made before this start
  std::string note;             // what has happened
  int handed_over = 0;          // ranks that left with nothing lost
};

// The views of a rank, one after the other.
class Views {
 public:
  // `first`: the communicator of the first view, which outlives this. `rejoin`: empty for a run that is not elastic.
  // `joined`: for a rank that joins a run, the view in which it does.
  Views(Rejoin rejoin, Communicator& first, View joined = {});

  bool elastic() const { return rejoin_.join != nullptr; }
  bool announced() const { return rejoin_.announced && rejoin_.announced(view_.number); }
  Communicator& communicator() { return *current_; }  // of the newest view that was joined
  // What all ranks of that view have agreed on last; step 0 if no step was made.
  const Agreement& agreed() const { return agreed_; }

  // After a collective over `failed` has thrown: joins the next view, if that was not done since, and settles
  // agreed(), by `mine` and what the other ranks have; again if a further rank dies meanwhile. False if the run ends.
  // Throws as Rejoin.
  bool join_next(const Communicator& failed, const Agreement& mine);
  // For Exchange::when_agreement_fails(), of an exchange over `used`; `mine`: its last_agreement().
  AgreementSource agreement_source(const Communicator& used, const Agreement& mine);
  // What this rank goes on from in the newest view, and as what; once for each view but the first of a run. `memory`: none
  // if the run begins anew, and of a rank that joins, which gets it from another. Collective. Throws Error if the
  // others go on from another step, or no rank has the run's state.
  void prepare(std::optional<RunInMemory>& memory, RunInputs& inputs);

 private:
  void share(std::optional<RunInMemory>& memory, const Config& config);
  std::string news(int handed_over);  // of the views since the last call

  const Rejoin rejoin_;
  Communicator* current_;
  std::vector<std::unique_ptr<Communicator>> joined_;  // a trainer may still refer to an earlier one
  View view_;
  bool joins_ = false;     // and has not agreed with the others on a step
  std::vector<int> told_;  // the ranks that news() told of last
  Agreement agreed_;
};

// The length of a run's metrics.jsonl up to the first record of this step or a later one, or to its last whole line.
std::uint64_t metrics_bytes_before(const std::string& path, std::int64_t step);

}  // namespace topknot

#pragma once
// Runs whose ranks go on without those that were killed (elastic.min_ranks), from memory. Ranks of a run are a view
// (dist/launch/launch.h). When a collective fails, each rank that is left joins the next view, and all tell each other
// the last step whose flags they have: the latest of these steps counts for all.

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "dist/exchange/exchange.h"
#include "dist/launch/launch.h"
#include "train/checkpoint/checkpointer.h"
#include "train/metrics/metrics.h"

namespace topknot {

// A step that was made, as it was before the ranks reported it.
struct UnreportedStep {
  TrainingPosition position;  // after it
  RunTotals totals;           // before it
  std::vector<StepRecord> records;
  std::vector<double> seconds;
  std::vector<StepReport> reports;  // this rank's
};

// What a rank goes on from in the next view.
struct RunInMemory {
  ResumedRun run;  // without files
  RunState state;  // with weights and optimizer on every rank
  Config config;   // Step::effective_config()
  UnreportedStep last;
  std::int64_t first_step = 0;  // steps made before this start
  std::string note;             // what has happened
};

// The views of a rank, one after the other.
class Views {
 public:
  // `first`: the communicator of the first view, which outlives this. `rejoin`: empty for a run that is not elastic.
  Views(Rejoin rejoin, Communicator& first);

  bool elastic() const { return rejoin_ != nullptr; }
  Communicator& communicator() { return *current_; }  // of the newest view that was joined
  // What all ranks of that view have agreed on last; step 0 if no step was made.
  const Agreement& agreed() const { return agreed_; }

  // After a collective over `failed` has thrown: joins the next view, if that was not done since, and settles
  // agreed(), by `mine` and what the other ranks have; again if a further rank dies meanwhile. False if the run ends.
  // Throws as Rejoin.
  bool join_next(const Communicator& failed, const Agreement& mine);
  // For Exchange::when_agreement_fails(), of an exchange over `used`; `mine`: its last_agreement().
  AgreementSource agreement_source(const Communicator& used, const Agreement& mine);
  // What this rank goes on from in the newest view, and as what. `memory`: null if the run begins anew. Throws Error if
  // the others go on from another step.
  void prepare(RunInMemory* memory, RunInputs& inputs);

 private:
  std::string news();  // of the views since the last call

  const Rejoin rejoin_;
  Communicator* current_;
  std::vector<std::unique_ptr<Communicator>> joined_;  // a trainer may still refer to an earlier one
  View view_;
  std::vector<int> told_;  // the ranks that news() told of last
  Agreement agreed_;
};

// The length of a run's metrics.jsonl up to the first record of this step or a later one, or to its last whole line.
std::uint64_t metrics_bytes_before(const std::string& path, std::int64_t step);

}  // namespace topknot

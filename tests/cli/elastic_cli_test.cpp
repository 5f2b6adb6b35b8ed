// Ranks that are killed while `train` goes on without them (elastic.min_ranks): real processes.
#include <cmath>
#include <set>

#include "tests/cli/command.h"
#include "tests/support/files.h"
#include "tests/support/temp_folder.h"
#include "train/metrics/metrics.h"

namespace topknot {
namespace {

// 4 ranks, 32 steps in each of 3 epochs while all live; every step compares the weights.
const std::string kElasticRun =
    "model.name=mlp model.hidden=[16] data.train_size=1024 data.test_size=32 data.batch_size=8 "
    "train.epochs=3 "
    "compress.name=topk compress.density=0.05 dist.backend=gloo dist.ranks=4 dist.timeout_s=30 "
    "train.check_every=1 "
    "train.threads=1 train.checkpoint_every=0.5 elastic.min_ranks=";

const std::string kWhenItTrains =
    "while [ $(wc -l 2>/dev/null < $run/metrics.jsonl || echo 0) -lt 2 ]; do sleep 0.02; done; ";
// The ranks' processes were started in their order.
std::string kill_ranks(const std::string& lines) {
  return "kill -9 $(echo \"$ranks\" | sed -n \"" + lines + "\"); ";
}

CommandOutcome run_and_kill(const TempFolder& temp, int min_ranks, const std::string& kills,
                            const std::string& keys = "") {
  return run_command(
      "run=" + temp.at("run") + "; " TOPKNOT_BIN "/train " + kElasticRun + std::to_string(min_ranks) + " " +
      keys + " output.dir=$run & parent=$!; " + kWhenItTrains +
      "ranks=$(ps -o pid= --ppid $parent | sort -n); " + kills +
      "wait $parent; code=$?; sleep 0.2; kill -0 $ranks 2>/dev/null && echo left over; exit $code");
}

void check_records(const TempFolder& temp) {
  const Metrics metrics = read_metrics(temp.at("run/metrics.jsonl"));
  std::int64_t last = 0;
  for (const StepRecord& step : metrics.steps) {
    CHECK(step.step == ++last);
    CHECK(std::isfinite(step.loss));
  }
  REQUIRE(metrics.end);
  CHECK(metrics.end->steps == last);
  CHECK(last > 96);  // fewer ranks take more steps
  REQUIRE(metrics.epochs.size() == 3);
  for (std::size_t i = 0; i < 3; ++i) CHECK(metrics.epochs[i].epoch == static_cast<double>(i + 1));
  CHECK(metrics.evals.size() == 3);
}

}  // namespace

TEST_CASE("a run goes on without ranks that are killed, rank 0 among them, and ends in order") {
  const auto check = [](const std::string& kills) {
    const TempFolder temp;
    INFO(kills);
    const CommandOutcome outcome = run_and_kill(temp, 1, kills);
    CHECK(outcome.ended(0));
    CHECK_FALSE(outcome.has("left over"));
    CHECK(outcome.has("killed by signal 9"));
    CHECK(outcome.has("done: "));  // twice if rank 0 dies right after it has said so
    check_records(temp);
  };
  check(kill_ranks("3p"));     // in the first steps
  check(kill_ranks("1p"));     // rank 0
  check(kill_ranks("2p;4p"));  // two at once
  check(kill_ranks("1p") + "sleep 0.15; " + kill_ranks("2p") + "sleep 1; " + kill_ranks("3p"));  // one by one
  // Rank 0 when the records are complete.
  check(kill_ranks("3p") + "until grep -qs event.:.end $run/metrics.jsonl; do :; done; " + kill_ranks("1p"));
}

TEST_CASE("a rank that is left alone goes on for longer than the others would have had to come") {
  const TempFolder temp;
  const CommandOutcome outcome =
      run_and_kill(temp, 1, kill_ranks("1p;3p;4p"), "dist.timeout_s=2 train.epochs=100 optimizer.lr=0.005");
  CHECK(outcome.ended(0));
  CHECK(outcome.has("rank 1 goes on after step"));
}

TEST_CASE("a run whose ranks fall below elastic.min_ranks ends with the rank that died") {
  const TempFolder temp;
  const CommandOutcome outcome = run_and_kill(temp, 4, kill_ranks("3p"));
  CHECK(outcome.ended(137));
  CHECK(outcome.has("rank 2 died: killed by signal 9"));
  CHECK_FALSE(outcome.has("left over"));
}

TEST_CASE("elastic.min_ranks refuses what it does not do, with one message") {
  for (const char* keys :
       {"dist.backend=threads", "exchange.every=4", "compress.name=powersgd", "compress.name=regtopk",
        "compress.memory=ef21", "compress.name=auto", "data.shard=by_label", "exchange.collective=gtopk",
        "compress.name=dense compress.values=int8", "elastic.min_ranks=5", "exchange.ranks_per_host=2"}) {
    INFO(keys);
    check_refused(train("--validate " + kElasticRun + "2 " + keys), {"elastic.min_ranks"});
  }
}

}  // namespace topknot

// Ranks that are killed while `train` goes on without them (elastic.min_ranks): real processes.
#include <cmath>
#include <regex>

#include "tests/cli/command.h"
#include "train/metrics/metrics.h"

namespace topknot {
namespace {

// 4 ranks, 32 steps in each of 3 epochs while all live; every step compares the weights.
const std::string kElasticRun =
    "model.name=mlp model.hidden=[16] data.train_size=1024 data.test_size=32 data.batch_size=8 "
    "train.epochs=3 "
    "compress.name=topk compress.density=0.05 dist.backend=gloo dist.ranks=4 dist.timeout_s=30 "
    "train.check_every=1 train.threads=1 train.checkpoint_every=0.5 elastic.min_ranks=";

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
  CHECK(last == 96);  // fewer ranks share the same samples
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
    check_outcome(outcome, 0, {"killed by signal 9", "done: "}, {"left over"});
    check_records(temp);
  };
  check(kill_ranks("3p"));     // in the first steps
  check(kill_ranks("1p"));     // rank 0
  check(kill_ranks("2p;4p"));  // two at once
  check(kill_ranks("1p") + "sleep 0.15; " + kill_ranks("2p") + "sleep 1; " + kill_ranks("3p"));  // one by one
  // When an epoch is over in which others died, whose evaluation takes a while.
  check(kill_ranks("3p") + "until grep -qs event.:.epoch $run/metrics.jsonl; do :; done; " +
        kill_ranks("2p"));
  // Rank 0 when the records are complete.
  check(kill_ranks("3p") + "until grep -qs event.:.end $run/metrics.jsonl; do :; done; " + kill_ranks("1p"));
}

TEST_CASE("a run without compression that loses ranks makes the steps and losses of one that does not") {
  const TempFolder temp, other;
  const std::string keys = "compress.name=dense optimizer.lr=0.005";
  CHECK(run_and_kill(temp, 1, kill_ranks("3p") + "sleep 0.2; " + kill_ranks("1p"), keys).ended(0));
  CHECK(run_command(TOPKNOT_BIN "/train " + kElasticRun + "1 " + keys + " output.dir=" + other.at("run"))
            .ended(0));
  check_records(temp);
  const Metrics one = read_metrics(temp.at("run/metrics.jsonl")),
                all = read_metrics(other.at("run/metrics.jsonl"));
  REQUIRE(one.steps.size() == all.steps.size());
  int others = 0;  // a step that counts though a rank died in it has the mean loss of those that are left
  for (std::size_t i = 0; i < all.steps.size(); ++i)
    others += one.steps[i].loss != Approx(all.steps[i].loss).epsilon(1e-5);
  CHECK(others <= 2);
  CHECK(one.evals.back().test.loss == Approx(all.evals.back().test.loss).epsilon(1e-5));
}

TEST_CASE("with a batch on each rank, the learning rate may follow the number of those that are left") {
  for (const auto& [rule, rate] : {std::pair("rank", 0.1), {"rank_linear", 0.025}, {"rank_sqrt", 0.05}}) {
    const TempFolder temp;
    CHECK(run_and_kill(temp, 1, kill_ranks("2p;3p;4p"), "elastic.batch=" + std::string(rule)).ended(0));
    const Metrics metrics = read_metrics(temp.at("run/metrics.jsonl"));
    CHECK(metrics.steps.front().lr == 0.1);
    CHECK(metrics.steps.back().lr == Approx(rate));
    CHECK(metrics.steps.size() > 200);  // of 4 ranks: 96
  }
}

TEST_CASE(
    "local steps go on from the last sync, as if the run had been stopped there and resumed with fewer "
    "ranks") {
  const TempFolder temp, other;
  const std::string local =
      "compress.name=dense exchange.every=31 optimizer.lr=0.005 optimizer.momentum=0 train.epochs=12";
  const CommandOutcome outcome = run_and_kill(
      temp, 1, "until [ $(wc -l < $run/metrics.jsonl) -gt 50 ]; do :; done; " + kill_ranks("3p"), local);
  CHECK(outcome.ended(0));
  std::smatch found;
  REQUIRE(std::regex_search(outcome.output, found, std::regex("ranks 0, 1, 3 go on after step ([0-9]+)")));
  const std::string sync = found[1], run = " output.dir=" + other.at("run");
  CHECK(std::stoll(sync) % 31 == 0);
  const std::string command = TOPKNOT_BIN "/train ";
  CHECK(run_command(command + kElasticRun + "1 " + local + run + " train.stop_after=" + sync).ended(0));
  CHECK(run_command(command + "--resume " + other.at("run") + " dist.ranks=3 train.stop_after=0").ended(0));
  const Metrics metrics = read_metrics(temp.at("run/metrics.jsonl"));
  for (std::size_t i = 0; i < metrics.steps.size(); ++i)
    CHECK(metrics.steps[i].step == static_cast<std::int64_t>(i + 1));
  REQUIRE(metrics.end);
  const Metrics resumed = read_metrics(other.at("run/metrics.jsonl"));
  REQUIRE(resumed.end);
  CHECK(metrics.end->parameter_checksum == resumed.end->parameter_checksum);
  CHECK(metrics.end->steps == resumed.end->steps);
}

TEST_CASE("ranks that are stopped are killed, and those that are killed are started again and join") {
  const TempFolder temp;
  check_outcome(run_and_kill(temp, 1, "kill -STOP $(echo \"$ranks\" | sed -n \"1p\"); ",
                             "train.epochs=1000 train.max_steps=1500 optimizer.lr=0.005 elastic.respawns=1"),
                0,
                {"rank 0 hung: silent for more than 2.5 s; elastic.min_ranks: ranks 1, 2, 3 go on, as view 2",
                 "view 3: rank 0 joins; ranks 1, 2, 3, 0 go on after step"},
                {"left over"});
  const Metrics metrics = read_metrics(temp.at("run/metrics.jsonl"));
  REQUIRE(metrics.starts.size() == 3);
  CHECK(metrics.starts[0].view == "");
  CHECK(metrics.starts[1].view.starts_with(
      "view 2: rank 0 is gone, and with it what was not sent; ranks 1, 2, 3 "));
  CHECK(metrics.starts[2].view.starts_with("view 3: rank 0 joins; ranks 1, 2, 3, 0 go on after step "));
  for (std::size_t i = 0; i < metrics.steps.size(); ++i)
    CHECK(metrics.steps[i].step == static_cast<std::int64_t>(i + 1));
  CHECK(run_command(TOPKNOT_BIN "/train status " + temp.at("run")).has("ranks       view 3: rank 0 joins; "));
}

TEST_CASE("a rank that gets a stop signal alone leaves, and all stop if its launcher gets it") {
  const TempFolder temp, other;
  check_outcome(run_and_kill(temp, 2, "kill $(echo \"$ranks\" | sed -n \"2p\"); ", "optimizer.lr=0.005"), 0,
                {"rank 1 left; elastic.min_ranks: ranks 0, 2, 3 go on, as view 2",
                 "view 2: rank 1 handed over what was not sent; ranks 0, 2, 3 go on after step"});
  check_records(temp);
  check_outcome(run_and_kill(other, 2, kill_ranks("3p") + "sleep 1; kill $parent; ",
                             "train.epochs=1000 optimizer.lr=0.001"),
                143, {"ranks 0, 1, 3 go on after step", "stopped by SIGTERM after step"});
  check_outcome(
      run_command(TOPKNOT_BIN "/train --resume " + other.at("run") + " train.epochs=0 train.max_steps=2000"),
      0, {", 4 ranks by gloo", "done: 2000 steps"});
}

TEST_CASE("a stop signal to one rank stops all if too few would be left") {
  const TempFolder temp;
  check_outcome(run_and_kill(temp, 4, "kill $(echo \"$ranks\" | sed -n \"2p\"); ", "train.epochs=1000"), 143,
                {"stopped by SIGTERM after step"}, {"go on, as view"});
}

TEST_CASE("a rank that is left alone goes on for longer than the others would have had to come") {
  const TempFolder temp;
  check_outcome(
      run_and_kill(temp, 1, kill_ranks("1p;3p;4p"), "dist.timeout_s=2 train.epochs=100 optimizer.lr=0.005"),
      0, {"rank 1 goes on after step"});
}

TEST_CASE("a run whose ranks fall below elastic.min_ranks ends with the rank that died") {
  const TempFolder temp;
  check_outcome(run_and_kill(temp, 4, kill_ranks("3p")), 137, {"rank 2 died: killed by signal 9"},
                {"left over"});
}

TEST_CASE("elastic.min_ranks refuses what it does not do, with one message") {
  for (const char* keys :
       {"dist.backend=threads", "exchange.every=4 exchange.fragments=2",
        "exchange.every=4 exchange.overlap_steps=1", "compress.name=powersgd", "compress.name=regtopk",
        "compress.memory=ef21", "compress.name=auto", "data.shard=by_label", "exchange.collective=gtopk",
        "compress.name=dense compress.values=int8", "elastic.min_ranks=5", "exchange.ranks_per_host=2"}) {
    INFO(keys);
    check_refused(train("--validate " + kElasticRun + "2 " + keys), {"elastic.min_ranks"});
  }
  check_refused(train("--validate " + kElasticRun + "2 exchange.every=4 elastic.batch=rank_sqrt"),
                {"elastic.batch", "elastic.batch=rank"});
}

}  // namespace topknot

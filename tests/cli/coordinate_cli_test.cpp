// `train --coordinate` looks after ranks that a shell starts as a launcher would: real processes.
#include "tests/cli/command.h"
#include "tests/support/free_port.h"
#include "train/metrics/metrics.h"

namespace topknot {
namespace {

const std::string kKeys =
    "model.name=mlp model.hidden=[16] data.train_size=1024 data.test_size=32 data.batch_size=8 "
    "train.max_steps=2000 train.epochs=0 optimizer.lr=0.005 compress.name=topk compress.density=0.05 "
    "dist.backend=gloo dist.ranks=3 dist.timeout_s=30 train.check_every=1 train.threads=1 "
    "train.checkpoint_every=1 ";

// `script` has `start R [KEY=VALUE...]`, which starts rank R in the background and leaves its process as $r, and $run. The
// coordinator is $c and ends with the exit code.
CommandOutcome coordinate(const TempFolder& temp, const std::string& script, const std::string& keys = "",
                          const std::string& arguments = kKeys + "elastic.min_ranks=1 output.dir=$run ") {
  const std::string where = "127.0.0.1:" + std::to_string(free_port()), program = TOPKNOT_BIN "/train ";
  return run_command("run=" + temp.at("run") + "; where=" + where +
                     "; start() { rank=$1; shift; RANK=$rank WORLD_SIZE=3 " + program + arguments + keys +
                     " dist.master=$where \"$@\" & r=$!; all=\"$all $r\"; }; " + program +
                     "--coordinate $where " + arguments + keys + " & c=$!; " + script +
                     " wait $c; code=$?; sleep 0.3; kill -0 $all 2>/dev/null && echo left over; exit $code");
}
const std::string kAllStart = "start 0; zero=$r; start 1; one=$r; start 2; ";

void check_all_steps(const TempFolder& temp) {
  const Metrics metrics = read_metrics(temp.at("run/metrics.jsonl"));
  for (std::size_t i = 0; i < metrics.steps.size(); ++i)
    CHECK(metrics.steps[i].step == static_cast<std::int64_t>(i + 1));
  REQUIRE(metrics.end);
  CHECK(metrics.end->steps == 2000);
}

}  // namespace

TEST_CASE("a coordinated run loses rank 0, takes it in again, lets another leave, and ends in order") {
  const TempFolder temp;
  check_outcome(
      coordinate(temp, kAllStart + kWhenItTrains +
                           "kill -9 $zero; sleep 0.3; start 0; "
                           "until grep -qs \"view 3\" $run/metrics.jsonl; do sleep 0.02; done; kill $one; "),
      0,
      {"all 3 ranks are here", "rank 0 died", "ranks 1, 2 go on, as view 2",
       "view 3: rank 0 joins; ranks 1, 2, 0 go on after step", "rank 1 left",
       "view 4: rank 1 handed over what was not sent; ranks 2, 0 go on after step", "done: 2000 steps"},
      {"left over", "first error"});
  check_all_steps(temp);
}

TEST_CASE("a coordinated rank 0 that hangs loses the run directory, and writes nothing when it wakes") {
  const TempFolder temp;
  check_outcome(
      coordinate(temp, kAllStart + kWhenItTrains +
                           "kill -STOP $zero; until grep -qs \"view 2\" $run/metrics.jsonl; do sleep 0.05; "
                           "done; kill -CONT $zero; wait $zero; echo woken $?; "),
      0, {"rank 0 hung", "takes the lock of", "started again, it joins", "woken 2"}, {"left over"});
  check_all_steps(temp);
}

TEST_CASE("a coordinator's stop signal and a rank's SIGINT stop all, and its end ends all") {
  const TempFolder temp, other;
  const std::string endless = "train.max_steps=1000000 ";
  check_outcome(coordinate(temp, kAllStart + kWhenItTrains + "kill $c; ", endless), 143,
                {"stopped by SIGTERM after step"}, {"left over", "error"});
  check_outcome(coordinate(temp,
                           kAllStart + "until [ $(grep -c event.:.start $run/metrics.jsonl) -gt 1 ]; do "
                                       "sleep 0.05; done; sleep 0.3; kill -INT $one; ",
                           "", "--resume " + temp.at("run") + " "),
                130, {"resumed after step", "stopped by SIGINT after step"}, {"left over", "go on"});
  check_outcome(
      coordinate(other,
                 kAllStart + kWhenItTrains +
                     "until ls $run/checkpoints/* >/dev/null 2>&1; do sleep 0.05; done; kill -9 $c; ",
                 endless),
      137, {"the coordinator at 127.0.0.1", "train --resume goes on from its last checkpoint"},
      {"left over"});
  CHECK(read_metrics(other.at("run/metrics.jsonl")).steps.size() > 3);
}

TEST_CASE("a coordinator refuses what cannot be, and names the ranks' mistakes") {
  const TempFolder temp;
  check_refused(coordinate(temp, "", "", kKeys), {"--coordinate is for elastic runs", "elastic.min_ranks"});
  check_refused(train("--coordinate 127.0.0.1 " + kKeys + "elastic.min_ranks=1"), {"HOST:PORT"});
  check_refused(train("--coordinate"), {"--coordinate takes HOST:PORT"});
  check_outcome(coordinate(temp, "start 0; start 2; ", "dist.timeout_s=3"), 2,
                {"only 2 of 3 ranks came within dist.timeout_s (3 s)", "the run did not begin"},
                {"left over"});
  check_outcome(
      coordinate(temp, "start 1; sleep 0.5; start 1; start 0 elastic.min_ranks=0; ", "dist.timeout_s=3"), 2,
      {"two processes were started as this rank", "port"}, {"left over"});
  check_outcome(coordinate(temp, "start 1 elastic.min_ranks=0; ", "dist.timeout_s=3"), 2,
                {"elastic.min_ranks is missing"});
  const std::string nobody = "127.0.0.1:" + std::to_string(free_port());
  check_outcome(run_command("RANK=1 WORLD_SIZE=3 " TOPKNOT_BIN "/train " + kKeys +
                            "elastic.min_ranks=1 dist.timeout_s=1 dist.master=" + nobody),
                1, {"no process answers", "train --coordinate " + nobody});
  check_outcome(coordinate(temp, kAllStart + kWhenItTrains + "kill -9 $one; start 1 optimizer.lr=0.1; "), 0,
                {"the configuration or the data are others than when the run began",
                 "rank 1 ended with exit code 2", "done: 2000 steps"});
}

}  // namespace topknot

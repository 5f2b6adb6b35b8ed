// What `train status` says of runs in every state.
#include "train/status.h"

#include <filesystem>

#include "tests/support/error_text.h"
#include "tests/support/files.h"
#include "tests/train/broken_sample.h"
#include "tests/train/resumed_run.h"

namespace fs = std::filesystem;
using namespace topknot;
using namespace topknot::testing;

namespace {

const Keys kKeys{"dist.ranks=2", "train.max_steps=12", "train.eval_every=0", "train.stop_after=0"};

}  // namespace

TEST_CASE("status tells a finished run from one that stopped, failed or was killed") {
  const TempFolder temp;
  start(temp, with(kKeys, {"train.stop_after=5"}), false);
  CHECK(says(status_text(temp.at("run")), {"stopped by train.stop_after", "5 of 12", "images/s", "checkpoint",
                                           "step 5", "train --resume " + temp.at("run")}));
  const std::string metrics = temp.at("run/metrics.jsonl");
  const Metrics stopped = read_metrics(metrics);
  REQUIRE(stopped.stop);
  CHECK(text_of(temp.at("run/metrics.csv")).find("\n5,") != std::string::npos);
  CHECK(stopped.stop->step == 5);
  // A killed run has no `stop` record: that of an earlier start does not count.
  MetricsWriter(metrics).write(StartRecord{5, 12, 64, "2026-01-01T00:00:00Z", "", {}});
  CHECK(says(status_text(temp.at("run")), {"not running", "killed"}));
  start(temp, kKeys, true);
  CHECK(says(status_text(temp.at("run")), {"finished", "12 of 12", "after step 12: test loss", "step 12"}));
  CHECK(status_text(temp.at("run")).find("--resume") == std::string::npos);
  CHECK(read_metrics(metrics).starts.size() == 2);
}

TEST_CASE("status has the error that ended a run") {
  const TempFolder temp;
  error_text([&] {
    start(temp,
          with(kKeys,
               {"data.name=broken_sample", "data.batch_size=2", "train.max_skips=1", "train.max_steps=40"}),
          false);
  });
  CHECK(says(status_text(temp.at("run")), {"failed at", "training has diverged"}));
  CHECK(text_of(temp.at("run/metrics.csv")).find("step,epoch,") == 0);  // what there is, as a table too
}

TEST_CASE("status of a run that goes on names its process") {
  const TempFolder temp;
  const LoadedConfig loaded = small_run(temp, kKeys);
  const RunDirectory folder = create_run_directory(loaded, {});
  CHECK(
      says(status_text(folder.path), {"running, process " + std::to_string(getpid()), "none was made yet"}));
}

TEST_CASE("status counts a checkpoint's files alone and shows words of the files as they are, in one line") {
  const TempFolder temp;
  start(temp, with(kKeys, {"train.stop_after=5"}), false);
  fs::create_directory(temp.at("run/checkpoints/step-000000005/mine"));
  const std::string before = status_text(temp.at("run"));
  CHECK(before.find("PB") == std::string::npos);
  MetricsWriter(temp.at("run/metrics.jsonl"))
      .write(StopRecord{5, true, "a\nstate       finished\x1b[2J", "2026-01-01T00:00:00Z"});
  CHECK(says(status_text(temp.at("run")), {"failed at", "a\\nstate       finished\\x1b[2J"}));
}

TEST_CASE("status of what is no run directory says so") {
  const TempFolder temp;
  CHECK(says(error_text([&] { status_text(temp.str()); }), {"no run directory"}));
  const char* const words[] = {"status", "a", "b"};
  CHECK(says(error_text([&] { status_command(3, words); }), {"one run directory"}));
}

// The program bench as a user runs it: record, then replay.
#include <filesystem>
#include <fstream>

#include "tests/cli/command.h"
#include "tests/support/catch.h"
#include "tests/support/temp_folder.h"
#include "train/metrics/metrics.h"
#include "train/metrics/npy.h"

using namespace topknot;

namespace {

const std::string kSmall =
    " model.name=mlp model.hidden=[8] data.train_size=64 data.test_size=16 data.batch_size=4 "
    "train.threads=1 ";

struct Recorded {
  TempFolder temp;
  std::string folder = temp.at("rec");
  CommandOutcome outcome = bench("--record " + folder + kSmall + "train.record_from=2 --steps 4");
};

}  // namespace

TEST_CASE("bench records a run and replays it, by threads and by processes") {
  const Recorded recorded;
  INFO(recorded.outcome.output);
  REQUIRE(recorded.outcome.code == 0);
  const NpyReader reader(recorded.folder + "/gradients.npy");
  CHECK(reader.shape()[0] == 4);
  CHECK(read_metrics(recorded.folder + "/metrics.jsonl").steps.size() == 6);

  for (const char* backend : {"threads", "gloo"}) {
    const std::string out = recorded.temp.at(std::string("out-") + backend);
    const CommandOutcome outcome =
        bench("--replay " + recorded.folder + " compress.name=topk compress.density=0.01 dist.ranks=3 " +
              "dist.backend=" + backend + " --steps 2 --out " + out);
    INFO(outcome.output);
    CHECK(outcome.code == 0);
    for (const char* word : {"4 recorded steps", "topk at density 0.01", "3 ranks by", "encode",
                             "communicate", "exposed", "decode", "a rank sends"})
      CHECK(outcome.count(word) == 1);
    CHECK(outcome.has(backend));
    const Metrics metrics = read_metrics(out + "/metrics.jsonl");
    CHECK(metrics.steps.size() == 7);
    CHECK(metrics.end.has_value());
    for (const char* file : {"bench.json", "config.yaml", "environment.json", "metrics.csv"})
      CHECK(std::filesystem::exists(out + "/" + file));
    CHECK(compare(out + " --out " + recorded.temp.at("report.html")).code == 0);
  }
}

TEST_CASE("bench prints its help") {
  check_help(bench, {"--record", "--replay", "--compute", "--out", "Examples"});
}

TEST_CASE("bench validates its arguments and the recording") {
  const Recorded recorded;
  REQUIRE(recorded.outcome.code == 0);
  const std::string replay = "--replay " + recorded.folder + " ";
  check_refused(bench("--replay " + recorded.temp.at("absent")), {"absent", "no such folder", "--record"});
  check_refused(bench("--record x --replay y"), {"--record DIR or --replay DIR"});
  check_refused(bench("dist.ranks=2"), {"--record DIR or --replay DIR"});
  check_refused(bench(replay + "--steps 0"), {"--steps"});
  check_refused(bench(replay + "--meet --compute 0.1"), {"--meet"});
  check_refused(bench("--record x --meet"), {"--meet is for --replay"});
  check_refused(bench(replay + "--setps 3"), {"--setps", "--help"});
  check_refused(bench(replay + "model.hidden=[9]"), {"model.hidden", "no part in a replay"});
  check_refused(bench(replay + "compress.name=tpok"), {"did you mean", "topk"});
  check_refused(bench(replay + "compress.denisty=0.1"), {"did you mean", "density"});
  check_refused(bench(replay + "config.yaml"), {"takes its configuration from"});
  check_refused(bench("--record " + recorded.folder + kSmall), {"already holds a run"});
  // Nothing is made where the configuration is wrong.
  const std::string out = recorded.temp.at("out");
  check_refused(bench(replay + "compress.layer_density=auto compress.scope=tensor --out " + out),
                {"layer_density"});
  CHECK_FALSE(std::filesystem::exists(out));
  const std::string npy = recorded.folder + "/gradients.npy";
  std::filesystem::resize_file(npy, std::filesystem::file_size(npy) - 4);
  check_refused(bench(replay), {"gradients.npy"});
  std::filesystem::remove(npy);
  check_refused(bench(replay), {"gradients.npy is missing"});
}

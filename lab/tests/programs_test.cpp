// The programs bench and predict as a user runs them.
#include <filesystem>
#include <fstream>

#include "tests/cli/command.h"
#include "tests/support/error_text.h"
#include "tests/support/files.h"
#include "tests/support/temp_folder.h"
#include "train/checkpoint/safetensors.h"
#include "train/metrics/metrics.h"
#include "train/plan/profile.h"

using namespace topknot;

namespace {

CommandOutcome predict(const std::string& arguments) {
  return run_command(TOPKNOT_BIN "/predict " + arguments);
}
CommandOutcome bench(const std::string& arguments) {
  return run_command(TOPKNOT_BIN "/bench " + arguments);
}

const std::string kSmall =
    " model.name=mlp model.hidden=[8] data.train_size=64 data.test_size=16 data.batch_size=4 "
    "train.threads=1 ";

struct Recorded {
  TempFolder temp;
  std::string folder = temp.at("rec");
  CommandOutcome outcome = bench("--record " + folder + kSmall + "train.record_gradients=[1,2] --steps 4");
};

void check_predict_refuses(const CommandOutcome& outcome, std::initializer_list<const char*> words) {
  check_refused(outcome, words, "predict: ");
}

// A folder with the profile of a run.
struct Profiled {
  TempFolder temp;
  Profiled() {
    ExchangeProfile p;
    p.model = "mlp", p.method = "topk", p.density = 0.01, p.ranks = 2, p.backend = "gloo", p.overlaps = true;
    p.parameters = {{"w", 100000, true, 0.02, 0.02}, {"bias", 10, false, 0, 0.02}};
    p.forward_s = 0.01, p.backward_s = 0.02, p.update_s = 0.001;
    p.groups = {{100000, 8000, 0, 0.001, 0.001}};
    p.dense = {10, 40, 0, 0, 0};
    p.link = {1e-4, 1e-8, 0};
    p.gather = {1e-4, 1e-8, 2};
    p.reduce = {2e-4, 1e-8, 2};
    std::ofstream(temp.at("exchange_profile.json")) << exchange_profile_json(p);
  }
};

}  // namespace

TEST_CASE("bench records a run and replays it, by threads and by processes") {
  const Recorded recorded;
  INFO(recorded.outcome.output);
  REQUIRE(recorded.outcome.code == 0);
  CHECK(GradientsReader(recorded.folder + "/gradients.safetensors").steps() == 4);
  CHECK(read_metrics(recorded.folder + "/metrics.jsonl").steps.size() == 6);

  for (const char* backend : {"threads", "gloo"}) {
    const std::string out = recorded.temp.at(std::string("out-") + backend);
    const CommandOutcome outcome =
        bench("--replay " + recorded.folder + " compress.name=topk compress.density=0.01 dist.ranks=3 " +
              "dist.backend=" + backend + " --steps 2 --out " + out);
    CHECK(outcome.ended(0));
    for (const char* word : {"4 recorded steps", "topk at density 0.01", "3 ranks by", "encode",
                             "communicate", "exposed", "decode", "a rank sends"})
      CHECK(outcome.count(word) == 1);
    CHECK(outcome.has(backend));
    const Metrics metrics = read_metrics(out + "/metrics.jsonl");
    CHECK(metrics.steps.size() == 7);
    CHECK(metrics.end.has_value());
    for (const char* file : {"bench.json", "config.yaml", "environment.json", "metrics.csv"})
      CHECK(std::filesystem::exists(out + "/" + file));
    CHECK(compare(out + " --out " + recorded.temp.at("report.html")).ended(0));
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
  check_refused(bench(replay + "compress.name=tpok"), {"did you mean", "topk"});
  check_refused(bench(replay + "compress.denisty=0.1"), {"did you mean", "density"});
  check_refused(bench(replay + "config.yaml"), {"takes its configuration from"});
  check_refused(bench("--record " + recorded.folder + kSmall), {"already holds a run"});
  check_refused(bench(replay + "output.overwrite=true --out " + recorded.folder), {"is the recording"});
  // Nothing is made where the configuration is wrong.
  const std::string out = recorded.temp.at("out");
  check_refused(bench(replay + "compress.layer_density=auto compress.scope=tensor --out " + out),
                {"layer_density"});
  CHECK_FALSE(std::filesystem::exists(out));
}

TEST_CASE("predict prints its help") {
  check_help(predict, {"--ranks", "--rate", "--measured", "--papers", "Examples", "exchange.merge=optimal"});
}

TEST_CASE("predict --papers needs no run and names claims and sources") {
  const CommandOutcome outcome = predict("--papers");
  CHECK(outcome.ended(0));
  for (const char* word : {"GaussianK", "DGC", "OMGS", "MODELLED", "Claim", "arXiv 1911.08772", "figure 6"})
    CHECK(outcome.has(word));
  check_predict_refuses(predict("somewhere --papers"), {"--papers"});
  check_predict_refuses(predict("--papers --out somewhere"), {"--papers", "--out"});
}

TEST_CASE("predict prints tables and writes what it printed") {
  const Profiled run;
  const std::string out = run.temp.at("a/b");
  const CommandOutcome outcome =
      predict(run.temp.str() + " --ranks 1,4,64 --rate measured,100mbit --merge all --out " + out);
  CHECK(outcome.ended(0));
  CHECK(outcome.count("modelled speed-up") == 2);
  CHECK(says(outcome.output, {"topk 0.01, merge all", "dense, merge all", "1.00 (100%)", "Assumptions"}));
  for (const char* name : {"csv", "json", "html"})
    CHECK(std::filesystem::file_size(out + "/prediction." + name) > 500);
  std::filesystem::remove(out + "/prediction.json");
  run.temp.write("config.yaml", {});
  std::filesystem::create_symlink(run.temp.at("config.yaml"), out + "/prediction.json");
  check_predict_refuses(predict(run.temp.str() + " --rate 100mbit --out " + out),
                        {"prediction.json", "of a run"});
}

TEST_CASE("a run may follow a list of predict") {
  const Profiled run;
  CHECK(predict("--rate measured,100mbit " + run.temp.str()).ended(0));
}

TEST_CASE("predict --auto reads what a run has measured, and writes what it printed") {
  const TempFolder temp;
  ExchangeProfile p;
  p.model = "mlp", p.method = "dense", p.ranks = 2, p.backend = "gloo", p.overlaps = p.sums = true;
  p.parameters = {{"w", 100000, false, 0.02, 0.02}};
  p.backward_s = 0.02;
  p.groups = {{100000, 400000, 0, 0, 0}};
  p.link = {1e-4, 1e-8, 0};
  std::ofstream(temp.at("auto_profiles.json")) << named_profiles_json({{"dense", p}});
  const std::string good = temp.str() + " --auto ", out = temp.at("a/b");
  const CommandOutcome outcome = predict(good + "--out " + out);
  CHECK(outcome.ended(0));
  CHECK(says(outcome.output, {"10mbit", "10gbit", "within a factor of 2", "\n32 "}));
  for (const char* name : {"csv", "json", "html"})
    CHECK(std::filesystem::file_size(out + "/prediction." + name) > 500);
  CHECK(says(predict(good + "--rate 1gbit,measured --ranks 3 --latency 1us,1ms").output,
             {"latency 1 us", "latency 1000 us", "measured  1gbit"}));
  const TempFolder empty;
  check_predict_refuses(predict(empty.str() + " --auto"), {"no auto_profiles.json", "compress.name=auto"});
  check_predict_refuses(predict(good + "--ranks 1"), {"--ranks", "from 2"});
  for (const char* other : {"--method dense", "--merge all", "--collective auto", "--every 5",
                            "--measured " TOPKNOT_SOURCE_DIR, "--papers"})
    check_predict_refuses(predict(good + other), {"--auto", "--help"});
}

TEST_CASE("predict validates its arguments") {
  const Profiled run;
  const TempFolder empty;
  const std::string good = run.temp.str() + " ";
  check_predict_refuses(predict("--rate 1gbit"), {"no run given"});
  check_predict_refuses(predict(empty.str()), {"no exchange_profile.json", "exchange.merge=optimal"});
  check_predict_refuses(predict(good + "--rate fast"), {"--rate", "fast"});
  check_predict_refuses(predict(good + "--ranks 2,x"), {"--ranks", "x"});
  check_predict_refuses(predict(good + "--ranks 0"), {"--ranks", "0"});
  check_predict_refuses(predict(good + "--ranks 2.5"), {"--ranks", "2.5"});
  check_predict_refuses(predict(good + "--latency -1"), {"--latency", "-1"});
  check_predict_refuses(predict(good + "--merge some"), {"some"});
  check_predict_refuses(predict(good + "--method dgc"), {"--method", "dgc"});
  check_predict_refuses(predict(good + "--collective tree"), {"--collective", "tree"});
  check_predict_refuses(predict(good + "--measured " + empty.str()), {"--measured", "metrics.jsonl"});
  check_predict_refuses(predict(good + good), {"two of the runs"});
  check_predict_refuses(predict(good + "--out /dev/null/x"), {"--out", "/dev/null/x"});
  check_predict_refuses(predict(good + "--wrong"), {"--wrong", "--help"});
}

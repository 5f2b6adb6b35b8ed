// The program predict as a user runs it.
#include <filesystem>
#include <fstream>

#include "tests/cli/command.h"
#include "tests/support/catch.h"
#include "tests/support/temp_folder.h"
#include "train/plan/exchange_profile.h"

using namespace topknot;

namespace {

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

TEST_CASE("predict prints its help") {
  check_help(predict, {"--ranks", "--rate", "--measured", "--papers", "Examples", "exchange.merge=optimal"});
}

TEST_CASE("predict --papers needs no run and names claims and sources") {
  const CommandOutcome outcome = predict("--papers");
  CHECK(outcome.code == 0);
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
  INFO(outcome.output);
  CHECK(outcome.code == 0);
  CHECK(outcome.count("modelled speed-up") == 2);
  CHECK(outcome.has("topk 0.01, merge all"));
  CHECK(outcome.has("dense, merge all"));
  CHECK(outcome.has("1.00 (100%)"));
  CHECK(outcome.has("Assumptions"));
  for (const char* name : {"csv", "json", "html"})
    CHECK(std::filesystem::file_size(out + "/prediction." + name) > 500);
}

TEST_CASE("a run may follow a list of predict") {
  const Profiled run;
  CHECK(predict("--rate measured,100mbit " + run.temp.str()).code == 0);
}

TEST_CASE("predict validates its arguments") {
  const Profiled run;
  const TempFolder empty;
  const std::string good = run.temp.str() + " ";
  check_predict_refuses(predict("--rate 1gbit"), {"no run given"});
  check_predict_refuses(predict(empty.str()), {"no exchange_profile.json", "exchange.merge=optimal"});
  check_predict_refuses(predict(empty.at("absent")), {"no such run directory"});
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

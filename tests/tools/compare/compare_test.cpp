#include "tools/compare/compare.h"

#include <cmath>
#include <filesystem>
#include <fstream>
#include <functional>
#include <nlohmann/json.hpp>
#include <sstream>

#include "tests/support/error_text.h"
#include "tests/support/files.h"
#include "tests/tools/compare/made_runs.h"
#include "train/run_directory.h"

namespace topknot {

using namespace testing;
namespace fs = std::filesystem;

TEST_CASE("seeds of one configuration are one method with mean and spread, dense comes first") {
  const Folder folder;
  folder.add("t1", {.overrides = {"compress.name=topk", "seed=1"}, .best = 0.7});
  folder.add("t2", {.overrides = {"compress.name=topk", "seed=2", "train.algorithm_cache=none",
                                  "dist.master=127.0.0.1:29501", "dist.token=second"},
                    .best = 0.8});
  folder.add("d", {});
  const auto c = folder.compare({"t1", "t2", "d"});
  REQUIRE(c.methods.size() == 2);
  CHECK(c.methods[0].name == "dense");
  CHECK(c.methods[1].name == "topk");
  CHECK(c.methods[1].runs == std::vector<std::size_t>{0, 1});
  CHECK(c.methods[1].best.mean == Approx(0.75));
  CHECK(c.methods[1].best.deviation == Approx(std::sqrt(0.005)));
  CHECK(c.methods[1].last.mean == Approx(0.74));
  REQUIRE(c.differing.size() == 1);
  CHECK(c.differing[0].key == "compress.name");
  CHECK(value_text(c.metric, c.methods[1].best) == "75.0 ± 7.1 %");
}

TEST_CASE("methods with one compressor are named by the keys that tell them apart") {
  const Folder folder;
  folder.add("a", {.overrides = {"compress.name=topk", "compress.density=0.01"}});
  folder.add("b", {.overrides = kTopk});
  folder.add("d", {});
  const auto c = folder.compare({"a", "b", "d"});
  CHECK(c.methods[0].name == "dense");
  CHECK(c.methods[1].name == "topk density=0.01");
  CHECK(c.methods[2].name == "topk density=0.001");
}

TEST_CASE("long lists of keys become letters, with one legend for all methods") {
  const Folder folder;
  const std::vector<std::string> keys[] = {
      {"compress.density=0.01", "optimizer.lr=0.1", "exchange.merge=none"},
      {"compress.density=0.02", "optimizer.lr=0.2", "exchange.merge=size:9"}};
  for (const std::string method : {"topk", "dgc"})
    for (int i = 0; i < 2; ++i) {
      auto overrides = keys[i];
      overrides.push_back("compress.name=" + method);
      folder.add((method == "topk" ? "t" : "d") + std::to_string(i), {.overrides = overrides});
    }
  folder.add("r", {.overrides = {"compress.name=randk", "optimizer.lr=0.1"}});
  folder.add("r2", {.overrides = {"compress.name=randk", "optimizer.lr=0.2"}});
  const auto c = folder.compare({"t0", "t1", "d0", "d1", "r", "r2"});
  std::vector<std::string> names;
  for (const Method& m : c.methods) names.push_back(m.name);
  CHECK(names ==
        std::vector<std::string>{"topk A", "topk B", "dgc A", "dgc B", "randk lr=0.1", "randk lr=0.2"});
  REQUIRE(c.abbreviations.size() == 2);
  CHECK(says(c.abbreviations[0].keys, {"compress.density=0.01", "exchange.merge=none"}));
  for (const std::string& text : {comparison_text(c), report_html(c)})
    CHECK(count_of(text, c.abbreviations[0].keys) == 1);
  const std::string csv = comparison_csv(c);
  CHECK(says(csv, {"\"topk A\"", "compress.density=0.01"}));
}

TEST_CASE("where lists of keys are long, folders that name their compressor name the methods") {
  const Folder folder;
  const auto add = [&](const std::string& name, const std::string& method, const std::string& density,
                       int seed) {
    folder.add(name, {.overrides = {"compress.name=" + method, "compress.density=" + density,
                                    "optimizer.lr=" + density, "exchange.merge=size:" + density.substr(2),
                                    "seed=" + std::to_string(seed)}});
  };
  const auto names = [&](const std::vector<std::string>& runs) {
    std::vector<std::string> result;
    for (const Method& m : folder.compare(runs).methods) result.push_back(m.name);
    return result;
  };
  using Names = std::vector<std::string>;
  for (int seed = 1; seed <= 2; ++seed) add("dgc_slow-s" + std::to_string(seed), "dgc", "0.01", seed);
  add("my_dgc", "dgc", "0.02", 1);
  add("topk", "topk", "0.01", 1);
  const Names runs{"dgc_slow-s1", "dgc_slow-s2", "my_dgc/", "topk"};
  CHECK(names(runs) == Names{"dgc_slow", "my_dgc", "topk"});
  const auto c = folder.compare(runs);
  REQUIRE(c.abbreviations.size() == 2);
  CHECK(c.abbreviations[0].text == "dgc_slow");
  CHECK(contains(c.abbreviations[0].keys, "compress.density=0.01"));
  CHECK(contains(comparison_text(c), "\nmy_dgc: " + c.abbreviations[1].keys));
  // Not where one says nothing of its compressor, two methods are called the same, or a method's runs are
  // not.
  add("fast", "dgc", "0.03", 1);
  CHECK(names({"dgc_slow-s1", "fast"}) == Names{"dgc A", "dgc B"});
  add("dgc_slow-s3", "dgc", "0.04", 1);
  CHECK(names({"dgc_slow-s1", "dgc_slow-s3"}) == Names{"dgc A", "dgc B"});
  add("other_dgc", "dgc", "0.01", 3);
  CHECK(names({"dgc_slow-s1", "other_dgc", "my_dgc"}) == Names{"dgc A", "dgc B"});
}

TEST_CASE("keys that mean nothing to a dense run neither split it nor count as its own") {
  const Folder folder;
  folder.add("d1", {.overrides = {"compress.density=0.5", "seed=1"}});
  folder.add("d2", {.overrides = {"seed=2"}});
  folder.add("t", {.overrides = {"compress.name=topk", "compress.density=0.5"}});
  const auto c = folder.compare({"d1", "d2", "t"});
  REQUIRE(c.methods.size() == 2);
  CHECK(c.methods[0].runs.size() == 2);
  REQUIRE(c.differing.size() == 2);
  CHECK(c.differing[1].key == "compress.density");
  CHECK(c.differing[1].values == std::vector<std::string>{"-", "0.5"});
}

TEST_CASE("a key that a run's file lacks counts as having its default") {
  const Folder folder;
  folder.add("t1", {.overrides = {"compress.name=topk", "seed=1"}});
  const std::string yaml = folder.add("t2", {.overrides = {"compress.name=topk", "seed=2"}}) + "/config.yaml";
  std::string text = text_of(yaml);
  const auto at = text.find("  check_every:");
  REQUIRE(at != std::string::npos);
  text.erase(at, text.find('\n', at) + 1 - at);
  std::ofstream(yaml) << text;
  CHECK(folder.compare({"t1", "t2"}).methods.size() == 1);
}

TEST_CASE("the default target is 95 % of the best dense accuracy, and the times to it are of training") {
  const Folder folder;
  folder.add("d", {.step_seconds = 0.2, .best = 0.8});
  folder.add("t", {.overrides = kTopk, .step_seconds = 0.1, .best = 0.79, .bytes = 40});
  const auto c = folder.compare({"d", "t"});
  CHECK(c.target == Approx(0.76));
  // Both meet it at step 15 of 0.2 s and of 0.1 s.
  CHECK(c.methods[0].seconds_to_target.mean == Approx(3.0));
  CHECK(c.methods[1].seconds_to_target.mean == Approx(1.5));
  CHECK(c.methods[0].steps_to_target.mean == 15);
  CHECK(c.methods[1].steps_to_target.mean == 15);
  CHECK(c.methods[1].target_speed_up == Approx(2));
  CHECK(c.methods[1].speed_up == Approx(2));
  CHECK(c.methods[1].dense_ratio == Approx(100));
  CHECK(c.methods[1].bytes_per_step.mean == Approx(40));
}

TEST_CASE("an accuracy that is the target reaches it") {
  const Folder folder;
  folder.add("d", {.step_seconds = 0.1, .best = 0.8});
  const auto c = folder.compare({"d"}, 0.8);
  CHECK(c.methods[0].reached == 1);
  CHECK(c.methods[0].seconds_to_target.mean == Approx(1.5));
}

TEST_CASE("without a dense run the target is the lowest best accuracy and there is no speed-up") {
  const Folder folder;
  folder.add("a", {.overrides = kTopk, .best = 0.6});
  folder.add("b", {.overrides = {"compress.name=gaussiank"}, .best = 0.7});
  const auto c = folder.compare({"a", "b"});
  CHECK(c.target == Approx(0.6));
  CHECK(std::isnan(c.methods[0].speed_up));
  CHECK(contains(comparison_text(c), "no dense run"));
}

TEST_CASE("a dense run on other ranks is no baseline") {
  const Folder folder;
  folder.add("one", {.overrides = {"compress.name=dense", "dist.ranks=1"}, .best = 0.8});
  folder.add("four", {.overrides = {"compress.name=topk", "dist.ranks=4"}, .best = 0.7});
  const auto c = folder.compare({"one", "four"});
  CHECK(c.methods[0].baseline == 0u);
  CHECK_FALSE(c.methods[1].baseline);
  CHECK(std::isnan(c.methods[1].speed_up));
  CHECK(contains(comparison_text(c), "topk: there is no dense run on as many ranks"));
}

TEST_CASE("of several dense methods the best makes the target, and the nearest is the baseline") {
  const Folder folder;
  folder.add("d1", {.overrides = {"optimizer.lr=0.1"}, .best = 0.8});
  folder.add("d2", {.overrides = {"optimizer.lr=0.2"}, .best = 0.6});
  folder.add("t2", {.overrides = {"compress.name=topk", "optimizer.lr=0.2"}, .best = 0.7});
  folder.add("t3", {.overrides = {"compress.name=topk", "optimizer.lr=0.3"}, .best = 0.7});
  const auto c = folder.compare({"d1", "d2", "t2", "t3"});
  CHECK(c.target == Approx(0.76));
  CHECK(c.methods[2].baseline == 1u);
  CHECK(c.methods[3].baseline == 0u);  // both are as near: the first
}

TEST_CASE("there is no speed-up to a target that not every run of a method reached") {
  const Folder folder;
  folder.add("d", {.best = 0.8});
  folder.add("t1", {.overrides = {"compress.name=topk", "seed=1"}, .best = 0.8});
  folder.add("t2", {.overrides = {"compress.name=topk", "seed=2"}, .best = 0.5});
  const auto c = folder.compare({"d", "t1", "t2"}, 0.7);
  CHECK(c.methods[1].reached == 1);
  CHECK(std::isnan(c.methods[1].target_speed_up));
}

TEST_CASE("a method that misses the target says so and has no speed-up to it") {
  const Folder folder;
  folder.add("d", {});
  folder.add("t", {.overrides = kTopk, .best = 0.5});
  const auto c = folder.compare({"d", "t"}, 0.78);
  CHECK(c.methods[1].reached == 0);
  CHECK(std::isnan(c.methods[1].target_speed_up));
  CHECK(says(comparison_text(c), {"not reached", "as asked for"}));
}

TEST_CASE("an incomplete run is named, drawn thin, and left out of the means") {
  const Folder folder;
  folder.add("d", {});
  folder.add("t1", {.overrides = {"compress.name=topk", "seed=1"}, .best = 0.8});
  folder.add("t2", {.overrides = {"compress.name=topk", "seed=2"}, .best = 0.2, .complete = false});
  const auto c = folder.compare({"d", "t1", "t2"});
  CHECK(c.methods[1].best.mean == Approx(0.8));
  CHECK(says(comparison_text(c), {"2 (1 incomplete)", "t2 is incomplete"}));
  CHECK(contains(report_html(c), "ending in ×"));
  const auto alone = folder.compare({"t2"});
  CHECK(alone.methods[0].best.mean == Approx(0.2));
  CHECK(contains(comparison_text(alone), "1 (1 incomplete)"));
  CHECK_FALSE(contains(report_html(folder.compare({"d", "t1"})), "ending in ×"));
}

TEST_CASE("the bytes of an incomplete run count the steps between those in its file") {
  const Folder folder;
  folder.add("t", {.overrides = kTopk, .bytes = 40, .complete = false, .every = 2});
  CHECK(folder.compare({"t"}).methods[0].bytes_per_step.mean == Approx(40));
}

TEST_CASE("the parts of a step add up to its time, and hidden communication stands beside them") {
  const Folder folder;
  folder.add("d", {.step_seconds = 0.1});
  const StepTimes t = folder.compare({"d"}).methods[0].times;
  CHECK(t.total == Approx(0.1));
  CHECK(t.forward + t.backward + t.exposed + t.other == Approx(t.total));
  CHECK(t.exposed == Approx(0.01));
  CHECK(t.hidden == Approx(0.005));
}

TEST_CASE("the first steps do not count in a step's times where there are twice as many") {
  const Folder folder;
  folder.add("ten", {.steps = 10, .slower = true});
  folder.add("eleven", {.steps = 11, .slower = true});
  CHECK(folder.compare({"ten"}).methods[0].times.forward == Approx(0.0055));     // of steps 1 to 10
  CHECK(folder.compare({"eleven"}).methods[0].times.forward == Approx(0.0085));  // of steps 6 to 11
}

TEST_CASE("the parts of a step are those of the steps that were measured, and absent if none was") {
  const Folder folder;
  folder.add("some", {.overrides = kTopk, .slower = true, .measured = 10});
  folder.add("none", {.measured = 0});
  const Comparison some = folder.compare({"some"}), none = folder.compare({"none"});
  CHECK(some.methods[0].times.forward == Approx(0.015));  // of steps 10 and 20
  CHECK(some.methods[0].times.total == Approx(0.1));
  const StepTimes& times = none.methods[0].times;
  CHECK(std::isnan(times.forward));
  CHECK(times.total == Approx(0.1));
  CHECK(times.other == Approx(0.1));
  CHECK(time_table(none).rows[0][2] == "-");
}

const Made kRegression = {.metric = Metric::squared_error(),
                          .task = "synthetic_regression, 1 target, samples [64, 1, 1]"};

TEST_CASE("runs are compared by the metric that they recorded, a loss without percent") {
  const Folder folder;
  folder.add("d", kRegression);
  const auto c = folder.compare({"d"});
  CHECK(c.metric == Metric::squared_error());
  CHECK(c.methods[0].best.mean == Approx(0.05));
  CHECK(std::isnan(c.target));
  CHECK(contains(comparison_text(c), "best test loss"));
  CHECK_FALSE(contains(comparison_text(c), "%"));
  CHECK_FALSE(contains(report_html(c), "Target"));
  CHECK(contains(report_html(c), "test loss (mean squared error)"));
  CHECK_FALSE(contains(report_html(c), "points against dense"));
  CHECK(contains(comparison_csv(c), "best_loss"));
  // A target of a loss is reached from above: 0.1 at step 10.
  const auto aimed = folder.compare({"d"}, 0.1);
  CHECK(aimed.methods[0].seconds_to_target.mean == Approx(1.0));
  CHECK(says(comparison_text(aimed), {"steps to 0.1", "time to 0.1"}));
}

TEST_CASE("a lower perplexity is better: in the table, the target and the time to it") {
  const Folder folder;
  const Made lm{.metric = Metric::perplexity(), .task = "text, 10000 words", .held_out_loss = std::log(2.0)};
  Made sparse = lm;
  sparse.overrides = kTopk;
  sparse.step_seconds = 0.2;
  folder.add("d", lm), folder.add("t", sparse);
  const auto c = folder.compare({"d", "t"});  // losses 1/5, 1/10, 1/15, 1/20
  CHECK(c.methods[0].best.mean == Approx(std::exp(0.05)));
  CHECK(c.methods[0].held_out.mean == Approx(2.0));
  CHECK(c.target == Approx(1.05 * std::exp(0.05)));
  CHECK(contains(c.target_reason, "105 % of the best dense validation perplexity"));
  CHECK(c.methods[0].seconds_to_target.mean == Approx(1.5));  // exp(1/10) is above it, exp(1/15) is not
  const std::string text = comparison_text(c), html = report_html(c);
  for (const char* part : {"best validation perplexity", "test perplexity", "tokens/s"})
    CHECK(contains(text, part));
  CHECK(contains(html, "Validation perplexity"));
  CHECK_FALSE(contains(text, "images/s"));
  CHECK(says(comparison_csv(c), {",best_perplexity,", ",test_perplexity,"}));
  CHECK(std::isnan(folder.compare({"t"}).methods[0].target_speed_up));
  CHECK(contains(folder.compare({"t"}).target_reason, "the greatest of"));
}

TEST_CASE("an accuracy that is 0 throughout is an accuracy of 0, not a loss") {
  const Folder folder;
  folder.add("d", {.best = 0});
  folder.add("old", {.best = 0, .metric = {}});
  folder.add("t", {.overrides = kTopk, .best = 0.5});
  for (const std::string dense : {"d", "old"}) {
    const auto c = folder.compare({dense, "t"});
    CHECK(c.metric == Metric::accuracy());
    CHECK(c.methods[0].best.mean == 0);
    CHECK(c.methods[0].last.mean == Approx(-0.01));
    CHECK(contains(comparison_text(c), "0.0 %"));
  }
}

TEST_CASE("files that recorded no metric have that of their data set, and the task as a run records it") {
  const Folder folder;
  folder.add("images", {.overrides = {"data.classes=3"}, .metric = {}});
  folder.add("regression", {.overrides = {"data.name=synthetic_regression"}, .metric = {}});
  const Run images = read_run(folder.path + "/images"), regression = read_run(folder.path + "/regression");
  CHECK(images.task ==
        "synthetic_images, 3 classes, samples [3, 32, 32]");  // as tests/train/run_test.cpp has them
  CHECK(images.metric == Metric::accuracy());
  CHECK(regression.task == "synthetic_regression, 1 target, samples [64, 1, 1]");
  CHECK(regression.metric == Metric::squared_error());
}

TEST_CASE("runs of different tasks or metrics are refused together") {
  const Folder folder;
  folder.add("a", {});
  folder.add("old", {.metric = {}});
  folder.add("classes", {.task = "synthetic_images, 3 classes, samples [3, 32, 32]"});
  folder.add("regression", kRegression);
  folder.add("old_mnist",
             {.overrides = {"data.name=mnist", "model.name=lenet", "data.root=/x"}, .metric = {}});
  CHECK_NOTHROW(folder.compare({"a", "old"}));
  for (const std::string other : {"classes", "regression", "old_mnist"})
    CHECK(user_error(
        [&] {
          folder.compare({"a", other});
        },
        {"different tasks", "/a has synthetic_images, 10 classes", "/" + other + " has ", "by themselves"}));
  folder.add("later", {.metric = Metric{"bleu", "", true}});
  CHECK(user_error([&] { read_run(folder.path + "/later"); }, {"/later", "its metric is 'bleu'"}));
}

TEST_CASE("an emulated link stands in the table, the subtitle and at the axes of time") {
  const Folder folder;
  folder.add("d", {});
  const std::string real = report_html(folder.compare({"d"}));
  CHECK(contains(real, ">training time (s)</text>"));
  CHECK_FALSE(contains(real, "emulat"));
  const std::string network = "threads, emulated link 100mbit, 50us";
  folder.add("e", {.network = network});
  folder.add("t", {.overrides = kTopk, .network = network});
  const auto c = folder.compare({"e", "t"});
  CHECK(contains(comparison_text(c), "network: threads, emulated link 100mbit, 50us\n"));
  const std::string html = report_html(c);
  CHECK(contains(html, "(threads, emulated link 100mbit, 50us)"));           // the subtitle
  CHECK(count_of(html, ">emulated link 100mbit, 50us</text>") == 3);         // the axes
  CHECK(count_of(html, "an emulation: emulated link 100mbit, 50us.") == 2);  // below the tables
  CHECK(count_of(comparison_csv(c), "\"threads, emulated link 100mbit, 50us\"") == 2);
  folder.add("other", {.overrides = {"compress.name=dgc"}});
  const auto mixed = folder.compare({"e", "other"});
  CHECK(count_of(comparison_text(mixed), "threads, emulated link 100mbit, 50us\n") == 1);
  CHECK(says(report_html(mixed),
             {"<td>threads, emulated link 100mbit, 50us</td>", ">partly emulated links</text>"}));
}

TEST_CASE(
    "a machine that was not equally free, and a run that went on over another network, are pointed out") {
  const Folder folder;
  folder.add("d", {});
  folder.add("busy", {.overrides = {"compress.name=topk"}, .steps = 80, .slower = true});
  folder.add("moved", {.overrides = {"compress.name=topk", "seed=2"}});
  const auto warned = [&](const std::string& name, const char* text) {
    const auto warnings = folder.compare({"d", name}).warnings;
    return std::any_of(warnings.begin(), warnings.end(), [&](const auto& w) { return contains(w, text); });
  };
  CHECK_FALSE(warned("moved", "not equally free"));
  CHECK_FALSE(warned("moved", "another network"));
  StartRecord start = read_metrics(folder.path + "/moved/metrics.jsonl").starts.at(0);
  start.backend = "gloo";
  MetricsWriter(folder.path + "/moved/metrics.jsonl").write(start);
  CHECK(warned("moved", "another network (threads, then gloo)"));
  CHECK(warned("busy", "not equally free"));
}

TEST_CASE("a mean over seeds does not hide the one that diverged") {
  const Folder folder;
  const Made text{.metric = Metric::perplexity(), .held_out_loss = 1};
  Made second = text, third = text;
  second.overrides = {"seed=2"}, third.overrides = {"seed=3"}, third.diverges = true;
  folder.add("a", text), folder.add("b", second), folder.add("c", third);
  const Comparison good = folder.compare({"a", "b"}), c = folder.compare({"a", "b", "c"});
  CHECK(good.methods[0].last.count == 2);
  CHECK(good.methods[0].held_out.count == 2);
  CHECK_FALSE(contains(comparison_text(good), "not finite"));
  CHECK(c.methods[0].last.count == 0);
  CHECK(c.methods[0].held_out.count == 0);
  CHECK(c.methods[0].best.count == 3);
  CHECK(
      contains(comparison_text(c), "the last validation perplexity of " + folder.path + "/c is not finite"));
}

TEST_CASE("a run that failed at its end is named with the reason") {
  const Folder folder;
  folder.add("a", {}), folder.add("b", {.overrides = {"seed=2"}});
  EndRecord end = read_metrics(folder.path + "/b/metrics.jsonl").end.value();
  end.failed = true, end.reason = "the last step was not finite";
  MetricsWriter(folder.path + "/b/metrics.jsonl").write(end);
  const Comparison c = folder.compare({"a", "b"});
  CHECK(contains(comparison_text(c), "/b has failed: the last step was not finite"));
  const auto json = nlohmann::json::parse(comparison_json(c));
  CHECK(json["runs"][0]["failed"] == false);
  CHECK(json["runs"][1]["failed"] == true);
}

TEST_CASE("runs of different commits and a seed that counts twice are pointed out") {
  const Folder folder;
  folder.add("a", {}), folder.add("b", {.overrides = {"seed=2"}}), folder.add("again", {});
  CHECK_FALSE(contains(comparison_text(folder.compare({"a", "b"})), "different commits"));
  CHECK_FALSE(contains(comparison_text(folder.compare({"a", "b"})), "more than once"));
  CHECK(contains(comparison_text(folder.compare({"a", "b", "again"})), "dense has seed 1 more than once ("));
  StartRecord start = read_metrics(folder.path + "/b/metrics.jsonl").starts.at(0);
  start.revision = "0000000";
  MetricsWriter(folder.path + "/b/metrics.jsonl").write(start);
  CHECK(contains(comparison_text(folder.compare({"a", "b"})), "different commits (0000000, "));
}

TEST_CASE("keys that make a comparison unfair are pointed out") {
  const Folder folder;
  folder.add("d", {.overrides = {"dist.ranks=2"}});
  folder.add("t", {.overrides = kTopk});
  CHECK(contains(comparison_text(folder.compare({"d", "t"})), "dist.ranks differs"));
}

TEST_CASE(
    "the last top-5 accuracy, character error rate or bits per byte stand beside the metric where runs have "
    "it") {
  const Folder folder;
  folder.add("d", {.second = 0.9});
  folder.add("s", {.metric = Metric::word_errors(), .task = "speech", .second = 0.5});
  folder.add("t", {.metric = Metric::perplexity(), .task = "text", .second = 1.5});
  folder.add("plain", {});
  const auto text = folder.compare({"t"});
  CHECK(text.methods[0].second.mean == Approx(1.2));
  CHECK(contains(comparison_text(text), "final bits per byte"));
  CHECK(contains(comparison_csv(text), ",final_bits_per_byte,"));
  const auto images = folder.compare({"d"}), speech = folder.compare({"s"});
  CHECK(images.methods[0].second.mean == Approx(0.6));
  CHECK(contains(comparison_text(images), "final top-5 accuracy"));
  CHECK(contains(comparison_csv(images), ",final_top-5_accuracy,"));
  CHECK(contains(comparison_text(speech), "final character error rate"));
  CHECK(says(comparison_csv(speech), {",final_word_error_rate,", ",final_character_error_rate,"}));
  CHECK_FALSE(contains(comparison_text(folder.compare({"plain"})), "top-5"));
  CHECK_FALSE(contains(comparison_csv(folder.compare({"plain"})), "top-5"));
}

TEST_CASE("the numbers as CSV: a row a method, quoted names, nothing where nothing is known") {
  const Folder folder;
  folder.add("d", {.best = 0.8});
  folder.add("t1", {.overrides = {"compress.name=topk", "seed=1"}, .best = 0.7, .bytes = 40});
  folder.add("t2", {.overrides = {"compress.name=topk", "seed=2"}, .best = 0.8, .bytes = 40});
  const std::string csv = comparison_csv(folder.compare({"d", "t1", "t2"}, 0.9));
  CHECK(says(csv, {"method,runs,complete,best_accuracy,best_accuracy_deviation,",
                   "\n\"dense\",1,1,0.8,,0.79,,2,,100,,,,,,4000,,", "\n\"topk\",2,2,0.75,0.0707106781,",
                   ",100,0.32,1,,0.1,",
                   ",\"synthetic_images, 10 classes, samples [3, 32, 32]\",\"compress.name=dense\"\n"}));
  CHECK(count_of(csv, "\n") == 3);
}

TEST_CASE("the numbers as JSON have what the page has, and docs/compare.md names every column") {
  const Folder folder;
  folder.add("d", {.best = 0.8});
  folder.add("t", {.overrides = kTopk, .best = 0.7, .bytes = 40, .complete = false});
  const auto c = folder.compare({"d", "t"});
  const auto json = nlohmann::json::parse(comparison_json(c));
  CHECK(json["metric"]["name"] == "accuracy");
  CHECK(json["metric"]["higher_is_better"] == true);
  CHECK(json["target"] == Approx(0.76));
  REQUIRE(json["methods"].size() == 2);
  CHECK(json["methods"][1]["method"] == "topk");
  CHECK(json["methods"][1]["keys"]["compress.name"] == "topk");
  CHECK(json["methods"][1]["baseline"] == "dense");
  CHECK(json["methods"][1]["bytes_ratio"] == Approx(100));
  CHECK(json["methods"][1]["seconds_to_target"].is_null());
  CHECK(json["methods"][0]["steps_to_target"] == 15);
  CHECK(json["runs"].size() == 2);
  CHECK(json["runs"][1]["complete"] == false);
  CHECK(json["warnings"].size() == c.warnings.size());

  const std::string page = text_of(TOPKNOT_SOURCE_DIR "/docs/compare.md");
  const auto documented = [&](std::string name) {
    const bool deviation = name.ends_with("_deviation");
    if (deviation) name = "_deviation";
    if (name.ends_with("_accuracy")) name.replace(name.rfind('_') + 1, 8, "METRIC");
    INFO(name);
    CHECK(contains(page, "`" + name + "`"));
  };
  const std::string csv = comparison_csv(c);
  std::stringstream header(csv.substr(0, csv.find('\n')));
  for (std::string name; std::getline(header, name, ',');) documented(name);
  for (const auto& part : {json, json["methods"][0], json["runs"][0]})
    for (const auto& [name, value] : part.items()) documented(name);
}

TEST_CASE("what is no run is refused with its name and the reason") {
  const Folder folder;
  CHECK(user_error([&] { read_runs({folder.path + "/none"}); }, {"/none: no such run directory"}));
  CHECK(user_error([&] { read_runs({folder.path}); }, {"no metrics.jsonl"}));
  const auto run = folder.add("d", {});
  for (const std::vector<std::string>& arguments : {std::vector{folder.path}, {run + "/", run}}) {
    const std::vector<Run> runs = read_runs(arguments);
    REQUIRE(runs.size() == 1);
    CHECK(runs[0].path == run);
  }
  const std::string metrics = run + "/metrics.jsonl";
  std::ofstream(metrics, std::ios::app) << "{damaged\n{}\n";
  CHECK(user_error([&] { read_run(run); }, {"damaged line"}));
  std::ofstream(metrics, std::ios::trunc).close();
  CHECK(user_error([&] { read_run(run); }, {"not finished a step"}));
  fs::remove(run + "/config.yaml");
  CHECK(user_error([&] { read_run(run); }, {"config.yaml"}));
}

}  // namespace topknot

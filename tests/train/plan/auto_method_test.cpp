// compress.name: auto. What may be chosen, what is, and that a run with it is the run of its choice.
#include "train/plan/auto_method.h"

#include <fstream>
#include <nlohmann/json.hpp>

#include "tests/support/files.h"
#include "tests/support/text.h"
#include "tests/train/resumed_run.h"
#include "train/metrics/run_config.h"

using namespace topknot;
using namespace topknot::testing;

namespace {

Config config_of(const Keys& keys) {
  const LoadedConfig loaded = load_config("", with({"compress.name=auto", "train.device=cpu"}, keys));
  REQUIRE(loaded.problems.empty());
  return loaded.config;
}

Keys names_of(const Config& config) {
  Keys names;
  for (const AutoOption& option : auto_options_of(config)) names.push_back(option.name);
  return names;
}

// Ten parameters of 1,000 elements, each ready 1 ms after the one before; a byte takes `byte` seconds.
ExchangeProfile profile(const std::string& method, double bytes_per_element, double encode_s, double byte) {
  ExchangeProfile p;
  p.method = method, p.ranks = 2, p.overlaps = true, p.sums = method == "dense";
  p.density = method == "dense" ? 1 : 0.01;
  for (int i = 0; i < 10; ++i)
    p.parameters.push_back({"p" + std::to_string(i), 1000, method != "dense", 1e-3, (i + 1) * 1e-3});
  p.forward_s = 5e-3, p.backward_s = 10e-3;
  p.groups = {{1000, 1000 * bytes_per_element, 0, encode_s / 10, encode_s / 10},
              {10000, 10000 * bytes_per_element, 0, encode_s, encode_s}};
  p.link = {1e-4, byte, 0};
  p.gather = {1e-4, byte, 2};
  p.reduce = {2e-4, byte, 2};
  return p;
}

std::vector<ModelledOption> modelled(double byte, double encode_s) {
  const auto& all = auto_options();
  return {best_plan(all[0], profile("dense", 4, 0, byte), 0),
          best_plan(all[1], profile("topk", 0.08, encode_s, byte), 0)};
}

}  // namespace

TEST_CASE("auto: dense is always among the options, and a class has those before it") {
  CHECK(names_of(config_of({"auto.accuracy=exact"})) == Keys{"dense"});
  const Keys safe = names_of(config_of({})), most = names_of(config_of({"auto.accuracy=aggressive"}));
  CHECK((safe.size() > 1 && most.size() > safe.size()));
  CHECK(std::equal(safe.begin(), safe.end(), most.begin()));
  CHECK(safe.front() == "dense");
  const Keys local = names_of(config_of({"auto.local_steps=true"}));
  CHECK(local.size() == safe.size() + 3);
  // What contradicts the run's other keys is left out: local steps clip no gradient before it is sent.
  CHECK(names_of(config_of({"auto.local_steps=true", "train.clip_local=1"})) == safe);
}

TEST_CASE("auto: every option is a configuration that a run can have") {
  for (const AutoOption& option : auto_options()) {
    INFO(option.name);
    const Config config = with_option(config_of({"exchange.merge=all"}), option);
    CHECK(check_config(config).empty());
    CHECK_FALSE(chooses_method(config));
    CHECK((config.exchange.every > 0) == option.local_steps);
  }
}

TEST_CASE(
    "auto: a slow link takes the small messages, a fast one dense, which little gain does not replace") {
  CHECK(quickest(modelled(1e-6, 1e-4)) == 1);
  CHECK(quickest(modelled(1e-10, 1e-4)) == 0);
  // Dense ends 0.7 ms, 4 % of a step, after topk.
  auto close = modelled(1e-6, 1e-4);
  close[0].step.seconds = 1.04 * close[1].step.seconds;
  CHECK(quickest(close) == 0);
  close[0].step.seconds = 1.06 * close[1].step.seconds;
  CHECK(quickest(close) == 1);
  const std::string slow = choice_text(modelled(1e-6, 1e-4), 1);
  CHECK(contains(slow, "takes topk, density 0.01: a step should take"));
  CHECK(contains(slow, "; dense "));
  CHECK(contains(slow, "a link has 8 Mbit/s and takes 100 us a message"));
  CHECK(contains(choice_text(modelled(1e-10, 1e-4), 0), "the quickest other one"));
}

TEST_CASE("auto: a plan is the best of one group, many groups and the optimal ones") {
  const ExchangeProfile p = profile("dense", 4, 0, 1e-7);
  const ModelledOption best = best_plan(auto_options()[0], p, 0);
  for (const std::vector<std::size_t>& groups :
       {std::vector<std::size_t>{10}, std::vector<std::size_t>(10, 1), planned_groups("optimal", p)})
    CHECK(best.step.seconds <= modelled_step(p, groups).seconds);
  // A sync hides behind nothing: fewer messages are better.
  CHECK(best_plan(auto_options()[0], p, 5).groups == std::vector<std::size_t>{10});
}

TEST_CASE("auto: a run over a slow link chooses, its files say what, and it is the run of its choice") {
  const TempFolder temp, other;
  const LoadedConfig loaded =
      small_run(temp, {"compress.name=auto", "dist.ranks=2", "train.max_steps=12", "compress.warmup=[]",
                       "train.stop_after=5", "train.checkpoint_keep=1"});
  const RunData data = load_data(loaded.config);
  const RunInputs inputs{loaded.config, data, create_run_directory(loaded, {}), true,
                         std::chrono::steady_clock::now()};
  run_thread_ranks(
      2, loaded.config.dist.timeout_s, [&](Communicator& communicator) { run_rank(inputs, communicator); },
      make_emulated_link("1mbit", "50us", 1));
  const RunConfig written(temp.at("run/config.yaml"));
  CHECK(written.text("compress.name") == "topk");
  CHECK(written.text("compress.dense_1d") == "false");
  CHECK_FALSE(written.numbers("exchange.groups").empty());
  CHECK(read_exchange_profile(temp.at("run/exchange_profile.json")).method == "topk");

  const RunOutcome resumed = start(temp, {"train.stop_after=0"}, true);
  CHECK(RunConfig(temp.at("run/config.yaml")).text("exchange.groups") == written.text("exchange.groups"));
  const LoadedConfig chosen =
      load_config(temp.at("run/config.yaml"), {"output.dir=" + other.at("run"), "train.stop_after=0"});
  throw_problems(chosen.problems);
  CHECK(run_in_directory(chosen).parameter_checksum == resumed.parameter_checksum);
}

TEST_CASE(
    "auto: a run asks for another choice where its collectives change, and goes by what it has measured") {
  AutoWatch watch;
  const auto steps = [&](int count, double step_s, double communicate_s) {
    for (int i = 0; i < count; ++i) watch.add(step_s, communicate_s);
  };
  watch.chosen("topk", 0.1, 0.5);
  steps(AutoWatch::kSettling, 9, 9);  // do not count
  steps(60, 0.1, 0.02);
  CHECK(watch.why_again().empty());
  CHECK(watch.measured("topk") == 0.1);
  CHECK_FALSE(watch.measured("dense"));
  steps(5, 0.1, 0.05);
  CHECK(watch.why_again().empty());  // half of the watched steps
  steps(2, 0.1, 0.05);
  CHECK(contains(watch.why_again(), "its collectives take 50 ms a step, and took 20 ms at first"));
  CHECK_FALSE(watch.measured("topk"));  // over another link

  // Twice as long, but a hundredth of a step.
  watch.chosen("topk", 0.1, 0.5);
  steps(30, 1, 0.005);
  steps(30, 1, 0.015);
  CHECK(watch.why_again().find("collectives") == std::string::npos);

  // Longer than dense should take: at once; not again where that brought the same choice.
  watch.chosen("other", 0.1, 0.5);
  steps(AutoWatch::kSettling + AutoWatch::kWatched, 0.6, 0.02);
  CHECK(contains(watch.why_again(), "a step takes 600 ms, and dense should take 500 ms"));
  watch.chosen("other", 0.1, 0.5);
  steps(AutoWatch::kSettling + AutoWatch::kWatched, 0.6, 0.02);
  CHECK(watch.why_again().empty());
  steps(2 * AutoWatch::kApart, 0.6, 0.02);
  CHECK_FALSE(watch.why_again().empty());
}

TEST_CASE("auto: a run follows a link that becomes fast, owes nothing, and goes on from its checkpoint") {
  const TempFolder temp;
  const LoadedConfig loaded =
      small_run(temp, {"compress.name=auto", "dist.ranks=2", "train.max_steps=400", "compress.warmup=[]",
                       "train.checkpoint_keep=1", "train.stop_after=390"});
  const RunData data = load_data(loaded.config);
  const RunInputs inputs{loaded.config, data, create_run_directory(loaded, {}), true,
                         std::chrono::steady_clock::now()};
  std::vector<std::string> checksums(2);
  run_thread_ranks(
      2, loaded.config.dist.timeout_s,
      [&](Communicator& communicator) {
        checksums[static_cast<std::size_t>(communicator.rank())] =
            run_rank(inputs, communicator).parameter_checksum;
      },
      make_emulated_link("1mbit,1000gbit@3.5", "0s", 1));
  CHECK(checksums[0] == checksums[1]);
  const auto choices = nlohmann::json::parse(text_of(temp.at("run/choices.json")));
  REQUIRE(choices.size() >= 2);
  CHECK(choices[0]["step"] == 0);
  CHECK(choices[0]["choice"] != "dense");
  CHECK(contains(choices[1]["why"], "its collectives take"));
  const std::int64_t at = choices[1]["step"];
  CHECK(at > AutoWatch::kApart);
  const Metrics metrics = read_metrics(temp.at("run/metrics.jsonl"));
  REQUIRE(metrics.steps.size() == 390);
  const std::string last = choices.back()["choice"];
  CHECK((RunConfig(temp.at("run/config.yaml")).text("compress.name") == "dense") == (last == "dense"));
  if (choices[1]["choice"] == "dense") {
    CHECK(metrics.steps[static_cast<std::size_t>(at)].density == 1);  // what was owed
    CHECK(metrics.steps[static_cast<std::size_t>(at)].selected > 0);
    CHECK(metrics.steps[static_cast<std::size_t>(at) + 1].selected == 0);
  }
  // A configuration of another time than the checkpoint, as a kill between the two would leave it.
  const std::string method = last == "dense" ? "dense" : "topk";
  std::string text = text_of(temp.at("run/config.yaml"));
  const auto name = text.find("\n  name: " + method);
  REQUIRE(name != std::string::npos);
  std::ofstream(temp.at("run/config.yaml")) << text.replace(name, 9 + method.size(), "\n  name: dgc");
  start(temp, {"train.stop_after=0"}, true);
  CHECK(read_metrics(temp.at("run/metrics.jsonl")).steps.size() == 400);
}

TEST_CASE("auto: one rank exchanges nothing and is dense") {
  const TempFolder temp;
  start(temp, {"compress.name=auto", "train.max_steps=2"}, false);
  CHECK(RunConfig(temp.at("run/config.yaml")).text("compress.name") == "dense");
}

TEST_CASE("auto: what it chooses by itself is refused beside it") {
  const auto refused = [](const Keys& keys) {
    const auto problems = check_config(config_of(keys));
    return problems.empty() ? std::string() : problems.front().message;
  };
  CHECK(refused({}).empty());
  CHECK(contains(refused({"exchange.every=5"}), "auto.local_steps=true"));
  CHECK(contains(refused({"exchange.groups=[3]"}), "leave exchange.groups"));
  CHECK(contains(refused({"train.device=cuda"}), "auto measures on CPUs"));
  LoadedConfig loaded = load_config("", {"auto.accuracy=exact", "compress.name=topk"});
  CHECK(unused_keys(loaded).size() == 1);
}

// compress.name: auto. What may be chosen, what is, and that a run with it is the run of its choice.
#include "train/plan/choose.h"

#include "nn/base/file.h"
#include "tests/train/resumed_run.h"
#include "train/metrics/run_config.h"
#include "train/step.h"

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

// Dense in its best plan and at once, and topk.
std::vector<ModelledOption> modelled(double byte, double encode_s) {
  const auto& all = auto_options();
  std::vector<ModelledOption> options = modelled_options({all[0].name, profile("dense", 4, 0, byte)});
  options.push_back(modelled_options({all[3].name, profile("topk", 0.08, encode_s, byte)}).front());
  return options;
}

// A run by auto over such a link, with a checkpoint where it stops.
void run_over(const TempFolder& temp, const std::string& rate, const Keys& keys) {
  const LoadedConfig loaded =
      small_run(temp, with({"compress.name=auto", "dist.ranks=2", "train.checkpoint_keep=1"}, keys));
  RanksOptions options;
  options.timeout_s = loaded.config.dist.timeout_s;
  options.link = make_emulated_link(rate, "0s", 1);
  const auto outcomes = outcomes_of(loaded, "link", 1, std::nullopt, options);
  CHECK(outcomes[0].parameter_checksum == outcomes[1].parameter_checksum);
}

RunConfig written_config(const TempFolder& temp) {
  return RunConfig(temp.at("run/config.yaml"));
}

// What auto would choose elsewhere.
constexpr double kForward = 0.01, kBackward = 0.02, kEncode = 2e-3, kDecode = 4e-3;
constexpr double kElements = 1e6, kSparseBytes = 8e4, kDensity = 0.01, kOverhead = 2e-5;

ExchangeProfile profile_of(const std::string& method) {
  const bool dense = method == "dense";
  ExchangeProfile p;
  p.model = "one_layer", p.method = method, p.backend = "gloo", p.ranks = 4, p.overlaps = true;
  p.sums = dense, p.density = dense ? 1 : kDensity;
  p.parameters = {{"w", static_cast<std::size_t>(kElements), !dense, kBackward, kBackward}};
  p.forward_s = kForward, p.backward_s = kBackward;
  p.groups = {{kElements, dense ? 4 * kElements : kSparseBytes, 0, dense ? 0 : kEncode, dense ? 0 : kDecode}};
  p.link = {1e-4, 1e-8, kOverhead};
  p.gather = {1.4e-4, 3e-8, 4};
  p.reduce = {6e-4, 1.5e-8, 4};
  return p;
}

std::vector<NamedProfile> profiles() {
  return {{"dense", profile_of("dense")}, {"topk, density 0.01", profile_of("topk")}};
}

PredictedNetwork network(double bits_per_s, double latency) {
  return {"given", bits_per_s, latency, 1};
}

// The rate at which a step with topk takes 1 - kAutoGain of one with dense; a byte takes 8 / rate.
double border(int ranks, double latency) {
  const double others = ranks - 1, alone = kForward + kBackward;
  const double gather = latency + (ranks - 2) * kOverhead;
  const double decode = kDecode * (kElementWeight + ranks * kDensity) / (kElementWeight + 4 * kDensity);
  const double sparse = alone + kEncode + gather + decode, sparse_bytes = others * kSparseBytes;
  // The byte of the agreement hides behind topk's decoding, and behind nothing of dense.
  const double dense = alone + 2 * others * latency + gather;
  const double dense_bytes = 2 * others / ranks * 4 * kElements + others;
  const double part = 1 - kAutoGain;
  return 8 * (part * dense_bytes - sparse_bytes) / (sparse - part * dense);
}

std::string with_change(std::string text, const std::string& from, const std::string& to) {
  const auto at = text.find(from);
  REQUIRE(at != std::string::npos);
  return text.replace(at, from.size(), to);
}

}  // namespace

TEST_CASE("auto: dense is always among the options, and a class has those before it") {
  CHECK(names_of(config_of({"auto.accuracy=exact"})) == Keys{"dense", "dense, exponents coded"});
  const Keys safe = names_of(config_of({})), most = names_of(config_of({"auto.accuracy=aggressive"}));
  CHECK((safe.size() > 2 && most.size() > safe.size()));
  CHECK(std::equal(safe.begin(), safe.end(), most.begin()));
  CHECK(safe.front() == "dense");
  const Keys local = names_of(config_of({"auto.accuracy=local_steps"}));
  CHECK(local.size() == safe.size() + 3);
  // What contradicts the run's other keys is left out: local steps clip no gradient before it is sent.
  CHECK(names_of(config_of({"auto.accuracy=local_steps", "train.clip_local=1"})) == safe);
}

TEST_CASE("auto: every option is a configuration that a run can have") {
  for (const AutoOption& option : auto_options()) {
    INFO(option.name);
    const Config config = with_option(config_of({"exchange.merge=all"}), option);
    CHECK(check_config(config).empty());
    CHECK_FALSE(chooses_method(config));
    CHECK((config.exchange.every > 0) == option.local_steps);
    // Each option alone says how sums are sent, whatever was chosen before it.
    const bool coded = option.name.find("exponents coded") != std::string::npos;
    CHECK((config.exchange.collective == "coded_sum") == coded);
    CHECK(with_option(config, auto_options()[0]).exchange.collective == "all_gather");
    CHECK(choosing(config).exchange.collective == "all_gather");
  }
}

TEST_CASE("auto: what may be the quickest is tried, dense first, and little gain does not replace dense") {
  const auto names = [](double byte, double encode_s) {
    Keys all;
    for (const ModelledOption& o : worth_trying(modelled(byte, encode_s))) all.push_back(o.option.name);
    return all;
  };
  CHECK(names(1e-5, 1e-4) == Keys{"topk, density 0.01"});
  CHECK(names(1e-10, 1e-4) == Keys{"dense", "dense, at once", "topk, density 0.01"});
  CHECK(names(1e-10, 1e-1) == Keys{"dense", "dense, at once"});
  auto tried = worth_trying(modelled(1e-10, 1e-4));
  const auto with_steps = [&](double plan, double at_once, double topk) {
    tried[0].step.seconds = plan, tried[1].step.seconds = at_once, tried[2].step.seconds = topk;
    return quickest(tried);
  };
  CHECK(with_steps(1, 2, 3) == 0);
  CHECK(with_steps(2, 1, 3) == 1);
  CHECK(with_steps(2, 1, 0.98) == 1);
  CHECK(with_steps(2, 1, 0.96) == 2);
  // Coded sums, which have a plan by their own times, give way to dense as others do.
  auto coded = modelled(1e-10, 1e-1);
  ExchangeProfile of_coded = profile("dense", 4, 0, 0.9e-10);
  of_coded.collective = "coded_sum";
  coded.push_back(modelled_options({auto_options()[1].name, of_coded}).front());
  CHECK_FALSE(coded.back().dense());
  auto both = worth_trying(coded);
  REQUIRE(both.size() == 3);
  CHECK((both[0].dense() && both[1].dense() && both[2].option.name == "dense, exponents coded"));
  both[0].step.seconds = both[1].step.seconds = 1;
  both[2].step.seconds = 0.98;
  CHECK(quickest(both) == 0);
  both[2].step.seconds = 0.96;
  CHECK(quickest(both) == 2);
  // Local steps cannot be tried beside others.
  auto local = modelled(1e-10, 1e-4);
  local.push_back(
      modelled_options({auto_options().back().name, profile("sparseloco", 0.08, 1e-4, 1e-10)}).front());
  local.back().step.seconds = 1;
  CHECK(worth_trying(local).size() == 3);
  local.back().step.seconds = 0.98 * worth_trying(modelled(1e-10, 1e-4))[0].step.seconds;  // too little
  CHECK(worth_trying(local).size() == 3);
  local.back().step.seconds = 1e-3;
  CHECK((worth_trying(local).size() == 1 && worth_trying(local)[0].option.local_steps));
}

TEST_CASE("auto: a plan is the best of one group, many groups and the optimal ones") {
  const ExchangeProfile p = profile("dense", 4, 0, 1e-7);
  const auto plans = modelled_options({"dense", p});
  for (const std::vector<std::size_t>& groups :
       {std::vector<std::size_t>{10}, std::vector<std::size_t>(10, 1), planned_groups("optimal", p)})
    CHECK(plans[0].step.seconds <= modelled_step(p, groups).seconds);
  REQUIRE(plans.size() == 2);
  CHECK(plans[1].groups == std::vector<std::size_t>{10});
  // A sync hides behind nothing: fewer messages are better.
  const auto sync = modelled_options({auto_options().back().name, p});
  CHECK((sync.size() == 1 && sync[0].groups == std::vector<std::size_t>{10}));
}

TEST_CASE("auto: a run over a slow link chooses, and its files say what") {
  const TempFolder temp, other;
  run_over(temp, "1mbit", {"train.max_steps=50", "train.stop_after=40"});
  const RunConfig written = written_config(temp);
  CHECK(written.text("compress.name") == "topk");
  CHECK(written.text("compress.dense_1d") == "false");
  CHECK_FALSE(written.numbers("exchange.groups").empty());
  CHECK(read_exchange_profile(temp.at("run/exchange_profile.json")).method == "topk");
  // All that it measured: enough to ask what it would choose elsewhere.
  const auto profiles = parse_auto_profiles(read_text_file(temp.at("run/auto_profiles.json"), 1 << 20), "it");
  REQUIRE(profiles.size() == auto_options_of(config_of({})).size());
  CHECK(profiles[1].profile.ranks == 2);
  CHECK(profiles[1].profile.link.beta > 0);
  CHECK(choice_at(profiles, 2, {"1mbit", 1e6, {}}).choice().method == "topk");
  CHECK(choice_at(profiles, 2, {"1e6gbit", 1e15, 0.0}).choice().step_s <
        choice_at(profiles, 2, {"1mbit", 1e6, {}}).choice().step_s);

  start(temp, {"train.stop_after=0"}, true);
  CHECK(written_config(temp).text("exchange.groups") == written.text("exchange.groups"));
  const LoadedConfig chosen =
      load_config(temp.at("run/config.yaml"), {"output.dir=" + other.at("run"), "train.stop_after=0"});
  throw_problems(chosen.problems);
  CHECK_FALSE(run_in_directory(chosen).stopped);  // a run of its own can be made with the choice
}

TEST_CASE("auto: each resume keeps the checkpoint's method, also one only tried, unless it is to choose") {
  const TempFolder temp;
  run_over(temp, "1mbit", {"train.max_steps=20", "train.stop_after=5"});
  const std::string choices = text_of(temp.at("run/choices.json"));
  REQUIRE(contains(choices, "trying"));
  const auto resumed = [&](const Keys& keys) {
    const RunCopy copy(temp);
    const RunOutcome outcome = start(copy, with({"train.stop_after=0"}, keys), true);
    return std::pair(outcome.parameter_checksum, text_of(copy.at("run/choices.json")));
  };
  CHECK(resumed({}) == resumed({}));
  CHECK(resumed({}).second == choices);
  CHECK(contains(resumed({"resume.method=choose"}).second, "resume.method=choose"));
}

TEST_CASE("auto: without loss a run over a slow link codes its sums, and keeps to it when it goes on") {
  const TempFolder temp;
  run_over(temp, "20mbit", {"auto.accuracy=exact", "train.max_steps=50", "train.stop_after=42"});
  const RunConfig written = written_config(temp);
  CHECK(written.text("compress.name") == "dense");
  CHECK(written.text("exchange.collective") == "coded_sum");
  const ExchangeProfile profile = read_exchange_profile(temp.at("run/exchange_profile.json"));
  CHECK(profile.collective == "coded_sum");
  // By its own times: of the bits of a float, as many as the link carries in the time of 32.
  CHECK((profile.reduce.beta < 0.95 * profile.link.beta && profile.reduce.beta > 0.8 * profile.link.beta));
  start(temp, {"train.stop_after=0"}, true);
  CHECK(written_config(temp).text("exchange.collective") == "coded_sum");
  CHECK(metrics_of(temp).steps.size() == 50);
}

TEST_CASE("auto: a link has changed if collectives take three times as long or a third, and much of a step") {
  AutoWatch watch;
  const auto steps = [&](int count, double step_s, double communicate_s) {
    for (int i = 0; i < count; ++i) watch.add(step_s, communicate_s);
  };
  steps(AutoWatch::kSettling, 9, 9);  // do not count
  steps(AutoWatch::kWatched - 1, 0.1, 0.02);
  CHECK_FALSE(watch.step_s());
  steps(60, 0.1, 0.02);
  CHECK(watch.step_s() == 0.1);
  CHECK(watch.link_change().empty());
  steps(AutoWatch::kWatched / 2 - 1, 0.1, 0.07);
  CHECK(watch.link_change().empty());
  steps(2, 0.1, 0.07);
  CHECK(contains(watch.link_change(), "its collectives take 70 ms a step, and took 20 ms at first"));
  watch.begin();  // twenty times as long, but a tenth of a step
  steps(30, 1, 0.005);
  steps(30, 1, 0.1);
  CHECK(watch.link_change().empty());
  watch.begin();  // not soon
  steps(15, 0.1, 0.05);
  steps(AutoWatch::kWatched, 0.1, 0.01);
  CHECK(watch.link_change().empty());
  steps(AutoWatch::kApart, 0.1, 0.01);
  CHECK_FALSE(watch.link_change().empty());
}

TEST_CASE("auto: a run follows a link that becomes fast, owes nothing, and goes on from its checkpoint") {
  const TempFolder temp;
  run_over(temp, "1mbit,1000gbit@5", {"train.max_steps=400", "train.stop_after=390"});
  const auto choices = nlohmann::json::parse(text_of(temp.at("run/choices.json")));
  REQUIRE(choices.size() >= 2);
  CHECK(choices[0]["step"] < 50);
  CHECK(choices[0]["choice"] != "dense");
  CHECK(contains(choices[1]["why"], "its collectives take"));
  CHECK(choices[1]["step"] > AutoWatch::kApart);
  const Metrics metrics = metrics_of(temp);
  REQUIRE(metrics.steps.size() == 390);
  // A slow machine may let it try once more just before it stops.
  const std::string last = choices.back().value("trying", choices.back().value("choice", ""));
  CHECK((written_config(temp).text("compress.name") == "dense") == last.starts_with("dense"));
  // The last step before dense sends what is owed.
  for (std::size_t i = 0; i + 1 < metrics.steps.size(); ++i)
    if (metrics.steps[i].selected > 0 && metrics.steps[i + 1].selected == 0) {
      CHECK(metrics.steps[i].density == 1);
      CHECK(metrics.steps[i].selected == metrics.steps[i].bytes_dense / 4);
    }
  // A configuration of another time than the checkpoint, as a kill between the two would leave it.
  const std::string method = last.starts_with("dense") ? "dense" : "topk";
  std::string text = text_of(temp.at("run/config.yaml"));
  const auto name = text.find("\n  name: " + method);
  REQUIRE(name != std::string::npos);
  std::ofstream(temp.at("run/config.yaml")) << text.replace(name, 9 + method.size(), "\n  name: dgc");
  start(temp, {"train.stop_after=0"}, true);
  CHECK(metrics_of(temp).steps.size() == 400);
}

TEST_CASE("auto: collectives that take longer over a link that is as it was change nothing") {
  const TempFolder temp;
  const LoadedConfig loaded = small_run(temp, {"compress.name=auto", "dist.ranks=2", "train.device=cpu"});
  const RunData data = load_data(loaded.config);
  const RunDirectory folder = create_run_directory(loaded, {});
  std::array<std::vector<bool>, 2> outcomes;
  std::string before, after;
  run_thread_ranks(
      2, loaded.config.dist.timeout_s,
      [&](Communicator& communicator) {
        std::vector<bool>& seen = outcomes[communicator.rank()];
        AutoMethod automatic(loaded.config);
        const auto choose = [&](std::int64_t step) {
          return automatic.choose(*data.train, communicator, folder, loaded.origins, step).has_value();
        };
        // Rank 0 asks, as in a run's reports.
        const auto due_after = [&](int steps, double communicate_s) {
          for (int i = 0; i < steps; ++i) automatic.add(0.1, communicate_s);
          std::vector<double> due{communicator.rank() == 0 && automatic.due() ? 1.0 : 0.0};
          sum_doubles(communicator, due);
          return due[0] > 0;
        };
        seen.push_back(choose(0));
        std::int64_t step = 0;
        while (due_after(12, 0.02)) choose(step += 12);  // the tries
        seen.push_back(due_after(40, 0.02));
        if (communicator.rank() == 0) before = text_of(folder.choices_json());
        seen.push_back(due_after(20, 0.09));
        seen.push_back(choose(step += 60));
        seen.push_back(due_after(60, 0.09));  // which is usual now
        seen.push_back(due_after(10, 0.02));
        if (communicator.rank() == 0) after = text_of(folder.choices_json());
      },
      make_emulated_link("1mbit", "0s", 1));
  const std::vector<bool> expected{true, false, true, false, false, true};
  CHECK(outcomes[0] == expected);
  CHECK(outcomes[1] == expected);
  CHECK_FALSE(before.empty());
  CHECK(after == before);
}

TEST_CASE("auto: residuals go on with another form of topk, and a step of density 1 leaves none") {
  const TempFolder temp;
  const LoadedConfig loaded =
      small_run(temp, {"dist.ranks=1", "compress.dense_1d=false", "compress.scope=group",
                       "compress.name=topk", "train.checkpoint_keep=0"});
  const RunData data = load_data(loaded.config);
  const RunInputs inputs{loaded.config, data, create_run_directory(loaded, {}), true,
                         std::chrono::steady_clock::now()};
  run_ranks("threads", 1, [&](Communicator& communicator) {
    Step step(inputs, communicator);
    step.begin_run(100);
    step.start_epoch(0, 0);
    int made = 0;
    const auto steps = [&](int count, double density) {
      for (int i = 0; i < count; ++i)
        step.make({.step = made++, .density = density, .lr = 0.05}), step.reports(1);
    };
    const auto owed = [&] {
      RunState state;
      if (const auto later = step.state(state)) later();
      return state.residual;
    };
    const auto exchange_by = [&](const Keys& keys) {
      Config config = loaded.config;
      config = with_option(config, {"", "", keys});
      config.exchange.merge = "all";
      step.exchange_by(exchange_options(config));
    };
    const auto none = [](const std::vector<float>& values) {
      return std::ranges::all_of(values, [](float x) { return x == 0; });
    };
    steps(3, 0.01);
    const std::vector<float> before = owed();
    CHECK_FALSE(none(before));
    exchange_by(
        {"compress.name=topk", "compress.scope=group", "compress.codec=auto", "compress.values=int8"});
    CHECK(owed() == before);
    exchange_by({"compress.name=topk", "compress.scope=group"});
    steps(1, 1.0);
    CHECK(none(owed()));
    exchange_by({"compress.name=dense"});
    steps(2, 1.0);
    exchange_by({"compress.name=topk", "compress.scope=group"});
    CHECK(none(owed()));  // what dense keeps there is no residual
    steps(1, 0.01);
    CHECK_FALSE(none(owed()));
  });
}

TEST_CASE("auto: what it chooses by itself is refused beside it, and one rank is dense") {
  const auto refused = [](const Keys& keys) {
    const auto problems = check_config(config_of(keys));
    return problems.empty() ? std::string() : problems.front().message;
  };
  CHECK(refused({}).empty());
  CHECK(says(refused({"exchange.every=5"}), {"auto.accuracy=local_steps"}));
  CHECK(says(refused({"exchange.groups=[3]"}), {"leave exchange.groups"}));
  CHECK(says(refused({"exchange.ranks_per_host=2"}), {"hosts of several ranks"}));
  CHECK(says(refused({"train.device=cuda"}), {"auto measures on CPUs"}));
  const Config typo = load_config("", {"compress.name=atuo"}).config;
  CHECK(says(check_config(typo).front().message, {"did you mean 'auto'?"}));
  CHECK(unused_keys(load_config("", {"auto.accuracy=exact", "compress.name=topk"})).size() == 1);
  const TempFolder temp;
  start(temp, {"compress.name=auto", "train.max_steps=2"}, false);
  CHECK(written_config(temp).text("compress.name") == "dense");
  CHECK_FALSE(std::filesystem::exists(temp.at("run/auto_profiles.json")));
}

TEST_CASE("auto elsewhere: topk below the rate at which it saves enough, dense above, by the closed form") {
  constexpr double kLatency = 5e-5;
  for (const int ranks : {2, 4, 8}) {
    INFO(ranks);
    const double rate = border(ranks, kLatency);
    REQUIRE(rate > 0);
    const ChoiceAt below = choice_at(profiles(), ranks, network(0.99 * rate, kLatency)),
                   above = choice_at(profiles(), ranks, network(1.01 * rate, kLatency));
    CHECK(below.choice().name == "topk, density 0.01");
    CHECK(below.choice().method == "topk");
    CHECK(below.gain() == Approx(1 / (1 - kAutoGain)).epsilon(5e-3));
    CHECK(above.choice().name == "dense");
    CHECK(above.gain() == 1);
    for (const ChoiceAt& at : {below, above}) CHECK((at.options[0].tried && at.options[1].tried));
  }
  // What is far from being the quickest is not tried.
  const ChoiceAt slow = choice_at(profiles(), 4, network(1e6, kLatency));
  CHECK((slow.taken == 1 && slow.options[1].tried && !slow.options[0].tried));
  CHECK(slow.gain() > kTried);
}

TEST_CASE("auto elsewhere: more ranks move the border") {
  const double few = border(2, 1e-4), many = border(4, 1e-4);
  REQUIRE(few < 0.9 * many);
  const PredictedNetwork between = network((few + many) / 2, 1e-4);
  CHECK(choice_at(profiles(), 2, between).choice().method == "dense");
  CHECK(choice_at(profiles(), 4, between).choice().method == "topk");
}

TEST_CASE("auto elsewhere: local steps send once in their interval") {
  auto all = profiles();
  const std::string local = "local steps, a sync every 10";
  all.push_back({local, profile_of("sparseloco")});
  all.back().profile.groups[0].decode_s = 0;
  const double byte = 8e-6;
  const ChoiceAt at = choice_at(all, 4, network(8 / byte, 0));
  const double sync = kEncode + 2 * kOverhead + 3 * kSparseBytes * byte + 2 * kOverhead + 3 * byte;
  CHECK(at.options[2].step_s == Approx(kForward + kBackward + sync / 10));
  CHECK(at.choice().name == local);
  CHECK_FALSE(at.options[1].tried);  // local steps are taken untried
}

TEST_CASE("auto_profiles.json reads back") {
  const std::string text = named_profiles_json(profiles());
  const auto read = parse_auto_profiles(text, "p.json");
  CHECK(named_profiles_json(read) == text);
  REQUIRE(read.size() == 2);
  CHECK(read[1].option == profiles()[1].option);
  CHECK(read[1].profile.groups[0].encode_s == kEncode);
}

TEST_CASE("a damaged auto_profiles.json is an error that names the file, the place and the remedy") {
  const std::string text = named_profiles_json(profiles());
  const auto refused = [](const std::string& damaged, const std::string& what) {
    return user_error([&] { parse_auto_profiles(damaged, "p.json"); },
                      {"p.json: ", what, "compress.name=auto"});
  };
  CHECK(refused("", "it is no list"));
  CHECK(refused(text.substr(0, text.size() / 2), "it is no list"));
  CHECK(refused("{}", "it is no list"));
  CHECK(refused("[]", "it is empty"));
  CHECK(refused("[3]", "it[0] is no JSON object"));
  CHECK(refused(with_change(text, "\"option\"", "\"name\""), "it[0].option is missing"));
  CHECK(refused(with_change(text, "\"gather\"", "\"gathers\""), "it[0].profile.gather is missing"));
  CHECK(refused(with_change(text, "\"forward_s\":0.01", "\"forward_s\":-1"), "it[0].profile.forward_s"));
  CHECK(refused(with_change(text, "\"dense\",\"profile\"", "\"denser\",\"profile\""), "'denser' by dense"));
  CHECK(refused(with_change(text, "\"method\":\"dense\"", "\"method\":\"topk\""), "'dense' by topk"));
  auto other = profiles();
  other[0].profile.groups.clear();
  CHECK(refused(named_profiles_json(other), "dense: groups is empty"));
  other = {profiles()[1]};
  CHECK(refused(named_profiles_json(other), "the first option is not dense"));
}

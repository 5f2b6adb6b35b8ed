#include "lab/predict/predict.h"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "lab/predict/chart.h"
#include "tests/support/error_text.h"
#include "tests/support/temp_folder.h"
#include "train/metrics/metrics.h"
#include "train/metrics/output_file.h"
#include "train/run_directory.h"

namespace topknot {
namespace {

// Two compressed parameters of 1000 and 3000 elements and a dense one of 10, profiled by 4 ranks.
ExchangeProfile sparse_profile() {
  ExchangeProfile p;
  p.model = "mlp", p.dataset = "toy", p.method = "topk", p.density = 0.01;
  p.ranks = 4, p.batch = 8, p.backend = "gloo", p.overlaps = true;
  p.parameters = {{"b", 1000, true, 0.2, 0.2}, {"a", 3000, true, 0.3, 0.5}, {"bias", 10, false, 0, 0.5}};
  p.forward_s = 0.25, p.backward_s = 0.5, p.update_s = 0.05;
  p.groups = {{1000, 80, 0, 0.01, 0.002}, {3000, 240, 0, 0.03, 0.006}, {4000, 320, 0, 0.04, 0.008}};
  p.dense = {10, 40, 0, 0, 0};
  p.link = {0.001, 1e-5, 0.0002};
  p.gather = {0.0015, 3e-5, 4};
  p.reduce = {0.004, 2e-5, 4};
  return p;
}

ExchangeProfile one_layer_dense() {
  ExchangeProfile p;
  p.method = "dense", p.backend = "gloo", p.overlaps = true, p.sums = true, p.ranks = 2;
  p.parameters = {{"w", 1000, false, 0.2, 0.2}};
  p.forward_s = 0.1, p.backward_s = 0.2, p.update_s = 0.05;
  p.groups = {{1000, 4000, 0, 0, 0}};
  p.link = {0.003, 2e-6, 0};
  p.gather = {0, 2e-6, 2};
  p.reduce = {0.006, 3e-6, 2};
  return p;
}

PredictedNetwork network(const std::string& rate, std::optional<double> latency = std::nullopt,
                         double efficiency = 1) {
  PredictedNetwork n = parse_network_rate(rate);
  n.latency = latency, n.efficiency = efficiency;
  return n;
}

double iteration(const ExchangeProfile& profile, int ranks, const PredictedNetwork& n,
                 const std::string& merge = "all") {
  return predict(profile, {ranks, n, merge}).iteration;
}

}  // namespace

TEST_CASE("one dense layer takes what the ring's formula says, at a rate and latency of one's own") {
  // 8 Mbit/s is 1e6 bytes per second; 4 ranks: 6 messages of 1 ms, and 6/4 of 4000 bytes. The agreement: one
  // latency and 3 bytes.
  const Prediction p = predict(one_layer_dense(), {4, network("8mbit", 0.001), "all"});
  CHECK(p.communicate == Approx(0.006 + 0.006 + 0.001003));
  CHECK(p.exposed == Approx(0.013003));
  CHECK(p.iteration == Approx(0.35 + 0.013003));
  CHECK(p.speed_up == Approx(4 * 0.35 / 0.363003));
  CHECK(p.efficiency == Approx(0.35 / 0.363003));
  CHECK(p.collective == "ring");
  // Half of the rate reaches the payload: the bytes take twice as long.
  CHECK(predict(one_layer_dense(), {4, network("8mbit", 0.001, 0.5), "all"}).communicate ==
        Approx(0.006 + 0.012 + 0.001006));
}

TEST_CASE("a measured ring scales by its messages and by the part of the data that is sent") {
  // At 2 ranks: 2 messages in 6 ms, so 3 ms each; 3e-6 s a byte, and each byte is sent once. At 8 ranks: 14
  // messages, 14/8 of the bytes. The agreement's alpha is 0, its 7 bytes take 2e-6 each.
  const Prediction p = predict(one_layer_dense(), {8, network("measured"), "all"});
  CHECK(p.communicate == Approx(14 * 0.003 + 1.75 * 4000 * 3e-6 + 7 * 2e-6));
}

TEST_CASE("with the profile's ranks and network its fits come back") {
  const ExchangeProfile profile = sparse_profile();
  const ExchangeProfile at = profile_at(profile, 4, network("measured"), "all_gather");
  CHECK(at.gather.alpha == Approx(0.0015));
  CHECK(at.gather.beta == Approx(3e-5));
  CHECK(at.reduce.alpha == Approx(0.004));
  CHECK(at.reduce.beta == Approx(2e-5));
  for (std::size_t i = 0; i < profile.groups.size(); ++i)
    CHECK(at.groups[i].decode_s == Approx(profile.groups[i].decode_s));
}

TEST_CASE("more ranks add an overhead, a share of the link and the decoding of their entries") {
  const ExchangeProfile at = profile_at(sparse_profile(), 16, network("measured"), "all_gather");
  CHECK(at.gather.alpha == Approx(0.0015 + 12 * 0.0002));
  CHECK(at.gather.beta == Approx(15e-5));
  CHECK(at.reduce.alpha == Approx(0.004 + 24 * 0.0002));
  CHECK(at.reduce.beta == Approx(2e-5 / 1.5 * 1.875));
  // (0.05 + 16 * 0.01) / (0.05 + 4 * 0.01)
  CHECK(at.groups[1].decode_s == Approx(0.006 * 0.21 / 0.09));
  const ExchangeProfile tree = profile_at(sparse_profile(), 16, network("measured"), "gtopk");
  CHECK(tree.groups[1].decode_s == Approx(0.006 * 0.06 / 0.09));
}

TEST_CASE("groups leave one after the other beside the backward pass, as the schedule has it") {
  // 10 ranks, 1e5 bytes per second, no latency but the overhead of 8 further messages: alpha 1.6 ms; a byte
  // 9e-5.
  const Prediction p = predict(sparse_profile(), {10, network("800kbit", 0.0), "none"});
  const double first = 0.0016 + 80 * 9e-5, second = 0.0016 + 240 * 9e-5;
  const double dense = 2 * 0.0016 + 1.8 * 40 * 1e-5;
  const double agreement = 0.0016 + 9e-5;
  // The first group leaves at 0.21 s and is through at 0.2188, before the second is encoded at 0.54.
  CHECK(p.communicate == Approx(first + second + dense + agreement));
  CHECK(p.encode == Approx(0.04));
  const double decode = 0.008 * (0.05 + 10 * 0.01) / (0.05 + 4 * 0.01);
  CHECK(p.decode == Approx(decode));
  CHECK(p.exposed == Approx(second + dense));  // decoding hides the agreement
  CHECK(p.iteration == Approx(0.8 + 0.04 + second + dense + decode));
  CHECK(p.groups == 3);
}

TEST_CASE("one rank has speed-up 1 by every method and plan, even where the profile has one rank") {
  ExchangeProfile alone = sparse_profile();
  alone.ranks = 1, alone.link = {}, alone.gather = alone.reduce = {0, 0, 1};
  for (const auto& profile : {sparse_profile(), dense_profile(sparse_profile()), one_layer_dense(), alone})
    for (const char* merge : {"none", "all", "optimal"}) {
      const Prediction p = predict(profile, {1, network("measured"), merge});
      CHECK(p.iteration == profile.forward_s + profile.backward_s + profile.update_s);
      CHECK(p.speed_up == 1);
      CHECK(p.efficiency == 1);
    }
}

TEST_CASE("without a price for messages and bytes nothing is exposed") {
  ExchangeProfile profile = sparse_profile();
  profile.link.overhead = 0;
  const Prediction p = predict(profile, {64, network("1e6gbit", 0.0), "none"});  // the greatest
  CHECK(p.exposed == Approx(0).margin(1e-5));
  CHECK(p.iteration == Approx(0.8 + p.encode + p.decode));
}

TEST_CASE("with local steps a step has its share of a sync, which nothing hides") {
  const PredictedNetwork slow = network("8mbit", 0.001);
  const Prediction once = predict(one_layer_dense(), {4, slow, "all", "all_gather", {}, 10});
  CHECK(once.communicate == Approx(0.0013003));
  CHECK(once.iteration == Approx(0.35 + 0.0013003));
  CHECK(once.speed_up == Approx(4 * 0.35 / 0.3513003));
  CHECK(predict(one_layer_dense(), {1, slow, "all", "all_gather", {}, 10}).every == 10);
  const Prediction each = predict(sparse_profile(), {4, slow}),
                   sync = predict(sparse_profile(), {4, slow, "all", "all_gather", {}, 1});
  CHECK(sync.exposed == Approx(each.communicate));
  CHECK(sync.encode == Approx(each.encode));
  CHECK(sync.iteration == Approx(0.8 + each.encode + each.communicate + each.decode));
}

TEST_CASE("a step takes longer with more ranks, a slower link and a greater latency") {
  for (const auto& profile : {sparse_profile(), dense_profile(sparse_profile())})
    for (const char* merge : {"none", "all", "size:4000", "optimal"}) {
      double last = 0;
      for (int ranks = 1; ranks <= 1024; ranks *= 2) {
        const double now = iteration(profile, ranks, network("10mbit", 0.001), merge);
        CHECK(now > last);
        last = now;
      }
      CHECK(iteration(profile, 16, network("1mbit"), merge) >
            iteration(profile, 16, network("2mbit"), merge));
      CHECK(iteration(profile, 16, network("10mbit", 0.01), merge) >
            iteration(profile, 16, network("10mbit", 0.001), merge));
      CHECK(iteration(profile, 16, network("1mbit"), "optimal") <=
            iteration(profile, 16, network("1mbit"), merge) * (1 + 1e-12));
    }
}

TEST_CASE("dense is foretold from any profile, as a ring over its link") {
  const ExchangeProfile dense = dense_profile(sparse_profile());
  CHECK(dense.reduce.alpha == Approx(6 * 0.001));
  CHECK(dense.reduce.beta == Approx(1.5 * 2e-5 / 1.5));  // the sums' figure, greater than the link's
  const Prediction p = predict(dense, {4, network("8mbit", 0.0), "all"});
  CHECK(p.groups == 1);
  CHECK(p.encode == 0);
  const double agreement = 2 * 0.0002 + 3e-6;
  CHECK(p.communicate == Approx(1.5 * 16040 * 1e-6 + agreement));
}

TEST_CASE("sparse collectives carry entries only, and auto takes the quickest") {
  const PredictedNetwork slow = network("8mbit", 0.0);
  const Prediction tree = predict(sparse_profile(), {16, slow, "all", "gtopk"});
  // 4 rounds there and back of 40 entries of 8 bytes; the dense part in rank order; 1 byte from each.
  const double overheads = 14 * 0.0002;
  CHECK(tree.communicate == Approx(8 * 320e-6 + 2 * overheads + 1.875 * 40e-6 + overheads + 15e-6));
  ExchangeProfile free = sparse_profile();
  free.link.overhead = 0;
  const Prediction quick = predict(free, {16, slow, "all", "auto"});
  CHECK(quick.collective == "oktopk");
  CHECK(quick.asked_collective == "auto");
  CHECK(user_error([&] { predict(one_layer_dense(), {4, slow, "all", "gtopk"}); }, {"gtopk", "dense"}));
}

TEST_CASE("coded sums send fewer bytes, and what they took beyond these is the coder's") {
  ExchangeProfile coded = one_layer_dense();
  coded.collective = "coded_sum", coded.reduce = {0.004, 2e-6, 2};
  const Prediction p = predict(coded, {2, network("measured"), "all", "coded_sum"});
  CHECK(p.collective == "coded_sum");
  CHECK(p.communicate == Approx(0.004 + 4000 * 2e-6 + 2e-6));
  // 8 Mbit/s is 1e6 bytes per second: 6/4 of 0.855 times the bytes, and the coder's 2e-6 - 0.855 * 2e-6 a byte.
  CHECK(predict(coded, {4, network("8mbit", 0.001), "all", "coded_sum"}).communicate ==
        Approx(0.002 + 4000 * (1.5 * 0.855e-6 + 0.29e-6) + 0.001003));
  ExchangeProfile narrow = coded;
  narrow.groups = {{1000, 2000, 0, 0, 0}};
  CHECK(predict(narrow, {4, network("8mbit", 0.001), "all", "coded_sum"}).communicate ==
        Approx(0.002 + 2000 * (1.5 * 0.71e-6 + 0.58e-6) + 0.001003));
  CHECK(user_error(
      [&] {
        predict(one_layer_dense(), {2, network("measured"), "all", "coded_sum"});
      },
      {"coded_sum"}));
  // Plain dense is foretold from such a profile too.
  const ExchangeProfile plain = dense_profile(coded);
  CHECK((plain.collective == "all_gather" && plain.reduce.alpha == 2 * coded.link.alpha));
  // A run is held against its own kind of sum.
  MeasuredRun run;
  run.method = "dense", run.ranks = 2, run.merge = "all", run.collective = "coded_sum", run.step = 1;
  CHECK(judge(run, {coded}, network("measured")).modelled.collective == "coded_sum");
  run.collective = "all_gather";
  CHECK(judge(run, {coded}, network("measured")).modelled.collective == "ring");
}

TEST_CASE("merge rules cut a profile's parameters as they cut the arena") {
  ExchangeProfile p = sparse_profile();
  using Groups = std::vector<std::size_t>;
  CHECK(groups_by("none", p) == Groups{1, 1, 1});
  CHECK(groups_by("all", p) == Groups{2, 1});
  CHECK(groups_by("size:16000", p) == Groups{2, 1});
  CHECK(groups_by("size:15999", p) == Groups{1, 1, 1});
  CHECK(groups_by("all", dense_profile(p)) == Groups{3});
  CHECK(user_error([&] { groups_by("some", p); }, {"some", "optimal"}));
}

TEST_CASE("rates are read as people write them") {
  CHECK(*parse_network_rate("100mbit").bits_per_s == 1e8);
  CHECK(*parse_network_rate("2.5gbit").bits_per_s == 2.5e9);
  CHECK(*parse_network_rate("64kbit").bits_per_s == 64000);
  CHECK(*parse_network_rate("1e6").bits_per_s == 1e6);
  CHECK_FALSE(parse_network_rate("measured").bits_per_s.has_value());
  for (const char* bad : {"", "fast", "-1gbit", "0", "1gb", "1gbit/s", "nan", "1e308", "1e-300", "1e300gbit"})
    CHECK(user_error([&] { parse_network_rate(bad); }, {"--rate", "100mbit"}));
}

TEST_CASE("a profile of one rank needs a network to be given") {
  ExchangeProfile alone = sparse_profile();
  alone.ranks = 1, alone.link = {}, alone.gather = alone.reduce = {0, 0, 1};
  CHECK(user_error([&] { predict(alone, {4, network("measured"), "all"}); }, {"one rank", "--latency"}));
  CHECK(user_error([&] { predict(alone, {4, network("1gbit"), "all"}); }, {"--latency"}));
  CHECK(predict(alone, {4, network("1gbit", 1e-4), "all"}).iteration > 0.8);
}

TEST_CASE("a run of a method without density is held against the profile of that method") {
  const TempFolder temp;
  const auto loaded = load_config("", {"output.dir=" + temp.at("run"), "compress.name=powersgd",
                                       "dist.ranks=4", "compress.density=0.5", "exchange.merge=none"});
  const RunDirectory folder = create_run_directory(loaded, {"train"});
  {
    MetricsWriter writer(folder.metrics_jsonl());
    for (int i = 1; i <= 15; ++i) {
      StepRecord step;
      step.step = i, step.time_s = i;
      writer.write(step);
    }
  }
  ExchangeProfile profile = one_layer_dense();
  profile.method = "powersgd", profile.density = 0.5;
  CHECK(judge(read_measured(temp.at("run")), {profile}, network("measured")).measured.step == Approx(1));
}

TEST_CASE(
    "a run of local steps is held, by the means from a sync to the next, against a prediction of local "
    "steps") {
  const TempFolder temp;
  const auto loaded =
      load_config("", {"output.dir=" + temp.at("run"), "compress.name=topk", "exchange.every=5",
                       "compress.density=0.01", "dist.ranks=4", "exchange.merge=none"});
  const RunDirectory folder = create_run_directory(loaded, {"train"});
  {
    MetricsWriter writer(folder.metrics_jsonl());
    double time = 0;
    for (int i = 1; i <= 22; ++i) {
      StepRecord step;
      step.step = i, step.time_s = time += i % 5 == 0 ? 1.5 : 1;
      step.communicate_s = i % 5 == 0 ? 0.2 : 0;
      writer.write(step);
    }
  }
  const MeasuredRun run = read_measured(temp.at("run"));
  CHECK(run.step == Approx(1.1));
  CHECK(run.communicate == Approx(0.04));
  CHECK(judge(run, {sparse_profile()}, network("measured")).modelled.every == 5);
}

TEST_CASE("a run is held against the prediction with its own plan") {
  const TempFolder temp;
  const auto loaded = load_config("", {"output.dir=" + temp.at("run"), "compress.name=topk",
                                       "compress.density=0.01", "dist.ranks=4", "exchange.merge=none"});
  REQUIRE(loaded.problems.empty());
  const RunDirectory folder = create_run_directory(loaded, {"train"});
  {
    MetricsWriter writer(folder.metrics_jsonl());
    for (int i = 1; i <= 15; ++i) {
      StepRecord step;
      step.step = i, step.time_s = i <= 5 ? 9 * i : 45 + 1.1 * (i - 5);
      step.communicate_s = i <= 5 ? 7 : 0.025, step.exposed_s = i <= 5 ? 7 : 0.02;
      writer.write(step);
    }
  }
  const MeasuredRun run = read_measured(temp.at("run"));
  CHECK(run.step == Approx(1.1));
  CHECK(run.communicate == Approx(0.025));
  CHECK_FALSE(run.replay);
  const Judgement j = judge(run, {one_layer_dense(), sparse_profile()}, network("measured"));
  CHECK(j.modelled.groups == 3);
  CHECK(j.modelled.ranks == 4);
  const double communicate = 2 * 0.0015 + 320 * 3e-5 + 0.004 + 40 * 2e-5 + 0.0015 + 3e-5;
  CHECK(j.modelled.communicate == Approx(communicate));
  CHECK(relative_error(j.modelled.communicate, run.communicate) == Approx(communicate / 0.025 - 1));

  SECTION("a replay has no forward pass and no update") {
    write_file(temp.at("run") + "/bench.json", "{}");
    const MeasuredRun replay = read_measured(temp.at("run"));
    CHECK(replay.replay);
    const Judgement r = judge(replay, {sparse_profile()}, network("measured"));
    CHECK(r.modelled.forward == 0);
    CHECK(r.modelled.backward == 0);
    CHECK(r.modelled.communicate == Approx(communicate));
  }
  SECTION("a method without a profile is refused") {
    CHECK(user_error([&] { judge(run, {one_layer_dense()}, network("measured")); }, {"topk", "0.01"}));
  }
}

TEST_CASE("times that no run takes are refused, and the greatest that are not give finite predictions") {
  const std::string text = exchange_profile_json(sparse_profile());
  for (const char* key : {"forward_s", "backward_s", "update_s", "data_s", "density"}) {
    auto json = nlohmann::ordered_json::parse(text);
    json[key] = 1e308;
    CHECK(user_error([&] { parse_exchange_profile(json.dump(), "p.json"); },
                     {"p.json", key, "1,000,000,000,000"}));
    json[key] = -1;
    CHECK(user_error([&] { parse_exchange_profile(json.dump(), "p.json"); }, {"p.json", key}));
  }
  ExchangeProfile p = sparse_profile();
  p.forward_s = p.backward_s = p.update_s = p.link.alpha = p.link.beta = p.gather.alpha = p.gather.beta =
      1e12;
  for (auto& parameter : p.parameters) parameter.backward_s = parameter.ready_s = 1e12;
  for (auto& group : p.groups) group.encode_s = group.decode_s = 1e12;
  PredictReport report;
  for (const char* merge : {"all", "none", "optimal"})
    for (const int ranks : {1, 2, 1 << 20}) {
      report.predictions.push_back(predict(p, {ranks, network("1", 10), merge}));
      CHECK(std::isfinite(report.predictions.back().iteration));
    }
  const std::string all = prediction_text(report) + prediction_csv(report) + prediction_json(report);
  CHECK(all.find("inf") == std::string::npos);
  CHECK(all.find("nan") == std::string::npos);
}

TEST_CASE("what is no run, or no profiled one, is refused with the way to make one") {
  const TempFolder temp;
  CHECK(user_error([&] { read_predictable(temp.at("absent")); }, {"absent", "no such"}));
  CHECK(user_error([&] { read_predictable(temp.str()); },
                   {"no exchange_profile.json", "train", "exchange.merge=optimal"}));
  CHECK(user_error([&] { read_measured(temp.str()); }, {"--measured", "metrics.jsonl", "bench"}));
  write_file(temp.at("exchange_profile.json"), exchange_profile_json(sparse_profile()));
  CHECK(read_predictable(temp.str()).parameters.size() == 3);
  CHECK(read_predictable(temp.at("exchange_profile.json")).method == "topk");
}

TEST_CASE("reports call what is modelled by its name") {
  PredictReport report;
  report.sources = {source_line("run", sparse_profile())};
  for (const int ranks : {1, 4, 16})
    for (const char* rate : {"1mbit", "1gbit"})
      report.predictions.push_back(predict(sparse_profile(), {ranks, network(rate, 1e-4), "optimal"}));
  MeasuredRun run;
  run.path = "other<run>", run.method = "topk", run.ranks = 4, run.density = 0.01, run.merge = "all";
  run.collective = "all_gather", run.communicate = 0.02, run.step = 1, run.exposed = 0;
  report.judgements.push_back(judge(run, {sparse_profile()}, network("measured")));
  report.assumptions = assumptions_of({sparse_profile()}, {network("1gbit")});

  const auto json = nlohmann::json::parse(prediction_json(report));
  REQUIRE(json["predictions"].size() == 6);
  for (const auto& p : json["predictions"]) CHECK(p["modelled"] == true);
  CHECK(json["predictions"][0]["speed_up"] == 1.0);
  CHECK(json["measured"][0]["communicate_s"]["measured"] == 0.02);
  CHECK(json["measured"][0]["exposed_s"]["error"].is_null());

  const std::string csv = prediction_csv(report);
  CHECK(std::count(csv.begin(), csv.end(), '\n') == 7);
  CHECK(csv.find("\nmodelled,topk,,0.01,all_gather,optimal,") != std::string::npos);
  const auto columns = std::count(csv.begin(), csv.begin() + static_cast<long>(csv.find('\n')), ',');
  CHECK(std::count(csv.begin(), csv.end(), ',') == 7 * columns);

  const std::string html = prediction_html(report);
  for (const char* word : {"modelled", "measured", "<svg", "rate 1gbit", "other&lt;run&gt;"})
    CHECK(html.find(word) != std::string::npos);
  CHECK(html.find("<script") == std::string::npos);
  CHECK(html.find("src=") == std::string::npos);
  CHECK(html.find("class=\"legend\"") == html.rfind("class=\"legend\""));  // one for the page
  CHECK(html.find(method_colour("topk")) != std::string::npos);            // as on every other page
  CHECK(html.find("topk 0.01, merge optimal (modelled): ") != std::string::npos);
  CHECK(prediction_text(report).find("MODELLED") == 0);
}

TEST_CASE("the papers' settings stand beside their claims, as models") {
  const std::string text = papers_text();
  for (const char* word : {"1.19x to 2.33x", "over 40x", "31 %", "Assumed", "MODELLED"})
    CHECK(text.find(word) != std::string::npos);
  // The published seconds of top-k over all of ResNet-50 follow from the published constant: 0.1376 s.
  CHECK(text.find("138") != std::string::npos);
}

}  // namespace topknot

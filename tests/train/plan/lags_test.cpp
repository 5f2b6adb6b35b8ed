// LAGS-SGD: densities by layer, from the formula, from a file, from measured times.
#include "train/plan/plan.h"

#include "tests/train/small_run.h"

using namespace topknot;
using namespace topknot::testing;

namespace {

constexpr double kAlpha = 1.744e-3, kBeta = 3.6e-8;  // the authors' 1 Gbit/s Ethernet

std::string checksum_in(const TempFolder& temp, const Keys& overrides) {
  const std::vector<RunOutcome> ranks = outcomes_of(small_run(temp, overrides));
  for (const RunOutcome& rank : ranks) CHECK(rank.parameter_checksum == ranks[0].parameter_checksum);
  return ranks[0].parameter_checksum;
}

Keys lags_keys() {
  return with({"compress.name=lags", "compress.scope=tensor", "compress.lr_inside=true"},
              {"compress.dense_1d=true", "compress.warmup=[]", "optimizer.momentum=0", "dist.ranks=2"});
}

}  // namespace

TEST_CASE("layer densities follow the formula") {
  // Four ranks: 4 ms - 2 * 1.744 ms = 0.512 ms are left for 2 * 3 * 3.6e-8 s * m * rho.
  const std::vector<std::size_t> sizes{36864, 2359296, 1728, 36864};
  const std::vector<double> times{0.004, 0.004, 0.004, 0.003488};
  const auto densities = lags_densities(times, sizes, kAlpha, kBeta, 4, 0.001);
  CHECK(densities[0] == Approx(0.000512 / 0.007962624).epsilon(1e-12));  // 0.0643
  CHECK(densities[1] == Approx(0.000512 / 0.509607936).epsilon(1e-12));  // 0.0010047
  CHECK(densities[2] == 0.05);                                           // 1.37 would be more than all of it
  CHECK(densities[3] == 0.001);                                          // no time is left
}

TEST_CASE("no layer density is below the base, and with one rank all are the base") {
  CHECK(lags_densities({0.004, 0.004, 0}, {2359296, 1728, 10}, kAlpha, kBeta, 4, 0.1) ==
        std::vector<double>{0.1, 0.1, 0.1});
  CHECK(lags_densities({1, 0}, {10, 10}, 0, kBeta, 1, 0.01) == std::vector<double>{0.01, 0.01});
  CHECK_THROWS_AS(lags_densities({1}, {10, 10}, 0, kBeta, 2, 0.01), Error);
}

TEST_CASE("a file of layer densities is checked against the model") {
  const Prepared run({});
  const TempFolder temp;
  const std::string name = run.arena().parameters()[0]->name();
  const auto read_as = [&](const std::string& text) {
    std::ofstream(temp.at("d.json")) << text;
    return read_layer_density(temp.at("d.json"), run.arena());
  };
  const auto of_name = [&](const std::string& value) { return read_as("{\"" + name + "\": " + value + "}"); };
  CHECK(of_name("0.25") == LayerDensity{{name, 0.25}});
  CHECK(read_as("{}").empty());
  CHECK_USER_ERROR(read_as("{\"" + name + "x\": 0.25}"), "compress.layer_density", "d.json",
                   "did you mean '" + name + "'");
  for (const char* wrong : {"0", "-1", "1.5", "\"a\"", "null"})
    CHECK_USER_ERROR(of_name(wrong), name, wrong, "above 0");
  CHECK_USER_ERROR(of_name(std::string(300000, '[') + std::string(300000, ']')), name, "a list or an object");
  for (const char* wrong : {"[1]", "{"}) CHECK_USER_ERROR(read_as(wrong), "no JSON object");
  CHECK_USER_ERROR(read_layer_density(temp.at("none"), run.arena()), "none", "No such file");
  const LayerDensity written{{name, 1.0 / 3}};
  CHECK(read_as(layer_density_json(written)) == written);
}

TEST_CASE("a run under measured densities is the run under the file it writes: measuring changes nothing") {
  const Keys conv{
      "model.name=resnet20", "data.batch_size=2",  "data.train_size=24",     "data.test_size=4",
      "train.max_steps=4",   "compress.alpha_s=0", "compress.density=0.001", "compress.beta_s_per_byte=1e-9"};
  const TempFolder first, second, third;
  const auto base = with(lags_keys(), conv);
  const std::string measured = checksum_in(first, with(base, {"compress.layer_density=auto"}));
  const std::string file = first.at("run/layer_density.json");
  REQUIRE(fs::exists(file));
  CHECK(checksum_in(second, with(base, {"compress.layer_density=" + file})) == measured);
  // Without a start-up time every layer has time to send more than the base.
  CHECK(checksum_in(third, base) != measured);
  for (const auto& [name, density] : read_layer_density(file, Prepared(base).arena())) CHECK(density > 0.001);
}

TEST_CASE("a layer's own density decides how much of it is sent") {
  const TempFolder temp;
  const Prepared run({});
  LayerDensity densities;
  double entries = 0;
  for (const Parameter* parameter : run.arena().parameters())
    if (parameter->compressible()) {
      densities[parameter->name()] = 0.5;
      entries += static_cast<double>(parameter->numel() / 2);
    }
  const std::string file = temp.at("half.json");
  std::ofstream(file) << layer_density_json(densities);
  checksum_in(temp, with(lags_keys(), {"train.max_steps=2", "compress.layer_density=" + file}));
  CHECK(metrics_of(temp).steps.at(0).selected == entries);
}

TEST_CASE("lags with the rate inside equals topk with the rate outside, bit for bit where the rate is 1/32") {
  const TempFolder inside, outside, falling_inside, falling_outside;
  const Keys keys{"optimizer.lr=0.03125", "optimizer.weight_decay=0", "train.max_steps=30"};
  const auto base = with(lags_keys(), keys);
  const Keys topk{"compress.name=topk", "compress.lr_inside=false"};
  CHECK(checksum_in(inside, base) == checksum_in(outside, with(base, topk)));
  const auto falling = with(base, {"schedule.name=cosine", "train.epochs=1"});
  CHECK(checksum_in(falling_inside, falling) != checksum_in(falling_outside, with(falling, topk)));
}

TEST_CASE("lags without a k for each layer, or with AdamW or Muon, is an error that names the remedy") {
  const auto problems = check_config(load_config("", {"compress.name=lags", "compress.scope=group"}).config);
  REQUIRE(problems.size() == 1);
  CHECK(problems[0].key == "compress.scope");
  CHECK(check_config(load_config("", {"compress.name=lags"}).config).empty());
  // Refused for what these do, not for a momentum that they have not.
  for (const std::string optimizer : {"adamw", "muon"}) {
    const Config config =
        load_config("", with(lags_keys(), {"optimizer.name=" + optimizer, "optimizer.momentum=0.9"})).config;
    const auto problems = check_run(config, load_data(config)).problems;
    INFO(optimizer);
    REQUIRE(problems.size() == 1);
    CHECK(says(problems[0].message, {optimizer + " takes plain gradients", "compress.lr_inside"}));
  }
}

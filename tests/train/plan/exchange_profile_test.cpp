// Profiles of the exchange: as JSON, as plans, and through a run.
#include "train/plan/profile.h"

#include "nn/core/pass_cost.h"
#include "tests/support/variables.h"
#include "tests/train/made_up_text.h"
#include "tests/train/small_run.h"
#include "train/evaluate.h"
#include "train/plan/plan.h"
#include "train/setup.h"

using namespace topknot;
using namespace topknot::testing;

namespace {

// Five parameters of 100 elements, the last one dense; each is ready 1 ms after the one before.
ExchangeProfile profile() {
  ExchangeProfile p;
  p.model = "mlp", p.dataset = "synthetic_images", p.method = "topk", p.options = "values=bf16";
  p.density = 0.01, p.ranks = 2, p.threads = 1, p.batch = 4, p.backend = "gloo", p.overlaps = true;
  for (int i = 0; i < 5; ++i)
    p.parameters.push_back({"p" + std::to_string(i), 100, i < 4, 1e-3, (i + 1) * 1e-3});
  p.forward_s = 2e-3, p.backward_s = 5e-3, p.update_s = 1e-4, p.data_s = 0.1 + 0.2;
  p.groups = {{100, 8, 0, 1e-5, 2e-5}, {200, 16, 0, 2e-5, 3e-5}, {400, 64, 4, 4e-5, 6e-5}};
  p.dense = {100, 400, 0, 1e-5, 1e-5};
  p.link = {1e-4, 1e-9, 1e-6};
  p.gather = {1e-4, 1e-9, 2};
  p.reduce = {2e-4, 1e-9, 2};
  return p;
}

std::string replaced(std::string text, const std::string& from, const std::string& to) {
  const auto at = text.find(from);
  REQUIRE(at != std::string::npos);
  return text.replace(at, from.size(), to);
}

struct Trained {
  std::string checksum;
  Config effective;  // config.yaml of the run directory
};

Trained trained(const TempFolder& temp, const LoadedConfig& loaded) {
  throw_problems(check_run(loaded.config, load_data(loaded.config)).problems);
  const std::vector<RunOutcome> outcomes = outcomes_of(loaded);
  for (const auto& outcome : outcomes) CHECK(outcome.parameter_checksum == outcomes[0].parameter_checksum);
  const LoadedConfig effective = load_config(temp.at("run/config.yaml"), {});
  throw_problems(effective.problems);
  return {outcomes[0].parameter_checksum, effective.config};
}

Keys keys(const Keys& more) {
  return with({"compress.name=topk", "compress.dense_1d=false", "model.hidden=[24,16]", "train.max_steps=8",
               "dist.ranks=2"},
              more);
}

int sum(const std::vector<int>& values) {
  return std::accumulate(values.begin(), values.end(), 0);
}

StepCost cost_of(const Keys& keys) {
  const Config config = load_config("", keys).config;
  const RunData data = load_data(config);
  const auto model = build_model(config, *data.train);
  return count_step_cost(config, *data.train, *model, unplanned_options(config, model->store.arena()));
}

// Of one image: 2 per multiply-add of a convolution whose output has `size` x `size` pixels.
double convolution(double in, double out, double kernel, double size) {
  return 2 * in * out * kernel * kernel * size * size;
}

// The peak of one pass over a whole batch.
double measured_activations(const Keys& keys) {
  const Config config = load_config("", keys).config;
  const RunData data = load_data(config);
  const auto model = build_model(config, *data.train);
  LoaderOptions options = loader_options(config, *data.train, true, 0, 1);
  options.workers = 0;
  Loader loader(*data.train, options);
  loader.start_epoch(0);
  Batch batch;
  REQUIRE(loader.next(batch));
  const PassCost cost;
  backward(batch_loss(model->module->forward(Variable(batch.images), ForwardContext()), view_of(batch, {})));
  return static_cast<double>(cost.peak_bytes());
}

const Keys kSmall = {"data.train_size=64", "data.test_size=8", "train.threads=1"};

Keys small(const Keys& keys) {
  return with(keys, kSmall);
}

}  // namespace

TEST_CASE("a profile reads back from its JSON to the last bit") {
  const ExchangeProfile written = profile();
  const std::string text = exchange_profile_json(written);
  const ExchangeProfile read = parse_exchange_profile(text, "p.json");
  CHECK(exchange_profile_json(read) == text);
  CHECK(read.data_s == written.data_s);
  CHECK(read.options == "values=bf16");
  CHECK(read.overlaps);
  CHECK(read.parameters.at(4).name == "p4");
  CHECK(!read.parameters.at(4).compressed);
  CHECK(read.groups.at(2).later_bytes == 4);
  CHECK(read.reduce.alpha == 2e-4);
  CHECK(read.link.overhead == 1e-6);
}

TEST_CASE("a damaged profile is an error that names the file, the field and the remedy") {
  const std::string text = exchange_profile_json(profile());
  const auto refused = [](const std::string& damaged, const std::string& field) {
    return user_error([&] { parse_exchange_profile(damaged, "p.json"); },
                      {"exchange.profile: p.json", field, "leave the key out"});
  };
  CHECK(refused("{", "no JSON object"));
  CHECK(refused("[1]", "no JSON object"));
  CHECK(refused(replaced(text, "\"ranks\": 2", "\"ranks\": \"2\""), "ranks is no whole number"));
  CHECK(refused(replaced(text, "\"alpha\"", "\"alfa\""), "link.alpha is missing"));
  CHECK(refused(replaced(text, "0.002", "-0.002"), "forward_s is no number from 0 to 1,000,000,000,000"));
  CHECK(refused(replaced(text, "\"name\": \"p3\"", "\"name\": 3"), "parameters[3].name is no text"));
  CHECK(refused(replaced(text, "\"elements\": 200.0", "\"elements\": 900.0"), "order of elements"));
  const TempFolder temp;
  CHECK_USER_ERROR(read_exchange_profile(temp.at("none.json")), "none.json", "No such file");
}

TEST_CASE("figures between measured sizes lie on straight lines") {
  for (const auto& [elements, bytes] :
       std::map<double, double>{{0, 0}, {10, 8}, {150, 12}, {300, 40}, {800, 128}}) {
    INFO(elements);
    CHECK(at_size(profile().groups, &ExchangeProfile::Group::bytes, elements) == bytes);
  }
}

TEST_CASE("the plan follows the network: costly messages are merged, free ones are not") {
  ExchangeProfile slow = profile();
  slow.gather.alpha = 10e-3;  // ten backward passes of a layer
  ExchangeProfile free = profile();
  free.gather = {0, 0, 2};
  for (const std::string rule : {"mgwfbp", "optimal"}) {
    INFO(rule);
    const auto merged = planned_groups(rule, slow);
    CHECK(merged.size() < 4);
    CHECK(std::accumulate(merged.begin(), merged.end(), std::size_t{0}) == 4);
    CHECK(planned_groups(rule, free) == std::vector<std::size_t>{1, 1, 1, 1});
  }
  // The authors' code always merges the first two layers.
  CHECK(planned_groups("omgs", free) == std::vector<std::size_t>{2, 1, 1});
  CHECK(planned_groups("omgs", slow).size() < 3);
}

TEST_CASE("the modelled makespan is that of the schedule, the dense part behind it") {
  ExchangeProfile p = profile();
  const auto makespan = [&](std::vector<std::size_t> groups) { return modelled_makespan(p, groups); };
  // One group of 4: ready at 4 ms, encoded 40 us later, sent in 100.064 us. The dense parameter is ready at
  // 5.04 ms, encoded 10 us later, and sent in 200.4 us.
  for (const auto& groups : {std::vector<std::size_t>{4, 1}, {4}})
    CHECK(makespan(groups) == Approx(5.05e-3 + 200.4e-6).epsilon(1e-12));
  // Where the network is the bottleneck the dense part waits for it.
  p.gather.alpha = 10e-3;
  CHECK(makespan({4}) == Approx(4.04e-3 + 10e-3 + 64e-9 + 200.4e-6).epsilon(1e-12));
  // With no overlap the dense parameter's backward pass waits as well.
  p.overlaps = false;
  CHECK(makespan({4}) == Approx(5.05e-3 + 10e-3 + 64e-9 + 200.4e-6).epsilon(1e-12));
  CHECK_THROWS_AS(makespan({3, 2}), Error);
}

TEST_CASE("the measured makespan ends with the last group's first collective") {
  using Kind = ExchangeSpan::Kind;
  const auto begin = std::chrono::steady_clock::now();
  const auto at = [&](int ms) { return begin + std::chrono::milliseconds(ms); };
  const std::vector<ExchangeSpan> spans{{Kind::encode, 0, 0, at(1), at(2)},
                                        {Kind::communicate, 1, 0, at(3), at(7)},
                                        {Kind::communicate, 0, 0, at(2), at(3)},
                                        {Kind::communicate, ExchangeSpan::kAgreement, 0, at(7), at(20)},
                                        {Kind::communicate, 0, 1, at(20), at(30)},
                                        {Kind::decode, 1, 0, at(30), at(40)}};
  CHECK(measured_makespan(spans, begin) == Approx(7e-3).epsilon(1e-9));
  CHECK(measured_makespan({}, begin) == 0);
}

TEST_CASE("the fit of a network follows large messages and keeps the start-up of small ones") {
  const std::vector<double> sizes{64, 4096, 1 << 20};
  std::vector<double> times;
  for (const double bytes : sizes) times.push_back(1e-4 + 8e-9 * bytes);
  const LinearFit exact = fit_network(sizes, times);
  CHECK(exact.alpha == Approx(1e-4).epsilon(1e-9));
  CHECK(exact.beta == Approx(8e-9).epsilon(1e-9));
  times[2] *= 1.2;  // 1.7 ms, many times alpha
  CHECK(fit_network(sizes, times).alpha == Approx(1e-4).epsilon(0.1));
  CHECK(fit_network(sizes, times).beta == Approx(1.2 * 8e-9).epsilon(0.02));
  const LinearFit falling = fit_network(std::vector<double>{1, 2}, std::vector<double>{2, 1});
  CHECK(falling.beta == 0);
  CHECK(falling.alpha > 1);
  CHECK(fit_network(std::vector<double>{64}, std::vector<double>{2}).seconds(64) == Approx(2));
}

TEST_CASE("a run that plans leaves its plan and its profile, and both repeat its bits") {
  const TempFolder temp;
  for (const std::string method : {"topk", "dense", "dense in bf16", "coded"}) {
    INFO(method);
    const bool dense = method != "topk";
    const std::string name = dense ? "compress.name=dense" : "compress.name=topk";
    Keys given{name, "exchange.merge=optimal"};
    if (method == "dense in bf16") given.push_back("compress.values=bf16");
    if (method == "coded") given.push_back("exchange.collective=coded_sum");
    const Trained first = trained(temp, small_run(temp, keys(given)));
    CHECK(first.effective.exchange.merge == "optimal");
    REQUIRE(sum(first.effective.exchange.groups) == 6);  // weights and biases of three layers
    CHECK(text_of(temp.at("run/config.yaml")).find("]  # measured at the start") != std::string::npos);
    const std::string file = temp.at(method + ".json");
    fs::rename(temp.at("run/exchange_profile.json"), file);
    const ExchangeProfile measured = read_exchange_profile(file);
    CHECK(measured.parameters.size() == 6);
    CHECK(measured.ranks == 2);
    CHECK(measured.sums == dense);
    CHECK(measured.collective == (method == "coded" ? "coded_sum" : "all_gather"));
    if (dense) CHECK(measured.reduce.seconds(1 << 20) > 0);  // its slope may be 0 beside other load
    const Metrics metrics = metrics_of(temp);
    REQUIRE(metrics.end);
    CHECK(metrics.end->modelled_makespan_s > 0);
    CHECK(metrics.end->makespan_p50_s > 0);
    CHECK(metrics.steps.back().makespan_s > 0);

    fs::copy_file(temp.at("run/config.yaml"), temp.at(method + ".yaml"));
    const LoadedConfig again = load_config(temp.at(method + ".yaml"), {"output.overwrite=true"});
    const Trained second = trained(temp, again);
    CHECK(second.checksum == first.checksum);
    CHECK(second.effective.exchange.groups == first.effective.exchange.groups);
    CHECK_FALSE(fs::exists(temp.at("run/exchange_profile.json")));

    given.push_back("exchange.profile=" + file);
    if (method == "coded")
      CHECK_THROWS_WITH(trained(temp, small_run(temp, keys({name, given[1], given.back()}))),
                        Catch::Contains("exchange.collective is coded_sum there"));
    const Trained third = trained(temp, small_run(temp, keys(given)));
    CHECK(third.checksum == first.checksum);
    CHECK(third.effective.exchange.groups == first.effective.exchange.groups);
    CHECK_FALSE(fs::exists(temp.at("run/exchange_profile.json")));
  }
}

TEST_CASE("a profile of another run is an error that names the difference") {
  const TempFolder temp;
  const std::string file = temp.at("p.json");
  const auto refused = [&](const Keys& more) {
    const Keys all = keys({"exchange.merge=optimal", "exchange.profile=" + file});
    const LoadedConfig loaded = small_run(temp, with(all, more));
    return error_text<UserError>(
        [&] { throw_problems(check_run(loaded.config, load_data(loaded.config)).problems); });
  };
  trained(temp, small_run(temp, keys({"exchange.merge=omgs"})));
  fs::rename(temp.at("run/exchange_profile.json"), file);
  CHECK(refused({}).empty());
  CHECK(says(refused({"compress.name=gaussiank"}), {"p.json", "compress.name is topk there"}));
  CHECK(says(refused({"compress.density=0.5"}), {"compress.density is 0.01 there"}));
  CHECK(says(refused({"compress.values=bf16"}), {"compress.*", "(default) there"}));
  CHECK(says(refused({"dist.ranks=3"}), {"ranks is 2 there and 3 here"}));
  CHECK(says(refused({"model.hidden=[24]"}), {"number of parameters is 6 there and 4 here"}));
  CHECK(says(refused({"model.hidden=[24,15]"}), {"parameter 0 is output.weight of 160 elements there"}));
  CHECK(says(refused({"compress.dense_1d=true"}),
             {"parameter 1 is hidden2.bias of 16 elements there and hidden2.weight"}));
}

TEST_CASE("exchange.collective=auto becomes one that the method can use, in config.yaml too") {
  const TempFolder temp;
  const Trained chosen = trained(temp, small_run(temp, keys({"exchange.collective=auto"})));
  CHECK(chosen.effective.exchange.collective != "auto");
  CHECK(chosen.effective.exchange.groups.empty());
  CHECK(fs::exists(temp.at("run/exchange_profile.json")));
  for (const std::string method : {"dense", "powersgd"}) {
    const Trained only =
        trained(temp, small_run(temp, keys({"exchange.collective=auto", "compress.name=" + method})));
    CHECK(only.effective.exchange.collective == "all_gather");
  }
}

TEST_CASE("every method can be planned for: rounds of sums, dense parts, clipping, one rank") {
  const TempFolder temp;
  for (const Keys& variant : std::vector<Keys>{{"compress.name=powersgd"},
                                               {"compress.dense_1d=true"},
                                               {"train.clip_local=1"},
                                               {"dist.ranks=1"},
                                               {"compress.scope=tensor"},
                                               {"compress.dense_1d=true", "compress.dense_values=bf16"}}) {
    INFO(variant.back());
    const Keys all = keys({"exchange.merge=optimal", "train.max_steps=3"});
    CHECK(sum(trained(temp, small_run(temp, with(all, variant))).effective.exchange.groups) > 0);
  }
}

TEST_CASE("operations of a step are those counted by hand: mlp, lenet, resnet20") {
  // Of one image: the first layer, whose pictures want no gradient, and the others.
  const auto check = [](const Keys& keys, double images, double first, double others) {
    INFO(keys.front());
    const StepCost cost = cost_of(small(keys));
    CHECK(cost.forward_flops == Approx(images * (first + others)));
    CHECK(cost.backward_flops == Approx(images * (first + 2 * others)));
  };
  // Three batches of 10 make a step.
  check({"model.name=mlp", "model.hidden=[24]", "data.batch_size=10", "train.accumulate=3"}, 30,
        2.0 * 3072 * 24, 2.0 * 24 * 10);
  check({"model.name=lenet", "data.batch_size=16"}, 16, convolution(3, 6, 5, 32),
        convolution(6, 16, 5, 12) + 2.0 * (16 * 36 * 120 + 120 * 84 + 84 * 10));
  const double first = convolution(3, 16, 3, 32);
  const double others = 6 * convolution(16, 16, 3, 32) + convolution(16, 32, 3, 16) +
                        5 * convolution(32, 32, 3, 16) + convolution(32, 64, 3, 8) +
                        5 * convolution(64, 64, 3, 8) + 2 * 64 * 10;
  CHECK((first + others) / 2 == Approx(40.55e6).epsilon(1e-3));  // multiply-adds
  check({"model.name=resnet20", "data.batch_size=8"}, 8, first, others);
  // A frozen layer has no weight gradient.
  const StepCost frozen = cost_of(
      small({"model.name=mlp", "model.hidden=[24]", "model.freeze=[hidden1.*]", "data.batch_size=1"}));
  CHECK(frozen.backward_flops == Approx(2.0 * 24 * 10));
}

TEST_CASE("operations and activations of a language model are those counted by hand") {
  const testing::MadeUpText text;  // 26 words
  const Keys keys{"data.name=text",    "data.root=" + text.root(), "data.sequence_length=6",
                  "data.batch_size=8", "model.name=lstm_lm",       "model.width=32",
                  "model.layers=2",    "model.dropout=0",          "train.accumulate=2",
                  "train.threads=1"};
  const StepCost cost = cost_of(keys);
  const double tokens = 2 * 8 * 6, layers = 2 * 2.0 * 128 * 64, output = 2.0 * 26 * 32;
  CHECK(cost.forward_flops == Approx(tokens * (layers + output)));
  CHECK(cost.backward_flops == Approx(2 * cost.forward_flops));
  CHECK(cost.activations == Approx(measured_activations(keys)).epsilon(0.05));
}

TEST_CASE("activations are those that a pass over the whole batch holds") {
  const testing::Threads one(1);  // what others allocate is not counted
  for (const Keys& keys :
       {small({"model.name=mlp", "data.batch_size=32"}), small({"model.name=lenet", "data.batch_size=32"}),
        small({"model.name=resnet20", "data.batch_size=32"}), small({"data.batch_size=3"})}) {
    INFO(keys[0]);
    CHECK(cost_of(keys).activations == Approx(measured_activations(keys)).epsilon(0.05));
  }
  // Each of the 19 convolutions keeps what batch norm reads and what the next layer does.
  const double outputs = 7 * 16 * 32 * 32 + 6 * 32 * 16 * 16 + 6 * 64 * 8 * 8;
  CHECK(cost_of(small({"model.name=resnet20", "data.batch_size=32"})).activations ==
        Approx(32 * 2 * 4 * outputs).epsilon(0.1));
}

TEST_CASE("the state of optimizer and method counts what each carries") {
  const double whole = 4.0 * 269722, compressible = 4.0 * 268336;
  CHECK(cost_of(small({})).optimizer == whole);
  CHECK(cost_of(small({"optimizer.momentum=0"})).optimizer == 0);
  CHECK(cost_of(small({"compress.name=topk"})).method < 1000);
  // dgc: a velocity for each compressed element.
  CHECK(cost_of(small({"compress.name=dgc"})).method == Approx(compressible).epsilon(0.01));
}

// Compressors as the exchange and the configuration see them.
#include "compress/sparse.h"
#include "tests/compress/every_method.h"

using namespace topknot;
using namespace topknot::testing;

namespace {

// By making a compressor, and the same by asking for its bytes.
std::string refusal(const CompressOptions& options) {
  const std::string text = error_text<UserError>([&] { make_compressor(options, whole_group(10, 1)); });
  CHECK(error_text<UserError>([&] { planned_message_bytes(options, whole_group(10, 1), 0.1); }) == text);
  return text.empty() ? "accepted" : text;
}
using Step = std::array<float, 2>;

// compress.lr_inside accumulates learning rate times gradient (LAGS-SGD, arXiv 1911.08727, algorithm 1): what
// waits in the residual keeps the rate of its own step. This is what one rank applies to two weights, of
// which one is sent in each step; the values are exact.
std::vector<Step> applied(bool lr_inside, const std::vector<Step>& gradients,
                          const std::vector<float>& rates) {
  SimulatedRanks ranks(named("lags", {lr_inside ? "lr_inside=true" : "lr_inside=false"}), whole_group(2, 1));
  CHECK(ranks[0].compressor->applied() == (lr_inside ? Applied::learning_rate : Applied::nothing));
  std::vector<Step> result;
  for (std::size_t t = 0; t < gradients.size(); ++t) {
    ranks[0].gradient.assign(gradients[t].begin(), gradients[t].end());
    REQUIRE(ranks.step(std::int64_t(t), 0.5, {}, true, rates[t]));
    const float rate = lr_inside ? 1.0f : rates[t];
    result.push_back({rate * ranks[0].average[0], rate * ranks[0].average[1]});
  }
  return result;
}

using Steps = std::vector<Step>;
const Steps kGradients = {{3, 2}, {0, 1}, {1, 0}};

}  // namespace

TEST_CASE("a group with more elements than positions can name is refused, by every method") {
  constexpr std::size_t kMost = std::size_t{1} << 31;
  for (const char* name : {"topk", "dense", "powersgd"}) {
    const CompressOptions options = named(name);
    const GroupSpec group = whole_group(kMost, 1);
    CHECK(user_error([&] { make_compressor(options, group); }, {"exchange.merge", "2147483648", "buckets"}));
    CHECK(user_error([&] { planned_message_bytes(options, group, 0.1); }, {"exchange.merge", "2147483648"}));
  }
}

TEST_CASE("k is the floor of density times d in double, at least 1, and d at density 1") {
  CHECK(target_count(0.001, 272474) == 272);
  CHECK(target_count(0.001, 5) == 1);
  CHECK(target_count(0.1, 30) == 3);
  CHECK(target_count(0.29, 100) == 28);  // 0.29 * 100 is 28.999999999999996 in double
  CHECK(target_count(1.0, 7) == 7);
  CHECK(target_count(0.999999, 7) == 6);
  CHECK_THROWS_AS(target_count(0.0, 7), Error);
}

TEST_CASE("every registered piece has a line of help, and every preset is made of registered pieces") {
  const RegisteredNames* const registries[] = {&compressors(), &selectors(), &memories(), &index_codecs(),
                                               &value_codecs()};
  for (const RegisteredNames* registry : registries) {
    CHECK_FALSE(registry->names().empty());
    for (const std::string& name : registry->names()) {
      INFO(name);
      CHECK_FALSE(registry->help(name).empty());
      for (const Option& option : registry->options(name)) {
        CHECK_FALSE(option.help.empty());
        CHECK(option_problem(option, option.standard).empty());
      }
    }
  }
  for (const std::string& name : sparse_presets().names()) {
    INFO(name);
    const SparsePreset& preset = sparse_presets().find(name);
    CHECK(compressors().contains(name));
    CHECK(selectors().contains(preset.select));
    CHECK(memories().contains(preset.memory));
    CHECK(index_codecs().contains(preset.codec));
    CHECK(value_codecs().contains(preset.values));
  }
}

TEST_CASE("an option's value is checked against its type, range and choices") {
  const Option share{.name = "share", .standard = 0.5, .help = "x", .least = 0, .greatest = 1, .above = true};
  const Option mode{.name = "mode", .standard = "fast", .help = "x", .choices = {"fast", "exact"}};
  OptionValues values("compress");
  CHECK(values.get<double>(share) == 0.5);
  CHECK(values.get<std::string>(mode) == "fast");
  values.set("share", 1);  // an int fits a number
  CHECK(values.get<double>(share) == 1.0);
  values.set("share", 0.0);
  CHECK_THROWS_WITH(values.get<double>(share), "compress.share must be above 0, at most 1, not 0");
  values.set("share", "half");
  CHECK_THROWS_WITH(values.get<double>(share), Catch::Contains("another type"));
  values.set("mode", "exacd");
  CHECK_THROWS_WITH(values.get<std::string>(mode),
                    "compress.mode must be fast | exact, not 'exacd'; did you mean 'exact'?");
  values.set("mode", "exact");
  CHECK(values.get<std::string>(mode) == "exact");
}

TEST_CASE("unknown names and combinations without sense are refused by name, with the reason") {
  CHECK(says(refusal(named("topkk")), {"did you mean 'topk'"}));
  CHECK(says(refusal(named("topk", {"select=gausiank"})), {"did you mean 'gaussiank'"}));
  CHECK(says(refusal(named("topk", {"memory=residul"})), {"compress.memory"}));
  CHECK(says(refusal(named("topk", {"values=bf15"})), {"compress.values", "did you mean 'bf16'"}));
  CHECK(says(refusal(named("topk", {"codec=rise"})), {"compress.codec", "did you mean 'rice'"}));
  for (const char* capacity : {"capacity=0.5", "capacity=-1", "capacity=nan"})
    CHECK(says(refusal(named("topk", {capacity})), {"compress.capacity"}));
  CHECK(says(refusal(named("threshold")), {"compress.threshold"}));
}

TEST_CASE("methods without a selection refuse the keys of sparse methods by name") {
  const std::string kept = "memory=residual", uncertain = "values=centroid2_ans";  // dense sums have neither
  for (const std::string method : {"dense", "powersgd", "acpsgd", "signsgd", "qsgd", "terngrad"}) {
    CHECK(refusal(named(method)) == "accepted");
    const bool dense = method == "dense";
    for (const std::string& key :
         {std::string("select=topk"), dense ? kept : "memory=dgc", std::string("codec=raw"),
          dense ? uncertain : "values=fp16", std::string("capacity=2"), std::string("lr_inside=true")}) {
      INFO(method << ", " << key);
      CHECK(refusal(named(method, {key})).find("compress." + key.substr(0, key.find('='))) == 0);
    }
  }
}

TEST_CASE("an explicit key overrides the preset's choice") {
  const std::size_t d = 5000;
  SimulatedRanks mixed(named("gaussiank", {"select=topk", "memory=residual", "codec=raw", "values=fp32"}),
                       whole_group(d, 1)),
      topk(named("topk"), whole_group(d, 1));
  step_alike(
      {&mixed, &topk}, [](std::size_t) { return noise(5000, 0); }, 0, 0.01);
  CHECK(same_bits(mixed[0].gradient, topk[0].gradient));
  CHECK(same_bits(mixed[0].residual, topk[0].residual));
}

TEST_CASE("groups that are not covered by their segments are refused") {
  const auto make = [](GroupSpec spec) { return make_compressor(named("topk"), spec); };
  CHECK_THROWS_AS(make({10, {{0, 9}}, 1}), Error);
  CHECK_THROWS_AS(make({10, {{0, 4}, {5, 10}}, 1}), Error);
  CHECK_THROWS_AS(make({10, {{0, 4}, {4, 4}, {4, 10}}, 1}), Error);
  CHECK_THROWS_AS(make({10, {{0, 10}}, 0}), Error);
  CHECK_NOTHROW(make({10, {{0, 4}, {4, 10}}, 1}));
}

TEST_CASE("several segments select each for itself and are sent in one block") {
  const std::vector<std::pair<std::size_t, std::size_t>> segments = {{0, 100}, {100, 107}, {107, 5000}};
  const GroupSpec spec{5000, segments, 1};
  SimulatedRanks ranks(named("topk"), spec);
  std::vector<float> g = noise(5000, 1);
  for (std::size_t i = 0; i < 100; ++i) g[i] *= 1000;  // one selection over all would take only from here
  ranks[0].gradient = g;
  REQUIRE(ranks.step(0, 0.02));
  std::vector<std::uint32_t> expected;
  double smallest = 1e9;
  for (const auto& [begin, end] : segments) {
    const std::vector<float> part(g.begin() + std::ptrdiff_t(begin), g.begin() + std::ptrdiff_t(end));
    for (const std::uint32_t i : plain_topk(part, target_count(0.02, end - begin))) {
      expected.push_back(i + std::uint32_t(begin));
      smallest = std::min(smallest, double(std::abs(part[i])));
    }
  }
  std::vector<std::uint32_t> sent;
  for (std::uint32_t i = 0; i < 5000; ++i)
    if (ranks[0].average[i] != 0) sent.push_back(i);
  CHECK(sent == expected);
  CHECK(ranks[0].compressor->diagnostics().selected == expected.size());
  CHECK(ranks[0].compressor->diagnostics().threshold == smallest);
  CHECK(ranks.blocks()[0].size() == planned_message_bytes(named("topk"), spec, 0.02));
}

TEST_CASE("beyond capacity the largest of the selected are sent, the rest stays and is counted") {
  const std::size_t d = 10007;
  SimulatedRanks unlimited(named("gaussiank"), whole_group(d, 1)),
      limited(named("gaussiank", {"capacity=1.5"}), whole_group(d, 1));
  const std::vector<float> x = fixture("cubic");  // the rule selects 229 for k = 10
  step_alike(
      {&unlimited, &limited}, [&](std::size_t) { return x; }, 0, 0.001);
  CHECK(unlimited[0].compressor->diagnostics().over_capacity == 0);
  CHECK(limited[0].compressor->diagnostics().selected == 15);
  CHECK(limited[0].compressor->diagnostics().over_capacity ==
        unlimited[0].compressor->diagnostics().selected - 15);
  const std::vector<std::uint32_t> largest = plain_topk(x, 15);
  for (std::uint32_t i = 0; i < d; ++i) {
    const bool sent = std::binary_search(largest.begin(), largest.end(), i);
    REQUIRE(limited[0].average[i] == (sent ? x[i] : 0));
    REQUIRE(limited[0].residual[i] == (sent ? 0 : x[i]));
  }
}

TEST_CASE("dense averages in place, with weights, and shows a sum that is not finite") {
  SimulatedRanks ranks(named("dense"), whole_group(3, 2));
  ranks[0].gradient = {1, 2, 3};
  ranks[1].gradient = {3, -2, 5};
  REQUIRE(ranks.step(0, 1.0, {1.5f, 0.5f}));
  CHECK(ranks[0].gradient == std::vector<float>{1.5f, 1, 3.5f});
  CHECK(ranks[1].gradient == ranks[0].gradient);
  ranks[0].gradient = {1, 3e38f, 3};
  ranks[1].gradient = {3, 3e38f, 5};
  CHECK_FALSE(ranks.step(1, 1.0));
  ranks[0].gradient = {1, 2, 3};
  ranks[1].gradient = {3, -2, std::nanf("")};
  CHECK_FALSE(ranks.step(2, 1.0));
  CHECK_FALSE(ranks[0].compressor->finite());
  CHECK(planned_message_bytes(named("dense"), whole_group(3, 2), 1.0) == 12);
}

TEST_CASE("calls out of order are refused") {
  for (const std::string name : {"dense", "topk"}) {
    const auto compressor = make_compressor(named(name), whole_group(4, 1));
    std::vector<float> gradient(4, 1.0f), residual(4), other(5);
    CHECK_THROWS_AS(compressor->decode({}), Error);
    CHECK_THROWS_AS(compressor->commit({}), Error);
    CHECK_THROWS_AS(compressor->encode({other, residual}, {}), Error);
    compressor->encode({gradient, residual}, {});
    CHECK_THROWS_AS(compressor->encode({gradient, residual}, {}), Error);
    CHECK_THROWS_AS(compressor->commit({}), Error);
    compressor->discard();
    CHECK_NOTHROW(compressor->encode({gradient, residual}, {}));
  }
}

TEST_CASE("a segment's own density counts where it is above the step's") {
  GroupSpec spec = whole_group(2000, 1);
  spec.segments = {{0, 1000}, {1000, 2000}};
  spec.densities = {0.0, 0.5};
  SimulatedRanks ranks(named("topk"), spec);
  for (const auto& [density, entries] : {std::pair<double, std::size_t>{0.1, 600}, {0.8, 1600}}) {
    for (std::size_t i = 0; i < 2000; ++i) ranks[0].gradient[i] = float(i + 1);
    REQUIRE(ranks.step(0, density));
    CHECK(ranks[0].compressor->diagnostics().selected == entries);
  }
}

TEST_CASE("the residual keeps the learning rate of the step it comes from") {
  // a1 = 0.5 (3, 2) = (1.5, 1): 1.5 is sent, 1 stays. a2 = (0, 1) + 0.25 (0, 1) = (0, 1.25).
  // a3 = 0.125 (1, 0).
  CHECK(applied(true, kGradients, {0.5f, 0.25f, 0.125f}) == Steps{{1.5f, 0}, {0, 1.25f}, {0.125f, 0}});
  // With the rate outside, u2 = (0, 2) + (0, 1) and all of it takes the second step's rate.
  CHECK(applied(false, kGradients, {0.5f, 0.25f, 0.125f}) == Steps{{1.5f, 0}, {0, 0.75f}, {0.125f, 0}});
  // Under a constant rate it makes no difference where it is applied.
  CHECK(applied(true, kGradients, {0.5f, 0.5f, 0.5f}) == applied(false, kGradients, {0.5f, 0.5f, 0.5f}));
}

// What auto would choose elsewhere: regions and their borders, and the file of a run's profiles.
#include "train/plan/choose.h"

#include "tests/support/test.h"

namespace topknot {
namespace {

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

}  // namespace topknot

// Deep Gradient Compression as a whole: golden traces, and what its memory promises.
#include <array>
#include <limits>

#include "compress/memory/memory.h"
#include "compress/select/passes/passes.h"
#include "compress/state.h"
#include "nn/base/check.h"
#include "nn/core/rng.h"
#include "tests/compress/simulated_ranks.h"
#include "tests/support/catch.h"

using namespace topknot;
using namespace topknot::testing;

namespace {

CompressOptions dgc(double momentum, bool nesterov, bool masking) {
  CompressOptions options = named("dgc");
  options.momentum = momentum;
  options.nesterov = nesterov;
  options.set("momentum_masking", masking);
  return options;
}

std::vector<float> random_vector(std::uint32_t stream, std::size_t n) {
  const CounterRng rng(43, RngUse::test, stream);
  std::vector<float> x(n);
  for (std::size_t i = 0; i < n; ++i) x[i] = rng.normal(i);
  return x;
}

// Of the last committed step, as it is saved.
std::vector<float> velocity_of(const Memory& memory) {
  StateWriter writer;
  memory.save(writer);
  const std::vector<std::byte> bytes = writer.take();
  StateReader reader(bytes);
  return reader.get_list<float>();
}

// Gradients of the golden traces.
double trace_gradient(int t, int p, int j) {
  return ((3 * t + 5 * p + 7 * j) % 11 - 5) / 10.0;
}

struct Sent {
  std::uint32_t index;
  double value;
};
using Weights = std::array<double, 4>;

// The paper's formulas, an element at a time.
struct PlainRank {
  std::array<double, 4> velocity{}, v{};
  Sent step(int t, int p, bool nesterov, bool masking) {
    std::size_t largest = 0;
    for (std::size_t j = 0; j < 4; ++j) {
      const double g = trace_gradient(t, p, static_cast<int>(j));
      velocity[j] = nesterov ? 0.9 * (velocity[j] + g) : 0.9 * velocity[j] + g;
      v[j] += nesterov ? velocity[j] + g : velocity[j];
      if (std::abs(v[j]) > std::abs(v[largest]) + 1e-12) largest = j;
    }
    const Sent sent{static_cast<std::uint32_t>(largest), v[largest]};
    v[largest] = 0;
    if (masking) velocity[largest] = 0;
    return sent;
  }
};

// Runs four steps of two ranks with one entry each and lr 0.1; calls check(t, entries of a step, weights).
template <class Check>
void run_trace(bool nesterov, bool masking, Check&& check) {
  SimulatedRanks ranks(dgc(0.9, nesterov, masking), whole_group(4, 2));
  Weights w{1, 1, 1, 1};
  for (int t = 0; t < 4; ++t) {
    for (int p = 0; p < 2; ++p)
      for (int j = 0; j < 4; ++j)
        ranks[static_cast<std::size_t>(p)].gradient[static_cast<std::size_t>(j)] =
            static_cast<float>(trace_gradient(t, p, j));
    REQUIRE(ranks.step(t, 0.25));
    for (std::size_t j = 0; j < 4; ++j) w[j] -= 0.1 * static_cast<double>(ranks[0].average[j]);
    check(static_cast<std::size_t>(t), ranks.sent(), w);
  }
}

void check_entry(const SparseVector& entries, Sent expected) {
  REQUIRE(entries.indices.size() == 1);
  CHECK(entries.indices[0] == expected.index);
  CHECK(entries.values[0] == Approx(expected.value).epsilon(1e-6));
}
void check_weights(const Weights& w, const Weights& expected) {
  for (std::size_t j = 0; j < 4; ++j) CHECK(w[j] == Approx(expected[j]).epsilon(1e-7));
}

}  // namespace

// Golden values: computed in float64, ties by lower index.
TEST_CASE("four steps of momentum correction with masking give the golden trace") {
  const Sent sent[4][2] = {
      {{0, -.5}, {1, -.4}}, {{1, .88}, {0, .3}}, {{3, .785}, {3, .609}}, {{1, -.57}, {0, -1.15}}};
  const Weights weights[4] = {
      {1.025, 1.02, 1, 1}, {1.01, .976, 1, 1}, {1.01, .976, 1, .9303}, {1.0675, 1.0045, 1, .9303}};
  run_trace(false, true, [&](std::size_t t, const std::vector<SparseVector>& entries, const Weights& w) {
    INFO("step " << t);
    for (std::size_t p = 0; p < 2; ++p) check_entry(entries[p], sent[t][p]);
    check_weights(w, weights[t]);
  });
}

TEST_CASE("four steps of Nesterov's form with masking give the golden trace") {
  const Sent sent[4][2] = {
      {{0, -.95}, {1, -.76}}, {{1, 1.492}, {0, .57}}, {{3, .9065}, {3, 1.1481}}, {{1, -.813}, {0, -1.735}}};
  run_trace(true, true, [&](std::size_t t, const std::vector<SparseVector>& entries, const Weights& w) {
    INFO("step " << t);
    for (std::size_t p = 0; p < 2; ++p) check_entry(entries[p], sent[t][p]);
    if (t == 3) check_weights(w, {1.10575, 1.00405, 1, .89727});
  });
}

TEST_CASE("traces follow the plain formulas, with and without masking") {
  const bool nesterov = GENERATE(false, true), masking = GENERATE(false, true);
  std::array<PlainRank, 2> plain;
  bool masked_matters = false;
  run_trace(nesterov, masking, [&](std::size_t t, const std::vector<SparseVector>& entries, const Weights&) {
    for (std::size_t p = 0; p < 2; ++p) {
      const Sent expected = plain[p].step(static_cast<int>(t), static_cast<int>(p), nesterov, masking);
      check_entry(entries[p], expected);
      masked_matters |= plain[p].velocity[expected.index] != 0;
    }
  });
  CHECK(masked_matters == !masking);
}

TEST_CASE(
    "at density 1 on one rank, DGC without masking is momentum SGD bit for bit, with masking plain SGD") {
  const bool nesterov = GENERATE(false, true), masking = GENERATE(false, true);
  const std::size_t d = 3001;
  SimulatedRanks ranks(dgc(0.9, nesterov, masking), whole_group(d, 1));
  const float m = static_cast<float>(0.9), lr = 0.05f;
  std::vector<float> w = random_vector(1000, d), expected = w, b(d);
  for (std::uint32_t t = 0; t < 20; ++t) {
    const std::vector<float> g = random_vector(t, d);
    for (std::size_t i = 0; i < d; ++i) {  // torch.optim.SGD
      float direction = g[i];
      b[i] = m * b[i] + g[i];
      if (!masking) direction = nesterov ? g[i] + m * b[i] : b[i];
      if (masking && nesterov) direction = g[i] + m * g[i];  // each step is a first one
      expected[i] -= lr * direction;
    }
    ranks[0].gradient = g;
    REQUIRE(ranks.step(t, 1.0));
    for (std::size_t i = 0; i < d; ++i) w[i] -= lr * ranks[0].average[i];
    REQUIRE(same_bits(w, expected));
  }
}

TEST_CASE("without masking nothing is lost: all that was sent and v are the sum of the velocities") {
  const bool nesterov = GENERATE(false, true);
  const std::size_t d = 2500;
  SimulatedRanks ranks(dgc(0.9, nesterov, false), whole_group(d, 2));
  std::vector<double> sent(d), sum(d);
  std::array<std::vector<double>, 2> velocity = {std::vector<double>(d), std::vector<double>(d)};
  for (std::uint32_t t = 0; t < 45; ++t) {
    for (std::uint32_t p = 0; p < 2; ++p) {
      const std::vector<float> g = random_vector(2 * t + p, d);
      ranks[p].gradient.assign(g.begin(), g.end());
      for (std::size_t i = 0; i < d; ++i) {
        const double x = g[i];
        velocity[p][i] = nesterov ? 0.9 * (velocity[p][i] + x) : 0.9 * velocity[p][i] + x;
        sum[i] += nesterov ? velocity[p][i] + x : velocity[p][i];
      }
    }
    REQUIRE(ranks.step(t, t < 40 ? 0.01 : 1.0));  // the last steps flush
    for (std::size_t i = 0; i < d; ++i) sent[i] += 2 * static_cast<double>(ranks[0].average[i]);
    if (t % 10 == 9 || t == 44)
      for (std::size_t i = 0; i < d; ++i)
        REQUIRE(sent[i] + static_cast<double>(ranks[0].residual[i]) +
                    static_cast<double>(ranks[1].residual[i]) ==
                Approx(sum[i]).epsilon(1e-5).margin(1e-4));
  }
  for (std::size_t i = 0; i < d; ++i) REQUIRE(ranks[0].residual[i] == 0);
}

TEST_CASE("v after a step is bit for bit what the formula says, on any number of elements") {
  const std::size_t d = GENERATE(1, 15, 16, 17, 1000, 200003);
  const bool nesterov = GENERATE(false, true), pass = GENERATE(false, true);
  const auto memory = make_memory("dgc", dgc(0.7, nesterov, true));
  std::vector<float> spare(d), velocity(d);
  for (std::uint32_t t = 0; t < 3; ++t) {
    const std::vector<float> values = random_vector(t, d);
    std::vector<float> gradient(values.begin(), values.end()), expected(d);
    for (std::size_t i = 0; i < d; ++i) {
      const float g = gradient[i], m = static_cast<float>(0.7);
      velocity[i] = nesterov ? m * (velocity[i] + g) : m * velocity[i] + g;
      expected[i] = spare[i] + (nesterov ? velocity[i] + g : velocity[i]);
    }
    const FeedbackInput input = memory->input(gradient, spare);
    const std::size_t cut = d * t / 3;  // ranges that begin anywhere
    for (const auto& [begin, size] : {std::pair(std::size_t{0}, cut), std::pair(cut, d - cut)}) {
      const std::span<float> range = std::span<float>(gradient).subspan(begin, size);
      Candidates found;
      if (pass)
        accumulate_and_collect(range, input.part(begin, size), kLargestFinite, 0, found);
      else
        input.part(begin, size).add_to(range);
    }
    REQUIRE(same_bits(gradient, expected));
    memory->commit(gradient, spare, {}, {});
    REQUIRE(same_bits(velocity_of(*memory), velocity));
    spare = gradient;
  }
}

TEST_CASE(
    "what is sent leaves v and loses its velocity; rejected entries keep both; coding errors stay in v") {
  const bool masking = GENERATE(true, false);
  const auto memory = make_memory("dgc", dgc(0.5, false, masking));
  std::vector<float> gradient = {1, 2, 3, 4}, spare(4);
  memory->input(gradient, spare).add_to(gradient);
  const std::vector<std::uint32_t> indices = {1, 2, 3}, rejected = {3};
  const std::vector<float> sent = {2, 2.75f, 4};
  memory->commit(gradient, spare, {indices, sent}, rejected);
  CHECK(gradient == std::vector<float>{1, 0, 0.25f, 4});
  CHECK(velocity_of(*memory) == (masking ? std::vector<float>{1, 0, 0, 4} : std::vector<float>{1, 2, 3, 4}));
}

TEST_CASE("a skipped step of DGC changes nothing, whether it held a NaN or was only not agreed on") {
  const int poison = GENERATE(0, 1, 2);
  const bool nesterov = GENERATE(false, true);
  const std::size_t d = 9001;
  SimulatedRanks skipped(dgc(0.9, nesterov, true), whole_group(d, 2)),
      straight(dgc(0.9, nesterov, true), whole_group(d, 2));
  for (std::uint32_t t = 0; t < 12; ++t) {
    if (t % 4 == 0) {  // the first step too
      for (std::uint32_t p = 0; p < 2; ++p) skipped[p].gradient = random_vector(500 + 2 * t + p, d);
      if (poison == 0) skipped[1].gradient[8999] = std::numeric_limits<float>::quiet_NaN();
      if (poison == 1) skipped[0].gradient[3] = -std::numeric_limits<float>::infinity();
      const std::vector<float> before = skipped[0].residual;
      REQUIRE_FALSE(skipped.step(t, 0.02, {}, poison != 2));
      CHECK(same_bits(skipped[0].residual, before));
    }
    for (std::uint32_t p = 0; p < 2; ++p)
      skipped[p].gradient = straight[p].gradient = random_vector(2 * t + p, d);
    REQUIRE(skipped.step(t, 0.01));
    REQUIRE(straight.step(t, 0.01));
    for (std::size_t p = 0; p < 2; ++p) {
      REQUIRE(same_bits(skipped[p].gradient, straight[p].gradient));
      REQUIRE(same_bits(skipped[p].residual, straight[p].residual));
      REQUIRE(skipped[p].compressor->state() == straight[p].compressor->state());
    }
    REQUIRE(skipped.blocks() == straight.blocks());
  }
}

TEST_CASE("DGC goes on from its saved state with the same bits, and needs it") {
  const std::size_t d = 5000;
  const CompressOptions options = dgc(0.9, false, true);
  SimulatedRanks straight(options, whole_group(d, 2)), resumed(options, whole_group(d, 2)),
      forgetful(options, whole_group(d, 2));
  const int saved_at = GENERATE(0, 4);
  for (std::uint32_t t = 0; t < 8; ++t) {
    if (t == static_cast<std::uint32_t>(saved_at))
      for (std::size_t p = 0; p < 2; ++p) {
        resumed[p].residual = forgetful[p].residual = straight[p].residual;
        resumed[p].compressor->load_state(straight[p].compressor->state());
      }
    for (std::uint32_t p = 0; p < 2; ++p)
      resumed[p].gradient = forgetful[p].gradient = straight[p].gradient = random_vector(2 * t + p, d);
    REQUIRE(straight.step(t, 0.01));
    if (t < static_cast<std::uint32_t>(saved_at)) continue;
    REQUIRE(resumed.step(t, 0.01));
    REQUIRE(forgetful.step(t, 0.01));
    REQUIRE(resumed.blocks() == straight.blocks());
    REQUIRE(same_bits(resumed[1].residual, straight[1].residual));
    if (saved_at > 0 && t == 7) CHECK(forgetful.blocks() != straight.blocks());
  }
}

TEST_CASE("a state of another method, or cut off, is refused") {
  SimulatedRanks trained(dgc(0.9, false, true), whole_group(10, 1)), other(named("topk"), whole_group(10, 1)),
      still(dgc(0, false, true), whole_group(10, 1)), longer(dgc(0.9, false, true), whole_group(11, 1));
  trained[0].gradient = random_vector(1, 10);
  REQUIRE(trained.step(0, 0.2));
  const std::vector<std::byte> state = trained[0].compressor->state();
  CHECK_THROWS_AS(other[0].compressor->load_state(state), Error);
  CHECK_THROWS_AS(still[0].compressor->load_state(state), Error);
  CHECK_THROWS_AS(longer[0].compressor->load_state(state), Error);
  CHECK_THROWS_AS(trained[0].compressor->load_state(std::span(state).first(state.size() - 1)), Error);
}

TEST_CASE("DGC without momentum is error feedback, bit for bit") {
  CompressOptions feedback = named("dgc");
  feedback.memory = "residual";
  SimulatedRanks a(dgc(0, false, true), whole_group(3000, 2)), b(feedback, whole_group(3000, 2));
  for (std::uint32_t t = 0; t < 5; ++t) {
    for (std::uint32_t p = 0; p < 2; ++p) a[p].gradient = b[p].gradient = random_vector(2 * t + p, 3000);
    REQUIRE(a.step(t, 0.01));
    REQUIRE(b.step(t, 0.01));
    CHECK(a.blocks() == b.blocks());
    CHECK(same_bits(a[1].residual, b[1].residual));
  }
}

TEST_CASE("the momentum of DGC's average is not the optimizer's, that of other memories is") {
  CHECK(make_compressor(dgc(0.9, false, true), whole_group(4, 1))->applied() == Applied::momentum);
  CompressOptions options = dgc(0.9, false, true);
  options.memory = "residual";
  CHECK(make_compressor(options, whole_group(4, 1))->applied() == Applied::nothing);
  options = dgc(0.9, false, true);
  options.select = "topk";
  CHECK(make_compressor(options, whole_group(4, 1))->applied() == Applied::momentum);
}

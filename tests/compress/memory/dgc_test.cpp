// Deep Gradient Compression as a whole: its traces, and what its memory promises. Golden traces:
// lab/tests/test_sparsify.py.
#include "compress/memory/memory.h"
#include "compress/select/passes/passes.h"
#include "compress/state.h"
#include "tests/compress/simulated_ranks.h"

using namespace topknot;
using namespace topknot::testing;

namespace {

CompressOptions dgc(double momentum, bool nesterov, bool masking) {
  CompressOptions options = named("dgc", {masking ? "momentum_masking=true" : "momentum_masking=false"});
  options.momentum = momentum, options.nesterov = nesterov;
  return options;
}

// Of the last committed step, as it is saved.
std::vector<float> velocity_of(const Memory& memory) {
  StateWriter writer;
  memory.save(writer);
  const std::vector<std::byte> bytes = writer.take();
  StateReader reader(bytes);
  return reader.get_list<float>();
}

// Gradients of the traces.
double trace_gradient(int t, int p, int j) {
  return ((3 * t + 5 * p + 7 * j) % 11 - 5) / 10.0;
}

struct Sent {
  std::uint32_t index;
  double value;
};

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

}  // namespace

TEST_CASE("traces follow the plain formulas, with and without masking") {
  const bool nesterov = GENERATE(false, true), masking = GENERATE(false, true);
  std::array<PlainRank, 2> plain;
  SimulatedRanks ranks(dgc(0.9, nesterov, masking), whole_group(4, 2));
  bool masked_matters = false;
  std::array<double, 4> weights{1, 1, 1, 1};
  for (int t = 0; t < 4; ++t) {
    for (std::size_t p = 0; p < 2; ++p)
      for (std::size_t j = 0; j < 4; ++j)
        ranks[p].gradient[j] =
            static_cast<float>(trace_gradient(t, static_cast<int>(p), static_cast<int>(j)));
    REQUIRE(ranks.step(t, 0.25));
    for (std::size_t p = 0; p < 2; ++p) {
      const Sent expected = plain[p].step(t, static_cast<int>(p), nesterov, masking);
      const SparseVector& entries = ranks.sent()[p];
      REQUIRE(entries.indices == std::vector<std::uint32_t>{expected.index});
      CHECK(entries.values[0] == Approx(expected.value).epsilon(1e-6));
      masked_matters |= plain[p].velocity[expected.index] != 0;
    }
    for (std::size_t j = 0; j < 4; ++j) weights[j] -= 0.1 * static_cast<double>(ranks[0].average[j]);
  }
  CHECK(masked_matters == !masking);
  if (!masking) return;
  // Computed in float64, ties by lower index.
  const double golden[2][4] = {{1.0675, 1.0045, 1, .9303}, {1.10575, 1.00405, 1, .89727}};
  for (std::size_t j = 0; j < 4; ++j) CHECK(weights[j] == Approx(golden[nesterov][j]).epsilon(1e-7));
}

TEST_CASE(
    "at density 1 on one rank, DGC without masking is momentum SGD bit for bit, with masking plain SGD") {
  const bool nesterov = GENERATE(false, true), masking = GENERATE(false, true);
  const std::size_t d = 3001;
  SimulatedRanks ranks(dgc(0.9, nesterov, masking), whole_group(d, 1));
  const float m = static_cast<float>(0.9), lr = 0.05f;
  std::vector<float> w = noise(d, 1000), expected = w, b(d);
  for (std::uint32_t t = 0; t < 20; ++t) {
    const std::vector<float> g = noise(d, t);
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
      const std::vector<float> g = noise(d, 2 * t + p);
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
  std::vector<float> residual(d), velocity(d);
  for (std::uint32_t t = 0; t < 3; ++t) {
    const std::vector<float> values = noise(d, t);
    std::vector<float> gradient(values.begin(), values.end()), expected(d);
    for (std::size_t i = 0; i < d; ++i) {
      const float g = gradient[i], m = static_cast<float>(0.7);
      velocity[i] = nesterov ? m * (velocity[i] + g) : m * velocity[i] + g;
      expected[i] = residual[i] + (nesterov ? velocity[i] + g : velocity[i]);
    }
    const FeedbackInput input = memory->input(gradient, residual);
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
    memory->commit(gradient, residual, {}, {});
    REQUIRE(same_bits(velocity_of(*memory), velocity));
    residual = gradient;
  }
}

TEST_CASE("what was sent leaves a memory and its velocity; rejected entries and coding errors stay") {
  struct Row {
    std::string memory;
    bool masking;
    std::vector<float> residual, kept, velocity;  // ef21 keeps the negative estimate
  };
  for (const Row& row : {Row{"residual", true, std::vector<float>(5), {1, 2, 0.25f, 0, 5}, {}},
                         {"dgc", true, std::vector<float>(5), {1, 2, 0.25f, 0, 5}, {1, 2, 0, 0, 5}},
                         {"dgc", false, std::vector<float>(5), {1, 2, 0.25f, 0, 5}, {1, 2, 3, 4, 5}},
                         {"ef21", true, {-1, 0, 0, -1, 0}, {-1, 0, -2.75f, -4, 0}, {}}}) {
    INFO(row.memory << ", masking " << row.masking);
    const auto memory = make_memory(row.memory, dgc(0.5, false, row.masking));
    std::vector<float> u = {1, 2, 3, 4, 5}, residual = row.residual;
    memory->input(u, residual).add_to(u);
    const std::vector<std::uint32_t> indices = {1, 2, 3, 4}, rejected = {4, 1};
    const std::vector<float> sent = {u[1], u[2] - 0.25f, u[3], u[4]};
    memory->commit(u, residual, {indices, sent}, rejected);
    CHECK((row.memory == "ef21" ? residual : u) == row.kept);
    if (row.memory == "dgc") CHECK(velocity_of(*memory) == row.velocity);
  }
}

TEST_CASE("a state of another method, or cut off, is refused") {
  SimulatedRanks trained(dgc(0.9, false, true), whole_group(10, 1)), other(named("topk"), whole_group(10, 1)),
      still(dgc(0, false, true), whole_group(10, 1)), longer(dgc(0.9, false, true), whole_group(11, 1));
  trained[0].gradient = noise(10, 1);
  REQUIRE(trained.step(0, 0.2));
  const std::vector<std::byte> state = trained[0].compressor->state();
  CHECK_THROWS_AS(other[0].compressor->load_state(state), Error);
  CHECK_THROWS_AS(still[0].compressor->load_state(state), Error);
  CHECK_THROWS_AS(longer[0].compressor->load_state(state), Error);
  CHECK_THROWS_AS(trained[0].compressor->load_state(std::span(state).first(state.size() - 1)), Error);
}

TEST_CASE("DGC without momentum is error feedback, bit for bit") {
  SimulatedRanks a(dgc(0, false, true), whole_group(3000, 2)),
      b(named("dgc", {"memory=residual"}), whole_group(3000, 2));
  for (std::uint32_t t = 0; t < 5; ++t) {
    const auto gradient = [&](std::size_t p) { return noise(3000, 2 * t + static_cast<std::uint32_t>(p)); };
    step_alike({&a, &b}, gradient, t, 0.01);
    CHECK(a.blocks() == b.blocks());
    CHECK(same_bits(a[1].residual, b[1].residual));
  }
}

TEST_CASE("the momentum of DGC's average is not the optimizer's, that of other memories is") {
  const auto applied = [](const std::vector<std::string>& keys) {
    return make_compressor(with(dgc(0.9, false, true), keys), whole_group(4, 1))->applied();
  };
  CHECK(applied({}) == Applied::momentum);
  CHECK(applied({"memory=residual"}) == Applied::nothing);
  CHECK(applied({"select=topk"}) == Applied::momentum);
}

// Memories: error feedback, EF21 (differences to an estimate are sent, and it is stepped along), and DGC.
#include "compress/memory/memory.h"
#include "compress/select/passes/passes.h"
#include "compress/select/selector.h"
#include "compress/sparse.h"
#include "compress/state.h"
#include "tests/compress/simulated_ranks.h"

using namespace topknot;
using namespace topknot::testing;

namespace {

// g_t,p[j] = ((3t + 5p + 7j) mod 11) - 5: ten times the gradients of the golden trace, integers so that the
// tie at t = 2 is exact.
std::vector<float> trace_gradient(int t, int p) {
  std::vector<float> g(4);
  for (int j = 0; j < 4; ++j) g[std::size_t(j)] = float((3 * t + 5 * p + 7 * j) % 11 - 5);
  return g;
}

struct Sent {
  std::uint32_t index;
  double value;
};
constexpr std::array<std::array<Sent, 2>, 4> kSent = {
    {{{{0, -5}, {1, -4}}}, {{{1, 7}, {0, 3}}}, {{{1, -3}, {3, 6}}}, {{{3, 5}, {0, -7}}}}};
// Weights of the golden trace; ten times the gradients at a tenth of lr = 0.1 give the same.
constexpr double kWeights[4][4] = {
    {1.025, 1.02, 1, 1}, {1.0325, 1.003, 1, 1}, {1.03925, 1.0027, 1, .97}, {1.080325, 1.00243, 1, .918}};
constexpr double kResiduals[2][4] = {{3, 0, -1, 0}, {0, 6, -3, -3}};

// SGD with momentum 0.9 on the average; the first buffer is the first gradient, which a buffer of zeros gives
// too.
void momentum_step(std::vector<double>& weights, std::vector<double>& momentum,
                   const std::vector<float>& average) {
  for (std::size_t j = 0; j < 4; ++j) {
    momentum[j] = 0.9 * momentum[j] + double(average[j]);
    weights[j] -= 0.01 * momentum[j];
  }
}

}  // namespace

TEST_CASE("two ranks of the topk compressor give the golden trace") {
  SimulatedRanks ranks(named("topk"), whole_group(4, 2));
  std::vector<double> weights(4, 1.0), momentum(4, 0.0);
  for (int t = 0; t < 4; ++t) {
    for (int p = 0; p < 2; ++p) ranks[std::size_t(p)].gradient = trace_gradient(t, p);
    REQUIRE(ranks.step(t, 0.25));
    for (std::size_t p = 0; p < 2; ++p) {
      CHECK(ranks[p].compressor->diagnostics().selected == 1);
      CHECK(ranks[p].compressor->diagnostics().threshold == std::abs(kSent[t][p].value));
    }
    const std::vector<float> average(ranks[0].average.begin(), ranks[0].average.end());
    momentum_step(weights, momentum, average);
    for (std::size_t j = 0; j < 4; ++j) CHECK(weights[j] == Approx(kWeights[t][j]).epsilon(1e-12));
  }
  for (std::size_t p = 0; p < 2; ++p)
    for (std::size_t j = 0; j < 4; ++j) CHECK(ranks[p].residual[j] == kResiduals[p][j]);
}

TEST_CASE("without a memory what is not sent is lost, and the residual memory is not needed") {
  const auto compressor = make_compressor(named("topk", {"memory=none"}), whole_group(4, 1));
  std::vector<float> gradient = {1, -4, 2, 3};
  StepContext info;
  info.density = 0.5;
  std::vector<std::vector<std::byte>> blocks = {compressor->encode({gradient, {}}, info).block};
  CHECK_FALSE(compressor->decode({.blocks = views_of(blocks)}));
  const auto average = compressor->commit({});
  CHECK(average.data() == gradient.data());
  CHECK(gradient == std::vector<float>{0, -4, 0, 3});
}

TEST_CASE("the (1 - k/d)^2 bound of Shi et al. holds for bell shapes and not for a constant magnitude") {
  const std::size_t d = 200000, k = 2000;
  const auto ratio = [&](std::vector<float> x) {
    const auto selector = make_selector("topk");
    Selection selected;
    SelectStep step;
    step.k = k;
    selector->select(x, {}, step, selected);
    double all = 0, kept = 0;
    for (const double v : x) all += v * v;
    for (const double v : selected.values) kept += v * v;
    return (all - kept) / all;
  };
  const CounterRng rng(31, RngUse::test);
  std::vector<float> normal(d), laplace(d), constant(d);
  for (std::size_t i = 0; i < d; ++i) {
    normal[i] = rng.normal(i);
    laplace[i] = float(-std::log(1.0 - rng.uniform(d + i)) * (i % 2 ? 1 : -1));
    constant[i] = i % 3 ? 0.7f : -0.7f;
  }
  const double bound = (1 - 0.01) * (1 - 0.01);
  CHECK(ratio(normal) == Approx(0.91624).margin(0.002));
  CHECK(ratio(laplace) == Approx(0.83610).margin(0.008));
  CHECK(ratio(normal) < bound);
  CHECK(ratio(laplace) < bound);
  CHECK(ratio(constant) == Approx(1 - 0.01).epsilon(1e-9));
  CHECK(ratio(constant) > bound);
}

namespace {

CompressOptions with_memory(const std::string& memory) {
  return named("topk", {"memory=" + memory});
}

// Ranks with different quadratics f_r(w) = sum_j a_rj (w_j - c_rj)^2 / 2, whose mean has its minimum at
// sum_r a c / sum_r a. Returns the greatest distance to it after `steps` of gradient descent.
double distance_to_optimum(const std::string& memory, int steps) {
  constexpr std::size_t d = 20, ranks = 4;
  SimulatedRanks steppers(with_memory(memory), whole_group(d, ranks));
  std::vector<std::vector<float>> a(ranks), c(ranks);
  for (std::uint32_t r = 0; r < ranks; ++r) {
    a[r] = noise(d, r);
    for (float& x : a[r]) x = 0.5f + x * x / (1 + x * x);
    c[r] = noise(d, 10 + r);
    for (float& x : c[r]) x *= 10;  // far apart: a rank's gradient does not vanish at the optimum
  }
  std::vector<double> w(d);
  for (int t = 0; t < steps; ++t) {
    for (std::size_t r = 0; r < ranks; ++r)
      for (std::size_t j = 0; j < d; ++j) steppers[r].gradient[j] = float(a[r][j] * (w[j] - c[r][j]));
    REQUIRE(steppers.step(t, 0.1));
    for (std::size_t j = 0; j < d; ++j) w[j] -= 0.05 * double(steppers[0].average[j]);
  }
  double distance = 0;
  for (std::size_t j = 0; j < d; ++j) {
    double weighted = 0, sum = 0;
    for (std::size_t r = 0; r < ranks; ++r)
      weighted += double(a[r][j]) * double(c[r][j]), sum += double(a[r][j]);
    distance = std::max(distance, std::abs(w[j] - weighted / sum));
  }
  return distance;
}

}  // namespace

TEST_CASE("ranks that differ reach the exact optimum with EF21, and stay away from it without a memory") {
  CHECK(distance_to_optimum("ef21", 3000) < 1e-5);
  CHECK(distance_to_optimum("none", 3000) > 0.1);
  CHECK(distance_to_optimum("residual", 3000) > 1e-4);  // near, and moving about
}

TEST_CASE("the estimate is the weighted mean of what all ranks hold, at all times") {
  const std::size_t d = 3000, ranks = 3;
  const bool weighted = GENERATE(false, true);
  const std::vector<float> weights =
      weighted ? std::vector<float>{0.5f, 1, 1.5f} : std::vector<float>{1, 1, 1};
  SimulatedRanks steppers(with_memory("ef21"), whole_group(d, ranks));
  std::vector<std::vector<float>> h(ranks, std::vector<float>(d));  // by the paper's formula
  for (std::uint32_t t = 0; t < 20; ++t) {
    std::vector<std::vector<float>> g(ranks);
    for (std::uint32_t r = 0; r < ranks; ++r) steppers[r].gradient = g[r] = noise(d, 3 * t + r);
    REQUIRE(steppers.step(t, 0.01, weights));
    for (std::size_t r = 0; r < ranks; ++r) {
      const SparseVector& sent = steppers.sent()[r];
      REQUIRE(sent.indices.size() == (t == 0 ? d : 30));
      for (std::size_t i = 0; i < sent.indices.size(); ++i) {
        const std::uint32_t at = sent.indices[i];
        REQUIRE(sent.values[i] == g[r][at] - h[r][at]);
        h[r][at] += sent.values[i];
      }
      for (std::size_t i = 0; i < d; ++i) REQUIRE(steppers[r].residual[i] == -h[r][i]);
    }
    for (std::size_t i = 0; i < d; ++i) {
      double mean = 0;
      for (std::size_t r = 0; r < ranks; ++r) mean += double(weights[r]) * double(h[r][i]) / ranks;
      REQUIRE(steppers[0].average[i] == Approx(mean).epsilon(1e-5).margin(1e-6));
    }
  }
}

TEST_CASE("the first committed step sends the whole gradient, also after steps that were skipped") {
  SimulatedRanks ranks(with_memory("ef21"), whole_group(500, 2));
  const auto fill = [&](std::uint32_t stream) {
    for (std::uint32_t p = 0; p < 2; ++p) {
      const std::vector<float> g = noise(500, stream + p);
      ranks[p].gradient.assign(g.begin(), g.end());
    }
  };
  fill(0);
  ranks[1].gradient[7] = std::numeric_limits<float>::quiet_NaN();
  REQUIRE_FALSE(ranks.step(0, 0.01));
  fill(2);
  REQUIRE_FALSE(ranks.step(0, 0.01, {}, false));
  fill(4);
  const std::vector<float> a = ranks[0].gradient, b = ranks[1].gradient;
  REQUIRE(ranks.step(0, 0.01));
  CHECK(ranks[0].compressor->diagnostics().selected == 500);
  for (std::size_t i = 0; i < 500; ++i) REQUIRE(ranks[0].average[i] == (a[i] + b[i]) * 0.5f);
  fill(6);
  REQUIRE(ranks.step(1, 0.01));
  CHECK(ranks[0].compressor->diagnostics().selected == 5);
}

TEST_CASE("a step that would make the estimate infinite is not finite on any rank, and changes nothing") {
  SimulatedRanks ranks(with_memory("ef21"), whole_group(4, 2));
  const auto step = [&](std::int64_t number, float gradient, float weight) {
    ranks[0].gradient = {gradient, 1, 1, 1};
    ranks[1].gradient = {0, 1, 1, 1};
    return ranks.step(number, 1, {weight, 2 - weight});
  };
  // The estimate rises where the first rank counts more, and hardly falls where it counts less.
  int steps = 0;
  while (steps < 12 && step(steps, steps % 2 ? -0.8e38f : 0.8e38f, steps % 2 ? 0.1f : 1.9f)) ++steps;
  REQUIRE(steps == 4);
  for (std::size_t r = 0; r < 2; ++r) CHECK_FALSE(ranks[r].compressor->finite());
  REQUIRE(step(5, -0.8e38f, 1));
  CHECK(std::isfinite(ranks[0].average[0]));
  CHECK(ranks[0].average[1] == Approx(1));
}

TEST_CASE("EF21 refuses an estimate before its first step, of another length, and of NaNs") {
  const auto memory = make_memory("ef21");
  const auto load = [&](std::uint8_t first, const std::vector<float>& estimate, std::size_t range = 0) {
    StateWriter writer;
    writer.put(first);
    writer.put_list(estimate);
    const std::vector<std::byte> bytes = writer.take();
    StateReader reader(bytes);
    reader.range = range;
    memory->load(reader);
  };
  CHECK_NOTHROW(load(1, {}, 2));
  CHECK_NOTHROW(load(0, {1, 2}, 2));
  CHECK_THROWS_AS(load(0, {1, 2}, 3), Error);
  CHECK_THROWS_AS(load(0, {1, std::numeric_limits<float>::quiet_NaN()}, 2), Error);
  CHECK_THROWS_AS(load(1, {1, 2}), Error);
  CHECK_THROWS_AS(load(2, {}), Error);
}

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

// The paper's formulas, an element at a time.
struct PlainRank {
  std::array<double, 4> velocity{}, v{};
  Sent step(int t, int p, bool nesterov, bool masking) {
    std::size_t largest = 0;
    for (std::size_t j = 0; j < 4; ++j) {
      const double g = trace_gradient(t, p, int(j));
      velocity[j] = nesterov ? 0.9 * (velocity[j] + g) : 0.9 * velocity[j] + g;
      v[j] += nesterov ? velocity[j] + g : velocity[j];
      if (std::abs(v[j]) > std::abs(v[largest]) + 1e-12) largest = j;
    }
    const Sent sent{std::uint32_t(largest), v[largest]};
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
      for (std::size_t j = 0; j < 4; ++j) ranks[p].gradient[j] = float(trace_gradient(t, int(p), int(j)));
    REQUIRE(ranks.step(t, 0.25));
    for (std::size_t p = 0; p < 2; ++p) {
      const Sent expected = plain[p].step(t, int(p), nesterov, masking);
      const SparseVector& entries = ranks.sent()[p];
      REQUIRE(entries.indices == std::vector<std::uint32_t>{expected.index});
      CHECK(entries.values[0] == Approx(expected.value).epsilon(1e-6));
      masked_matters |= plain[p].velocity[expected.index] != 0;
    }
    for (std::size_t j = 0; j < 4; ++j) weights[j] -= 0.1 * double(ranks[0].average[j]);
  }
  CHECK(masked_matters == !masking);
  if (!masking) return;
  // Computed in float64, ties by lower index.
  const double golden[2][4] = {{1.0675, 1.0045, 1, .9303}, {1.10575, 1.00405, 1, .89727}};
  for (std::size_t j = 0; j < 4; ++j) CHECK(weights[j] == Approx(golden[nesterov][j]).epsilon(1e-7));
}

TEST_CASE("at density 1 on one rank, DGC is momentum SGD bit for bit, with masking plain SGD") {
  const bool nesterov = GENERATE(false, true), masking = GENERATE(false, true);
  const std::size_t d = 3001;
  SimulatedRanks ranks(dgc(0.9, nesterov, masking), whole_group(d, 1));
  const float m = float(0.9), lr = 0.05f;
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
    for (std::size_t i = 0; i < d; ++i) sent[i] += 2 * double(ranks[0].average[i]);
    if (t % 10 == 9 || t == 44)
      for (std::size_t i = 0; i < d; ++i)
        REQUIRE(sent[i] + double(ranks[0].residual[i]) + double(ranks[1].residual[i]) ==
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
      const float g = gradient[i], m = float(0.7);
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
    const auto gradient = [&](std::size_t p) { return noise(3000, 2 * t + std::uint32_t(p)); };
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

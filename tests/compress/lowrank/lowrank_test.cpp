// What PowerSGD and ACP-SGD have in common: whatever their factors are, nothing is lost, ranks agree, and a
// step can be undone.
#include "compress/lowrank/plan.h"
#include "tests/compress/lowrank/lowrank_fixture.h"

using namespace topknot;
using namespace topknot::testing;

namespace {

const std::string kMethods[] = {"powersgd", "acpsgd"};
const std::vector<std::pair<std::size_t, std::size_t>> kShapes = {
    {24, 17}, {9, 1}, {8, 40}, {1, 6}, {30, 30}};

auto normal(std::uint32_t step, std::size_t n) {
  return [=](std::size_t rank) { return normal_vector(step, std::uint32_t(rank), n); };
}

// Algorithm 1 in double, for one matrix and weighted ranks: Gram-Schmidt, Q by columns.
struct PlainPowerSgd {
  std::size_t rows, cols, rank;
  std::vector<double> q;                       // [cols, rank]
  std::vector<std::vector<double>> residuals;  // by rank
  std::vector<double> average;

  void step(const std::vector<std::vector<float>>& gradients, const std::vector<double>& weights) {
    const double ranks = double(gradients.size());
    std::vector<double> p(rows * rank), mean_q(cols * rank);
    for (std::size_t w = 0; w < gradients.size(); ++w)
      for (std::size_t i = 0; i < rows * cols; ++i) residuals[w][i] += double(gradients[w][i]);  // M
    for (std::size_t w = 0; w < gradients.size(); ++w)
      for (std::size_t i = 0; i < rows; ++i)
        for (std::size_t j = 0; j < cols; ++j)
          for (std::size_t k = 0; k < rank; ++k)
            p[i * rank + k] += weights[w] * residuals[w][i * cols + j] * q[j * rank + k] / ranks;
    for (std::size_t k = 0; k < rank; ++k) {
      for (std::size_t before = 0; before <= k; ++before) {
        double dot = 0;
        for (std::size_t i = 0; i < rows; ++i) dot += p[i * rank + k] * p[i * rank + before];
        for (std::size_t i = 0; i < rows; ++i)
          p[i * rank + k] =
              before == k ? p[i * rank + k] / std::sqrt(dot) : p[i * rank + k] - dot * p[i * rank + before];
      }
    }
    for (std::size_t w = 0; w < gradients.size(); ++w) {
      std::vector<double> own(cols * rank);
      for (std::size_t i = 0; i < rows; ++i)
        for (std::size_t j = 0; j < cols; ++j)
          for (std::size_t k = 0; k < rank; ++k)
            own[j * rank + k] += residuals[w][i * cols + j] * p[i * rank + k];
      for (std::size_t i = 0; i < rows; ++i)
        for (std::size_t j = 0; j < cols; ++j)
          for (std::size_t k = 0; k < rank; ++k)
            residuals[w][i * cols + j] -= p[i * rank + k] * own[j * rank + k];
      for (std::size_t i = 0; i < own.size(); ++i) mean_q[i] += weights[w] * own[i] / ranks;
    }
    average.assign(rows * cols, 0.0);
    for (std::size_t i = 0; i < rows; ++i)
      for (std::size_t j = 0; j < cols; ++j)
        for (std::size_t k = 0; k < rank; ++k)
          average[i * cols + j] += p[i * rank + k] * mean_q[j * rank + k];
    q = mean_q;
  }
};

// One matrix and rank 1 in double, where a basis is a normalised vector.
struct PlainAcpSgd {
  std::size_t rows, cols;
  std::vector<double> last;
  std::vector<std::vector<double>> residuals;
  std::vector<double> average;
  bool sends_p = true;

  void step(const std::vector<std::vector<float>>& gradients, const std::vector<double>& weights) {
    std::vector<double> basis = last;
    for (double& x : basis) x /= norm(last);
    last.assign(sends_p ? rows : cols, 0.0);
    const auto entry = [&](const std::vector<double>& other, std::size_t i, std::size_t j) {
      return sends_p ? other[i] * basis[j] : basis[i] * other[j];
    };
    for (std::size_t w = 0; w < gradients.size(); ++w) {
      std::vector<double> own(last.size());
      for (std::size_t i = 0; i < rows; ++i)
        for (std::size_t j = 0; j < cols; ++j) {
          double& m = residuals[w][i * cols + j];
          m += double(gradients[w][i * cols + j]);
          own[sends_p ? i : j] += m * basis[sends_p ? j : i];
        }
      for (std::size_t i = 0; i < rows; ++i)
        for (std::size_t j = 0; j < cols; ++j) residuals[w][i * cols + j] -= entry(own, i, j);
      for (std::size_t i = 0; i < own.size(); ++i) last[i] += weights[w] * own[i] / double(gradients.size());
    }
    average.assign(rows * cols, 0.0);
    for (std::size_t i = 0; i < rows; ++i)
      for (std::size_t j = 0; j < cols; ++j) average[i * cols + j] = entry(last, i, j);
    sends_p = !sends_p;
  }
};

}  // namespace

TEST_CASE("products with thin factors are those of a plain loop") {
  for (const std::size_t rows : {1u, 5u, 64u})
    for (const std::size_t cols : {1u, 15u, 33u, 300u})
      for (const std::size_t rank : {1u, 4u, 7u}) {
        const auto m = normal_vector(1, 1, rows * cols), q = normal_vector(1, 2, rank * cols),
                   p = normal_vector(1, 3, rows * rank);
        std::vector<float> made_p(rows * rank), made_q(rank * cols), rebuilt(rows * cols), left = m;
        lowrank::product(m.data(), 0, rows, cols, q.data(), rank, made_p.data());
        for (std::size_t j = 0; j < cols; j += lowrank::kStrip)
          lowrank::transposed_product(m.data(), rows, cols, j, std::min(j + lowrank::kStrip, cols), p.data(),
                                      rank, made_q.data());
        lowrank::rebuild(left.data(), rebuilt.data(), 0, rows, cols, rank, {p.data(), q.data()},
                         {p.data(), q.data()});
        std::vector<double> plain_p(rows * rank), plain_q(rank * cols), plain(rows * cols),
            plain_left(m.begin(), m.end());
        for (std::size_t i = 0; i < rows; ++i)
          for (std::size_t j = 0; j < cols; ++j)
            for (std::size_t k = 0; k < rank; ++k) {
              const double x = m[i * cols + j], pik = p[i * rank + k], qkj = q[k * cols + j];
              plain_p[i * rank + k] += x * qkj;
              plain_q[k * cols + j] += x * pik;
              plain[i * cols + j] += pik * qkj;
              plain_left[i * cols + j] -= pik * qkj;
            }
        CHECK(distance(made_p, plain_p) <= 1e-6 * norm(m) * norm(q));
        CHECK(distance(made_q, plain_q) <= 1e-6 * norm(m) * norm(p));
        CHECK(distance(rebuilt, plain) <= 1e-6 * norm(p) * norm(q));
        CHECK(distance(left, plain_left) <= 1e-6 * (norm(m) + norm(p) * norm(q)));
      }
}

TEST_CASE("a basis is orthonormal and spans the columns, as Gram-Schmidt in double gives it") {
  const CounterRng fill(3, RngUse::test);
  std::vector<double> scratch;
  const std::size_t n = 37, rank = 5;
  const auto a = normal_vector(2, 1, n * rank);
  auto q = a;
  lowrank::orthonormalise(q.data(), n, rank, rank, 1, fill, scratch);
  std::vector<double> plain(a.begin(), a.end());
  for (std::size_t k = 0; k < rank; ++k) {
    for (std::size_t before = 0; before < k; ++before) {
      double dot = 0;
      for (std::size_t i = 0; i < n; ++i) dot += plain[i * rank + k] * plain[i * rank + before];
      for (std::size_t i = 0; i < n; ++i) plain[i * rank + k] -= dot * plain[i * rank + before];
    }
    double square = 0;
    for (std::size_t i = 0; i < n; ++i) square += plain[i * rank + k] * plain[i * rank + k];
    for (std::size_t i = 0; i < n; ++i) plain[i * rank + k] /= std::sqrt(square);
  }
  CHECK(distance(q, plain) < 1e-6);
  std::vector<float> by_columns(n * rank);
  for (std::size_t i = 0; i < n; ++i)
    for (std::size_t k = 0; k < rank; ++k) by_columns[k * n + i] = a[i * rank + k];
  lowrank::orthonormalise(by_columns.data(), n, rank, 1, n, fill, scratch);
  for (std::size_t i = 0; i < n; ++i)
    for (std::size_t k = 0; k < rank; ++k) CHECK(by_columns[k * n + i] == q[i * rank + k]);
}

TEST_CASE("a basis is orthonormal where columns are zero, equal, tiny, huge, or as many as rows") {
  const CounterRng fill(3, RngUse::test);
  std::vector<double> scratch;
  for (const std::size_t n : {1u, 4u, 50u})
    for (const float size : {0.0f, 1.0f, 3e38f, 1e-45f}) {
      const std::size_t rank = std::min<std::size_t>(n, 4);
      std::vector<float> q(n * rank);
      for (std::size_t i = 0; i < n; ++i)
        for (std::size_t k = 0; k < rank; ++k) q[i * rank + k] = k == 2 ? 0.0f : i % 2 ? -size : size;
      lowrank::orthonormalise(q.data(), n, rank, rank, 1, fill, scratch);
      for (std::size_t k = 0; k < rank; ++k)
        for (std::size_t l = 0; l <= k; ++l) {
          double dot = 0;
          for (std::size_t i = 0; i < n; ++i) dot += double(q[i * rank + k]) * double(q[i * rank + l]);
          CHECK(dot == Approx(k == l ? 1.0 : 0.0).margin(1e-6));
        }
    }
}

TEST_CASE("low-rank methods at full rank average as the dense method does") {
  for (const std::string& name : kMethods)
    for (const auto& shape : {std::pair<std::size_t, std::size_t>{12, 7}, {7, 12}, {9, 9}}) {
      // The basis of ACP-SGD, a factor of the step before, is complete only where the matrix is square.
      if (name == "acpsgd" && shape.first != shape.second) continue;
      INFO(name);
      const GroupSpec spec = matrices({shape}, 3);
      SimulatedRanks ranks(low_rank(name, 12), spec), dense(named("dense"), spec);
      for (std::uint32_t step = 0; step < 6; ++step) {
        step_alike({&ranks, &dense}, normal(step, spec.numel), step, 1.0, {0.5f, 1.0f, 1.5f});
        CHECK(distance(ranks[0].average, dense[0].average) <= 1e-5 * norm(dense[0].average));
      }
    }
}

TEST_CASE("a matrix of the factors' rank is delivered within two steps, by powersgd in one") {
  const auto m = with_singular_values(20, 13, {3.0, 1.0});
  for (const std::string& name : kMethods) {
    INFO(name);
    SimulatedRanks ranks(low_rank(name, 2), matrices({{20, 13}}, 2));
    std::vector<double> missing(m.size());
    for (std::uint32_t step = 0; step < 2; ++step) {
      for (std::size_t i = 0; i < m.size(); ++i) missing[i] += double(m[i]);
      step_alike(
          {&ranks}, [&](std::size_t) { return m; }, step, 1.0);
      for (std::size_t i = 0; i < m.size(); ++i) missing[i] -= double(ranks[0].average[i]);
      CHECK((norm(missing) < 1e-5) == (step == 1 || name == "powersgd"));
    }
  }
}

TEST_CASE("1-D tensors and those that would shrink too little are sent exactly, and leave no residual") {
  for (const std::string& name : kMethods) {
    INFO(name);
    const CompressOptions options = with(low_rank(name, 2), {"min_compression=2.0"});
    // 64 x 64 shrinks 16-fold; 5 x 4 by 20 / 18, or 40 / 18 where one factor is sent per step.
    const GroupSpec spec = matrices({{7, 1}, {5, 4}, {64, 64}, {3, 1}}, 2);
    SimulatedRanks ranks(options, spec), dense(named("dense"), spec);
    step_alike({&ranks, &dense}, normal(1, spec.numel), 0, 1.0);
    std::size_t exact = 0;
    for (std::size_t i = 0; i < spec.numel; ++i)
      exact += ranks[0].average[i] == dense[0].average[i] && ranks[0].residual[i] == 0;
    CHECK(exact == (name == "powersgd" ? 30u : 10u));
    CHECK(ranks[0].compressor->diagnostics().selected ==
          (name == "powersgd" ? 30u + 256u : 10u + 10u + 128u));
    CHECK(planned_message_bytes(options, spec, 0.1) ==
          4 * (name == "powersgd" ? 30u + 256u : 10u + 9u + 128u));
  }
}

TEST_CASE("low-rank methods converge to the best approximation of a constant matrix") {
  const std::size_t rows = 30, cols = 22;
  const auto m = with_singular_values(rows, cols, {5.0, 3.0, 1.0, 0.5});
  const auto best = with_singular_values(rows, cols, {5.0, 3.0});
  for (const std::string& name : kMethods) {
    INFO(name);
    SimulatedRanks ranks(with(low_rank(name, 2), {"memory=none"}), matrices({{rows, cols}}, 2));
    double first = 0, last = 0;
    const std::uint32_t steps = name == "powersgd" ? 15 : 30;
    for (std::uint32_t step = 0; step < steps; ++step) {
      step_alike(
          {&ranks}, [&](std::size_t) { return m; }, step, 1.0);
      last = distance(ranks[0].average, best);
      if (step == 0) first = last;
    }
    CHECK(first > 1e-2);
    CHECK(last < 1e-5);
  }
}

TEST_CASE("groups without matrices are sent dense") {
  for (const std::string& name : kMethods)
    for (GroupSpec spec :
         {whole_group(50, 2), matrices({{20, 1}, {30, 1}}, 2), matrices({{1, 1}}, 2), GroupSpec{0, {}, 2}}) {
      INFO(name);
      SimulatedRanks ranks(low_rank(name, 4), spec), dense(named("dense"), spec);
      step_alike({&ranks, &dense}, normal(1, spec.numel), 0, 1.0);
      CHECK(same_bits<float>(ranks[0].average, dense[0].average));
    }
}

TEST_CASE("a low-rank method finds its factors again after zero gradients") {
  for (const std::string& name : kMethods) {
    INFO(name);
    const GroupSpec spec = matrices({{20, 13}}, 2);
    SimulatedRanks ranks(low_rank(name, 2), spec);
    for (std::uint32_t step = 0; step < 4; ++step) {
      step_alike(
          {&ranks}, [&](std::size_t) { return std::vector<float>(spec.numel); }, step, 1.0);
      CHECK(norm(ranks[0].average) == 0);
    }
    // Rows of zeros first: a basis of unit vectors would miss it.
    std::vector<float> m(spec.numel);
    std::fill(m.begin() + 10 * 13, m.end(), 0.5f);
    for (std::uint32_t step = 4; step < 24; ++step)
      step_alike(
          {&ranks}, [&](std::size_t) { return m; }, step, 1.0);
    CHECK(norm(ranks[0].residual) < (name == "powersgd" ? 1e-4 : 2.0) * norm(m));
  }
}

TEST_CASE("low-rank methods skip what is not finite on one rank, and what would overflow") {
  for (const std::string& name : kMethods)
    for (const float bad : {-std::numeric_limits<float>::infinity(), 3.4e38f})
      for (const std::size_t where : {5u, 410u}) {
        INFO(name << ", " << bad << " at " << where);
        const GroupSpec spec = matrices(kShapes, 2);
        SimulatedRanks ranks(low_rank(name, 2), spec), straight(low_rank(name, 2), spec);
        for (std::uint32_t step = 0; step < 3; ++step) {
          for (std::uint32_t r = 0; r < 2; ++r) ranks[r].gradient = normal_vector(step, r, spec.numel);
          const auto residual = ranks[1].residual;
          const auto state = ranks[1].compressor->state();
          // Two of 3.4e38 are finite, their sum and most products are not.
          const std::size_t count = where == 5 ? 400 : 2;
          for (std::size_t r = bad == 3.4e38f ? 0 : 1; r < 2; ++r)
            std::fill_n(ranks[r].gradient.begin() + std::ptrdiff_t(where), count, bad);
          REQUIRE_FALSE(ranks.step(step, 1.0));
          CHECK(same_bits(ranks[1].residual, residual));
          CHECK(ranks[1].compressor->state() == state);
          step_alike({&ranks, &straight}, normal(step, spec.numel), step, 1.0);
          CHECK(same_bits<float>(ranks[0].average, straight[0].average));
          CHECK(same_bits(ranks[1].residual, straight[1].residual));
        }
      }
}

TEST_CASE("columns that differ by a float's last bits are no combination of each other") {
  const CounterRng fill(3, RngUse::test);
  std::vector<double> scratch;
  std::vector<float> q = {1, 1, 0, 1e-7f, 0, 0, 0, 0};  // 4 rows, 2 columns
  lowrank::orthonormalise(q.data(), 4, 2, 2, 1, fill, scratch);
  CHECK(std::abs(q[3]) == Approx(1.0));
}

TEST_CASE("a tensor that shrinks by just compress.min_compression is sent as it is") {
  const GroupSpec spec = matrices({{4, 4}}, 1);  // 16 entries, factors of 8
  CHECK_FALSE(lowrank::Plan(with(low_rank("powersgd", 1), {"min_compression=2"}), spec, 1.0).any());
  CHECK(lowrank::Plan(with(low_rank("powersgd", 1), {"min_compression=1.99"}), spec, 1.0).any());
}

TEST_CASE("groups start from factors of their own") {
  GroupSpec spec = matrices({{8, 6}}, 1);
  std::vector<float> first(6), second(6);
  lowrank::Plan(low_rank("powersgd", 1), spec, 1.0).draw_q(first);
  spec.offset = 48;
  lowrank::Plan(low_rank("powersgd", 1), spec, 1.0).draw_q(second);
  CHECK(first != second);
}

TEST_CASE("a rank whose own factor is too large stops the step, though the sum is small") {
  for (const std::string& name : kMethods) {
    INFO(name);
    SimulatedRanks ranks(low_rank(name, 1), matrices({{16, 16}}, 2));
    // The basis is that of constant columns, of which the own factor is 4 times an entry; a float ends at
    // 3.4e38.
    for (const float size : {1.0f, 3e37f}) {
      ranks[0].gradient.assign(256, size);
      ranks[1].gradient.assign(256, -0.98f * size);
      CHECK(ranks.step(size == 1 ? 0 : 1, 1.0) == (size == 1));
    }
  }
}

TEST_CASE("acpsgd plans the mean of its two factors, rounded up") {
  CHECK(planned_message_bytes(low_rank("acpsgd", 1), matrices({{5, 2}}, 1), 1.0) == 4 * 4);
}

TEST_CASE("powersgd follows algorithm 1 and 2 in double, with uneven weights") {
  const std::size_t rows = 14, cols = 19, rank = 3;
  const GroupSpec spec = matrices({{rows, cols}}, 3);
  SimulatedRanks ranks(low_rank("powersgd", 3), spec);
  PlainPowerSgd plain{rows, cols, rank, {}, std::vector(3, std::vector<double>(rows * cols)), {}};
  const CounterRng start(5, RngUse::compress, 0, 0);
  for (std::size_t j = 0; j < cols; ++j)
    for (std::size_t k = 0; k < rank; ++k) plain.q.push_back(double(start.normal(k * cols + j)));
  for (std::uint32_t step = 0; step < 8; ++step) {
    std::vector<std::vector<float>> gradients;
    for (std::uint32_t r = 0; r < 3; ++r)
      gradients.push_back(ranks[r].gradient = normal_vector(step, r, spec.numel));
    REQUIRE(ranks.step(step, 1.0, {0.5f, 1.75f, 0.75f}));
    plain.step(gradients, {0.5, 1.75, 0.75});
    CHECK(distance(ranks[0].average, plain.average) < 1e-5 * norm(plain.average));
    for (std::size_t r = 0; r < 3; ++r)
      CHECK(distance(ranks[r].residual, plain.residuals[r]) < 1e-5 * norm(plain.residuals[r]));
  }
}

TEST_CASE("powersgd refuses another's state") {
  const GroupSpec spec = matrices({{24, 17}, {6, 1}}, 1);
  const auto compressor = make_compressor(low_rank("powersgd", 2), spec);
  auto state = compressor->state();
  CHECK_THROWS_AS(make_compressor(low_rank("powersgd", 3), spec)->load_state(state), Error);
  state.pop_back();
  CHECK_THROWS_AS(compressor->load_state(state), Error);
}

TEST_CASE("acpsgd alternates between P and Q as the paper does, in double, with uneven weights") {
  const std::size_t rows = 11, cols = 16;
  const GroupSpec spec = matrices({{rows, cols}}, 2);
  SimulatedRanks ranks(low_rank("acpsgd", 1), spec);
  PlainAcpSgd plain{rows, cols, {}, std::vector(2, std::vector<double>(rows * cols)), {}};
  const CounterRng start(5, RngUse::compress, 0, 0);
  for (std::size_t j = 0; j < cols; ++j) plain.last.push_back(double(start.normal(j)));
  for (std::uint32_t step = 0; step < 9; ++step) {
    std::vector<std::vector<float>> gradients;
    for (std::uint32_t r = 0; r < 2; ++r)
      gradients.push_back(ranks[r].gradient = normal_vector(step, r, spec.numel));
    REQUIRE(ranks.step(step, 1.0, {1.25f, 0.75f}));
    plain.step(gradients, {1.25, 0.75});
    CHECK(ranks[0].compressor->diagnostics().selected == (step % 2 == 0 ? rows : cols));
    CHECK(distance(ranks[0].average, plain.average) < 1e-5 * norm(plain.average));
    for (std::size_t r = 0; r < 2; ++r)
      CHECK(distance(ranks[r].residual, plain.residuals[r]) < 1e-5 * norm(plain.residuals[r]));
  }
}

TEST_CASE("acpsgd refuses a state of another turn") {
  SimulatedRanks ranks(low_rank("acpsgd", 2), matrices({{24, 17}, {6, 1}}, 1));
  for (std::uint32_t step = 0; step < 2; ++step) {
    auto state = ranks[0].compressor->state();
    const std::byte turn = state[0];
    state[0] = std::byte{2};
    CHECK_THROWS_AS(ranks[0].compressor->load_state(state), Error);
    state[0] = turn ^ std::byte{1};  // a factor of the other's length
    CHECK_THROWS_AS(ranks[0].compressor->load_state(state), Error);
    state[0] = turn;
    ranks[0].compressor->load_state(state);
    REQUIRE(ranks.step(step, 1.0));
  }
}

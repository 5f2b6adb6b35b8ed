// Muon against values of a float64 program that agrees with the published ones, and against a loop in double.
#include "optim/muon.h"

#include "nn/base/checksum.h"
#include "optim/optimizer.h"
#include "tests/support/any_threads.h"
#include "tests/support/error_text.h"
#include "tests/support/fill_normal.h"
#include "tests/support/generated.h"
#include "tests/support/threads.h"

using namespace topknot;

namespace {

using Matrix = std::vector<double>;  // by rows

// generated() as a parameter of the arena, or in its place of a gradient.
void copy_golden(std::int64_t n, std::int64_t seed, float* to) {
  for (const double x : testing::generated(std::size_t(n), seed)) *to++ = float(x);
}

// The sum, the sum weighted by 1 + i mod 13, the norm.
std::array<double, 3> sums_of(const std::vector<double>& x) {
  std::array<double, 3> sums{};
  for (std::size_t i = 0; i < x.size(); ++i) {
    sums[0] += x[i];
    sums[1] += double(1 + i % 13) * x[i];
    sums[2] += x[i] * x[i];
  }
  sums[2] = std::sqrt(sums[2]);
  return sums;
}

// Two hidden matrices between a first convolution and an output layer, and vectors.
struct Net {
  ParameterStore store;
  ParameterArena* arena;
  Parameter *matrix, *filters;
  Net(std::int64_t rows, std::int64_t cols) {
    store.add("conv.weight", {2, 1, 3, 3}, fill_normal);
    store.add("conv.bias", {2}, fill_normal);
    matrix = &store.add("matrix", {rows, cols}, fill_normal);
    filters = &store.add("filters", {5, 2, 3, 1}, fill_normal);
    store.add("scale", {3}, fill_normal);
    store.add("output.weight", {4, 3}, fill_normal);
    arena = &store.build([](const Parameter& p) { return p.shape().rank() > 1; }, 1);
  }
  std::span<float> values(const Parameter& p) const { return {p.value(), p.numel()}; }
};

OptimizerOptions muon_options(const std::string& variant) {
  OptimizerOptions options;
  options.name = "muon", options.set("variant", variant);
  options.lr = 0.02, options.weight_decay = 0.01;
  return options;
}

// After three steps: sums of the parameter, its first three elements; sums of the last update (with the shape factor),
// its first three elements.
using Golden = double[6];
void check_steps(const char* variant, std::int64_t rows, std::int64_t cols, const Golden& parameter,
                 const Golden& update_of) {
  INFO(variant << ", " << rows << " x " << cols);
  Net model(rows, cols);
  const std::int64_t n = rows * cols;
  const std::span<float> weights = model.values(*model.matrix);
  copy_golden(n, 9, weights.data());
  const OptimizerOptions options = muon_options(variant);
  const auto optimizer = make_optimizer(options, *model.arena);
  std::vector<double> before;
  for (int step = 0; step < 3; ++step) {
    std::vector<float> gradient(model.arena->size());
    copy_golden(n, 10 + step, gradient.data() + model.matrix->offset());
    before.assign(weights.begin(), weights.end());
    optimizer->update(0, gradient, {step, options.lr});
  }
  const std::vector<double> after(weights.begin(), weights.end());
  std::vector<double> update;
  for (std::size_t i = 0; i < after.size(); ++i)
    update.push_back((before[i] * (1 - options.lr * options.weight_decay) - after[i]) / options.lr);
  const auto check = [&](const std::vector<double>& actual, const Golden& expected, double tolerance) {
    const std::array<double, 3> sums = sums_of(actual);
    const double norm = expected[2];
    CHECK(std::abs(sums[0] - expected[0]) < tolerance * norm * 5);
    CHECK(std::abs(sums[1] - expected[1]) < tolerance * norm * 50);
    CHECK(std::abs(sums[2] - expected[2]) < tolerance * norm);
    for (std::size_t i = 0; i < 3; ++i) CHECK(std::abs(actual[i] - expected[3 + i]) < tolerance * norm);
  };
  check(after, parameter, 1e-6);
  check(update, update_of, 2e-5);
}

}  // namespace

TEST_CASE("muon makes the steps of the published variants") {
  check_steps("jordan", 8, 12,
              {-1.704027987, -12.46559281, 4.939272716, -0.2309741167, 0.01862556002, 0.5182591302},
              {-0.596515321, 9.98878352, 2.491906283, -0.01372847093, -0.2505080884, 0.06108509151});
  check_steps("jordan", 12, 8,
              {-1.731553315, -12.45055037, 4.9486407, -0.2300900621, 0.02104241349, 0.5251585241},
              {-0.8246246644, 1.857641957, 3.021531713, -0.2380986715, -0.2956330553, -0.1580852027});
  check_steps("moonshot", 8, 12,
              {-1.714920338, -12.42785302, 4.937186939, -0.2329862807, 0.01300078365, 0.5152329036},
              {-0.4132778829, 6.920428694, 1.726442973, -0.009511353097, -0.1735570985, 0.04232094743});
  check_steps("moonshot", 12, 8,
              {-1.734999073, -12.40372393, 4.941568508, -0.2333189745, 0.01203999071, 0.5178833028},
              {-0.4664784661, 1.050839546, 1.709236519, -0.1346889635, -0.1672352577, -0.08942657356});
  check_steps("muloco", 8, 12,
              {-1.687143751, -12.16303133, 4.939219752, -0.2305506388, 0.01726443276, 0.5185334187},
              {-1.695766424, -0.189699709, 2.281531567, -0.1324469108, -0.22341967, -0.1497000093});
  check_steps("muloco", 12, 8,
              {-1.824487557, -13.12925315, 4.947398087, -0.2310916118, 0.02153307061, 0.5254193034},
              {0.6805887657, 17.64475494, 3.448035404, -0.2689050977, -0.3554542241, -0.2973697375});
}

namespace {

// Newton and Schulz's iteration in double; x by rows.
Matrix orthogonal(const Matrix& input, std::size_t rows, std::size_t cols, double epsilon,
                  const std::array<double, 3>& factors) {
  const bool turned = rows > cols;
  const std::size_t n = std::min(rows, cols), m = std::max(rows, cols);
  Matrix x(n * m);
  for (std::size_t i = 0; i < rows; ++i)
    for (std::size_t j = 0; j < cols; ++j) x[turned ? j * m + i : i * m + j] = input[i * cols + j];
  double norm = 0;
  for (const double value : x) norm += value * value;
  for (double& value : x) value /= std::sqrt(norm) + epsilon;
  for (int step = 0; step < 5; ++step) {
    Matrix a(n * n), b(n * n), next(n * m);
    for (std::size_t i = 0; i < n; ++i)
      for (std::size_t j = 0; j < n; ++j)
        for (std::size_t k = 0; k < m; ++k) a[i * n + j] += x[i * m + k] * x[j * m + k];
    for (std::size_t i = 0; i < n; ++i)
      for (std::size_t j = 0; j < n; ++j) {
        double square = 0;
        for (std::size_t k = 0; k < n; ++k) square += a[i * n + k] * a[k * n + j];
        b[i * n + j] = factors[1] * a[i * n + j] + factors[2] * square;
      }
    for (std::size_t i = 0; i < n; ++i)
      for (std::size_t k = 0; k < n; ++k)
        for (std::size_t j = 0; j < m; ++j) next[i * m + j] += b[i * n + k] * x[k * m + j];
    for (std::size_t i = 0; i < n * m; ++i) x[i] = factors[0] * x[i] + next[i];
  }
  Matrix result(rows * cols);
  for (std::size_t i = 0; i < rows; ++i)
    for (std::size_t j = 0; j < cols; ++j) result[i * cols + j] = x[turned ? j * m + i : i * m + j];
  return result;
}

double distance(std::span<const float> actual, const std::vector<double>& expected) {
  double sum = 0;
  for (std::size_t i = 0; i < expected.size(); ++i) {
    const double apart = actual[i] - expected[i];
    sum += apart * apart;
  }
  return std::sqrt(sum);
}

}  // namespace

TEST_CASE("muon steps matrices of any shape, AdamW with its own rate what is none, in whole slices") {
  for (const auto& [rows, cols] :
       {std::pair{1, 1}, std::pair{5, 1}, std::pair{1, 7}, std::pair{16, 16}, std::pair{17, 33},
        std::pair{130, 65}, std::pair{64, 300}, std::pair{300, 129}}) {
    INFO(rows << " x " << cols);
    Net model(rows, cols);
    ParameterArena& arena = *model.arena;
    OptimizerOptions options = muon_options("jordan");
    options.lr = 0.5, options.weight_decay = 0.1;
    options.set("muon_momentum", 0.8), options.set("adam_lr", 0.05);
    options.set("beta1", 0.7), options.set("beta2", 0.9), options.set("epsilon", 1e-3);
    const auto optimizer = make_optimizer(options, arena);
    const auto weights = arena.weights();
    std::vector<double> w(weights.begin(), weights.end()), m(w.size()), v(w.size());
    for (int step = 0; step < 3; ++step) {
      const double lr = 0.5 / (1 + step), scale = step == 1 ? 0.25 : 1, t = step + 1;
      const std::vector<float> gradient = gradient_of_step(w.size(), std::uint32_t(step));
      for (const Parameter* p : arena.parameters()) {
        const std::size_t begin = p->offset(), end = begin + p->numel();
        if (p == model.matrix || p == model.filters) {
          Matrix input;
          for (std::size_t i = begin; i < end; ++i) {
            const double added = 0.2 * scale * gradient[i];
            m[i] = 0.8 * m[i] + added;
            input.push_back(added + 0.8 * m[i]);
          }
          const auto r = std::size_t(p->shape()[0]), c = p->numel() / r;
          const Matrix update = orthogonal(input, r, c, 1e-7, {3.4445, -4.7750, 2.0315});
          const double factor = std::sqrt(std::max(1.0, double(r) / double(c)));
          for (std::size_t i = begin; i < end; ++i)
            w[i] = w[i] * (1 - lr * 0.1) - lr * factor * update[i - begin];
          continue;
        }
        const double rate = 0.1 * lr;  // 0.05 where the schedule has 0.5
        for (std::size_t i = begin; i < end; ++i) {
          const double g = scale * gradient[i];
          if (p->shape().rank() > 1) w[i] -= rate * 0.1 * w[i];
          m[i] = 0.7 * m[i] + 0.3 * g;
          v[i] = 0.9 * v[i] + 0.1 * g * g;
          w[i] -= rate * (m[i] / (1 - std::pow(0.7, t))) / (std::sqrt(v[i] / (1 - std::pow(0.9, t))) + 1e-3);
        }
      }
      // Behind the matrix, then up to it.
      const std::size_t cut = model.matrix->offset() + model.matrix->numel();
      const std::span<const float> all = gradient;
      optimizer->update(cut, all.subspan(cut), {step, lr, scale});
      optimizer->update(0, all.first(cut), {step, lr, scale});
    }
    double norm = 0;
    for (const double value : w) norm += value * value;
    CHECK(distance(weights, w) < 2e-5 * std::sqrt(norm));
    CHECK(optimizer->state().size() == 2);
  }
}

TEST_CASE("muon's bits do not depend on the number of threads") {
  testing::check_any_threads([] {
    Net model(200, 150);
    const auto optimizer = make_optimizer(muon_options("muloco"), *model.arena);
    for (int step = 0; step < 2; ++step)
      optimizer->update(0, gradient_of_step(model.arena->size(), std::uint32_t(step)), {step, 0.02});
    return model.arena->host_weights();
  });
}

// One checksum for the version of the loops that the CPU takes; `make tsan` compiles the baseline's alone.
TEST_CASE("muon's bits do not depend on the instruction set") {
  const auto checksum = [](const std::string& variant, std::int64_t rows, std::int64_t cols) {
    Net model(rows, cols);
    const std::span<float> weights = model.values(*model.matrix);
    copy_golden(rows * cols, 9, weights.data());
    const auto optimizer = make_optimizer(muon_options(variant), *model.arena);
    for (int step = 0; step < 2; ++step) {
      std::vector<float> gradient(model.arena->size());
      copy_golden(rows * cols, 10 + step, gradient.data() + model.matrix->offset());
      optimizer->update(0, gradient, {step, 0.02});
    }
    Checksum sum;
    sum.update(std::as_bytes(weights));
    return sum.value();
  };
  CHECK(checksum("jordan", 130, 65) == 0x4ee92d3efef321d0u);
  CHECK(checksum("moonshot", 17, 33) == 0x91a0d837c9093f28u);
  CHECK(checksum("muloco", 64, 300) == 0xeacacfd1277ff3f1u);
}

TEST_CASE("muon moves a matrix whose gradient is zero by its weight decay alone") {
  Net model(6, 9);
  const std::span<float> weights = model.values(*model.matrix);
  const std::vector<float> before(weights.begin(), weights.end());
  const auto optimizer = make_optimizer(muon_options("jordan"), *model.arena);
  optimizer->update(0, std::vector<float>(model.arena->size()), {0, 0.5});
  for (std::size_t i = 0; i < before.size(); ++i) CHECK(weights[i] == float(1 - 0.5 * 0.01) * before[i]);
}

TEST_CASE("muon refuses a slice that cuts a matrix, and gradients with momentum or the rate in them") {
  Net model(6, 9);
  const auto optimizer = make_optimizer(muon_options("jordan"), *model.arena);
  const std::vector<float> before = model.arena->host_weights();
  const std::size_t begin = model.matrix->offset(), end = begin + model.matrix->numel();
  const std::vector<float> gradient = gradient_of_step(model.arena->size(), 1);
  const std::span<const float> all = gradient;
  for (const auto& [from, to] : {std::pair{std::size_t{0}, begin + 1}, std::pair{end - 1, all.size()}}) {
    const std::string error = error_text([&, from = from, to = to] {
      optimizer->update(from, all.subspan(from, to - from), {0, 0.1});
    });
    CHECK(says(error, {"muon takes whole matrices", "cuts matrix"}));
  }
  CHECK_THROWS_AS(optimizer->update(0, all, {0, 0.1}, Applied::momentum), Error);
  CHECK(model.arena->host_weights() == before);
  CHECK(optimizers().find("muon").takes(Applied::nothing));
  CHECK_FALSE(optimizers().find("muon").takes(Applied::momentum));
  CHECK_FALSE(optimizers().find("muon").takes(Applied::learning_rate));
}

TEST_CASE("muon's options out of range are the user's errors") {
  Net model(3, 3);
  const auto make = [&](const OptimizerOptions& options) {
    return error_text<UserError>([&] { make_optimizer(options, *model.arena); });
  };
  CHECK(says(make(muon_options("polar")), {"optimizer.variant", "'polar'", "jordan | moonshot | muloco"}));
  OptimizerOptions momentum = muon_options("jordan"), rate = momentum;
  momentum.set("muon_momentum", 1), rate.set("adam_lr", 0);
  CHECK(says(make(momentum), {"optimizer.muon_momentum", "0.9999"}));
  CHECK(says(make(rate), {"optimizer.adam_lr", "above 0"}));
}

TEST_CASE("variants of muon have their AdamW: rates, betas and epsilon") {
  const auto after = [](const OptimizerOptions& options) {
    Net model(3, 4);
    const auto optimizer = make_optimizer(options, *model.arena);
    for (int step = 0; step < 3; ++step) {
      std::vector<float> gradient = gradient_of_step(model.arena->size(), std::uint32_t(step));
      for (float& g : gradient) g *= 1e-8f;  // beside which epsilon counts
      optimizer->update(0, gradient, {step, options.lr});
    }
    return model.arena->host_weights();
  };
  struct Numbers {
    const char* variant;
    double lr, beta2, epsilon;
  };
  for (const Numbers& n : {Numbers{"jordan", 3e-4, 0.95, 1e-10}, Numbers{"moonshot", 0.02, 0.95, 1e-8},
                           Numbers{"muloco", 0.02, 0.99, 1e-8}}) {
    INFO(n.variant);
    OptimizerOptions given = muon_options(n.variant);
    given.set("adam_lr", n.lr), given.set("beta1", 0.9), given.set("beta2", n.beta2),
        given.set("epsilon", n.epsilon);
    given.set("muon_momentum", 0.95);
    CHECK(after(given) == after(muon_options(n.variant)));
  }
}

TEST_CASE("a model's hidden matrices: all but what it marks, else its first convolution and last weight") {
  const auto hidden = [](ParameterStore& store) {
    store.build([](const Parameter&) { return true; }, 1);
    std::string names;
    for (const auto& p : store.parameters())
      if (p->hidden()) names += p->name() + " ";
    return names;
  };
  ParameterStore images, tokens, dense;
  for (const char* name : {"conv1", "conv2"}) images.add(name, {3, 3, 1, 1}, fill_normal);
  for (const char* name : {"fc1", "fc2"}) images.add(name, {3, 3}, fill_normal);
  images.add("bias", {3}, fill_normal);
  CHECK(hidden(images) == "conv2 fc1 ");
  tokens.add("tied", {3, 3}, fill_normal).mark_outer();
  for (const char* name : {"first", "last"}) tokens.add(name, {3, 3}, fill_normal);
  CHECK(hidden(tokens) == "first last ");
  for (const char* name : {"fc1", "fc2"}) dense.add(name, {3, 3}, fill_normal);
  CHECK(hidden(dense) == "fc1 ");
}

// What must not depend on the number of compute threads.
#include "nn/core/threads.h"

#include "tests/support/any_threads.h"
#include "tests/support/probe.h"
#include "tests/support/test.h"

using namespace topknot;
using namespace topknot::testing;

namespace {

// Value, gradients, and statistics behind them.
Probe run_batch_norm(Layout layout) {
  const Shape shape{7, 32, 9, 5};
  Buffer mean{"mean", std::vector<float>(32, 0.0f)}, variance{"variance", std::vector<float>(32, 1.0f)};
  Probe r = probe(
      [&](auto v) {
        return batch_norm(v[0], v[1], v[2], {}, {&mean, &variance}, {true, true});
      },
      {{shape, random_values(shape.numel(), 1), layout},
       {{32}, random_values(32, 2), {}, true},
       {{32}, random_values(32, 3), {}, true}},
      random_values(shape.numel(), 4), Device{}, DType::f32);
  r.gradients.insert(r.gradients.end(), {mean.values, variance.values});
  return r;
}

// All but the weight's gradient, whose sum is taken by thread.
Probe run_conv(const reference::Conv& g, bool with_batch_norm) {
  Buffer mean{"mean", std::vector<float>(std::size_t(g.out))}, variance(mean);
  const auto op = [&](std::span<const Variable> v) {
    return with_batch_norm
               ? conv_bn(v[0], v[1], v[2], v[3], {}, g.geometry(), {&mean, &variance}, {true, true})
               : conv2d(v[0], v[1], v[2], g.geometry());
  };
  std::vector<Input> inputs{{{g.n, g.in, g.height, g.width},
                             random_values(g.x_size(), 1),
                             g.in % channel_block() == 0 ? Layout::blocked : Layout::plain},
                            {g.geometry().weight_shape(), random_values(g.w_size(), 2), {}, true},
                            {{g.out}, random_values(g.out, 3), {}, true}};
  if (with_batch_norm) inputs.push_back({{g.out}, random_values(g.out, 4), {}, true});
  Probe r = probe(op, inputs, random_values(g.y_size(), 5), Device{}, DType::f32);
  r.gradients.erase(r.gradients.begin() + 1);
  r.gradients.insert(r.gradients.end(), {mean.values, variance.values});
  return r;
}

// A convolution of 16 channels, and a batch for it.
struct Layer {
  Layer(std::int64_t stride, const Shape& shape)
      : geometry{16, 16, 3, stride, 1},
        w(geometry.weight_shape(), random_values(16 * 16 * 9, 1)),
        x(in_layout(Variable(Tensor::from(random_values(shape.numel(), 2), shape)), Layout::blocked)) {}

  Variable outputs() const { return conv2d(x, w.variable(), {}, geometry); }

  ConvGeometry geometry;
  Leaf w;
  Variable x;
};

}  // namespace

TEST_CASE("batch_norm: values, gradients and statistics have the same bits for any thread count") {
  for (const Layout layout : {Layout::plain, Layout::blocked})
    check_any_threads([&] { return run_batch_norm(layout); });
}

TEST_CASE("conv2d and conv_bn: values and input gradients have the same bits for any thread count") {
  for (const bool with_batch_norm : {false, true})
    for (const reference::Conv& g : {reference::Conv{7, 16, 9, 9, 16, 3, 1, 1},
                                     {5, 3, 8, 8, 16, 3, 1, 1},
                                     {5, 16, 9, 9, 32, 3, 2, 1},
                                     {3, 64, 5, 5, 64, 3, 1, 1},
                                     {3, 128, 4, 4, 128, 3, 1, 1},
                                     {3, 6, 7, 7, 16, 5, 1, 0}}) {
      INFO(g.str() << (with_batch_norm ? ", batch norm" : ""));
      check_any_threads([&] { return run_conv(g, with_batch_norm); });
    }
}

TEST_CASE("one layer's kernels follow a change of the thread count") {
  const Layer layer(1, {5, 16, 6, 6});
  std::vector<std::vector<float>> values;
  for (const int threads : {1, 3, 2, 1, 3}) {
    const Threads scope(threads);
    const Variable y = layer.outputs();
    values.push_back(values_of(y));
    CHECK_NOTHROW(backward(weighted_sum(y, random_values(y.shape().numel(), 3))));
  }
  for (const auto& v : values) CHECK((v == values[0]));
}

TEST_CASE("conv2d has the same bits where OpenMP gives fewer threads than it may") {
  const Layer layer(2, {10, 16, 9, 9});
  const Threads scope(3);
  std::vector<float> found;
  std::string problem;
#pragma omp parallel num_threads(2)
#pragma omp single
  try {
    found = values_of(layer.outputs());  // a parallel region in another has one thread
  } catch (const std::exception& error) {
    problem = error.what();
  }
  CHECK(problem == "");
  CHECK((found == values_of(layer.outputs())));
}

namespace {

// Of a fully connected layer; before and after it, what oneDNN makes primitives for.
Probe run_linear() {
  return probe([](auto v) { return linear(v[0], v[1], {}); },
               {{{64, 400}, random_values(64 * 400, 1)}, {{120, 400}, random_values(120 * 400, 2), {}, true}},
               random_values(64 * 120, 3), Device{}, DType::f32);
}

}  // namespace

TEST_CASE("a team is settled at the size that OpenMP gives, and linear has its results in it") {
  Probe one;
  {
    const Threads scope(1);
    one = run_linear();
  }
  const Threads scope(3);
  CHECK(team_size() == 3);
  const int levels = omp_get_max_active_levels();
  omp_set_max_active_levels(0);  // no region has more than one thread
  CHECK((run_linear() == one));
  CHECK(team_size() == 1);
  CHECK(omp_get_max_threads() == 1);
  omp_set_max_active_levels(levels);
  omp_set_dynamic(1);
  CHECK(set_team_size(5) == 5);
  CHECK(omp_get_dynamic() == 0);
}

TEST_CASE("waiting threads sleep while the thread waits for cores, and two seconds on; a variable decides") {
  const auto tasks = [] {
    const std::filesystem::directory_iterator all("/proc/self/task");
    return std::distance(begin(all), end(all));
  };
  const std::string policy = std::getenv("OMP_WAIT_POLICY") ? std::getenv("OMP_WAIT_POLICY") : "";
  const Threads scope(2);
  setenv("OMP_WAIT_POLICY", "active", 1);
  SpinControl off;
  unsetenv("OMP_WAIT_POLICY");
  SpinControl control;
  off.update(0.5), control.update(0.05);
  CHECK_FALSE(off.sleeping());
  CHECK_FALSE(control.sleeping());
  const auto before = tasks();
  control.update(0.5);
  CHECK(control.sleeping());
  CHECK(tasks() > before);
  control.update(0.5);
  for (int i = 0; i < 7; ++i) control.update(0);
  control.update(0.2);
  for (int i = 0; i < 7; ++i) control.update(0);
  CHECK(control.sleeping());
  control.update(0);
  CHECK_FALSE(control.sleeping());
  {
    const Threads one(1);  // no team, so nobody waits
    control.update(0.5);
    CHECK_FALSE(control.sleeping());
  }
  if (!policy.empty()) setenv("OMP_WAIT_POLICY", policy.c_str(), 1);
}

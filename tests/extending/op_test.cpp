// The worked example of an op (docs/examples/swish.cpp): against its formula in float64, and in a model.
#include <cmath>

#include "nn/models/model.h"
#include "tests/support/variables.h"

namespace topknot {

Variable swish(const Variable& x);

namespace {

using namespace testing;

struct AbsentKernels {
  static constexpr const char* op = "absent";
};

TEST_CASE("the example op agrees with the formula, forward and backward, in every layout") {
  const Shape shape{2, 16, 5, 3};
  const auto values = random_values(shape.numel(), 1), dy = random_values(shape.numel(), 2);
  for (const Layout layout : {Layout::plain, Layout::blocked}) {
    Leaf x(shape, values);
    const Variable y = swish(in_layout(x.variable(), layout));
    CHECK(y.value().layout() == layout);
    backward(weighted_sum(y, dy));
    Array expected(values.size()), gradient(values.size());
    for (std::size_t i = 0; i < values.size(); ++i) {
      const double v = values[i], s = 1 / (1 + std::exp(-v));
      expected[i] = v * s;
      gradient[i] = dy[i] * (s + v * s * (1 - s));
    }
    check_close("y", values_of(y), expected, 1e-6);
    check_close("dx", x.gradient(), gradient, reference::absolute(as_double(dy)), 1e-6);
  }
}

TEST_CASE("the example model trains with the example op") {
  ParameterStore store;
  ModelOptions options;
  options.input = {1, 4, 4}, options.outputs = 3;
  const ModulePtr model = make_model("swish_net", store, options);
  ParameterArena& arena = store.build([](const Parameter&) { return true; }, 1);
  const Variable x(Tensor::from(random_values(30 * 16, 3), {30, 1, 4, 4}));
  std::vector<std::int32_t> labels(30);
  for (std::size_t i = 0; i < labels.size(); ++i) labels[i] = std::int32_t(i % 3);
  float first = 0, last = 0;
  for (int step = 0; step < 100; ++step) {
    arena.mark_gradients_unwritten();
    const Variable loss = softmax_cross_entropy(model->forward(x, {}), labels);
    (step == 0 ? first : last) = loss.value().data()[0];
    backward(loss);
    for (std::size_t i = 0; i < arena.size(); ++i)
      arena.weights()[i] -= 0.5f * arena.gradient(0, arena.size())[i];
  }
  CHECK(last < 0.1f * first);
}

TEST_CASE("an op without kernels for a device names itself and the device") {
  float value = 0;
  const Tensor on_gpu = Tensor::view(&value, {1}, {DeviceKind::cuda, 1});
  CHECK_THROWS_WITH(kernels_for<AbsentKernels>(on_gpu), Catch::Contains("absent has no kernels for cuda:1"));
}

}  // namespace
}  // namespace topknot

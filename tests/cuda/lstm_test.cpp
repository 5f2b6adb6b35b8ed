// embedding and lstm on a GPU against float64 loops, and against the CPU.
#include "nn/ops/ops.h"

#include <cmath>

#include "tests/cuda/fixture.h"
#include "tests/cuda/gpu_leaf.h"
#include "tests/support/lstm_reference.h"
#include "tests/support/variables.h"

namespace topknot {
namespace {

using namespace testing;
using reference::LstmCase;
using testing::backward_from;
using testing::CaughtInput;
using testing::gpu_tensor;
using testing::GpuLeaf;
using testing::rounded_to;

struct LstmInputs {
  std::vector<float> x, input, recurrent, input_bias, recurrent_bias, hidden, cell, dy;
};

LstmInputs inputs_of(const LstmCase& c, DType type) {
  const auto scaled = [](std::vector<float> values, std::int64_t by) {
    for (float& v : values) v /= std::sqrt(static_cast<float>(by));
    return values;
  };
  const std::int64_t rows = c.steps * c.batch;
  return {rounded_to(type, random_values(rows * c.in, 1)),
          scaled(random_values(4 * c.width * c.in, 2), c.in),
          scaled(random_values(4 * c.width * c.width, 3), c.width),
          random_values(4 * c.width, 4),
          random_values(4 * c.width, 5),
          rounded_to(type, scaled(random_values(c.batch * c.width, 6), 9)),
          random_values(c.batch * c.width, 7),
          rounded_to(type, random_values(rows * c.width, 8))};
}

struct LstmOutputs {
  std::vector<float> y, hidden, cell, dx, dinput, drecurrent, dinput_bias, drecurrent_bias;
};

LstmOutputs run_on_gpu(const LstmCase& c, const LstmInputs& v, DType type) {
  const CaughtInput x(gpu_tensor(v.x, {c.steps * c.batch, c.in}, Layout::plain, type));
  const GpuLeaf input({4 * c.width, c.in}, v.input), recurrent({4 * c.width, c.width}, v.recurrent),
      input_bias({4 * c.width}, v.input_bias), recurrent_bias({4 * c.width}, v.recurrent_bias);
  ParameterStore states(cuda::Context::current().device());
  states.add("unused", {1}, [](std::span<float> values, const CounterRng&) { values[0] = 0; });
  const auto state = [&](const char* name, const std::vector<float>& values) {
    Buffer& buffer = states.add_state(name, values.size());
    buffer.values = values;
    return &buffer;
  };
  const LstmState carried{state("hidden", v.hidden), state("cell", v.cell)};
  states.build([](const Parameter&) { return true; }, 1);
  LstmOutputs out;
  for (int pass = 0; pass < 2; ++pass) {  // the second overwrites the first's gradients
    carried.hidden->values = v.hidden, carried.cell->values = v.cell;
    states.statistics_to_device();
    for (const GpuLeaf* leaf : {&input, &recurrent, &input_bias, &recurrent_bias}) leaf->clear();
    const Variable y = lstm(
        x.variable(), c.batch,
        {input.variable(), recurrent.variable(), input_bias.variable(), recurrent_bias.variable()}, carried);
    out.y = testing::values_of(y.value());
    backward_from({{y, v.dy}});
  }
  states.statistics_to_host();
  out.hidden = carried.hidden->values, out.cell = carried.cell->values;
  out.dx = x.gradient(), out.dinput = input.gradient(), out.drecurrent = recurrent.gradient();
  out.dinput_bias = input_bias.gradient(), out.drecurrent_bias = recurrent_bias.gradient();
  return out;
}

void check_case(const LstmCase& c, cuda::Precision precision) {
  OnGpu gpu(precision);
  const DType type = gpu.context().activation_type();
  INFO(c.steps << " steps of " << c.batch << ", " << c.in << " -> " << c.width
               << (type == DType::bf16 ? ", bf16" : ""));
  const LstmInputs v = inputs_of(c, type);
  const LstmOutputs got = run_on_gpu(c, v, type);
  const reference::LstmResult expected = reference::lstm(
      c,
      {as_double(v.x), as_double(rounded_to(type, v.input)), as_double(rounded_to(type, v.recurrent)),
       as_double(v.input_bias), as_double(v.recurrent_bias), as_double(v.hidden), as_double(v.cell)},
      as_double(v.dy));
  const auto near = [&](const char* what, const std::vector<float>& actual, const Array& reference) {
    double largest = 1e-3;
    for (const double e : reference) largest = std::max(largest, std::abs(e));
    check_close(what, actual, reference, Array(reference.size(), largest), type == DType::bf16 ? 0.02 : 2e-5);
  };
  near("y", got.y, expected.y);
  near("hidden", got.hidden, expected.hidden);
  near("cell", got.cell, expected.cell);
  near("dx", got.dx, expected.dx);
  near("dW_ih", got.dinput, expected.dinput);
  near("dW_hh", got.drecurrent, expected.drecurrent);
  near("db_ih", got.dinput_bias, expected.dbias);
  near("db_hh", got.drecurrent_bias, expected.dbias);
}

}  // namespace

TEST_CASE("lstm on a GPU agrees with the formula, forward and backward") {
  for (const LstmCase& c : {LstmCase{1, 1, 1, 1}, {3, 4, 7, 17}, {5, 2, 16, 16}, {20, 5, 12, 24}})
    check_case(c, cuda::Precision::fp32);
}

TEST_CASE("lstm on a GPU in bfloat16 keeps gates, cells and gradients of weights in fp32") {
  for (const LstmCase& c : {LstmCase{3, 4, 7, 17}, {5, 6, 16, 16}}) check_case(c, cuda::Precision::bf16);
}

TEST_CASE("lstm on a GPU without a state begins with zeros") {
  for (const auto precision : {cuda::Precision::fp32, cuda::Precision::bf16}) {
    const OnGpu gpu(precision);
    const DType type = cuda::Context::current().activation_type();
    const LstmCase c{3, 4, 5, 20};
    LstmInputs v = inputs_of(c, type);
    std::fill(v.hidden.begin(), v.hidden.end(), 0.0f);
    std::fill(v.cell.begin(), v.cell.end(), 0.0f);
    const GpuLeaf input({80, 5}, v.input), recurrent({80, 20}, v.recurrent), b({80}, v.input_bias),
        c2({80}, v.recurrent_bias);
    const Variable y = lstm(Variable(gpu_tensor(v.x, {12, 5}, Layout::plain, type)), 3,
                            {input.variable(), recurrent.variable(), b.variable(), c2.variable()}, {});
    CHECK(testing::values_of(y.value()) == run_on_gpu(c, v, type).y);
  }
}

TEST_CASE("embedding on a GPU gives the CPU's bits, value and gradient") {
  const std::int64_t batch = 3, steps = 4, tokens = 7, width = 300;
  const std::vector<float> ids{0, 6, 6, 2, 1, 6, 0, 0, 3, 3, 3, 3};
  const auto table = random_values(tokens * width, 1), dy = random_values(steps * batch * width, 2);
  Leaf cpu({tokens, width}, table);
  const Variable expected = embedding(Variable(Tensor::from(ids, {batch, steps, 1, 1})), cpu.variable());
  backward(weighted_sum(expected, dy));
  const OnGpu gpu;
  const GpuLeaf weight({tokens, width}, table);
  const Variable input(gpu_tensor(ids, {batch, steps, 1, 1}, Layout::nhwc, DType::f32));
  for (int pass = 0; pass < 2; ++pass) {  // the second overwrites the first
    weight.clear();
    const Variable y = embedding(input, weight.variable());
    CHECK(testing::values_of(y.value()) == expected.value().to_vector());
    backward_from({{y, dy}});
    CHECK(weight.gradient() == cpu.gradient());
  }
  weight.clear();
  const Variable a = embedding(input, weight.variable()), b = embedding(input, weight.variable());
  backward_from({{a, dy}, {b, dy}});
  for (std::size_t i = 0; i < table.size(); ++i)
    CHECK(weight.gradient()[i] == Approx(2 * cpu.gradient()[i]).margin(1e-5));
  const Variable beyond =
      embedding(Variable(gpu_tensor({7, -1, 2}, {1, 3, 1, 1}, Layout::nhwc, DType::f32)), weight.variable());
  const auto rows = testing::values_of(beyond.value());
  CHECK(std::isnan(rows[0]));
  CHECK(std::isnan(rows[static_cast<std::size_t>(width)]));
  CHECK(std::isfinite(rows[static_cast<std::size_t>(2 * width)]));
}

TEST_CASE("embedding on a GPU in bfloat16 reads whole ids and sums its gradient in fp32") {
  const OnGpu gpu(cuda::Precision::bf16);
  const std::int64_t tokens = 1001;  // bfloat16 has no 999
  const auto table = random_values(tokens, 1);
  const GpuLeaf weight({tokens, 1}, table);
  const Variable y = embedding(Variable(gpu_tensor({999, 1000, 999}, {1, 3, 1, 1}, Layout::nhwc, DType::f32)),
                               weight.variable());
  CHECK(y.value().dtype() == DType::bf16);
  CHECK((testing::values_of(y.value()) == rounded_to(DType::bf16, {table[999], table[1000], table[999]})));
  backward_from({{y, {1.0f, 4.0f, 0.00390625f}}});  // 1 + 2^-8 is no bfloat16
  CHECK(weight.gradient()[999] == 1.00390625f);
  CHECK(weight.gradient()[1000] == 4.0f);
}

}  // namespace topknot

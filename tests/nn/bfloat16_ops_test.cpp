// Every op with activations in bfloat16 on a CPU against itself in fp32, on inputs that bfloat16 has: values
// and gradients differ by roundings of activations alone, 2^-8 of the largest each.
#include "nn/core/simd.h"
#include "tests/support/bfloat16.h"
#include "tests/support/probe.h"

using namespace topknot;
using namespace topknot::testing;

namespace {

constexpr double kRounding = 1.0 / 256;

// An input of random values.
struct Made {
  Shape shape;
  Layout layout = Layout::plain;
  bool parameter = false;
  float mean = 0, scale = 1;
};

Probe run(const std::vector<Made>& made, const Op& op, DType type, const std::vector<float>& dy) {
  std::vector<Input> inputs;
  for (const Made& in : made) {
    auto values = random_values(in.shape.numel(), std::uint32_t(inputs.size()), in.mean);
    for (float& v : values) v *= in.scale;
    inputs.push_back({in.shape, rounded_to(DType::bf16, values), in.layout, in.parameter});
  }
  const auto watched = [&](std::span<const Variable> x) {
    const Variable y = op(x);
    CHECK(y.value().dtype() == (y.value().numel() == 1 ? DType::f32 : type));
    return y;
  };
  return probe(watched, inputs, dy, Device{}, type);
}

void compare(const std::string& what, const std::vector<float>& actual, const std::vector<float>& expected,
             double roundings) {
  float largest = 0, worst = 0;
  for (std::size_t i = 0; i < expected.size(); ++i) {
    largest = std::max(largest, std::abs(expected[i]));
    worst = std::max(worst, std::isfinite(actual[i]) ? std::abs(actual[i] - expected[i]) : INFINITY);
  }
  INFO(what << ": " << worst << " of " << largest);
  CHECK(worst <= roundings * kRounding * largest);
}

// `roundings`: of the value, and of the gradients, in parts of the largest.
void check_op(const std::string& name, const std::vector<Made>& inputs, const Op& op, double of_value = 1,
              double of_gradients = 2) {
  INFO(name);
  // What a rounding moves over the corner of a ReLU takes no part in the gradients.
  const auto y = run(inputs, op, DType::bf16, {}).value, y32 = run(inputs, op, DType::f32, {}).value;
  auto dy = rounded_to(DType::bf16, random_values(std::int64_t(y.size()), 99));
  for (std::size_t i = 0; i < dy.size(); ++i)
    if ((y[i] == 0) != (y32[i] == 0)) dy[i] = 0;
  const Probe narrow = run(inputs, op, DType::bf16, dy), wide = run(inputs, op, DType::f32, dy);
  compare("value", narrow.value, wide.value, of_value);
  for (std::size_t i = 0; i < inputs.size(); ++i)
    compare("gradient " + std::to_string(i), narrow.gradients[i], wide.gradients[i], of_gradients);
}

}  // namespace

TEST_CASE("bfloat16 convolutions agree with fp32: chunked, whole, Winograd's, plain, in groups, with bias") {
  if (!multiplies_bfloat16()) return;
  const auto geometry = [](std::int64_t in, std::int64_t out, Extent kernel, Extent stride, Extent padding,
                           std::int64_t groups = 1) {
    ConvGeometry g;
    g.in = in, g.out = out, g.kernel = kernel, g.stride = stride, g.padding = padding, g.groups = groups;
    return g;
  };
  for (const ConvGeometry& g :
       {geometry(3, 16, 3, 1, 1), geometry(16, 32, 3, 2, 1), geometry(32, 32, 3, 1, 1),
        geometry(16, 32, 3, 1, 1), geometry(24, 40, 1, 1, 0), geometry(128, 256, 3, 1, 1),
        geometry(64, 10, 1, 1, 0), geometry(32, 32, 3, 1, 1, 32), geometry(16, 32, {5, 3}, {2, 1}, {2, 1}, 2),
        geometry(3, 64, 7, 2, 3)}) {
    const Layout layout = g.in % channel_block() == 0 ? Layout::blocked : Layout::plain;
    const Shape weight = g.weight_shape();
    const float scale = 1 / std::sqrt(float(weight.numel() / weight[0]));
    const bool winograd = g == geometry(16, 32, 3, 1, 1);  // for so many pixels
    const Shape x{5, g.in, winograd ? 21 : 9, winograd ? 20 : 8};
    check_op("conv " + std::to_string(g.in) + " to " + std::to_string(g.out),
             {{x, layout}, {weight, {}, true, 0, scale}},
             [&](std::span<const Variable> v) { return conv2d(v[0], v[1], {}, g); });
    check_op(
        "with bias", {{x, layout}, {weight, {}, true, 0, scale}, {{g.out}, {}, true}},
        [&](std::span<const Variable> v) { return conv2d(v[0], v[1], v[2], g); }, 2);
    // An input that two ops share adds up its gradients.
    check_op(
        "shared input", {{x, layout}, {weight, {}, true, 0, scale}},
        [&](std::span<const Variable> v) {
          return add(conv2d(v[0], v[1], {}, g), conv2d(v[0], v[1], {}, g));
        },
        2, 3);
  }
}

TEST_CASE("batch norm in bfloat16, alone and behind a convolution, agrees with fp32") {
  if (!multiplies_bfloat16()) return;
  ConvGeometry g;
  for (const std::int64_t channels : {6, 16, 32})
    for (const bool training : {true, false})
      for (const bool relu : {false, true}) {
        g.in = channels, g.out = 2 * channels;
        const Layout layout = channels % channel_block() == 0 ? Layout::blocked : Layout::plain;
        const Layout out = kernels_for<ConvKernels>(Tensor::zeros({1})).output_layout(g);
        const auto state = [](std::int64_t n) {
          return std::pair{Buffer{"mean", std::vector<float>(std::size_t(n), 0.1f)},
                           Buffer{"variance", std::vector<float>(std::size_t(n), 1.5f)}};
        };
        const std::vector<Made> of_norm = {{{7, channels, 5, 6}, layout, false, 0.5f},
                                           {{channels}, {}, true, 1},
                                           {{channels}, {}, true},
                                           {{7, channels, 5, 6}, layout}};
        check_op(
            "batch_norm", of_norm,
            [&](std::span<const Variable> v) {
              auto [mean, variance] = state(channels);
              return batch_norm(v[0], v[1], v[2], v[3], {&mean, &variance, 0.1f, 1e-5f}, {training, relu});
            },
            1, 4);
        check_op(
            "conv_bn",
            {{{7, channels, 5, 6}, layout},
             {g.weight_shape(), {}, true, 0, 0.1f},
             {{g.out}, {}, true, 1},
             {{g.out}, {}, true},
             {{7, g.out, 5, 6}, out}},
            [&](std::span<const Variable> v) {
              auto [mean, variance] = state(g.out);
              return conv_bn(v[0], v[1], v[2], v[3], v[4], g, {&mean, &variance, 0.1f, 1e-5f},
                             {training, relu});
            },
            3, 8);
      }
}

TEST_CASE("the other ops in bfloat16 agree with fp32, in either layout") {
  if (!multiplies_bfloat16()) return;
  const std::int64_t c = 2 * channel_block();
  using V = std::span<const Variable>;
  for (const Layout layout : {Layout::plain, Layout::blocked}) {
    const Made x{{3, c, 8, 6}, layout};
    for (const PoolKind kind : {PoolKind::max, PoolKind::average})
      check_op(
          "pool", {x},
          [=](V v) {
            return pool(v[0], {kind, 3, 2, 1});
          },
          1, 3);
    check_op("mean", {x}, [](V v) { return global_average_pool(v[0]); });
    check_op("relu", {x}, [](V v) { return relu(v[0]); });
    check_op("relu6", {x}, [](V v) { return clamp(v[0], 0, 6); });
    check_op("hardswish", {x}, [](V v) { return hardswish(v[0]); });
    check_op("silu", {x}, [](V v) { return silu(v[0]); });
    check_op("gelu", {x}, [](V v) { return gelu(v[0]); });
    check_op("gelu_tanh", {x}, [](V v) { return gelu_tanh(v[0]); });
    check_op("sigmoid", {x}, [](V v) { return sigmoid(v[0]); });
    check_op("add", {x, x}, [](V v) { return add(v[0], v[1]); });
    check_op("dropout", {x}, [](V v) { return dropout(v[0], 0.4f, CounterRng(1, RngUse::dropout)); });
    check_op("shortcut", {x}, [=](V v) { return subsample_and_pad(v[0], 2 * c); });
    check_op("concat", {x, x}, [](V v) { return concat({v[0], v[1], v[0]}); });
    check_op("slice", {x}, [=](V v) { return slice_channels(v[0], c / 2, c / 2); });
    check_op("shuffle", {x}, [](V v) { return channel_shuffle(v[0], 4); });
    check_op("pad", {x}, [](V v) { return pad_end(v[0], 1, 2, 0.5f); });
    check_op("scale", {x, {{3, c}}}, [](V v) { return scale_channels(v[0], v[1]); });
    check_op("lrn", {x}, [](V v) { return local_response_norm(v[0], {}); });
    check_op("flatten", {x}, [](V v) { return flatten(v[0]); });
  }
  check_op("frames", {{{3, c, 8, 6}, Layout::blocked}}, [](V v) { return frames_to_rows(v[0]); });
  check_op(
      "lookahead", {{{12, 7}}, {{7, 3}, {}, true}}, [](V v) { return lookahead(v[0], 2, v[1]); }, 2, 2);
  check_op(
      "attention", {{{12, 40}}}, [](V v) { return attention(v[0], 4, 2, 2, true); }, 1, 3);
  check_op("linear", {{{9, 20}}, {{12, 20}, {}, true, 0, 0.2f}, {{12}, {}, true}},
           [](V v) { return linear(v[0], v[1], v[2]); });
  const Made rows{{9, 40}}, weight{{40}, {}, true, 1}, bias{{40}, {}, true};
  check_op("layer_norm", {rows, weight, bias}, [](V v) { return layer_norm(v[0], v[1], v[2]); });
  check_op("rms_norm", {rows, weight}, [](V v) { return rms_norm(v[0], v[1]); });
  check_op(
      "add_layer_norm", {rows, rows, weight, bias},
      [](V v) { return add_layer_norm(v[0], v[1], v[2], v[3]).norm; }, 2, 2);
  check_op("swiglu", {rows}, [](V v) { return swiglu(v[0]); });
  check_op("rope", {rows}, [](V v) { return rope(v[0], 2, 1, 3); });
  const std::vector<std::int32_t> labels{0, 5, kNoLabel, 11};
  check_op("cross-entropy", {{{4, 12}}}, [&](V v) { return softmax_cross_entropy(v[0], labels); });
  check_op("squared error", {{{4, 3}}}, [](V v) { return mean_squared_error(v[0], Tensor::zeros({4, 3})); });
}

TEST_CASE("the LSTM layer in bfloat16 agrees with fp32, of any units, with and without a carried state") {
  if (!multiplies_bfloat16()) return;
  for (const std::int64_t width : {5, 16, 37, 64})
    for (const int threads : {1, 2})
      for (const bool carried : {false, true}) {
        const Threads scope(threads);
        INFO(width << " units, " << threads << " threads" << (carried ? ", carried" : ""));
        const std::int64_t batch = 3, steps = 4, in = 11;
        const float scale = 1 / std::sqrt(float(width));
        check_op(
            "lstm",
            {{{steps * batch, in}},
             {{4 * width, in}, {}, true, 0, scale},
             {{4 * width, width}, {}, true, 0, scale},
             {{4 * width}, {}, true},
             {{4 * width}, {}, true}},
            [&](std::span<const Variable> v) {
              const auto size = std::size_t(batch * width);
              Buffer hidden{"h", std::vector<float>(size, 0.5f)}, cell{"c", std::vector<float>(size, -1.0f)};
              const LstmState state = carried ? LstmState{&hidden, &cell} : LstmState{};
              const Variable y = lstm(v[0], batch, {v[1], v[2], v[3], v[4]}, state);
              if (carried) {  // the last step's
                const auto rows = y.value().to_vector();
                CHECK(std::equal(hidden.values.begin(), hidden.values.end(),
                                 rows.end() - std::ptrdiff_t(size)));
              }
              return y;
            },
            2, 4);
      }
}

TEST_CASE("kernels that take fp32 alone are not given bfloat16") {
  const Tensor x = Tensor::empty({2, 3}, Layout::plain, {}, DType::bf16);
  CHECK_THROWS_AS(kernels_for<LookaheadKernels>(x), Error);
  CHECK_NOTHROW(kernels_for<ReluKernels>(x));
}

TEST_CASE("bfloat16 in lanes is rounded and widened as one by one") {
  std::vector<float> values = random_values(16 * 4096, 3);
  for (std::size_t i = 0; i < values.size(); ++i) values[i] *= std::exp(float(i % 170) - 85.0f);
  const float specials[] = {0.0f, -0.0f, INFINITY, -INFINITY, NAN, 3.4e38f, 1e-40f, 1.00390625f, 1.01171875f};
  std::copy(std::begin(specials), std::end(specials), values.begin());
  for (std::size_t i = 0; i < values.size(); i += 16) {
    BFloat16 stored[16];
    store_as<Lanes>(stored, load_as<Lanes>(values.data() + i));
    float back[16];
    store_as<Lanes>(back, load_as<Lanes>(stored));
    for (std::size_t k = 0; k < 16; ++k) {
      REQUIRE(stored[k].bits == to_bfloat16(values[i + k]).bits);
      if (!std::isnan(values[i + k])) REQUIRE(back[k] == to_float(stored[k]));
    }
    store_as<Lanes8>(stored, load_as<Lanes8>(values.data() + i));
    for (std::size_t k = 0; k < 8; ++k) REQUIRE(stored[k].bits == to_bfloat16(values[i + k]).bits);
  }
}

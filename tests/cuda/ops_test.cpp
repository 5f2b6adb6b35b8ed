// Ops that are exact have the CPU's bits on a GPU, rounded once where activations are bfloat16; and what GPUs
// alone do.
#include "nn/ops/ops.h"

#include "nn/ops/cuda/layout.h"
#include "tests/cuda/fixture.h"
#include "tests/cuda/gpu_leaf.h"
#include "tests/support/ctc_reference.h"

namespace topknot {
namespace {

using namespace testing;

// Of ops whose inputs and value have the same shape. Odd sizes leave elements over after the last 16 bytes.
const std::vector<Shape> kShapes{{2, 16, 3, 5}, {3, 5, 7, 3}, {1, 1, 1, 1},
                                 {4, 1, 9, 9},  {5, 33},      {2, 8, 1, 1}};

// `tolerance`: of what is not exact, relative to 1 and more; 0: the same bits. `fp32_inputs`: bf16 where sums
// have to be exact.
void check_same(const Op& op, const std::vector<Shape>& shapes, double tolerance = 0,
                DType fp32_inputs = DType::f32) {
  for (const bool bf16 : {false, true}) {
    INFO(shapes[0].str() << (bf16 ? ", bf16" : ", f32"));
    const OnGpu gpu(bf16 ? cuda::Precision::bf16 : cuda::Precision::fp32);
    const DType type = bf16 ? DType::bf16 : fp32_inputs;
    std::vector<Input> x;
    for (const Shape& shape : shapes)
      x.push_back({shape, rounded_to(type, random_values(shape.numel(), std::uint32_t(x.size())))});
    x[0].values[0] = -0.0f;
    std::vector<Variable> plain;
    for (const Input& input : x) plain.emplace_back(Tensor::from(input.values, input.shape));
    const auto dy = rounded_to(type, random_values(op(plain).shape().numel(), 9));
    const Probe expected = probe(op, x, dy, false), actual = probe(op, x, dy, true);
    REQUIRE(actual.shape == expected.shape);
    const auto same = [&](const std::vector<float>& a, const std::vector<float>& b) {
      if (tolerance == 0) {
        CHECK(same_bits(a, rounded_to(bf16 ? DType::bf16 : DType::f32, b)));
        return;
      }
      Array scale;
      for (const float v : b) scale.push_back(std::abs(v) + (bf16 ? 0.1 : 1.0));
      check_close("values", a, as_double(b), scale, bf16 ? 1.0 / 256 : tolerance);
    };
    same(actual.value, expected.value);
    for (std::size_t i = 0; i < x.size(); ++i) same(actual.gradients[i], expected.gradients[i]);
    for (const Order order : orders()) {
      const auto scope = order();
      CHECK((probe(op, x, dy, true) == actual));
    }
  }
}

TEST_CASE("activation functions, add and dropout on a GPU are the CPU's, value and gradients") {
  for (const Shape& shape : kShapes) {
    check_same([](auto x) { return relu(x[0]); }, {shape});
    check_same([](auto x) { return relu6(x[0]); }, {shape});
    check_same([](auto x) { return clamp(x[0], -0.5f, 0.75f); }, {shape});
    check_same([](auto x) { return hardswish(x[0]); }, {shape});
    check_same([](auto x) { return sigmoid(x[0]); }, {shape});
    check_same([](auto x) { return silu(x[0]); }, {shape});
    check_same([](auto x) { return gelu(x[0]); }, {shape});
    check_same([](auto x) { return gelu_tanh(x[0]); }, {shape});
    check_same([](auto x) { return add(x[0], x[1]); }, {shape, shape});
    for (const float p : {0.25f, 0.9f})
      check_same([=](auto x) { return dropout(x[0], p, CounterRng(5, RngUse::dropout, 3, 9)); }, {shape});
  }
}

TEST_CASE("swiglu and rope on a GPU are the CPU's, value and gradients") {
  for (const Shape& shape : {Shape{1, 2}, Shape{5, 34}, Shape{40, 256}})
    check_same([](auto x) { return swiglu(x[0]); }, {shape});
  check_same([](auto x) { return rope(x[0], 5, 1, 3); }, {{120, 7 * 6}});
  check_same([](auto x) { return rope(add(x[0], x[0]), 3, 3, 1); }, {{30, 9 * 64}});  // in place
}

TEST_CASE("ops that move channels, pixels and frames on a GPU are the CPU's, value and gradients") {
  check_same([](auto x) { return concat({x[0], x[1], x[2]}); }, {{2, 16, 3, 5}, {2, 3, 3, 5}, {2, 5, 3, 5}});
  check_same([](auto x) { return slice_channels(x[0], 2, 5); }, {{3, 9, 4, 3}});
  check_same(
      [](auto x) {
        return concat({slice_channels(x[0], 3, 2), slice_channels(x[0], 0, 4)});
      },
      {{3, 5, 1, 3}});  // two contributions to one gradient
  check_same([](auto x) { return channel_shuffle(x[0], 2); }, {{2, 58, 3, 4}});
  check_same([](auto x) { return channel_shuffle(x[0], 3); }, {{2, 12, 1, 4}});
  check_same([](auto x) { return pad_end(x[0], 1, 1); }, {{2, 5, 4, 6}});
  check_same([](auto x) { return pad_end(x[0], 0, 2, -3.0f); }, {{1, 16, 3, 3}});
  // Channels by whole parameters and not; odd and even sides.
  for (const auto& [shape, channels] : std::vector<std::pair<Shape, std::int64_t>>{{{2, 16, 8, 8}, 32},
                                                                                   {{3, 32, 7, 5}, 64},
                                                                                   {{1, 16, 1, 1}, 16},
                                                                                   {{2, 5, 4, 3}, 9},
                                                                                   {{2, 8, 3, 4}, 16},
                                                                                   {{2, 3, 4, 4}, 8},
                                                                                   {{1, 24, 5, 2}, 40}})
    check_same([channels = channels](auto x) { return subsample_and_pad(x[0], channels); }, {shape});
  for (const Shape& shape : {Shape{3, 40, 3, 5}, Shape{2, 3, 9, 8}, Shape{2, 64, 1, 1}, Shape{3, 7}})
    check_same([](auto x) { return flatten(x[0]); }, {shape});
  for (const std::int64_t channels : {1, 3, 32})
    check_same([](auto x) { return flatten(rows_to_images(frames_to_rows(x[0]))); }, {{2, channels, 5, 7}});
}

TEST_CASE("scale_channels and pooling of whole channels on a GPU are the CPU's, local_response_norm nearly") {
  for (const std::int64_t channels : {5, 32})
    check_same([](auto x) { return scale_channels(x[0], x[1]); }, {{3, channels, 4, 5}, {3, channels}}, 0,
               DType::bf16);
  for (const Shape& shape : {Shape{1, 1, 1, 1}, Shape{3, 5, 4, 3}, Shape{2, 300, 7, 7}, Shape{2, 1, 33, 9}})
    check_same([](auto x) { return global_average_pool(x[0]); }, {shape});
  for (const std::int64_t channels : {3, 40})
    for (const LrnOptions& o : {LrnOptions{}, LrnOptions{3, 0.5f, 0.5f, 1}})
      check_same([=](auto x) { return local_response_norm(x[0], o); }, {{2, channels, 3, 5}}, 1e-5,
                 DType::bf16);
}

TEST_CASE("mask_frames on a GPU masks as on the CPU, pictures and rows") {
  const OnDevice gpu(GENERATE(from_range(activation_types())));
  const std::vector<std::int32_t> frames{7, 2, 0};
  const DeviceNumbers there(frames);
  for (const Shape& shape : {Shape{3, 5, 4, 7}, Shape{7 * 3, 10}}) {
    const auto values = random_activations(shape.numel(), 1), dy = random_activations(shape.numel(), 2);
    const Leaf x(shape, values), cpu(shape, values, Device{});
    const Layout layout = shape.rank() == 4 ? Layout::nhwc : Layout::plain;
    const Variable y = mask_frames(activation(x.variable(), layout), there),
                   expected = mask_frames(cpu.variable(), frames);
    CHECK(values_of(y) == values_of(expected));
    backward(weighted_sum(y, dy));
    backward(weighted_sum(expected, dy));
    CHECK(x.gradient() == cpu.gradient());
  }
}

TEST_CASE("relu on a GPU lets a NaN through and a negative zero not") {
  const OnGpu gpu;
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const Probe y =
      probe([](auto x) { return relu(x[0]); }, {{{5}, {nan, -0.0f, 0, -1, 2}}}, {1, 2, 3, 4, 5}, true);
  CHECK(std::isnan(y.value[0]));
  CHECK(same_bits(std::vector<float>(y.value.begin() + 1, y.value.end()), {0, 0, 0, 2}));
  CHECK(y.gradients[0] == std::vector<float>{1, 0, 0, 0, 5});
}

TEST_CASE("add on a GPU takes inputs of two layouts") {
  const OnGpu gpu;
  const Shape shape{2, 3, 4, 5};
  const auto a = random_values(shape.numel(), 1), b = random_values(shape.numel(), 2);
  const Variable left(cuda::to_activation(Tensor::from(a, shape)));
  const Variable right(Tensor::from(b, shape, gpu.device()));
  const Variable y = add(left, right);
  CHECK(y.value().layout() == Layout::nhwc);
  CHECK(cuda::to_plain(y.value()).to_vector() ==
        add(Variable(Tensor::from(a, shape)), Variable(Tensor::from(b, shape))).value().to_vector());
}

TEST_CASE("a captured dropout draws anew for each step's word") {
  const OnGpu gpu;
  const Shape shape{2, 8, 3, 3};
  const auto values = random_values(shape.numel(), 1);
  const DeviceVector<std::uint32_t> step(std::vector<std::uint32_t>{77});
  const Tensor x = cuda::to_activation(Tensor::from(values, shape));
  const auto draw = [&] {
    return dropout(Variable(x), 0.5f, CounterRng(5, RngUse::dropout, 0, 9), step.data());
  };
  draw();  // a capture takes the memory that this gives back
  Variable y;
  CapturedGraph graph(gpu.stream(), [&] { y = draw(); });
  for (const std::uint32_t s : {0u, 1u, 4000000000u}) {
    to_device(step.data(), std::vector<std::uint32_t>{s});
    graph.launch(gpu.stream());
    const Variable expected =
        dropout(Variable(Tensor::from(values, shape)), 0.5f, CounterRng(5, RngUse::dropout, s, 9));
    CHECK(same_bits(cuda::to_plain(y.value()).to_vector(), expected.value().to_vector()));
  }
}

TEST_CASE("the checksum of weights on a GPU is the CPU's, slice by slice") {
  const OnGpu gpu;
  std::vector<float> values = random_values(70001, 3);
  values[7] = -0.0f, values[8] = NAN;
  const DeviceVector<float> there(values);
  std::vector<std::span<const float>> here, on_gpu;
  for (const auto& [begin, length] :
       std::vector<std::pair<std::size_t, std::size_t>>{{0, 0}, {0, 1}, {1, 300}, {7, 2}, {3, 69998}}) {
    here.emplace_back(values.data() + begin, length);
    on_gpu.emplace_back(there.data() + begin, length);
  }
  CHECK(backend(gpu.device()).checksums(on_gpu) == cpu_backend().checksums(here));
}

TEST_CASE("attention on a GPU refuses heads that are too wide for its kernels, and says what to do") {
  const OnGpu gpu;
  const Variable wide(Tensor::zeros({2, 3 * 257}, Layout::plain, gpu.device()));
  CHECK_THROWS_WITH(attention(wide, 1, 1, 1, true),
                    Catch::Contains("up to 256 elements, not 257; use more heads"));
}

TEST_CASE("images become activations and come back: bfloat16 rounds to nearest") {
  for (const bool bf16 : {false, true}) {
    const OnGpu gpu(bf16 ? cuda::Precision::bf16 : cuda::Precision::fp32);
    const Shape shape{2, 3, 5, 34};
    const auto values = random_values(shape.numel(), 3);
    for (const Device from : {Device{}, gpu.device()}) {
      const Tensor x = cuda::to_activation(Tensor::from(values, shape, from));
      CHECK(x.layout() == Layout::nhwc);
      CHECK(x.dtype() == (bf16 ? DType::bf16 : DType::f32));
      const auto stored = x.to_vector();
      std::vector<float> expected;
      for (std::int64_t n = 0; n < 2; ++n)
        for (std::int64_t i = 0; i < 5 * 34; ++i)
          for (std::int64_t c = 0; c < 3; ++c)
            expected.push_back(values[std::size_t((n * 3 + c) * 5 * 34 + i)]);
      CHECK(same_bits(stored, bf16 ? rounded_to(DType::bf16, expected) : expected));
      CHECK(same_bits(cuda::to_plain(x).to_vector(), bf16 ? rounded_to(DType::bf16, values) : values));
    }
    const Tensor features = cuda::to_activation(Tensor::from(random_values(21, 4), {3, 7}));
    CHECK(features.layout() == Layout::plain);
    CHECK(features.dtype() == (bf16 ? DType::bf16 : DType::f32));
  }
}

TEST_CASE("max pooling on a GPU: padding never wins, a NaN comes through, equal values share one gradient") {
  const OnGpu gpu(cuda::Precision::fp32, GENERATE(true, false));
  const Shape shape{1, 4, 4, 4};
  std::vector<float> low(64, -100.0f);
  const CaughtInput x(gpu_tensor(low, shape, Layout::nhwc, DType::f32));
  const Variable y = pool(x.variable(), {PoolKind::max, 2, 2, 0});
  CHECK(values_of(y.value()) == std::vector<float>(16, -100.0f));
  backward_from({{y, std::vector<float>(16, 1.0f)}});
  const auto dx = x.gradient();
  double sum = 0;
  for (const float g : dx) sum += g;
  CHECK(sum == 16);

  low[0] = std::numeric_limits<float>::quiet_NaN();  // channel 0, first window
  const Variable bad =
      pool(Variable(gpu_tensor(low, shape, Layout::nhwc, DType::f32)), {PoolKind::max, 3, 2, 1});
  const auto values = values_of(bad.value());
  for (std::size_t i = 0; i < values.size(); ++i) CHECK(std::isnan(values[i]) == (i == 0));
}

TEST_CASE("ctc_loss on a GPU: many labels take several rounds of threads; a NaN stands for bad targets") {
  CtcCase one{"long", 301, 5, 150, 0, std::vector<std::int32_t>(300), {150, 3}, {301, 300}};
  for (std::size_t i = 0; i < one.labels.size(); ++i) one.labels[i] = 1 + std::int32_t(i % 4);
  const auto run = [&](const Leaf& logits) {
    const DeviceNumbers labels(one.labels), lengths(one.lengths), frames(one.frame_counts);
    const Variable loss = ctc_loss(logits.variable(), {labels, lengths, frames});
    backward(loss);
    return loss.value().to_vector()[0];
  };
  const Leaf on_cpu({602, 5}, one.logits());
  const float expected = run(on_cpu);
  const OnDevice device;
  const Leaf logits({602, 5}, one.logits()), again({602, 5}, one.logits());
  CHECK(run(logits) == Approx(expected).epsilon(1e-6));
  check_close("dz", logits.gradient(), as_double(on_cpu.gradient()), Array(602 * 5, 1.0), 1e-6);
  one.frame_counts[1] = 2;  // for three labels
  CHECK(std::isnan(run(again)));
  CHECK(std::isnan(again.gradient()[5]));        // row 1: frame 0 of the second
  CHECK_FALSE(std::isnan(again.gradient()[0]));  // of the first
}

TEST_CASE("a label that is no class makes the loss and its row's gradient NaN, and reads nothing outside") {
  const OnDevice gpu;
  for (const std::int32_t label : {-2, 3, 1 << 30}) {
    const Leaf logits({2, 3}, {1, 2, 3, 4, 5, 6});
    const DeviceNumbers labels({label, 1});
    const Variable loss = softmax_cross_entropy(logits.variable(), labels);
    backward(loss);
    CHECK(std::isnan(loss.value().to_vector()[0]));
    for (std::size_t i = 0; i < 6; ++i) CHECK(std::isnan(logits.gradient()[i]) == (i < 3));
  }
}

TEST_CASE("embedding on a GPU gives NaN for what is no token, and of others whole rows") {
  const OnGpu gpu;
  const GpuLeaf weight({7, 300}, random_values(7 * 300, 1));
  const auto rows = values_of(
      embedding(Variable(gpu_tensor({7, -1, 2}, {1, 3, 1, 1}, Layout::nhwc, DType::f32)), weight.variable()));
  CHECK(std::isnan(rows[0]));
  CHECK(std::isnan(rows[300]));
  CHECK(std::isfinite(rows[600]));
}

TEST_CASE("embedding on a GPU in bfloat16 reads whole ids and sums its gradient in fp32") {
  const OnGpu gpu(cuda::Precision::bf16);
  const std::int64_t tokens = 1001;  // bfloat16 has no 999
  const auto table = random_values(tokens, 1);
  const GpuLeaf weight({tokens, 1}, table);
  const Variable y = embedding(Variable(gpu_tensor({999, 1000, 999}, {1, 3, 1, 1}, Layout::nhwc, DType::f32)),
                               weight.variable());
  CHECK(y.value().dtype() == DType::bf16);
  CHECK((values_of(y.value()) == rounded_to(DType::bf16, {table[999], table[1000], table[999]})));
  backward_from({{y, {1.0f, 4.0f, 0.00390625f}}});  // 1 + 2^-8 is no bfloat16
  CHECK(weight.gradient()[999] == 1.00390625f);
  CHECK(weight.gradient()[1000] == 4.0f);
}

TEST_CASE("embedding on a GPU adds a token's rows up in their order, however far apart") {
  const OnGpu gpu;
  // 3 sequences of 300 steps: a token in each step of one of them, two that are rare, one id that is no token.
  const std::int64_t batch = 3, steps = 300, tokens = 9, width = 5;
  std::vector<float> ids(std::size_t(batch * steps), 2);
  for (std::int64_t t = 0; t < steps; ++t) {
    ids[std::size_t(steps + t)] = float(t % 3 + 3);
    ids[std::size_t(2 * steps + t)] = t == 1 || t == 298 ? 7 : t == 299 ? 8 : t == 150 ? -1 : 2;
  }
  const auto dy = random_values(batch * steps * width, 3);
  std::vector<float> expected(std::size_t(tokens * width), 0.0f);
  for (std::int64_t row = 0; row < batch * steps; ++row)
    if (const float id = ids[std::size_t(row % batch * steps + row / batch)]; id >= 0)
      for (std::int64_t c = 0; c < width; ++c)
        expected[std::size_t(std::int64_t(id) * width + c)] += dy[std::size_t(row * width + c)];
  const GpuLeaf weight({tokens, width}, random_values(tokens * width, 1));
  const Variable y =
      embedding(Variable(gpu_tensor(ids, {batch, steps, 1, 1}, Layout::nhwc, DType::f32)), weight.variable());
  backward_from({{y, dy}});
  CHECK(same_bits(weight.gradient(), expected));
}

}  // namespace
}  // namespace topknot

// What a GPU computes does not depend on the order in which blocks, threads and a graph's branches run.
#include "compress/codec/codec.h"
#include "compress/codec/cuda/device_codec.h"
#include "compress/memory/cuda/device_memory.h"
#include "data/cuda/device_dataset.h"
#include "optim/clip.h"
#include "optim/optimizer.h"
#include "tests/cuda/batch_norm_probe.h"
#include "tests/cuda/compressor_ranks.h"
#include "tests/cuda/selectors.h"
#include "tests/data/small_dataset.h"
#include "tests/emulator/tests/machine_settings.h"

namespace topknot {
namespace {

using namespace testing;

// What `work` gives in ascending order is what it gives in descending order, and where blocks take turns.
template <class Work>
auto of_all_orders(const Work& work) {
  const emulator::Settings settings;
  const auto ascending = work();
  emulator::machine().reverse = true;
  CHECK((work() == ascending));
  emulator::machine().reverse = false;
  emulator::machine().interleave = 1;
  CHECK((work() == ascending));
  return ascending;
}

TEST_CASE("a convolution and its gradients are the same in either order of blocks and threads") {
  const ConvGeometry g{5, 40, 3, 2, 1};
  for (const auto precision : {cuda::Precision::fp32, cuda::Precision::bf16})
    of_all_orders([&] {
      OnGpu gpu(precision);
      const DType type = gpu.context().activation_type();
      const CaughtInput x(gpu_tensor(random_values(2 * 5 * 31 * 17, 1), {2, 5, 31, 17}, Layout::nhwc, type));
      const GpuLeaf w(g.weight_shape(), random_values(g.weight_shape().numel(), 2)),
          b({40}, random_values(40, 3));
      const Variable y = conv2d(x.variable(), w.variable(), b.variable(), g);
      backward_from({{y, random_values(y.shape().numel(), 4)}});
      return std::vector{values_of(y.value()), x.gradient(), w.gradient(), b.gradient()};
    });
}

TEST_CASE("pointwise ops give the same for any order of blocks and threads") {
  const Shape shape{2, 40, 7, 6};
  const std::vector<std::pair<Op, std::int64_t>> ops{
      {[](auto x) { return relu(x[0]); }, shape.numel()},
      {[](auto x) { return add(x[0], x[0]); }, shape.numel()},
      {[](auto x) { return dropout(x[0], 0.5f, CounterRng(1, RngUse::dropout)); }, shape.numel()},
      {[](auto x) { return subsample_and_pad(x[0], 64); }, 2 * 64 * 4 * 3},
      {[](auto x) { return flatten(x[0]); }, shape.numel()},
      {[](auto x) { return silu(x[0]); }, shape.numel()},
      {[](auto x) { return gelu(x[0]); }, shape.numel()},
      {[](auto x) { return gelu_tanh(x[0]); }, shape.numel()},
      {[](auto x) { return swiglu(flatten(x[0])); }, shape.numel() / 2},
      {[](auto x) { return rope(flatten(x[0]), 20, 20, 1); }, shape.numel()},
      {[](auto x) {
         return concat({x[0], slice_channels(x[0], 3, 8)});
       },
       2 * 48 * 7 * 6},
      {[](auto x) { return channel_shuffle(x[0], 2); }, shape.numel()},
      {[](auto x) { return pad_end(x[0], 1, 2); }, 2 * 40 * 8 * 8},
      {[](auto x) { return scale_channels(x[0], global_average_pool(x[0])); }, shape.numel()},
      {[](auto x) { return local_response_norm(x[0]); }, shape.numel()}};
  for (const auto precision : {cuda::Precision::fp32, cuda::Precision::bf16})
    for (const auto& [op, outputs] : ops)
      of_all_orders([&, &op = op, &outputs = outputs] {
        const OnGpu gpu(precision);
        return probe(op, {{shape, random_values(shape.numel(), 1)}}, random_values(outputs, 2), true);
      });
}

TEST_CASE("norms and their gradients are the same in either order of blocks and threads") {
  for (const auto precision : {cuda::Precision::fp32, cuda::Precision::bf16})
    for (const std::int64_t width : {70, 132})
      of_all_orders([&] {
        OnGpu gpu(precision);
        const std::int64_t rows = 150;
        const DType type = gpu.context().activation_type();
        const CaughtInput x(gpu_tensor(random_values(rows * width, 1), {rows, width}, Layout::plain, type));
        const GpuLeaf w({width}, random_values(width, 2)), b({width}, random_values(width, 3));
        const Variable y = layer_norm(x.variable(), w.variable(), b.variable());
        backward_from({{y, random_values(rows * width, 4)}});
        return std::vector{values_of(y.value()), x.gradient(), w.gradient(), b.gradient()};
      });
}

TEST_CASE("positions and the head's loss and gradients are the same in either order of blocks and threads") {
  for (const auto precision : {cuda::Precision::fp32, cuda::Precision::bf16})
    of_all_orders([&] {
      OnGpu gpu(precision);
      const std::int64_t rows = 6, width = 40, classes = 300;
      const DType type = gpu.context().activation_type();
      const CaughtInput x(gpu_tensor(random_values(rows * width, 1), {rows, width}, Layout::plain, type));
      const GpuLeaf positions({4, width}, random_values(4 * width, 2)),
          weight({classes, width}, random_values(classes * width, 3));
      const DeviceVector<std::int32_t> labels(std::vector<std::int32_t>{3, 39, kNoLabel, 0, 299, 7});
      const Variable loss = linear_cross_entropy(add_positions(x.variable(), 2, positions.variable()),
                                                 weight.variable(), {labels.data(), 6}, 0.1f, 4);
      const std::vector<float> value = loss.value().to_vector();
      backward(loss);
      return std::vector{value, x.gradient(), positions.gradient(), weight.gradient()};
    });
}

TEST_CASE("attention gives the same for any order of blocks and threads") {
  const Shape shape{2 * 41, 4 * 40};  // 2 sequences of 41 tokens
  for (const auto precision : {cuda::Precision::fp32, cuda::Precision::bf16})
    for (const bool causal : {false, true})
      of_all_orders([&] {
        const OnGpu gpu(precision);
        return probe([&](auto x) { return attention(x[0], 2, 1, 2, causal); },
                     {{shape, random_values(shape.numel(), 1)}}, random_values(2 * 41 * 2 * 40, 2), true);
      });
}

TEST_CASE("a batch is the same for any order of blocks and threads") {
  const auto [images, labels] = of_all_orders([] {
    const OnGpu gpu;
    const cuda::DeviceDataset dataset(SmallDataset(9, true, {3, 40, 41}), true, 5);
    const DeviceVector<std::int32_t> indices(std::vector<std::int32_t>{8, 0, 3}), labels(3);
    Tensor images = Tensor::empty({3, 3, 40, 41}, Layout::nhwc, gpu.device()), none;
    dataset.make_batch(gpu.stream(), indices.data(), 3, nullptr, images, labels.data(), none);
    return std::pair(images.to_vector(), labels.host());
  });
  CHECK(labels == std::vector<std::int32_t>{3, 0, 3});
}

TEST_CASE("batch norm's bits do not depend on the order of blocks and threads") {
  for (const cuda::Precision precision : {cuda::Precision::fp32, cuda::Precision::bf16}) {
    OnGpu gpu(precision);
    for (const std::int64_t channels : {5, 24}) {
      const BatchNormProbe p({17, channels, 7, 5, true, true}, gpu.context().activation_type());
      of_all_orders([&] { return by_op(p); });
    }
  }
}

TEST_CASE("pooling and losses have the same bits in any order of blocks and threads") {
  const OnGpu gpu;
  of_all_orders([&] {
    const CaughtInput x(gpu_tensor(random_values(2 * 40 * 9, 1), {2, 40, 3, 3}, Layout::nhwc, DType::f32));
    const DeviceVector<std::int32_t> labels(std::vector<std::int32_t>{3, 39});
    const DeviceVector<double> hits(std::vector<double>{0});
    const Variable pooled = global_average_pool(x.variable());
    const Variable loss = softmax_cross_entropy(pooled, {labels.data(), 2});
    const Variable other = mean_squared_error(pooled, Tensor::zeros({2, 40}, Layout::plain, gpu.device()));
    count_correct(pooled.value(), {labels.data(), 2}, 5, hits.data());
    std::vector<float> all{loss.value().to_vector()[0], other.value().to_vector()[0],
                           static_cast<float>(hits.host()[0])};
    backward(add(loss, other));
    const auto dx = x.gradient();
    all.insert(all.end(), dx.begin(), dx.end());
    return all;
  });
}

TEST_CASE("a clipped SGD step gives the same whatever the order of blocks and threads") {
  const auto [weights, scale] = of_all_orders([] {
    const OnGpu gpu;
    ParameterStore store(gpu.device());
    const auto normal = [](std::span<float> v, const CounterRng& rng) {
      for (std::size_t i = 0; i < v.size(); ++i) v[i] = rng.normal(i);
    };
    store.add("weight", {130, 170}, normal);
    store.add("bias", {170}, normal);
    ParameterArena& arena = store.build([](const Parameter&) { return true; }, 1);
    OptimizerOptions options;
    options.momentum = 0.9, options.weight_decay = 0.1;
    const auto optimizer = make_optimizer(options, arena);
    std::vector<float> gradient(arena.size());
    normal(gradient, CounterRng(1, RngUse::test));
    const DeviceVector<float> there(gradient);
    DeviceVector<StepParameters> parameters(std::vector<StepParameters>(1));
    Clip clip(gpu.device(), arena.size());
    const std::span<float> vector(there.data(), there.size());
    clip.sum_of_squares({&vector, 1});
    clip.set_gradient_scale(1.0, parameters.data());
    optimizer->update(0, {there.data(), there.size()}, StepState{parameters.data()});
    return std::pair(arena.host_weights(), parameters.host()[0].gradient_scale);
  });
  CHECK(scale < 1);
}

TEST_CASE("codes on a GPU do not depend on the order of threads") {
  const emulator::Reordered reordered(GENERATE(0u, 1u));
  const OnGpu gpu;
  const std::size_t numel = 70001, count = 2500, capacity = 2600;
  SparseVector entries;
  for (std::size_t i = 0; i < count; ++i) {
    entries.indices.push_back(static_cast<std::uint32_t>(i * i % 17 + 28 * i));
    entries.values.push_back(0.001f * static_cast<float>(i) - 1.0f);
  }
  const DeviceVector<std::uint32_t> positions(entries.indices), stats(std::vector<std::uint32_t>{count, 1});
  const DeviceVector<float> values(entries.values);
  for (const char* layout : {"raw", "rice", "bitmap"})
    for (const char* value : {"fp32", "bf16", "fp16", "int8"}) {
      INFO(layout << " " << value);
      const auto* const index_codec = &index_codecs().find(layout);
      const auto* const value_codec = &value_codecs().find(value);
      std::vector<std::byte> expected = write_block(entries, numel, *index_codec, *value_codec);
      SparseVector decoded;
      read_block(expected, numel, *index_codec, *value_codec, decoded);
      const auto code = cuda::make_device_codec(layout, value, numel, 1);
      code->set_capacity(capacity);
      expected.resize(code->block_bytes());
      DeviceVector<std::byte> block(code->block_bytes());
      code->write(gpu.stream(), {positions.data(), values.data(), stats.data(), stats.data() + 1},
                  block.data());
      CHECK(block.host() == expected);
      DeviceVector<std::uint32_t> indices(capacity);
      DeviceVector<float> out(capacity);
      DeviceVector<cuda::DecodedStats> found(1);
      code->read(gpu.stream(), block.data(), {indices.data(), out.data(), found.data()});
      CHECK(found.host()[0].damaged == 0);
      CHECK(found.host()[0].count == count);
      CHECK(to_host<std::uint32_t>(indices.data(), count) == decoded.indices);
      CHECK(to_host<float>(out.data(), count) == decoded.values);
    }
}

TEST_CASE("compressors on a GPU do not depend on the order of threads") {
  const emulator::Reordered reordered(GENERATE(0u, 1u));
  const OnGpu gpu;
  const std::size_t n = 1300;
  for (const char* name : kMethods) {
    INFO(name);
    CompressOptions options = options_of(name);
    options.codec = "rice";
    options.values = "fp16";
    BothRanks both(options, {n, {{0, 600}, {600, n}}, 3});
    ten_steps(both, n, {0.75f, 1.25f, 1.0f});
  }
}

TEST_CASE("selections are the same where blocks and threads run backwards") {
  const emulator::Reordered reordered(GENERATE(0u, 1u));
  const OnGpu gpu;
  for (const char* name : {"topk", "threshold", "gaussiank"})
    for (const double capacity : {0.0, 1.5})
      for (const std::size_t n : {33u, 4097u, 20000u}) {
        CompressOptions options;
        options.set("threshold", 0.8);
        options.capacity = capacity;
        SelectPair pair(name, options, n, capacity > 0);
        pair.set_density(0.02);
        for (std::uint32_t t = 0; t < 10; ++t) {
          INFO(name << ", " << n << " elements, capacity " << capacity << ", step " << t);
          pair.step(gradient_of(t % 3 == 2 ? static_cast<int>(t) % kGradients : 0, n, t), 0.02, t != 4);
        }
      }
}

TEST_CASE("sampled selection is the CPU's when blocks and threads run backwards") {
  const emulator::Reordered reordered(GENERATE(0u, 1u));
  const OnGpu gpu;
  CompressOptions options;
  options.set("resample", GENERATE(true, false));
  const std::size_t n = 20011;
  BothSelectors both("dgc_sampled", options, n, 0, 0.05);
  for (std::uint32_t draw = 0; draw < 6; ++draw) {
    Asked asked;
    asked.density = draw < 4 ? 0.01 : 0.00001;
    asked.step = draw;
    both.select(gpu.stream(), noise(n, draw, draw % 2 ? 9 : 1), noise(n, 50), asked);
  }
}

TEST_CASE("RegTop-k is the CPU's when blocks and threads run backwards") {
  const emulator::Reordered reordered(GENERATE(0u, 1u));
  const OnGpu gpu;
  CompressOptions options;
  options.set("mu", 1);
  const std::size_t n = 20011;
  BothSelectors both("regtopk", options, n, 0, 0.05);
  for (std::uint32_t step = 0; step < 6; ++step) {
    Asked asked;
    asked.density = 0.05;
    std::vector<float> u = noise(n, 1, 2);
    for (float& x : u) x += 0.01f * static_cast<float>(step);
    both.select(gpu.stream(), u, noise(n, 60), asked);
    both.commit(gpu.stream(), step == 2, 1, 2, step);
  }
}

TEST_CASE("memories take what was sent, or the old residual back, in any order of threads") {
  const emulator::Reordered reordered(GENERATE(0u, 1u));
  const OnGpu gpu;
  const std::size_t n = 3000;
  CompressOptions options;
  options.momentum = 0.9;
  const auto memory = cuda::make_device_memory("dgc", options, n);
  DeviceVector<float> u(noise(n, 1)), residual(noise(n, 2));
  const Slice slice{{u.data(), n}, {residual.data(), n}};
  const cuda::Accumulate made = memory->accumulate(slice, nullptr);
  to_device(made.next_velocity, noise(n, 3));
  DeviceVector<std::uint32_t> positions(std::vector<std::uint32_t>{0, 1700, 2999}),
      count(std::vector<std::uint32_t>{3});
  const std::vector<float> before = u.host();
  DeviceVector<float> values(std::vector<float>{before[0], before[1700], 1});
  const bool bad = GENERATE(false, true);
  StepStatus word;
  word.bad = bad;
  DeviceVector<StepStatus> status(std::vector<StepStatus>{word});
  DeviceVector<cuda::DecodedStats> received(std::vector<cuda::DecodedStats>{{3, 1, 0, 0}});
  DeviceVector<float> weights(std::vector<float>{1});
  memory->commit(gpu.stream(), status.data(), slice, {positions.data(), values.data(), count.data()},
                 {{positions.data(), values.data(), received.data()}, 3, 1, weights.data()});
  std::vector<float> kept = bad ? noise(n, 2) : before;
  std::vector<float> velocity = bad ? std::vector<float>(n) : noise(n, 3);
  if (!bad) {
    kept[0] = kept[1700] = 0;
    kept[2999] -= 1;
    velocity[0] = velocity[1700] = velocity[2999] = 0;
  }
  CHECK(same_bits(u.host(), kept));
  CHECK(same_bits(to_host(static_cast<const float*>(made.next_velocity), n), velocity));
}

TEST_CASE(
    "ranges that take less than there is room for keep to their places in the list, in any order of blocks") {
  const GroupSpec group{32001, {{0, 9001}, {9001, 9002}, {9002, 29000}, {29000, 32001}}, 2};
  const emulator::Reordered order(GENERATE(0u, 1u, 3u));
  const OnGpu gpu;
  for (const char* name : kMethods) {
    INFO(name);
    BothRanks both(options_of(name), group);
    both.set_density(0.25);
    both.lower_density(0.01);
    for (std::int64_t step = 0; step < 4; ++step) {
      for (std::size_t r = 0; r < both.ranks(); ++r) both.gradient(r) = gradient_of(step, r, group.numel);
      both.step(step);
    }
  }
}

}  // namespace
}  // namespace topknot

// Ops and batches do not depend on the order of blocks and threads.
#include "data/cuda/device_dataset.h"
#include "nn/ops/ops.h"
#include "tests/cuda/probe.h"
#include "tests/cuda/stand_in/machine.h"
#include "tests/data/small_dataset.h"
#include "tests/support/catch.h"

namespace topknot {
namespace {

using namespace testing;

TEST_CASE("a convolution and its gradients are the same in either order of blocks and threads") {
  const ConvGeometry g{5, 40, 3, 2, 1};
  const auto run = [&](bool reverse, cuda::Precision precision) {
    stand_in::machine().reverse = reverse;
    OnGpu gpu(precision);
    const DType type = gpu.context().activation_type();
    const CaughtInput x(gpu_tensor(random_values(2 * 5 * 31 * 17, 1), {2, 5, 31, 17}, Layout::nhwc, type));
    const GpuLeaf w(g.weight_shape(), random_values(g.weight_shape().numel(), 2)),
        b({40}, random_values(40, 3));
    const Variable y = conv2d(x.variable(), w.variable(), b.variable(), g);
    backward_from({{y, random_values(y.shape().numel(), 4)}});
    std::vector results{values_of(y.value()), x.gradient(), w.gradient(), b.gradient()};
    stand_in::reset();
    return results;
  };
  for (const auto precision : {cuda::Precision::fp32, cuda::Precision::bf16})
    CHECK(run(false, precision) == run(true, precision));
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
      {[](auto x) {
         return concat({x[0], slice_channels(x[0], 3, 8)});
       },
       2 * 48 * 7 * 6},
      {[](auto x) { return channel_shuffle(x[0], 2); }, shape.numel()},
      {[](auto x) { return pad_end(x[0], 1, 2); }, 2 * 40 * 8 * 8},
      {[](auto x) { return scale_channels(x[0], global_average_pool(x[0])); }, shape.numel()},
      {[](auto x) { return local_response_norm(x[0]); }, shape.numel()}};
  for (const auto precision : {cuda::Precision::fp32, cuda::Precision::bf16})
    for (const auto& [op, outputs] : ops) {
      std::vector<Probe> results;
      for (const bool reverse : {false, true}) {
        stand_in::reset();
        stand_in::machine().reverse = reverse;
        const OnGpu gpu(precision);
        results.push_back(
            probe(op, {{shape, random_values(shape.numel(), 1)}}, random_values(outputs, 2), true));
      }
      stand_in::reset();
      CHECK(results[0] == results[1]);
    }
}

TEST_CASE("a batch is the same for any order of blocks and threads") {
  std::vector<std::vector<float>> made;
  std::vector<std::vector<std::int32_t>> made_labels;
  for (const bool reverse : {false, true}) {
    stand_in::reset();
    stand_in::machine().reverse = reverse;
    const OnGpu gpu;
    const cuda::DeviceDataset dataset(SmallDataset(9, true, {3, 40, 41}), true, 5);
    const DeviceVector<std::int32_t> indices(std::vector<std::int32_t>{8, 0, 3}), labels(3);
    Tensor images = Tensor::empty({3, 3, 40, 41}, Layout::nhwc, gpu.device()), none;
    dataset.make_batch(gpu.stream(), indices.data(), 3, nullptr, images, labels.data(), none);
    made.push_back(images.to_vector());
    made_labels.push_back(labels.host());
  }
  stand_in::reset();
  CHECK(same_bits(made[0], made[1]));
  CHECK(made_labels[0] == made_labels[1]);
  CHECK(made_labels[0] == std::vector<std::int32_t>{3, 0, 3});
}

}  // namespace
}  // namespace topknot

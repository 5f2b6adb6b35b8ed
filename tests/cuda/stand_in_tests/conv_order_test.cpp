// Kernels of convolutions give the same bits in whatever order blocks and threads run.
#include "nn/ops/conv2d.h"
#include "nn/ops/cuda/conv_layout.h"
#include "nn/ops/linear.h"
#include "tests/cuda/fixture.h"
#include "tests/cuda/gpu_leaf.h"
#include "tests/cuda/stand_in/machine.h"
#include "tests/support/variables.h"

namespace topknot {

TEST_CASE("a convolution and its gradients are the same in either order of blocks and threads") {
  using testing::random_values;
  const ConvGeometry g{5, 40, 3, 2, 1};
  const auto run = [&](bool reverse, cuda::Precision precision) {
    stand_in::machine().reverse = reverse;
    OnGpu gpu(precision);
    const DType type = gpu.context().activation_type();
    const test::CaughtInput x(
        test::gpu_tensor(random_values(2 * 5 * 31 * 17, 1), {2, 5, 31, 17}, Layout::nhwc, type));
    const test::GpuLeaf w(g.weight_shape(), random_values(g.weight_shape().numel(), 2)),
        b({40}, random_values(40, 3));
    const Variable y = conv2d(x.variable(), w.variable(), b.variable(), g);
    test::backward_from({{y, random_values(y.shape().numel(), 4)}});
    std::vector results{test::values_of(y.value()), x.gradient(), w.gradient(), b.gradient()};
    stand_in::reset();
    return results;
  };
  for (const auto precision : {cuda::Precision::fp32, cuda::Precision::bf16})
    CHECK(run(false, precision) == run(true, precision));
}

}  // namespace topknot

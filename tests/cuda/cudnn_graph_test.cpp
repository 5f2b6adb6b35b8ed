// A convolution's weight gradient in fp32 by the plans of cuDNN's graph API.
#include "nn/ops/cuda/cudnn_graph.h"

#include "tests/cuda/fixture.h"
#include "tests/cuda/gpu_leaf.h"
#include "tests/support/variables.h"

namespace topknot {
namespace {

using reference::Conv;
using testing::random_values;
using testing::rounded_to;

}  // namespace

TEST_CASE("plans of cuDNN's graph API give a weight gradient in fp32 from bfloat16") {
  OnGpu gpu(cuda::Precision::bf16);
  for (const Conv& g : {Conv{2, 8, 6, 5, 16, 3, 1, 1}, Conv{3, 16, 9, 9, 24, 1, 2, 0},
                        Conv{2, 8, 9, 8, 8, {3, 2}, {2, 1}, {0, 1}}}) {
    const auto x = rounded_to(DType::bf16, random_values(g.x_size(), 1)),
               dy = rounded_to(DType::bf16, random_values(g.y_size(), 2));
    const Shape shape{g.n, g.in, g.height, g.width};
    const Tensor on_gpu = testing::gpu_tensor(x, shape, Layout::nhwc, DType::bf16),
                 gradient =
                     testing::gpu_tensor(dy, g.geometry().output_shape(shape), Layout::nhwc, DType::bf16);
    cuda::WeightGradientGraph graph(gpu.context().cudnn(), g.geometry(), shape);
    if (graph.plans() == 0) WARN("cuDNN " << cudnnGetVersion() << " has no plan for " << g.str());
    CHECK(graph.plan(graph.plans()) == nullptr);
    for (int i = 0; i < graph.plans(); ++i) {
      const cuda::WeightGradientPlan* plan = graph.plan(i);
      if (!plan) continue;
      INFO(g.str() << ", engine " << graph.engine(i));
      Tensor dw = Tensor::empty(g.geometry().weight_shape(), Layout::nhwc, gpu.device());
      REQUIRE(plan->run(gpu.context().cudnn(), on_gpu.data(), gradient.data(),
                        gpu.context().workspace(plan->workspace()), dw.data()) == CUDNN_STATUS_SUCCESS);
      const auto rx = testing::as_double(x), rdy = testing::as_double(dy);
      testing::check_close("dw", testing::values_of(dw), conv2d_weight_gradient(g, rx, rdy),
                           conv2d_weight_gradient(g, reference::absolute(rx), reference::absolute(rdy)),
                           2e-5);
    }
  }
}

}  // namespace topknot

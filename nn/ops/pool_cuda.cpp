// Pooling by cuDNN, which passes a NaN of the window on.
#include "nn/core/check.h"
#include "nn/core/cuda_context.h"
#include "nn/ops/cuda_ops.h"
#include "nn/ops/cudnn_descriptor.h"

namespace topknot::cuda {
namespace {

struct PoolPlan {
  PoolPlan(const PoolGeometry& g, const Tensor& like, const Shape& output)
      : x(cudnn_activation_tensor(like.shape(), like.dtype())),
        y(cudnn_activation_tensor(output, like.dtype())) {
    const int window = static_cast<int>(g.window), padding = static_cast<int>(g.padding),
              stride = static_cast<int>(g.stride);
    TOPKNOT_CUDNN(
        cudnnSetPooling2dDescriptor(pooling.get(),
                                    g.kind == PoolKind::max ? CUDNN_POOLING_MAX_DETERMINISTIC
                                                            : CUDNN_POOLING_AVERAGE_COUNT_EXCLUDE_PADDING,
                                    CUDNN_PROPAGATE_NAN, window, window, padding, padding, stride, stride));
  }
  CudnnTensor x, y;
  CudnnPooling pooling;
};

constexpr float kOne = 1, kZero = 0;

}  // namespace

Variable pool(const Variable& x, const PoolGeometry& geometry) {
  const Tensor& in = x.value();
  TOPKNOT_CHECK(in.layout() == Layout::nhwc, "pool: an activation on a GPU is nhwc");
  const Shape shape{in.dim(0), in.dim(1), geometry.output_size(in.dim(2)), geometry.output_size(in.dim(3))};
  TOPKNOT_CHECK(in.dim(2) + 2 * geometry.padding >= geometry.window &&
                    in.dim(3) + 2 * geometry.padding >= geometry.window,
                "pool: a window larger than " + in.shape().str());
  const auto plan = std::make_shared<PoolPlan>(geometry, in, shape);
  Tensor y = Tensor::empty(shape, in.layout(), in.device(), in.dtype());
  TOPKNOT_CUDNN(cudnnPoolingForward(Context::current().cudnn(), plan->pooling.get(), &kOne, plan->x.get(),
                                    in.data(), &kZero, plan->y.get(), y.data()));
  return {
      "pool", y, {x}, [=](Tensor grad) {
        Tensor dx = Tensor::empty_like(x.value());
        TOPKNOT_CUDNN(cudnnPoolingBackward(Context::current().cudnn(), plan->pooling.get(), &kOne,
                                           plan->y.get(), y.data(), plan->y.get(), grad.data(), plan->x.get(),
                                           x.value().data(), &kZero, plan->x.get(), dx.data()));
        x.accumulate_grad(std::move(dx));
      }};
}

}  // namespace topknot::cuda

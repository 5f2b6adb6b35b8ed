// Pooling by cuDNN, which passes a NaN of the window on. Where cuDNN does not pool bfloat16, it pools the same numbers
// as floats.
#include "nn/core/base/check.h"
#include "nn/core/cuda/context.h"
#include "nn/ops/cuda/activation.h"
#include "nn/ops/cuda/cudnn_descriptor.h"
#include "nn/ops/cuda_ops.h"

namespace topknot::cuda {
namespace {

constexpr float kOne = 1, kZero = 0;

// In one type of numbers.
class PoolPlan {
 public:
  PoolPlan(const PoolGeometry& g, const Shape& input, const Shape& output, DType type)
      : x_(cudnn_activation_tensor(input, type)), y_(cudnn_activation_tensor(output, type)) {
    const int window = static_cast<int>(g.window), padding = static_cast<int>(g.padding),
              stride = static_cast<int>(g.stride);
    TOPKNOT_CUDNN(
        cudnnSetPooling2dDescriptor(pooling_.get(),
                                    g.kind == PoolKind::max ? CUDNN_POOLING_MAX_DETERMINISTIC
                                                            : CUDNN_POOLING_AVERAGE_COUNT_EXCLUDE_PADDING,
                                    CUDNN_PROPAGATE_NAN, window, window, padding, padding, stride, stride));
  }
  cudnnStatus_t forward(const Tensor& x, Tensor& y) const {
    return cudnnPoolingForward(Context::current().cudnn(), pooling_.get(), &kOne, x_.get(), x.data(), &kZero,
                               y_.get(), y.data());
  }
  cudnnStatus_t backward(const Tensor& y, const Tensor& dy, const Tensor& x, Tensor& dx) const {
    return cudnnPoolingBackward(Context::current().cudnn(), pooling_.get(), &kOne, y_.get(), y.data(),
                                y_.get(), dy.data(), x_.get(), x.data(), &kZero, x_.get(), dx.data());
  }

 private:
  CudnnTensor x_, y_;
  CudnnPooling pooling_;
};

bool refuses(cudnnStatus_t status, DType type) {
  const int category = CUDNN_STATUS_CATEGORY(static_cast<int>(status));
  return type == DType::bf16 &&
         (category == CUDNN_STATUS_NOT_SUPPORTED || category == CUDNN_STATUS_BAD_PARAM);
}

Tensor as_floats(const Tensor& x) {
  return in_form(x, x.layout(), DType::f32);
}

}  // namespace

Variable pool(const Variable& x, const PoolGeometry& geometry) {
  const Tensor& in = x.value();
  TOPKNOT_CHECK(in.layout() == Layout::nhwc, "pool: an activation on a GPU is nhwc");
  const Shape shape{in.dim(0), in.dim(1), geometry.output_size(in.dim(2)), geometry.output_size(in.dim(3))};
  TOPKNOT_CHECK(in.dim(2) + 2 * geometry.padding >= geometry.window &&
                    in.dim(3) + 2 * geometry.padding >= geometry.window,
                "pool: a window larger than " + in.shape().str());
  const DType type = in.dtype();
  const auto plan_in = [=](DType of) { return PoolPlan(geometry, x.shape(), shape, of); };
  const auto plan = std::make_shared<PoolPlan>(geometry, in.shape(), shape, type);
  Tensor y = Tensor::empty(shape, in.layout(), in.device(), type);
  if (const cudnnStatus_t status = plan->forward(in, y); refuses(status, type)) {
    Tensor wide = Tensor::empty(shape, in.layout(), in.device(), DType::f32);
    TOPKNOT_CUDNN(plan_in(DType::f32).forward(as_floats(in), wide));
    y = in_form(wide, in.layout(), type);
  } else {
    check_cudnn(status, "cudnnPoolingForward", __FILE__, __LINE__);
  }
  return {"pool", y, {x}, [=](Tensor grad) {
            Tensor dx = Tensor::empty_like(x.value());
            if (const cudnnStatus_t status = plan->backward(y, grad, x.value(), dx); refuses(status, type)) {
              Tensor wide = Tensor::empty(dx.shape(), dx.layout(), dx.device(), DType::f32);
              TOPKNOT_CUDNN(
                  plan_in(DType::f32).backward(as_floats(y), as_floats(grad), as_floats(x.value()), wide));
              dx = in_form(wide, dx.layout(), type);
            } else {
              check_cudnn(status, "cudnnPoolingBackward", __FILE__, __LINE__);
            }
            x.accumulate_grad(std::move(dx));
          }};
}

}  // namespace topknot::cuda

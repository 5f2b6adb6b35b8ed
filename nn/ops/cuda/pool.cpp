// Pooling by cuDNN, which passes a NaN of the window on. Where cuDNN does not pool bfloat16, it pools the same numbers
// as floats.
#include "nn/core/cuda/context.h"
#include "nn/ops/cuda/cudnn_descriptor.h"
#include "nn/ops/kernels.h"

namespace topknot::cuda {
namespace {

constexpr float kOne = 1, kZero = 0;

// In one type of numbers.
class CudnnPool {
 public:
  CudnnPool(const PoolGeometry& g, const Shape& input, const Shape& output, DType type)
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

bool unsupported(cudnnStatus_t status, DType type) {
  const int category = CUDNN_STATUS_CATEGORY(static_cast<int>(status));
  return type == DType::bf16 &&
         (category == CUDNN_STATUS_NOT_SUPPORTED || category == CUDNN_STATUS_BAD_PARAM);
}

Tensor as_floats(const Tensor& x) {
  return in_form(x, x.layout(), DType::f32);
}

OpState forward(const PoolGeometry& geometry, const Tensor& x, Tensor& y) {
  TOPKNOT_CHECK(x.layout() == Layout::nhwc, "pool: an activation on a GPU is nhwc");
  const auto plan = std::make_shared<CudnnPool>(geometry, x.shape(), y.shape(), x.dtype());
  if (const cudnnStatus_t status = plan->forward(x, y); unsupported(status, x.dtype())) {
    Tensor wide = Tensor::empty(y.shape(), y.layout(), y.device(), DType::f32);
    TOPKNOT_CUDNN(CudnnPool(geometry, x.shape(), y.shape(), DType::f32).forward(as_floats(x), wide));
    y = in_form(wide, y.layout(), y.dtype());
  } else {
    check_cudnn(status, "cudnnPoolingForward", __FILE__, __LINE__);
  }
  return plan;
}

void backward(const PoolGeometry& geometry, const OpState& state, const Tensor& x, const Tensor& y,
              const Tensor& dy, Tensor& dx) {
  if (const cudnnStatus_t status = state_as<CudnnPool>(state).backward(y, dy, x, dx);
      unsupported(status, x.dtype())) {
    Tensor wide = Tensor::empty(dx.shape(), dx.layout(), dx.device(), DType::f32);
    TOPKNOT_CUDNN(CudnnPool(geometry, x.shape(), y.shape(), DType::f32)
                      .backward(as_floats(y), as_floats(dy), as_floats(x), wide));
    dx = in_form(wide, dx.layout(), dx.dtype());
  } else {
    check_cudnn(status, "cudnnPoolingBackward", __FILE__, __LINE__);
  }
}

const RegisterKernels<PoolKernels> registered(DeviceKind::cuda, {.forward = forward, .backward = backward});

}  // namespace
}  // namespace topknot::cuda

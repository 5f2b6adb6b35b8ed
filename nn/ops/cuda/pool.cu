// Pooling: windows by cuDNN, which passes a NaN of the window on, and the mean of whole images here. Where
// cuDNN does not pool bfloat16, it pools the same numbers as floats. cuDNN's quicker maximum may add the
// gradients of windows that overlap in any order; ContextOptions::deterministic takes the other one.
#include "nn/ops/cuda/cudnn_descriptor.h"
#include "nn/ops/cuda/op_tools.h"

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
    const auto max =
        Context::current().options().deterministic ? CUDNN_POOLING_MAX_DETERMINISTIC : CUDNN_POOLING_MAX;
    TOPKNOT_CUDNN(cudnnSetPooling2dDescriptor(
        pooling_.get(), g.kind == PoolKind::max ? max : CUDNN_POOLING_AVERAGE_COUNT_EXCLUDE_PADDING,
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

// x lies in N, pixels, C order. No size is zero.
struct AveragePoolShape {
  std::uint32_t images = 0, pixels = 0, channels = 0;
};

AveragePoolShape shape_of(const Tensor& x) {
  // Images are a dimension of the grid, and an image's elements are counted in 32 bits.
  TOPKNOT_CHECK(x.layout() == Layout::nhwc && x.numel() > 0 && x.dim(0) <= 65535 &&
                    x.numel() / x.dim(0) < std::int64_t{1} << 31,
                "global_average_pool: 1 to 65,535 images in nhwc order, not " + x.shape().str());
  return {word(x.dim(0)), word(x.dim(2) * x.dim(3)), word(x.dim(1))};
}

// y[n, c] = scale times the sum of x[n, ., c] in the order of the pixels, as on the CPU.
// One thread per channel of an image.
template <class T>
__global__ void __launch_bounds__(kThreads)
    average_forward_kernel(const T* x, T* y, AveragePoolShape s, float scale) {
  const std::size_t i = awaited_index();
  if (i >= std::size_t{s.images} * s.channels) return;
  const std::size_t image = i / s.channels, channel = i % s.channels;
  const T* from = x + image * s.pixels * s.channels + channel;
  float sum = 0;
#pragma unroll 8
  for (std::uint32_t p = 0; p < s.pixels; ++p) sum += as_float(from[std::size_t{p} * s.channels]);
  y[i] = from_float<T>(sum * scale);
}

void average_forward(const Tensor& x, Tensor& y) {
  const AveragePoolShape s = shape_of(x);
  by_type(x, [&]<class T>(T) {
    launch_each(std::size_t{s.images} * s.channels, average_forward_kernel<T>, x.as<T>(), y.as<T>(), s,
                1.0f / static_cast<float>(s.pixels));
  });
}

// dx[n, ., c] = scale dy[n, c].
// A block goes through pixels of one image, its threads side by side over the channels.
template <class T>
__global__ void __launch_bounds__(kThreads)
    average_backward_kernel(const T* dy, T* dx, AveragePoolShape s, float scale) {
  await_previous();
  const std::uint32_t per_image = s.pixels * s.channels;
  const T* from = dy + std::size_t{blockIdx.y} * s.channels;
  T* to = dx + std::size_t{blockIdx.y} * per_image;
  for (std::uint32_t i = blockIdx.x * kThreads + threadIdx.x; i < per_image; i += gridDim.x * kThreads)
    __stcs(to + i, from_float<T>(as_float(from[i % s.channels]) * scale));
}

void average_backward(const Tensor& dy, Tensor& dx) {
  const AveragePoolShape s = shape_of(dx);
  const unsigned blocks = grid_for(std::size_t{s.pixels} * s.channels, kThreads * 4).x;
  by_type(dx, [&]<class T>(T) {
    launch(average_backward_kernel<T>, dim3(blocks, s.images), kThreads, compute_stream(), dy.as<T>(),
           dx.as<T>(), s, 1.0f / static_cast<float>(s.pixels));
  });
}

const bool registered = add_cuda_kernels<PoolKernels>({.forward = forward, .backward = backward});
const bool average_registered =
    add_cuda_kernels<GlobalAveragePoolKernels>({.forward = average_forward, .backward = average_backward});

}  // namespace
}  // namespace topknot::cuda

#include "nn/ops/cuda/op_tools.h"

namespace topknot::cuda {
namespace {

// A thread for each of n elements of `out`, [N, H, W, C], whose corner is that of `in`; outside: `value`.
struct CornerShape {
  std::uint32_t channels, height, width, from_height, from_width;
};
template <class T>
__global__ void __launch_bounds__(kThreads)
    corner_kernel(const T* in, T* out, CornerShape s, std::uint32_t n, float value) {
  const std::size_t at = awaited_index();
  if (at >= n) return;
  const std::uint32_t item = static_cast<std::uint32_t>(at), c = item % s.channels, pixel = item / s.channels;
  const std::uint32_t j = pixel % s.width, row = pixel / s.width, i = row % s.height, image = row / s.height;
  out[item] = i < s.from_height && j < s.from_width
                  ? in[((std::size_t{image} * s.from_height + i) * s.from_width + j) * s.channels + c]
                  : from_float<T>(value);
}

void copy_corner(const Tensor& in, Tensor& out, float value) {
  const Tensor& large = in.numel() > out.numel() ? in : out;
  TOPKNOT_CHECK(out.layout() == Layout::nhwc && large.numel() < std::int64_t{1} << 32,
                "pad_end: an nhwc activation of fewer than 2^32 elements, not " + large.shape().str());
  const CornerShape shape = {word(out.dim(1)), word(out.dim(2)), word(out.dim(3)), word(in.dim(2)),
                             word(in.dim(3))};
  const std::uint32_t n = word(out.numel());
  by_type(out,
          [&]<class T>(T) { launch_each(n, corner_kernel<T>, in.as<T>(), out.as<T>(), shape, n, value); });
}

void forward(const Tensor& x, float value, Tensor& y) {
  copy_corner(x, y, value);
}
void backward(const Tensor& dy, Tensor& dx) {
  copy_corner(dy, dx, 0.0f);
}

const bool registered = add_cuda_kernels<PadKernels>({.forward = forward, .backward = backward});

}  // namespace
}  // namespace topknot::cuda

#include "nn/ops/cuda/op_tools.h"
#include "nn/ops/cuda/products.h"

namespace topknot::cuda {
namespace {

// A thread for each element that moves.
template <class T>
__global__ void __launch_bounds__(kThreads)
    copy_channels_kernel(const T* x, T* y, ChannelCopy c, std::uint32_t n, bool accumulate) {
  const std::size_t at = awaited_index();
  if (at >= n) return;
  const std::uint32_t item = static_cast<std::uint32_t>(at), i = item % c.count, row = item / c.count;
  const T in = x[std::size_t{row} * c.from_channels + c.from + i * c.from_step];
  T* const out = y + std::size_t{row} * c.to_channels + c.to + i * c.to_step;
  *out = accumulate ? from_float<T>(as_float(*out) + as_float(in)) : in;
}

Layout layout(const Tensor&, const ChannelRun&, std::int64_t) {
  return Layout::nhwc;
}

void copy(const Tensor& x, Tensor& y, const ChannelRun& run, bool accumulate) {
  TOPKNOT_CHECK(
      x.layout() == Layout::nhwc && y.layout() == Layout::nhwc && x.numel() < std::int64_t{1} << 32 &&
          y.numel() < std::int64_t{1} << 32,
      "channels are copied in nhwc activations of fewer than 2^32 elements, not " + x.shape().str());
  copy_channels(compute_stream(), is_bf16(x), x.data(), y.data(),
                {word(x.numel() / x.dim(1)), word(run.count), word(x.dim(1)), word(run.from),
                 word(run.from_step), word(y.dim(1)), word(run.to), word(run.to_step)},
                accumulate);
}

const bool registered = add_cuda_kernels<ChannelCopyKernels>({.layout = layout, .copy = copy});

}  // namespace

void copy_channels(cudaStream_t stream, bool bf16, const void* x, void* y, ChannelCopy copy,
                   bool accumulate) {
  const std::uint32_t n = copy.rows * copy.count;
  if (n == 0) return;
  by_type(bf16, [&]<class T>(T) {
    launch(copy_channels_kernel<T>, grid_for(n, kThreads), kThreads, stream, static_cast<const T*>(x),
           static_cast<T*>(y), copy, n, accumulate);
  });
}

}  // namespace topknot::cuda

#pragma once
// Kernels around a convolution or matrix product on a GPU: the weight in the order and type of the product, its gradient
// in the arena's, the bias and its gradient, a copy of channels. `bf16`: of bfloat16 numbers instead of floats; arithmetic is
// in float.

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

namespace topknot::cuda {

struct FilterShape {
  std::int64_t out, in, taps;  // taps: height times width of the kernel
  std::size_t size() const { return static_cast<std::size_t>(out * in * taps); }
};

// filter [out, taps, in] (KRSC, which cuDNN wants beside NHWC activations), rounded to bfloat16 where asked for, from
// the arena's weight [out, in, taps] (OIHW).
void filter_from_weight(cudaStream_t stream, const float* weight, void* filter, bool bf16, FilterShape shape);
// The way back: weight = filter, or weight += filter.
void weight_from_filter(cudaStream_t stream, const void* filter, bool bf16, float* weight, bool accumulate,
                        FilterShape shape);

// y[i, c] += bias[c] for y of [rows, channels].
void add_bias(cudaStream_t stream, void* y, bool bf16, const float* bias, std::size_t rows,
              std::size_t channels);

// sums[c] = sum over the rows of x[i, c], or sums[c] += that. Summed in an order that rows and channels decide, so
// with the same bits in every run. `scratch`: column_sums_scratch() floats, or null where that is 0.
std::size_t column_sums_scratch(std::size_t rows, std::size_t channels);
void column_sums(cudaStream_t stream, const void* x, bool bf16, std::size_t rows, std::size_t channels,
                 float* scratch, float* sums, bool accumulate);

// In N, H, W, C order: channels from + i from_step of x, which has from_channels, become channels to + i to_step of y, for
// i < count, in each of `rows` pixels; with `accumulate` they are added. Fewer than 2^32 elements. In concat.cu.
struct ChannelCopy {
  std::uint32_t rows, count, from_channels, from, from_step, to_channels, to, to_step;
};
void copy_channels(cudaStream_t stream, bool bf16, const void* x, void* y, ChannelCopy copy, bool accumulate);

}  // namespace topknot::cuda

// linear_cross_entropy() on a GPU: products by cuBLAS, a chunk's losses and their gradient by a block for
// each row. Operations as nn/ops/linear_cross_entropy.cpp counts them. Of its 1,280 x 50,257 logits a chunk
// reads 257 MB twice (the greatest and the sum, the gradient) and writes dz once: 0.6 GB, 0.2 ms at 3.3 TB/s,
// against 296 G operations, 0.7 ms at 400 T/s in bfloat16. The host waits for nothing, and all memory
// comes from the stream's pool: the op may be captured into a graph.

#include <algorithm>
#include <cstddef>
#include <utility>

#include "nn/core/cuda/context.h"
#include "nn/ops/cuda/op_tools.h"
#include "nn/ops/cuda/products.h"

namespace topknot::cuda {
namespace {

// *counted = labels that are not masked, at least 1. One block.
__global__ void __launch_bounds__(kThreads)
    count_kernel(const std::int32_t* labels, std::size_t rows, double* counted) {
  await_previous();
  double unmasked = 0;
  for (std::size_t i = threadIdx.x; i < rows; i += kThreads) unmasked += labels[i] != kNoLabel;
  unmasked = block_sum(unmasked);
  if (threadIdx.x == 0) *counted = unmasked > 0 ? unmasked : 1.0;
}

// *loss = sum / counted. One block.
__global__ void __launch_bounds__(kThreads)
    mean_kernel(const double* losses, std::size_t rows, const double* counted, float* loss) {
  await_previous();
  double sum = 0;
  for (std::size_t i = threadIdx.x; i < rows; i += kThreads) sum += losses[i];
  sum = block_sum(sum);
  if (threadIdx.x == 0) *loss = static_cast<float>(sum / *counted);
}

// Four neighbours of a row, in one access.
template <class T>
struct alignas(4 * sizeof(T)) Quad {
  T at[4];
};

// A block for each row of `stride` elements, whole quads: its loss, 0 if it is masked, and with dz,
// dz = (softmax(z) - t) / counted, and 0 after the classes. dz may be z. A label that is no class makes the
// loss and the row's gradient NaN, since kernels cannot throw.
template <class T>
__global__ void __launch_bounds__(kThreads)
    row_kernel(const float* logits, std::int64_t classes, std::int64_t stride, const std::int32_t* labels,
               float smoothing, const double* counted, double* losses, T* gradient) {
  await_previous();
  const float* z = logits + std::int64_t{blockIdx.x} * stride;
  T* dz = gradient ? gradient + std::int64_t{blockIdx.x} * stride : nullptr;
  const std::int32_t label = labels[blockIdx.x];
  if (label == kNoLabel) {  // the whole block
    if (threadIdx.x == 0) losses[blockIdx.x] = 0;
    if (dz)
      for (std::int64_t c = threadIdx.x; c < stride; c += kThreads) dz[c] = from_float<T>(0.0f);
    return;
  }
  // A thread's sum is of powers of e^(z - top), its greatest so far.
  const auto quads = reinterpret_cast<const Quad<float>*>(z);
  const std::int64_t last = (classes + 3) / 4;
  float top = -INFINITY;
  double sum = 0, total = 0;
#pragma unroll 4
  for (std::int64_t q = threadIdx.x; q < last; q += kThreads) {
    Quad<float> v = quads[q];
    float highest = top;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      if (4 * q + e >= classes)
        v.at[e] = -INFINITY;
      else if (smoothing > 0)
        total += v.at[e];
      highest = v.at[e] > highest ? v.at[e] : highest;
    }
    if (highest > top) sum *= expf(top - highest);
    top = highest;
    const float base = top == -INFINITY ? 0.0f : top;
    sum += (expf(v.at[0] - base) + expf(v.at[1] - base)) + (expf(v.at[2] - base) + expf(v.at[3] - base));
  }
  const float own = top;
  top = block_max(own);
  const bool known = label >= 0 && label < classes;
  const float at_label = z[known ? label : 0] - top;  // before the gradient is written over it
  sum = block_sum(sum == 0 ? 0.0 : sum * expf(own - top));
  const double others = smoothing > 0 ? block_sum(total) / static_cast<double>(classes) - top : 0.0;
  if (!known) sum = nan("");
  if (threadIdx.x == 0)
    losses[blockIdx.x] =
        log(sum) - (smoothing > 0 ? (1.0 - smoothing) * at_label + smoothing * others : at_label);
  if (!dz) return;
  const float scale = static_cast<float>(1.0 / *counted), factor = static_cast<float>(scale / sum),
              other = scale * (smoothing / static_cast<float>(classes)), hit = (1.0f - smoothing) * scale;
#pragma unroll 4
  for (std::int64_t q = threadIdx.x; q < stride / 4; q += kThreads) {
    const Quad<float> v = quads[q];
    Quad<T> gradient_of;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const std::int64_t c = 4 * q + e;
      gradient_of.at[e] = from_float<T>(
          c < classes ? expf(v.at[e] - top) * factor - other - (c == label ? hit : 0.0f) : 0.0f);
    }
    reinterpret_cast<Quad<T>*>(dz)[q] = gradient_of;
  }
}

const void* row(const Tensor& x, std::int64_t i) {
  return reinterpret_cast<const std::byte*>(x.data()) +
         static_cast<std::size_t>(i * x.dim(1)) * size_of(x.dtype());
}

// Rows of logits begin at multiples of 16 bytes in bfloat16 too: with 50,257 classes side by side cuBLAS took
// kernels that load single elements, at a fifth of the speed.
constexpr std::int64_t kAligned = 8;

// [classes rounded up, width], zeros after the last class; the weight itself in float.
Tensor aligned_weight(DType type, const Tensor& weight, std::int64_t classes) {
  if (type == DType::f32) return weight;
  return filter_of(weight, type, {classes, weight.dim(1), 1, weight.dim(0), weight.dim(1)});
}

void forward(const LinearCrossEntropyCall& call, Tensor& loss, Tensor& dx, Tensor& dweight) {
  const Tensor& x = call.x;
  const std::int64_t n = x.dim(0), width = x.dim(1), classes = call.weight.dim(0),
                     stride = (classes + kAligned - 1) / kAligned * kAligned;
  const DType type = x.dtype();
  const bool wanted = dx.defined() || dweight.defined();
  const Tensor weight = aligned_weight(type, call.weight, stride);
  const std::int64_t products = type == DType::f32 ? classes : stride;  // columns of zeros cost nothing
  Tensor z = Tensor::empty({call.chunk, stride}, Layout::plain, x.device()), dz;
  if (wanted) dz = type == DType::f32 ? z : Tensor::empty(z.shape(), Layout::plain, x.device(), type);
  const DeviceArray<double> losses(call.labels.size()), counted(1);
  launch(count_kernel, 1, kThreads, compute_stream(), call.labels.data(), call.labels.size(), counted.data());
  for (std::int64_t begin = 0; begin < n; begin += call.chunk) {
    const std::int64_t rows = std::min(call.chunk, n - begin);
    multiply(rows, products, width, type, {row(x, begin), false}, {weight.data(), true}, false, z.data(),
             DType::f32, stride);
    by_type(x, [&]<class T>(T) {
      launch(row_kernel<T>, static_cast<unsigned>(rows), kThreads, compute_stream(), z.data(), classes,
             stride, call.labels.data() + begin, call.smoothing, counted.data(), losses.data() + begin,
             wanted ? dz.as<T>() : nullptr);
    });
    if (dx.defined())
      multiply(rows, width, products, type, {dz.data(), false, stride}, {weight.data(), false}, false,
               dx.data() + begin * width, DType::f32);
    if (!dweight.defined()) continue;
    // The classes in whole pieces of kAligned, then the rest.
    const std::int64_t most = classes / kAligned * kAligned;
    for (const auto& [from, count] : {std::pair{std::int64_t{0}, most}, {most, classes - most}})
      if (count > 0)
        multiply(
            count, width, rows, type,
            {reinterpret_cast<const std::byte*>(dz.data()) + static_cast<std::size_t>(from) * size_of(type),
             true, stride},
            {row(x, begin), false}, begin > 0, dweight.data() + from * width, DType::f32);
  }
  launch(mean_kernel, 1, kThreads, compute_stream(), losses.data(), losses.size(), counted.data(),
         loss.data());
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    scale_kernel(const float* from, const float* by, bool accumulate, T* to, std::size_t n) {
  const std::size_t i = awaited_index();
  if (i >= n) return;
  const float value = *by * from[i];
  to[i] = from_float<T>(accumulate ? as_float(to[i]) + value : value);
}

void scale(const Tensor& from, const Tensor& by, bool accumulate, Tensor& to) {
  const std::size_t n = elements(from);
  by_type(to, [&]<class T>(T) {
    launch_each(n, scale_kernel<T>, from.data(), by.data(), accumulate, to.as<T>(), n);
  });
}

const bool registered = add_cuda_kernels<LinearCrossEntropyKernels>({.forward = forward, .scale = scale});

}  // namespace
}  // namespace topknot::cuda

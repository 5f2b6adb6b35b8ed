#include "nn/ops/cuda/layout.h"

#include "nn/core/cuda/context.h"
#include "nn/ops/cuda/op_tools.h"

namespace topknot::cuda {
namespace {

constexpr int kTile = 32, kRows = kThreads / kTile;

// `rows` x `columns` matrices become columns x rows: N, C, H * W to N, H * W, C and back. bfloat16 is rounded
// to nearest, ties to even. A block a tile; an image's lie side by side, for the L2 cache.
template <class In, class Out>
__global__ void __launch_bounds__(kThreads)
    transpose_kernel(const In* in, Out* out, std::size_t rows, std::size_t columns,
                     std::uint32_t tiles_across, std::uint32_t tiles_per_image) {
  await_previous();
  __shared__ float tile[kTile][kTile + 1];
  const std::uint32_t image = blockIdx.x / tiles_per_image, place = blockIdx.x % tiles_per_image;
  const std::size_t row0 = std::size_t{place / tiles_across} * kTile,
                    column0 = std::size_t{place % tiles_across} * kTile;
  const std::size_t x = threadIdx.x % kTile, y = threadIdx.x / kTile;
  in += image * rows * columns;
  out += image * rows * columns;
  for (std::size_t j = y; j < kTile; j += kRows)
    if (row0 + j < rows && column0 + x < columns)
      tile[j][x] = as_float(in[(row0 + j) * columns + column0 + x]);
  __syncthreads();
  for (std::size_t j = y; j < kTile; j += kRows)
    if (column0 + j < columns && row0 + x < rows)
      out[(column0 + j) * rows + row0 + x] = from_float<Out>(tile[x][j]);
}

template <class In, class Out>
__global__ void __launch_bounds__(kThreads) convert_kernel(const In* in, Out* out, std::size_t n) {
  await_previous();
  std::size_t i = std::size_t{blockIdx.x} * kThreads * 4 + threadIdx.x;
  for (int j = 0; j < 4; ++j, i += kThreads)
    if (i < n) out[i] = from_float<Out>(as_float(in[i]));
}

// fn(In(), Out()) with the types of the elements.
void by_types(bool in_bf16, bool out_bf16, const auto& fn) {
  by_type(in_bf16, [&](auto in) { by_type(out_bf16, [&](auto out) { fn(in, out); }); });
}

// Transposes `images` matrices.
void transpose(const Tensor& x, Tensor& y, std::int64_t images, std::int64_t rows, std::int64_t columns) {
  if (x.numel() == 0) return;
  const auto size = [](std::int64_t n) { return static_cast<std::size_t>(n); };
  const std::size_t across = ceil_div(size(columns), kTile), tiles = across * ceil_div(size(rows), kTile);
  by_types(is_bf16(x), is_bf16(y), [&](auto in, auto out) {
    using In = decltype(in);
    using Out = decltype(out);
    launch(transpose_kernel<In, Out>, grid_for(size(images) * tiles, 1), kThreads, compute_stream(),
           x.as<In>(), y.as<Out>(), size(rows), size(columns), across, tiles);
  });
}

Tensor convert_form(const Tensor& x, Layout layout, DType type) {
  TOPKNOT_CHECK(x.layout() != Layout::blocked && layout != Layout::blocked, "no blocked tensors on a GPU");
  Tensor y = Tensor::empty(x.shape(), layout, x.device(), type);
  if (x.layout() == layout)
    convert(compute_stream(), x.data(), is_bf16(x), y.data(), is_bf16(y), elements(x));
  else if (layout == Layout::nhwc)
    transpose(x, y, x.dim(0), x.dim(1), x.dim(2) * x.dim(3));
  else
    transpose(x, y, x.dim(0), x.dim(2) * x.dim(3), x.dim(1));
  return y;
}

const bool registered = add_cuda_kernels<LayoutKernels>({.convert = convert_form});

Tensor on_this_gpu(const Tensor& x) {
  const Context& context = Context::current();
  if (x.device() == context.device()) return x;
  TOPKNOT_CHECK(x.device().kind == DeviceKind::cpu && x.layout() == Layout::plain && x.dtype() == DType::f32,
                "only plain f32 tensors go from the host to the GPU");
  Tensor y = Tensor::empty(x.shape(), Layout::plain, context.device());
  backend(y.device()).to_device(y.data(), x.data(), elements(x));
  return y;
}

}  // namespace

void convert(cudaStream_t stream, const void* in, bool in_bf16, void* out, bool out_bf16, std::size_t n) {
  if (n == 0) return;
  by_types(in_bf16, out_bf16, [&](auto from, auto to) {
    using In = decltype(from);
    using Out = decltype(to);
    launch(convert_kernel<In, Out>, grid_for(n, kThreads * 4), kThreads, stream, static_cast<const In*>(in),
           static_cast<Out*>(out), n);
  });
}

Tensor to_activation(const Tensor& images) {
  const Tensor x = on_this_gpu(images);
  return in_form(x, x.shape().rank() == 4 ? Layout::nhwc : Layout::plain,
                 Context::current().activation_type());
}

Tensor to_plain(const Tensor& x) {
  return in_form(on_this_gpu(x), Layout::plain, DType::f32);
}

}  // namespace topknot::cuda

// layer_norm and rms_norm: a warp a row, in f32, sums by shuffles. Bytes as at the head of nn/ops/norm.cpp, if a row
// fits into a warp's registers and there are many rows; else a row is read again, from the caches or not, and the
// gradients of weight and bias read x and dy once more: 5 n s backward instead of 3 n s. The bits are the same.
//
// Gradients of parameters: a block adds 32 columns over a chunk of rows, then chunks are added in order. The
// number of chunks depends on the rows alone.
#include <type_traits>

#include "nn/ops/cuda/op_tools.h"
#include "nn/ops/norm_rows.h"

namespace topknot::cuda {
namespace {

constexpr unsigned kWarps = kThreads / 32;  // rows of a block
constexpr int kQuad = 4;

template <class T>
struct alignas(sizeof(T) * kQuad) NormQuad {
  T values[kQuad];
};

template <class T>
bool in_quads(const T* data) {
  return reinterpret_cast<std::uintptr_t>(data) % sizeof(NormQuad<T>) == 0;
}

// How a lane's columns lie: V neighbours at a time, which are quads in memory if all addresses allow it. V
// depends on the width alone, and so does the order of sums. kHeld: how many times V the lane holds at most; 0: it
// reads them anew for each pass.
template <int V_, bool kQuads_, int kHeld_ = 0>
struct NormForm {
  static constexpr int V = V_, kHeld = kHeld_, kSlots = kHeld_ > 0 ? kHeld_ : 1;
  static constexpr bool kQuads = kQuads_;
  static constexpr std::int64_t kTurn = 32 * V;  // columns of a warp at a time
};
constexpr int kMostHeld = 8;  // quads: a width of 1,024

// fn(slot, column) for each first column of a lane's V.
template <class Form, class Fn>
__device__ void for_columns(std::int64_t width, const Fn& fn) {
  const std::int64_t first = (threadIdx.x & 31) * Form::V;
  if constexpr (Form::kHeld > 0) {
#pragma unroll
    for (int slot = 0; slot < Form::kHeld; ++slot)
      if (first + slot * Form::kTurn < width) fn(slot, first + slot * Form::kTurn);
  } else {
    for (std::int64_t c = first; c < width; c += Form::kTurn) fn(0, c);
  }
}

template <class Form, class T>
__device__ void load_values(const T* at, float (&out)[Form::V]) {
  constexpr int V = Form::V;
  if constexpr (!Form::kQuads) {
    for (int j = 0; j < V; ++j) out[j] = as_float(at[j]);
  } else {
    const NormQuad<T> quad = *reinterpret_cast<const NormQuad<T>*>(at);
    for (int j = 0; j < V; ++j) out[j] = as_float(quad.values[j]);
  }
}
template <class Form, class T>
__device__ void store_values(T* at, const float (&v)[Form::V]) {
  constexpr int V = Form::V;
  if constexpr (!Form::kQuads) {
    for (int j = 0; j < V; ++j) at[j] = from_float<T>(v[j]);
  } else {
    NormQuad<T> quad;
    for (int j = 0; j < V; ++j) quad.values[j] = from_float<T>(v[j]);
    *reinterpret_cast<NormQuad<T>*>(at) = quad;
  }
}

// The sum over a warp, in all of its lanes, by halves.
__device__ float warp_sum(float value) {
  for (int by = 16; by > 0; by /= 2) value += __shfl_xor_sync(kAllLanes, value, by);
  return value;
}

__device__ std::int64_t row_of_warp() {
  return std::int64_t{blockIdx.x} * kWarps + threadIdx.x / 32;
}

template <class T, class Form, bool centred>
__global__ void __launch_bounds__(kThreads) norm_kernel(NormRows<T> r) {
  await_previous();
  constexpr int V = Form::V;
  constexpr bool held = Form::kHeld > 0;
  const std::int64_t row = row_of_warp(), at = row * r.width;
  if (row >= r.rows) return;  // a whole warp
  T* x = r.x + at;
  float v[Form::kSlots][V], sum = 0;
  if (r.left)  // a lane reads below what it has stored itself
    for_columns<Form>(r.width, [&](int slot, std::int64_t c) {
      float other[V];
      load_values<Form>(r.left + at + c, v[slot]);
      load_values<Form>(r.branch + at + c, other);
      for (int j = 0; j < V; ++j) v[slot][j] = as_float(from_float<T>(v[slot][j] + other[j]));
      store_values<Form>(x + c, v[slot]);
    });
  const auto load = [&](int slot, std::int64_t c) { load_values<Form>(x + c, v[slot]); };
  if (held && !r.left) for_columns<Form>(r.width, load);
  if (centred)
    for_columns<Form>(r.width, [&](int slot, std::int64_t c) {
      if (!held) load(slot, c);
      for (int j = 0; j < V; ++j) sum += v[slot][j];
    });
  const float mean = centred ? warp_sum(sum) / static_cast<float>(r.width) : 0.0f;
  float squares = 0;
  for_columns<Form>(r.width, [&](int slot, std::int64_t c) {
    if (!held) load(slot, c);
    for (int j = 0; j < V; ++j) squares += (v[slot][j] - mean) * (v[slot][j] - mean);
  });
  const float inverse = 1.0f / sqrtf(warp_sum(squares) / static_cast<float>(r.width) + r.epsilon);
  if ((threadIdx.x & 31) == 0) {
    r.mean[row] = mean;
    r.inverse[row] = inverse;
  }
  for_columns<Form>(r.width, [&](int slot, std::int64_t c) {
    if (!held) load(slot, c);
    for (int j = 0; j < V; ++j) {
      v[slot][j] = (v[slot][j] - mean) * inverse * r.weight[c + j];
      if (r.bias) v[slot][j] += r.bias[c + j];
    }
    store_values<Form>(r.y + at + c, v[slot]);
  });
}

// A lane's part of a row, and what of it goes into dx.
template <class T, class Form, bool centred>
struct NormGradientRow {
  static constexpr int V = Form::V;
  float x[Form::kSlots][V], dy[Form::kSlots][V];
  float mean = 0, inverse = 0;

  __device__ void load(const NormGradientRows<T>& r, std::int64_t at, int slot, std::int64_t c) {
    load_values<Form>(r.x + at + c, x[slot]);
    load_values<Form>(r.dy + at + c, dy[slot]);
  }
  __device__ float normalised(int slot, int j) const { return (x[slot][j] - mean) * inverse; }

  // The row's part of dx, if the row is held or not. Its x and dy are there afterwards, if it is.
  __device__ void make(const NormGradientRows<T>& r, std::int64_t row) {
    const std::int64_t at = row * r.width;
    mean = centred ? r.mean[row] : 0.0f, inverse = r.inverse[row];
    float sum_g = 0, sum_product = 0;
    for_columns<Form>(r.width, [&](int slot, std::int64_t c) {
      load(r, at, slot, c);
      for (int j = 0; j < V; ++j) {
        const float g = dy[slot][j] * r.weight[c + j];
        if (centred) sum_g += g;
        sum_product += g * normalised(slot, j);
      }
    });
    const float width = static_cast<float>(r.width);
    const float mean_g = centred ? warp_sum(sum_g) / width : 0.0f,
                mean_product = warp_sum(sum_product) / width;
    for_columns<Form>(r.width, [&](int slot, std::int64_t c) {
      float before[V] = {};
      if (Form::kHeld == 0) load(r, at, slot, c);
      if (r.accumulate) load_values<Form>(r.dx + at + c, before);
      for (int j = 0; j < V; ++j) {
        const float g = dy[slot][j] * r.weight[c + j], xhat = normalised(slot, j);
        before[j] += (g - mean_g - xhat * mean_product) * inverse;
      }
      store_values<Form>(r.dx + at + c, before);
    });
  }
};

template <class T, class Form, bool centred>
__global__ void __launch_bounds__(kThreads) norm_gradient_kernel(NormGradientRows<T> r) {
  await_previous();
  const std::int64_t row = row_of_warp();
  if (row >= r.rows) return;
  NormGradientRow<T, Form, centred> of_row;
  of_row.make(r, row);
}

// dx, and sums as norm_parameter_sums_kernel() has them, in its order: a block a chunk of rows, a warp every kWarps-th
// row of it, whose columns' sums its lanes keep.
template <class T, class Form, bool centred>
__global__ void __launch_bounds__(kThreads)
    norm_gradients_kernel(NormGradientRows<T> r, std::int64_t chunks, float* sums) {
  await_previous();
  constexpr int V = Form::V;
  static_assert(Form::kHeld > 0);
  __shared__ float partial[kWarps][Form::kHeld * Form::kTurn];
  const unsigned warp = threadIdx.x / 32;
  const std::int64_t chunk = blockIdx.x, end = r.rows * (chunk + 1) / chunks;
  float products[Form::kHeld][V] = {}, gradients[Form::kHeld][V] = {};
  NormGradientRow<T, Form, centred> of_row;
  for (std::int64_t row = r.rows * chunk / chunks + warp; row < end; row += kWarps) {
    of_row.make(r, row);
    for_columns<Form>(r.width, [&](int slot, std::int64_t) {
      for (int j = 0; j < V; ++j) {
        products[slot][j] += of_row.dy[slot][j] * of_row.normalised(slot, j);
        gradients[slot][j] += of_row.dy[slot][j];
      }
    });
  }
  for (int which = 0; which < 2; ++which) {
    for_columns<Form>(r.width, [&](int slot, std::int64_t c) {
      for (int j = 0; j < V; ++j) partial[warp][c + j] = which == 0 ? products[slot][j] : gradients[slot][j];
    });
    __syncthreads();
    for (std::int64_t c = threadIdx.x; c < r.width; c += kThreads) {
      float sum = partial[0][c];
      for (unsigned other = 1; other < kWarps; ++other) sum += partial[other][c];
      sums[(which * chunks + chunk) * r.width + c] = sum;
    }
    __syncthreads();
  }
}

// sums[0][chunk][column] = the chunk's sum of dy xhat, sums[1][...] that of dy. A lane a column, a warp every
// kWarps-th row; the warps' sums are added in their order.
template <class T>
__global__ void __launch_bounds__(kThreads)
    norm_parameter_sums_kernel(NormGradientRows<T> r, std::int64_t chunks, float* sums) {
  await_previous();
  __shared__ float products[kWarps][32], gradients[kWarps][32];
  const unsigned lane = threadIdx.x & 31, warp = threadIdx.x / 32;
  const std::int64_t chunk = blockIdx.y, column = std::int64_t{blockIdx.x} * 32 + lane;
  const std::int64_t end = r.rows * (chunk + 1) / chunks;
  float product = 0, gradient = 0;
  if (column < r.width)
    for (std::int64_t row = r.rows * chunk / chunks + warp; row < end; row += kWarps) {
      const float dy = as_float(r.dy[row * r.width + column]);
      product += dy * ((as_float(r.x[row * r.width + column]) - r.mean[row]) * r.inverse[row]);
      gradient += dy;
    }
  products[warp][lane] = product;
  gradients[warp][lane] = gradient;
  __syncthreads();
  if (warp > 0 || column >= r.width) return;
  for (unsigned other = 1; other < kWarps; ++other) {
    product += products[other][lane];
    gradient += gradients[other][lane];
  }
  sums[chunk * r.width + column] = product;
  sums[(chunks + chunk) * r.width + column] = gradient;
}

// dweight or, of blockIdx.y == 1, dbias. A lane a column, a warp every kWarps-th chunk; sums in warps' order.
__global__ void __launch_bounds__(kThreads)
    norm_parameters_kernel(const float* sums, std::int64_t chunks, std::int64_t width, GradientTarget dweight,
                           GradientTarget dbias) {
  await_previous();
  __shared__ float partial[kWarps][32];
  const GradientTarget target = blockIdx.y == 0 ? dweight : dbias;
  if (!target.data) return;  // the whole block
  const unsigned lane = threadIdx.x & 31, warp = threadIdx.x / 32;
  const std::int64_t column = std::int64_t{blockIdx.x} * 32 + lane;
  float sum = 0;
  if (column < width)
#pragma unroll 4
    for (std::int64_t chunk = warp; chunk < chunks; chunk += kWarps)
      sum += sums[(blockIdx.y * chunks + chunk) * width + column];
  partial[warp][lane] = sum;
  __syncthreads();
  if (warp > 0 || column >= width) return;
  for (unsigned other = 1; other < kWarps; ++other) sum += partial[other][lane];
  target.data[column] = target.accumulate ? target.data[column] + sum : sum;
}

// fn(NormForm(), centred as a constant). aligned: all rows begin with a quad, if the width is of quads.
void by_form(std::int64_t width, bool aligned, bool centred, const auto& fn) {
  const auto with = [&](auto form) { centred ? fn(form, std::true_type{}) : fn(form, std::false_type{}); };
  if (width % kQuad != 0)
    with(NormForm<1, false>{});
  else if (aligned && width <= 32 * kQuad * kMostHeld)
    with(NormForm<kQuad, true, kMostHeld>{});
  else if (aligned)
    with(NormForm<kQuad, true>{});
  else
    with(NormForm<kQuad, false>{});
}

void forward(NormCall& call, const Tensor& left, const Tensor& branch, Tensor& y, Tensor& statistics) {
  const std::int64_t rows = call.x.dim(0), width = call.x.dim(1);
  if (rows == 0) return;
  by_type(call.x, [&]<class T>(T) {
    const NormRows<T> r(call, left, branch, y, statistics);
    const bool aligned = in_quads(r.x) && in_quads(r.y) && in_quads(r.left) && in_quads(r.branch);
    by_form(width, aligned, call.centred, [&](auto form, auto centred) {
      launch(norm_kernel<T, decltype(form), centred()>, grid_for(static_cast<std::size_t>(rows), kWarps),
             kThreads, compute_stream(), r);
    });
  });
}

void backward(const NormCall& call, const Tensor& statistics, const Tensor& dy, WeightedGradients& out) {
  const std::int64_t rows = call.x.dim(0), width = call.x.dim(1);
  by_type(call.x, [&]<class T>(T) {
    const NormGradientRows<T> r(call, statistics, dy, out.x);
    const bool parameters = out.weight.data || out.bias.data;
    constexpr std::int64_t kRowsOfChunk = 64, kMost = 128;
    const std::int64_t wanted = (rows + kRowsOfChunk - 1) / kRowsOfChunk;
    const std::int64_t chunks = wanted < 1 ? 1 : wanted > kMost ? kMost : wanted;
    Tensor sums = parameters ? Tensor::empty({2, chunks, width}, Layout::plain, call.x.device()) : Tensor();
    bool made = !parameters;  // the sums
    if (r.dx && rows > 0)
      by_form(width, in_quads(r.x) && in_quads(r.dy) && in_quads(r.dx), call.centred,
              [&](auto form, auto centred) {
                using Form = decltype(form);
                if constexpr (Form::kHeld > 0)
                  if (parameters && chunks == kMost) {  // blocks enough for a GPU
                    launch(norm_gradients_kernel<T, Form, centred()>, dim3(word(chunks)), kThreads,
                           compute_stream(), r, chunks, sums.data());
                    made = true;
                    return;
                  }
                launch(norm_gradient_kernel<T, Form, centred()>,
                       grid_for(static_cast<std::size_t>(rows), kWarps), kThreads, compute_stream(), r);
              });
    if (!parameters) return;
    if (!made)
      launch(norm_parameter_sums_kernel<T>, dim3(word((width + 31) / 32), word(chunks)), kThreads,
             compute_stream(), r, chunks, sums.data());
    launch(norm_parameters_kernel, dim3(word((width + 31) / 32), 2), kThreads, compute_stream(), sums.data(),
           chunks, width, out.weight, out.bias);
  });
}

const bool registered = add_cuda_kernels<NormKernels>({.forward = forward, .backward = backward});

}  // namespace
}  // namespace topknot::cuda

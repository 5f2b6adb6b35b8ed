// The same bits as nn/ops/rope.cpp. A thread takes a pair of up to kHeads heads of a row, which share its
// rotation; neighbours have neighbouring pairs. Bound by memory.
#include "nn/ops/cuda/op_tools.h"
#include "nn/ops/rope_rule.h"

namespace topknot::cuda {
namespace {

constexpr unsigned kHeads = 4;

// `threads`: a row's pairs of all rows. y may be x: then the values stay as they are.
template <class T>
__global__ void __launch_bounds__(kThreads)
    rope_kernel(RopeCall call, std::int64_t threads, const T* x, T* y) {
  const std::int64_t i = awaited_index<std::int64_t>();
  if (i >= threads) return;
  const std::int64_t row = i / call.pairs, pair = i % call.pairs, all = call.rotated + call.kept;
  const std::int64_t first = std::int64_t{blockIdx.y} * kHeads, last = first + kHeads;
  const Rotation by = rotation_of(static_cast<double>(row / call.batch) * call.quarters[pair]);
  const float sine = call.back ? -by.sine : by.sine;
  for (std::int64_t h = first; h < last && h < all; ++h) {
    const std::int64_t at = (row * all + h) * 2 * call.pairs + pair;
    if (h < call.rotated) {
      const float a = as_float(x[at]), b = as_float(x[at + call.pairs]);
      y[at] = from_float<T>(a * by.cosine - b * sine);
      y[at + call.pairs] = from_float<T>(b * by.cosine + a * sine);
    } else if (x != y) {
      y[at] = x[at];
      y[at + call.pairs] = x[at + call.pairs];
    }
  }
}

void rotate(const RopeCall& call, const Tensor& x, Tensor& y) {
  const std::int64_t threads = x.dim(0) * call.pairs;
  if (threads == 0) return;
  by_type(x, [&]<class T>(T) {
    const bool in_place = x.as<T>() == y.as<T>();
    const auto heads = static_cast<std::size_t>(call.rotated + (in_place ? 0 : call.kept));
    const dim3 grid(grid_for(static_cast<std::size_t>(threads), kThreads).x,
                    static_cast<unsigned>(ceil_div(heads, kHeads)));
    launch(rope_kernel<T>, grid, kThreads, compute_stream(), call, threads, x.as<T>(), y.as<T>());
  });
}

const bool registered = add_cuda_kernels<RopeKernels>({.rotate = rotate});

}  // namespace
}  // namespace topknot::cuda

// Batch norm by our kernels, over x as a matrix of rows = N H W pixels and `channels` columns.
//
// Forward in training: sums, apply: x is read twice, y written once. Backward: sums, apply. The block that
// finishes a column tile's sums adds them up; if that is much for one block, a kernel of its own does.
#include "nn/ops/cuda/batch_norm.h"

#include "nn/ops/cuda/op_tools.h"

namespace topknot::cuda {
namespace {

// 16 bytes of activations at once, as floats. Addresses of packs are 16-byte aligned.
template <class T>
inline constexpr int kPack = static_cast<int>(16 / sizeof(T));

// A type and a width, to choose a kernel by.
template <class Type, int Width>
struct Pack {
  using T = Type;
  static constexpr int V = Width;
};

__device__ inline void unpack(uint4 p, float (&out)[4]) {
  out[0] = __uint_as_float(p.x), out[1] = __uint_as_float(p.y);
  out[2] = __uint_as_float(p.z), out[3] = __uint_as_float(p.w);
}
__device__ inline void unpack(uint4 p, float (&out)[8]) {
  const unsigned words[4] = {p.x, p.y, p.z, p.w};
  for (int i = 0; i < 4; ++i) {
    out[2 * i] = __uint_as_float(words[i] << 16);
    out[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
  }
}

// V elements: one, or a pack.
template <int V, class T>
__device__ inline void load_pack(const T* at, float (&out)[V]) {
  if constexpr (V == 1)
    out[0] = as_float(*at);
  else
    unpack(*reinterpret_cast<const uint4*>(at), out);
}
template <int V, class T>
__device__ inline void store_pack(T* at, const float (&v)[V]) {
  if constexpr (V == 1) {
    *at = from_float<T>(v[0]);
  } else if constexpr (sizeof(T) == 4) {
    *reinterpret_cast<uint4*>(at) =
        uint4{__float_as_uint(v[0]), __float_as_uint(v[1]), __float_as_uint(v[2]), __float_as_uint(v[3])};
  } else {
    unsigned words[4];
    for (int i = 0; i < 4; ++i)
      words[i] = __bfloat16_as_ushort(from_float<T>(v[2 * i])) |
                 unsigned{__bfloat16_as_ushort(from_float<T>(v[2 * i + 1]))} << 16;
    *reinterpret_cast<uint4*>(at) = uint4{words[0], words[1], words[2], words[3]};
  }
}
// V floats, from an address of no more than a float's alignment.
template <int V>
__device__ inline void load_floats(const float* at, float (&out)[V]) {
  for (int i = 0; i < V; ++i) out[i] = at[i];
}

constexpr unsigned kMostBlocks = 1024;      // of a pass; enough for every card's memory, and few partial sums
constexpr std::int64_t kRowsPerThread = 4;  // at least, before more blocks are worth it
constexpr int kChannelsPerBlock = 32;       // where partial sums are added up
constexpr unsigned kAddingParts = kThreads / kChannelsPerBlock;  // threads that share a channel there
// Sums that a thread of a tile's last block adds, at most: as many as in the longest kernel of its own.
constexpr unsigned kMostAdded = kMostBlocks / kAddingParts;

// [channels] floats each, in GPU memory: what the forward pass normalised by, and y = scale x + shift.
struct BatchNormStatistics {
  float *mean, *inverse_std, *scale, *shift;
};

struct BatchNormParameters {
  const float *gamma, *beta;
  float *running_mean, *running_variance;
  float momentum, epsilon;
};

struct BatchNormCoefficients {
  const float* gamma;
  bool training;  // mean and variance depend on x
  GradientTarget dgamma, dbeta;
  float* values;  // of dx = a g + b x + c: a, b, c, [3][channels]
};

// A thread's elements: `count` of them (of packs), from `at` on, `stride` apart; `channel`: its first column.
struct Spot {
  std::int64_t at;
  unsigned count, stride, channel;
};
__device__ inline Spot spot(const BatchNormTiles& t, unsigned chunk) {
  const unsigned lane = threadIdx.x & (t.lanes - 1), step = kThreads / t.lanes;
  const std::int64_t row = chunk * t.chunk_rows + threadIdx.x / t.lanes;
  const std::int64_t chunk_end = (chunk + std::int64_t{1}) * t.chunk_rows;
  const std::int64_t end = chunk_end < t.rows ? chunk_end : t.rows;
  Spot s;
  s.channel = (blockIdx.x * t.lanes + lane) * t.vector;
  s.at = row * t.channels + s.channel;
  s.stride = step * t.channels;
  s.count = s.channel < t.channels && row < end ? static_cast<unsigned>((end - row + step - 1) / step) : 0;
  return s;
}

// Adds up a block's sums over its rows, by halves, and writes them: partial[chunk][2][channels].
template <int V>
__device__ void reduce_rows(const BatchNormTiles& t, const Spot& s, const float (&first)[V],
                            const float (&second)[V], float* partial) {
  __shared__ float sums[2 * V][kThreads];
  for (int i = 0; i < V; ++i) {
    sums[i][threadIdx.x] = first[i];
    sums[V + i][threadIdx.x] = second[i];
  }
  __syncthreads();
  for (unsigned half = kThreads / 2; half >= t.lanes; half /= 2) {
    if (threadIdx.x < half)
      for (int i = 0; i < 2 * V; ++i) sums[i][threadIdx.x] += sums[i][threadIdx.x + half];
    __syncthreads();
  }
  if (threadIdx.x >= t.lanes || s.channel >= t.channels) return;
  float* out = partial + std::size_t{2} * blockIdx.y * t.channels + s.channel;
  for (int i = 0; i < V; ++i) {
    out[i] = sums[i][threadIdx.x];
    out[t.channels + i] = sums[V + i][threadIdx.x];
  }
}

__device__ inline std::int64_t rows_of(const BatchNormTiles& t, unsigned chunk) {
  const std::int64_t left = t.rows - chunk * t.chunk_rows;
  return left < t.chunk_rows ? left : t.chunk_rows;
}

// The two sums of a channel over all chunks, in double: eight threads per channel, then theirs in order. All
// threads of the block call, and may again; the first kChannelsPerBlock have the result. `shifted`: of the
// forward pass, each chunk's about its own shift; the result is about that of the first chunk.
template <bool shifted>
__device__ inline void add_chunks(const BatchNormTiles& t, const float* partial, unsigned channel,
                                  double (&totals)[2]) {
  __shared__ double sums[2][kThreads];
  double first = 0, second = 0;
  if (channel < t.channels)
    for (unsigned chunk = threadIdx.x / kChannelsPerBlock; chunk < t.chunks; chunk += kAddingParts) {
      const float* from = partial + std::size_t{2} * chunk * t.channels + channel;
      const double sum = from[0], squares = from[t.channels];
      const auto rows = static_cast<double>(rows_of(t, chunk));
      const double moved =
          shifted ? static_cast<double>(partial[t.shift(chunk) + channel]) - partial[t.shift(0) + channel]
                  : 0.0;
      first += sum + rows * moved;
      second += squares + moved * (2 * sum + rows * moved);
    }
  __syncthreads();
  sums[0][threadIdx.x] = first;
  sums[1][threadIdx.x] = second;
  __syncthreads();
  if (threadIdx.x >= kChannelsPerBlock) return;
  for (int which = 0; which < 2; ++which) {
    totals[which] = 0;
    for (unsigned part = 0; part < kAddingParts; ++part)
      totals[which] += sums[which][part * kChannelsPerBlock + threadIdx.x];
  }
}

// All threads of a block that has written its partial sums call it: the last of a column tile's blocks calls
// finish(c) for the tile's channels, 32 threads side by side. done: the tiles' blocks that were here,
// [tiles], zeros before and after the launch.
__device__ inline void finish_tile(const BatchNormTiles& t, unsigned* done, const auto& finish) {
  if (!is_last_block(&done[blockIdx.x], t.chunks)) return;
  const unsigned begin = blockIdx.x * t.tile_channels(), behind = begin + t.tile_channels();
  for (unsigned c = begin; c < behind && c < t.channels; c += kChannelsPerBlock)
    finish(c + (threadIdx.x & (kChannelsPerBlock - 1)));
}

// Computes channel c's statistics from sums and moves the running ones; partial null: takes those, unmoved.
__device__ inline void normalize(const BatchNormTiles& t, const float* partial, const BatchNormParameters& p,
                                 const BatchNormStatistics& out, unsigned c) {
  double totals[2] = {};
  if (partial) add_chunks<true>(t, partial, c, totals);
  if (threadIdx.x >= kChannelsPerBlock || c >= t.channels) return;
  double mean = p.running_mean[c], variance = p.running_variance[c];
  if (partial) {
    const double count = static_cast<double>(t.rows);
    const double offset = totals[0] / count;
    mean = partial[t.shift(0) + c] + offset;
    variance = totals[1] / count - offset * offset;
    if (!(variance > 0)) variance = 0;
    const double unbiased = count > 1 ? variance * count / (count - 1) : variance;
    p.running_mean[c] += p.momentum * (static_cast<float>(mean) - p.running_mean[c]);
    p.running_variance[c] += p.momentum * (static_cast<float>(unbiased) - p.running_variance[c]);
  }
  const double inverse_std = 1.0 / sqrt(variance + static_cast<double>(p.epsilon));
  out.mean[c] = static_cast<float>(mean);
  out.inverse_std[c] = static_cast<float>(inverse_std);
  out.scale[c] = static_cast<float>(p.gamma[c] * inverse_std);
  out.shift[c] = static_cast<float>(p.beta[c] - p.gamma[c] * inverse_std * mean);
}

__device__ inline unsigned channel_of_thread() {
  return blockIdx.x * kChannelsPerBlock + (threadIdx.x & (kChannelsPerBlock - 1));
}
__global__ void __launch_bounds__(kThreads)
    normalization_kernel(BatchNormTiles t, const float* partial, BatchNormParameters p,
                         BatchNormStatistics out) {
  await_previous();
  normalize(t, partial, p, out, channel_of_thread());
}

// partial: sums of x - shift and of their squares, for each chunk, and the shift: the mean of four rows of
// the chunk. About 0 or the running mean the variance's digits could cancel. `done`: as finish_tile() has it;
// null: normalization_kernel() adds the sums up.
template <class T, int V>
__global__ void __launch_bounds__(kThreads)
    sums_kernel(BatchNormTiles t, const T* __restrict__ x, float* partial, BatchNormParameters p,
                BatchNormStatistics out, unsigned* done) {
  await_previous();
  Spot s = spot(t, blockIdx.y);
  float by[V] = {}, sum[V] = {}, squares[V] = {};
  if (s.channel < t.channels) {
    for (int part = 1; part < 8; part += 2) {
      const std::int64_t row = blockIdx.y * t.chunk_rows + rows_of(t, blockIdx.y) * part / 8;
      float v[V];
      load_pack<V>(x + row * t.channels + s.channel, v);
      for (int i = 0; i < V; ++i) by[i] += v[i];
    }
    for (int i = 0; i < V; ++i) by[i] *= 0.25f;
    if (threadIdx.x < t.lanes)
      for (int i = 0; i < V; ++i) partial[t.shift(blockIdx.y) + s.channel + i] = by[i];
  }
#pragma unroll(V == 8 ? 2 : 4)
  for (std::int64_t at = s.at; s.count > 0; --s.count, at += s.stride) {
    float v[V];
    load_pack<V>(x + at, v);
    for (int i = 0; i < V; ++i) {
      v[i] -= by[i];
      sum[i] += v[i];
      squares[i] += v[i] * v[i];
    }
  }
  reduce_rows<V>(t, s, sum, squares, partial);
  if (done) finish_tile(t, done, [&](unsigned c) { normalize(t, partial, p, out, c); });
}

__device__ inline float relu_of(float v) {
  return v <= 0 ? 0.0f : v;  // so that NaN comes through
}

// y = scale x + shift (+ residual), then max(0, .) where relu.
template <class T, int V, bool kResidual, bool kRelu>
__global__ void __launch_bounds__(kThreads)
    apply_kernel(BatchNormTiles t, const T* __restrict__ x, const T* __restrict__ residual,
                 const float* __restrict__ scale, const float* __restrict__ shift, T* __restrict__ y) {
  await_previous();
  // Last chunk first: the sums left it in the cache.
  Spot s = spot(t, t.chunks - 1 - blockIdx.y);
  if (s.channel >= t.channels) return;
  float a[V], b[V];
  load_floats<V>(scale + s.channel, a);
  load_floats<V>(shift + s.channel, b);
#pragma unroll 2
  for (std::int64_t at = s.at; s.count > 0; --s.count, at += s.stride) {
    float v[V], r[V];
    load_pack<V>(x + at, v);
    if (kResidual) load_pack<V>(residual + at, r);
    for (int i = 0; i < V; ++i) {
      v[i] = a[i] * v[i] + b[i];
      if (kResidual) v[i] += r[i];
      if (kRelu) v[i] = relu_of(v[i]);
    }
    store_pack<V>(y + at, v);
  }
}

// If the forward pass ended with relu, a gradient counts where y > 0.
enum class BatchNormMask {
  none,
  recomputed,  // y is worked out again from x; there was no residual
  stored,      // y is read, and the masked gradient written, which may be over grad
};

// Recomputes y's sign, rounded as apply_kernel does, to know whether the gradient counts.
template <class T>
__device__ float masked_by(float grad, float y) {
  return as_float(from_float<T>(y)) <= 0 ? 0.0f : grad;
}

__device__ inline void put(GradientTarget target, unsigned c, float value) {
  if (target.data) target.data[c] = target.accumulate ? target.data[c] + value : value;
}

// Channel c's gradients of gamma and beta, and its a, b, c of dx = a g + b x + c.
__device__ inline void write_coefficients(const BatchNormTiles& t, const float* partial,
                                          const BatchNormStatistics& n, const BatchNormCoefficients& out,
                                          unsigned c) {
  double totals[2] = {};
  add_chunks<false>(t, partial, c, totals);
  if (threadIdx.x >= kChannelsPerBlock || c >= t.channels) return;
  const double count = static_cast<double>(t.rows);
  const double inverse_std = n.inverse_std[c], mean = n.mean[c], scale = out.gamma[c] * inverse_std;
  const double with_xhat = totals[1] * inverse_std;
  put(out.dbeta, c, static_cast<float>(totals[0]));
  put(out.dgamma, c, static_cast<float>(with_xhat));
  const double b = out.training ? -scale * with_xhat / count * inverse_std : 0.0;
  out.values[c] = static_cast<float>(scale);
  out.values[t.channels + c] = static_cast<float>(b);
  out.values[2 * t.channels + c] =
      out.training ? static_cast<float>(-scale * totals[0] / count - b * mean) : 0.0f;
}
__global__ void __launch_bounds__(kThreads)
    coefficients_kernel(BatchNormTiles t, const float* partial, BatchNormStatistics n,
                        BatchNormCoefficients out) {
  await_previous();
  write_coefficients(t, partial, n, out, channel_of_thread());
}

// partial: each chunk's sums of the masked gradient g, and of g (x - mean). `done`: as in sums_kernel().
template <class T, int V, BatchNormMask kMask>
__global__ void __launch_bounds__(kThreads)
    backward_sums_kernel(BatchNormTiles t, const T* grad, const T* __restrict__ x, const T* __restrict__ y,
                         BatchNormStatistics n, T* masked, float* partial, BatchNormCoefficients out,
                         unsigned* done) {
  await_previous();
  Spot s = spot(t, blockIdx.y);
  float mean[V] = {}, a[V], b[V], sum[V] = {}, with_x[V] = {};
  if (s.channel < t.channels) {
    load_floats<V>(n.mean + s.channel, mean);
    if (kMask == BatchNormMask::recomputed) {
      load_floats<V>(n.scale + s.channel, a);
      load_floats<V>(n.shift + s.channel, b);
    }
  }
#pragma unroll 2
  for (std::int64_t at = s.at; s.count > 0; --s.count, at += s.stride) {
    float g[V], v[V], o[V];
    load_pack<V>(grad + at, g);
    load_pack<V>(x + at, v);
    if (kMask == BatchNormMask::stored) load_pack<V>(y + at, o);
    for (int i = 0; i < V; ++i) {
      if (kMask == BatchNormMask::recomputed) g[i] = masked_by<T>(g[i], a[i] * v[i] + b[i]);
      if (kMask == BatchNormMask::stored) g[i] = o[i] <= 0 ? 0.0f : g[i];
      sum[i] += g[i];
      with_x[i] += g[i] * (v[i] - mean[i]);
    }
    if (kMask == BatchNormMask::stored) store_pack<V>(masked + at, g);
  }
  reduce_rows<V>(t, s, sum, with_x, partial);
  if (done) finish_tile(t, done, [&](unsigned c) { write_coefficients(t, partial, n, out, c); });
}

// dx (+)= a g + (b x + c). With kRecomputed g is the gradient still to be masked, else it is masked.
template <class T, int V, bool kRecomputed, bool kAccumulate>
__global__ void __launch_bounds__(kThreads)
    backward_apply_kernel(BatchNormTiles t, const T* __restrict__ grad, const T* __restrict__ x,
                          BatchNormStatistics n, const float* __restrict__ coefficients, T* __restrict__ dx) {
  await_previous();
  Spot s = spot(t, t.chunks - 1 - blockIdx.y);
  if (s.channel >= t.channels) return;
  float a[V], b[V], c[V], scale[V], shift[V];
  load_floats<V>(coefficients + s.channel, a);
  load_floats<V>(coefficients + t.channels + s.channel, b);
  load_floats<V>(coefficients + 2 * t.channels + s.channel, c);
  if (kRecomputed) {
    load_floats<V>(n.scale + s.channel, scale);
    load_floats<V>(n.shift + s.channel, shift);
  }
#pragma unroll 2
  for (std::int64_t at = s.at; s.count > 0; --s.count, at += s.stride) {
    float g[V], v[V], before[V];
    load_pack<V>(grad + at, g);
    load_pack<V>(x + at, v);
    if (kAccumulate) load_pack<V>(dx + at, before);
    for (int i = 0; i < V; ++i) {
      if (kRecomputed) g[i] = masked_by<T>(g[i], scale[i] * v[i] + shift[i]);
      g[i] = a[i] * g[i] + (b[i] * v[i] + c[i]);
      if (kAccumulate) g[i] += before[i];
    }
    store_pack<V>(dx + at, g);
  }
}

template <class T, bool kResidual, bool kRelu>
__global__ void __launch_bounds__(kThreads) finish_kernel(T* y, const T* residual, std::size_t n) {
  await_previous();
  constexpr int V = kPack<T>;
  const std::size_t at = (std::size_t{blockIdx.x} * kThreads + threadIdx.x) * V;
  const auto of = [](float v, float r) {
    if (kResidual) v += r;
    return kRelu ? relu_of(v) : v;
  };
  if (at + V <= n) {
    float v[V], r[V] = {};
    load_pack<V>(y + at, v);
    if (kResidual) load_pack<V>(residual + at, r);
    for (int i = 0; i < V; ++i) v[i] = of(v[i], r[i]);
    store_pack<V>(y + at, v);
  } else {
    for (std::size_t i = at; i < n; ++i)
      y[i] = from_float<T>(of(as_float(y[i]), kResidual ? as_float(residual[i]) : 0.0f));
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads) mask_kernel(const T* grad, const T* y, T* masked, std::size_t n) {
  await_previous();
  constexpr int V = kPack<T>;
  const std::size_t at = (std::size_t{blockIdx.x} * kThreads + threadIdx.x) * V;
  if (at + V <= n) {
    float g[V], o[V];
    load_pack<V>(grad + at, g);
    load_pack<V>(y + at, o);
    for (int i = 0; i < V; ++i) g[i] = o[i] <= 0 ? 0.0f : g[i];
    store_pack<V>(masked + at, g);
  } else {
    for (std::size_t i = at; i < n; ++i) masked[i] = as_float(y[i]) <= 0 ? from_float<T>(0.0f) : grad[i];
  }
}

// Calls fn<T, V>() for the tiles' element type and vector.
void by_type(const BatchNormTiles& t, const auto& fn) {
  if (t.bf16)
    t.vector == 1 ? fn(Pack<__nv_bfloat16, 1>()) : fn(Pack<__nv_bfloat16, kPack<__nv_bfloat16>>());
  else
    t.vector == 1 ? fn(Pack<float, 1>()) : fn(Pack<float, kPack<float>>());
}

dim3 grid_of(const BatchNormTiles& t) {
  return dim3(t.column_tiles, t.chunks);
}
dim3 channel_grid(const BatchNormTiles& t) {
  return grid_for(t.channels, kChannelsPerBlock);
}

// For finish_tile(); null if it would do too much in one block.
struct TilesDone {
  DeviceArray<unsigned> blocks = on_device(std::vector<unsigned>(kMostBlocks));
};
unsigned* tiles_done(const BatchNormTiles& t) {
  const std::size_t added = ceil_div(t.chunks, kAddingParts) * ceil_div(t.tile_channels(), kChannelsPerBlock);
  if (added > kMostAdded || t.column_tiles > kMostBlocks) return nullptr;
  return Context::current().keep<TilesDone>().blocks.data();
}

class KernelBatchNorm final : public BatchNormMethod {
 public:
  Tensor forward(const BatchNormArguments& call, BatchNormKept& kept) const override {
    const BatchNormTiles t = tiles_of(call.x);
    kept.values = DeviceArray<float>(std::size_t{4} * t.channels);
    const BatchNormStatistics n = statistics(kept);
    const BatchNormState& s = call.state;
    float* partial = nullptr;
    if (call.options.training)
      partial = static_cast<float*>(Context::current().workspace(t.partial_floats() * sizeof(float)));
    const BatchNormParameters p{call.gamma.data(),  call.beta.data(), s.mean->device,
                                s.variance->device, s.momentum,       s.epsilon};
    unsigned* const done = partial ? tiles_done(t) : nullptr;
    Tensor y = Tensor::empty_like(call.x);
    by_type(t, [&](auto pack) {
      using T = typename decltype(pack)::T;
      constexpr int V = decltype(pack)::V;
      const T* x = call.x.as<T>();
      const T* residual = call.residual.defined() ? call.residual.as<T>() : nullptr;
      if (partial)
        launch_in_turn(sums_kernel<T, V>, grid_of(t), kThreads, compute_stream(), t, x, partial, p, n, done);
      if (!done)
        launch_in_turn(normalization_kernel, channel_grid(t), kThreads, compute_stream(), t, partial, p, n);
      const bool relu = call.options.relu;
      const auto kernel = residual ? relu ? apply_kernel<T, V, true, true> : apply_kernel<T, V, true, false>
                          : relu ? apply_kernel<T, V, false, true>
                                   : apply_kernel<T, V, false, false>;
      launch_in_turn(kernel, grid_of(t), kThreads, compute_stream(), t, x, residual, n.scale, n.shift,
                     y.as<T>());
    });
    if (call.residual.defined() && call.options.relu) kept.y = y;
    return y;
  }

  void backward(const BatchNormArguments& call, const BatchNormKept& kept, Tensor grad,
                BatchNormGradients& out) const override {
    const BatchNormTiles t = tiles_of(call.x);
    const BatchNormStatistics n = statistics(kept);
    const std::size_t partial_floats = t.partial_floats();
    auto* partial = static_cast<float*>(
        Context::current().workspace((partial_floats + std::size_t{3} * t.channels) * sizeof(float)));
    const BatchNormCoefficients coefficients{call.gamma.data(), call.options.training, out.gamma, out.beta,
                                             partial + partial_floats};
    unsigned* const done = tiles_done(t);
    const bool stored = call.options.relu && call.residual.defined(),
               recomputed = call.options.relu && !stored;
    Tensor g = !stored || grad.exclusive() ? grad : Tensor::empty_like(call.x);
    by_type(t, [&](auto pack) {
      using T = typename decltype(pack)::T;
      constexpr int V = decltype(pack)::V;
      const T* x = call.x.as<T>();
      const auto sums = stored       ? backward_sums_kernel<T, V, BatchNormMask::stored>
                        : recomputed ? backward_sums_kernel<T, V, BatchNormMask::recomputed>
                                     : backward_sums_kernel<T, V, BatchNormMask::none>;
      launch_in_turn(sums, grid_of(t), kThreads, compute_stream(), t, grad.as<T>(), x,
                     stored ? kept.y.as<T>() : nullptr, n, stored ? g.as<T>() : nullptr, partial,
                     coefficients, done);
      if (!done)
        launch_in_turn(coefficients_kernel, channel_grid(t), kThreads, compute_stream(), t, partial, n,
                       coefficients);
      if (!out.x.tensor.defined()) return;
      const bool add = out.x.accumulate;
      const auto apply = recomputed ? add ? backward_apply_kernel<T, V, true, true>
                                          : backward_apply_kernel<T, V, true, false>
                         : add ? backward_apply_kernel<T, V, false, true>
                                    : backward_apply_kernel<T, V, false, false>;
      launch_in_turn(apply, grid_of(t), kThreads, compute_stream(), t, g.as<T>(), x, n, coefficients.values,
                     out.x.tensor.as<T>());
    });
    if (out.want_residual) out.residual = std::move(g);
  }

 private:
  static BatchNormTiles tiles_of(const Tensor& x) {
    return batch_norm_tiles(x.numel() / x.dim(1), x.dim(1), is_bf16(x));
  }
  static BatchNormStatistics statistics(const BatchNormKept& kept) {
    float* at = kept.values.data();
    const std::size_t channels = kept.values.size() / 4;
    return {at, at + channels, at + 2 * channels, at + 3 * channels};
  }
};

}  // namespace

BatchNormTiles batch_norm_tiles(std::int64_t rows, std::int64_t channels, bool bf16) {
  BatchNormTiles t;
  t.rows = rows;
  t.channels = static_cast<unsigned>(channels);
  t.bf16 = bf16;
  const unsigned pack = bf16 ? 8 : 4;
  t.vector = t.channels % pack == 0 ? pack : 1;
  const unsigned groups = t.channels / t.vector;
  while (t.lanes < groups && t.lanes < 32) t.lanes *= 2;
  t.column_tiles = static_cast<unsigned>(ceil_div(groups, t.lanes));
  const std::int64_t step = kThreads / t.lanes;  // rows of a block at once
  const auto wanted = static_cast<std::int64_t>(
      ceil_div(static_cast<std::size_t>(rows), static_cast<std::size_t>(step * kRowsPerThread)));
  const std::int64_t most = kMostBlocks / t.column_tiles > 0 ? kMostBlocks / t.column_tiles : 1;
  const std::int64_t chunks = wanted < most ? wanted : most;
  const std::int64_t rows_per_chunk = (rows + chunks - 1) / chunks;
  t.chunk_rows = (rows_per_chunk + step - 1) / step * step;
  t.chunks = static_cast<unsigned>((rows + t.chunk_rows - 1) / t.chunk_rows);
  return t;
}

std::unique_ptr<BatchNormMethod> make_kernel_batch_norm() {
  return std::make_unique<KernelBatchNorm>();
}

void batch_norm_finish(Tensor& y, const Tensor& residual, bool relu) {
  if (!residual.defined() && !relu) return;
  by_type(y, [&]<class T>(T) {
    const auto kernel = !residual.defined() ? finish_kernel<T, false, true>
                        : relu              ? finish_kernel<T, true, true>
                                            : finish_kernel<T, true, false>;
    launch_in_turn(kernel, grid_for(elements(y), kThreads * kPack<T>), kThreads, compute_stream(), y.as<T>(),
                   residual.defined() ? residual.as<T>() : nullptr, elements(y));
  });
}

void batch_norm_mask(const Tensor& grad, const Tensor& y, Tensor& masked) {
  by_type(y, [&]<class T>(T) {
    launch_in_turn(mask_kernel<T>, grid_for(elements(y), kThreads * kPack<T>), kThreads, compute_stream(),
                   grad.as<T>(), y.as<T>(), masked.as<T>(), elements(y));
  });
}

}  // namespace topknot::cuda

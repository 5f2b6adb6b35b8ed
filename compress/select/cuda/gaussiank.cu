#include "compress/select/cuda/gaussiank_kernels.h"
#include "compress/select/cuda/gpu_tiles.h"
#include "nn/core/cuda/kernel_tools.h"

namespace topknot::cuda {
namespace {

using gaussiank::Way;
constexpr int kLanes = 16;

__global__ void reset_kernel(GaussianKState* state) {
  *state = GaussianKState{};
}

__global__ void begin_kernel(GaussianKState* state, const StepParameters* parameters, Accumulate a,
                             std::size_t n) {
  state->k = static_cast<std::uint32_t>(density_count(parameters->density, n));
  state->broken = state->nonzero = 0;
  for (int r = 0; r < kLevels; ++r) state->counts[r] = 0;
  state->shift = moments_shift(a.peek(0), a.peek(n / 2), a.peek(n - 1));
}

// A block a chunk. All threads fetch; the sums are 16 chains, whose order is the CPU's, and hide behind other
// blocks' loads.
template <Fetch kFetch>
__global__ void __launch_bounds__(kThreads, 4)
    moments_kernel(Accumulate a, std::size_t n, bool aligned, GaussianKState* state, ChunkMoments* chunks) {
  __shared__ float4 tile4[kSelectTile / 4];
  __shared__ double sums[kLanes], squares[kLanes];
  const float* tile = reinterpret_cast<const float*>(tile4);
  const std::size_t begin = std::size_t{blockIdx.x} * kMomentsChunk;
  const std::size_t end = begin + kMomentsChunk < n ? begin + kMomentsChunk : n;
  const double shift = state->shift;
  double sum = 0, square = 0, tail_sum = 0, tail_square = 0;
  bool broken = false, nonzero = false;
  for (std::size_t base = begin; base < end; base += kSelectTile) {
    float x[kTileShare];
    fetch_tile<kFetch>(a, base, n, aligned, x);
#pragma unroll
    for (int q = 0; q < kQuads; ++q) {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const GpuKey key = key_of(x[4 * q + c]);
        broken |= key > kLargestFinite;
        nonzero |= key != 0;
      }
      tile4[q * kThreads + threadIdx.x] = make_float4(x[4 * q], x[4 * q + 1], x[4 * q + 2], x[4 * q + 3]);
    }
    __syncthreads();
    const int there = static_cast<int>(end - base < kSelectTile ? end - base : kSelectTile);
    if (threadIdx.x < kLanes) {
#pragma unroll 8
      for (int i = static_cast<int>(threadIdx.x); i < there / kLanes * kLanes; i += kLanes) {
        const double d = static_cast<double>(tile[i]) - shift;
        sum += d;
        square += d * d;
      }
    }
    if (threadIdx.x == 0)
      for (int i = there / kLanes * kLanes; i < there; ++i) {
        const double d = static_cast<double>(tile[i]) - shift;
        tail_sum += d;
        tail_square += d * d;
      }
    __syncthreads();
  }
  if (threadIdx.x < kLanes) sums[threadIdx.x] = sum, squares[threadIdx.x] = square;
  broken = __syncthreads_or(broken);
  nonzero = __syncthreads_or(nonzero);
  if (threadIdx.x != 0) return;
  ChunkMoments result = {0, 0};
  for (int lane = 0; lane < kLanes / 2; ++lane) {
    result.sum += sums[lane] + sums[lane + kLanes / 2];
    result.squares += squares[lane] + squares[lane + kLanes / 2];
  }
  result.sum += tail_sum;
  result.squares += tail_square;
  chunks[blockIdx.x] = result;
  if (broken) atomicOr(&state->broken, 1u);
  if (nonzero) atomicOr(&state->nonzero, 1u);
}

__device__ void fit(GaussianKState* state, const StepParameters* parameters, const DensityQuantile& quantile,
                    std::size_t n, double sum, double squares) {
  const NormalFit normal = normal_fit(state->shift, sum, squares, n);
  state->list_above = kLargestFinite;
  state->next = state->carried;
  state->way = gaussiank::way_of(!state->broken, !state->nonzero, state->k, n, normal);
  if (state->way != Way::rule) return;
  const double density = parameters->density;
  const double z = density == quantile.density ? quantile.z : -normal_quantile_formula(density / 2);
  state->threshold = gaussiank::thresholds_from(normal.mean + z * normal.deviation);
  for (int r = 0; r < kLevels; ++r) state->above[r] = key_below<float>(state->threshold.level[r]);
  state->list_above = state->above[state->carried];
}

// One block. Chunks are added in order: one thread adds sums, another, of the next warp, squares.
__global__ void __launch_bounds__(kThreads)
    fit_kernel(GaussianKState* state, const StepParameters* parameters, DensityQuantile quantile,
               const ChunkMoments* chunks, std::size_t n) {
  constexpr int per = 4 * kThreads;
  __shared__ double sums[per], squares[per], total;
  const std::size_t count = (n + kMomentsChunk - 1) / kMomentsChunk;
  double sum = 0;
  for (std::size_t start = 0; start < count; start += per) {
    const int here = static_cast<int>(count - start < per ? count - start : per);
    for (int i = static_cast<int>(threadIdx.x); i < here; i += kThreads) {
      const ChunkMoments chunk = chunks[start + static_cast<std::size_t>(i)];
      sums[i] = chunk.sum, squares[i] = chunk.squares;
    }
    __syncthreads();
    if (threadIdx.x == 0 || threadIdx.x == 32) {
      const double* from = threadIdx.x == 0 ? sums : squares;
#pragma unroll 8
      for (int i = 0; i < here; ++i) sum += from[i];
    }
    __syncthreads();
  }
  if (threadIdx.x == 32) total = sum;
  __syncthreads();
  if (threadIdx.x == 0) fit(state, parameters, quantile, n, sum, total);
}

__global__ void __launch_bounds__(kThreads)
    levels_kernel(GaussianKState* state, const float* u, std::size_t n, bool aligned, TileMemory tiles) {
  const std::size_t count = (n + kSelectTile - 1) / kSelectTile;
  if (state->way != Way::rule) {
    for (std::size_t tile = blockIdx.x; tile < count; tile += gridDim.x)
      if (threadIdx.x == 0) tiles.counts[tile] = 0;
    return;
  }
  Accumulate read;
  read.u = const_cast<float*>(u);  // Fetch::read writes nothing
  GpuKey above[kLevels];
  std::uint32_t counts[kLevels];
#pragma unroll
  for (int r = 0; r < kLevels; ++r) above[r] = state->above[r], counts[r] = 0;
  const GpuKey list_above = state->list_above;
  for (std::size_t tile = blockIdx.x; tile < count; tile += gridDim.x) {
    const std::size_t base = tile * kSelectTile;
    float x[kTileShare];
    fetch_tile<Fetch::read>(read, base, n, aligned, x);
#pragma unroll
    for (int q = 0; q < kQuads; ++q)
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const bool there = quad_at(base, q) + static_cast<std::size_t>(c) < n;
        const GpuKey key = there ? key_of(x[4 * q + c]) : -1;
#pragma unroll
        for (int r = 0; r < kLevels; ++r) counts[r] += key > above[r];
      }
    list_tile(x, base, n, list_above, tiles);
  }
#pragma unroll
  for (int r = 0; r < kLevels; ++r) {
    std::uint32_t total;
    block_exclusive_sum(counts[r], total);
    if (threadIdx.x == 0 && total > 0) atomicAdd(&state->counts[r], total);
  }
}

struct LevelCounts {
  const std::uint32_t* counts;
  TOPKNOT_HOST_DEVICE std::uint32_t operator()(int, int level) const { return counts[level]; }
};

__global__ void decide_kernel(GaussianKState* state, EntryList list, double multiple, std::uint32_t capacity,
                              StatsOut stats) {
  const std::uint32_t k = state->k;
  Choice choice;
  std::uint32_t kept = 0, over = 0;
  float threshold = 0;
  choice.skip = 1;
  if (state->way == Way::exact) {
    kept = k < capacity ? k : capacity;
    choice.skip = 0;
    choice.whole = 1;
    choice.k = kept;
  } else if (state->way == Way::rule) {
    const int level = gaussiank::last_level(k, LevelCounts{state->counts});
    state->next = level;
    const std::uint32_t count = state->counts[level];
    choose_within(multiple, k, count, state->above[level], choice, kept, over);
    choice.whole = level != state->carried || count > list.limit;
    threshold = static_cast<float>(state->threshold.level[level]);
  }
  state->choice = choice;
  *stats.count = kept < capacity ? kept : capacity;
  *stats.finite = !state->broken;
  *stats.over = over;
  *stats.threshold = threshold;  // of an exact selection, when it is known
}

__global__ void commit_kernel(GaussianKState* state, const StepStatus* status) {
  if (!status->bad) state->carried = state->next;
}

template <Fetch kFetch>
void moments(cudaStream_t stream, GaussianKState* state, const Accumulate& a, std::size_t n,
             ChunkMoments* chunks) {
  launch(moments_kernel<kFetch>, grid_for(n, kMomentsChunk), kThreads, stream, a, n, aligned(a), state,
         chunks);
}

}  // namespace

void gaussiank_reset(cudaStream_t stream, GaussianKState* state) {
  launch(reset_kernel, 1, 1, stream, state);
}

void gaussiank_begin(cudaStream_t stream, GaussianKState* state, const StepParameters* parameters,
                     const Accumulate& accumulate, std::size_t n) {
  launch(begin_kernel, 1, 1, stream, state, parameters, accumulate, n);
}

void gaussiank_moments(cudaStream_t stream, GaussianKState* state, const StepParameters* parameters,
                       const DensityQuantile& quantile, const Accumulate& accumulate, std::size_t n,
                       ChunkMoments* chunks) {
  switch (fetch_of(accumulate)) {
    case Fetch::plain:
      moments<Fetch::plain>(stream, state, accumulate, n, chunks);
      break;
    case Fetch::residual:
      moments<Fetch::residual>(stream, state, accumulate, n, chunks);
      break;
    case Fetch::velocity:
      moments<Fetch::velocity>(stream, state, accumulate, n, chunks);
      break;
    default:
      moments<Fetch::both>(stream, state, accumulate, n, chunks);
      break;
  }
  launch(fit_kernel, 1, kThreads, stream, state, parameters, quantile, chunks, n);
}

void gaussiank_count(cudaStream_t stream, GaussianKState* state, const float* u, std::size_t n,
                     const TileMemory& tiles, const EntryList& list) {
  Accumulate read;
  read.u = const_cast<float*>(u);
  launch(levels_kernel, grid_for(n, kSelectTile, 2048), kThreads, stream, state, u, n, aligned(read), tiles);
  gather_tiles(stream, u, n, &state->list_above, tiles, list);
}

void gaussiank_decide(cudaStream_t stream, GaussianKState* state, const EntryList& list, double multiple,
                      std::uint32_t capacity, const StatsOut& stats) {
  launch(decide_kernel, 1, 1, stream, state, list, multiple, capacity, stats);
}

void gaussiank_commit(cudaStream_t stream, GaussianKState* state, const StepStatus* status) {
  launch(commit_kernel, 1, 1, stream, state, status);
}

}  // namespace topknot::cuda

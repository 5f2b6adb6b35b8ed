// CUDA counterpart of compress/select/gaussiank.cpp. In steady state, where the rule ends at the threshold
// at which it ended last step, 16 bytes per element; else 24.
#include <topknot_kernel.h>

#include "compress/compressor.h"
#include "compress/select/cuda/device_selector.h"
#include "compress/select/cuda/gpu_tiles.h"
#include "compress/select/gaussiank_rule.h"
#include "compress/select/passes/quantiles.h"
#include "nn/core/cuda/kernel_tools.h"

namespace topknot::cuda {
namespace {

using gaussiank::kLevels, gaussiank::kMomentsChunk, gaussiank::Way;
constexpr int kLanes = 16;

// Sums of a chunk of x - shift and of its square.
struct ChunkMoments {
  double sum, squares;
};

// A range's state, in GPU memory.
struct GaussianKState {
  std::int32_t carried;  // the level at which the last committed step ended
  // State of this step:
  std::int32_t next;
  std::uint32_t k;
  double shift;
  std::uint32_t broken;   // 1: a NaN or Inf somewhere
  std::uint32_t nonzero;  // 1: not all is zero
  gaussiank::Way way;
  gaussiank::Thresholds threshold;
  std::uint32_t calls;  // of is_last_block()
  MagnitudeKey above[kLevels];
  std::uint32_t counts[kLevels];
};

// z: minus the normal quantile of density / 2. For other densities the kernel computes its own, in which the
// last bits may differ from the CPU's.
struct DensityQuantile {
  double density, z;
};

// In GPU memory.
struct GaussianKWork {
  GaussianKState* states;            // by range
  const DensityQuantile* quantiles;  // by range
  RangeBlocks blocks;                // a block a chunk; ranges' chunks one after the other
  ChunkMoments* chunks;              // by block
};

// A thread per range.
__global__ void begin_kernel(SelectRanges ranges, GaussianKState* states, const StepParameters* parameters,
                             Accumulate accumulate) {
  await_previous();
  const std::uint32_t r = range_of_thread();
  if (r >= ranges.count) return;
  const SelectRange& range = ranges.range[r];
  GaussianKState& state = states[r];
  state.k = static_cast<std::uint32_t>(density_count(range.density(*parameters), range.n));
  state.broken = state.nonzero = 0;
  for (int level = 0; level < kLevels; ++level) state.counts[level] = 0;
  const Accumulate a = accumulate.from(range.begin);
  state.shift = moments_shift(a.peek(0), a.peek(range.n / 2), a.peek(range.n - 1));
}

// A call, so that the pass around it has the registers that it needs.
__device__ __noinline__ void fit(const SelectRange& range, GaussianKState& state,
                                 const StepParameters& parameters, const DensityQuantile& quantile,
                                 double sum, double squares, MagnitudeKey& above) {
  const NormalFit normal = normal_fit(state.shift, sum, squares, range.n);
  above = kLargestFinite;
  state.next = state.carried;
  state.way = gaussiank::way_of(!state.broken, !state.nonzero, state.k, range.n, normal);
  if (state.way != Way::rule) return;
  const double density = range.density(parameters);
  const double z = density == quantile.density ? quantile.z : -normal_quantile_formula(density / 2);
  state.threshold = gaussiank::thresholds_from(normal.mean + z * normal.deviation);
  for (int r = 0; r < kLevels; ++r) state.above[r] = key_below(state.threshold.level[r]);
  above = state.above[state.carried];
}

// In the last block of a range: adds chunks in order, sums and squares in two warps. `scratch`: kSelectTile.
__device__ void fit_range(const SelectRanges& ranges, const GaussianKWork& work, std::uint32_t r,
                          const StepParameters* parameters, double* scratch) {
  constexpr std::uint32_t per = kSelectTile / 4;
  __shared__ double total;
  double *const sums = scratch, *const squares = scratch + per;
  const SelectRange& range = ranges.range[r];
  const auto count = static_cast<std::uint32_t>((range.n + kMomentsChunk - 1) / kMomentsChunk);
  const ChunkMoments* chunks = work.chunks + (work.blocks.first ? work.blocks.first[r] : 0);
  double sum = 0;
  for (std::uint32_t start = 0; start < count; start += per) {
    const std::uint32_t here = count - start < per ? count - start : per;
    for (std::uint32_t i = threadIdx.x; i < here; i += kThreads) {
      const ChunkMoments chunk = chunks[start + i];
      sums[i] = chunk.sum, squares[i] = chunk.squares;
    }
    __syncthreads();
    if (threadIdx.x == 0 || threadIdx.x == 32) {
      const double* from = threadIdx.x == 0 ? sums : squares;
#pragma unroll 4
      for (std::uint32_t i = 0; i < here; ++i) sum += from[i];
    }
    __syncthreads();
  }
  if (threadIdx.x == 32) total = sum;
  __syncthreads();
  if (threadIdx.x == 0)
    fit(range, work.states[r], *parameters, work.quantiles[r], sum, total, ranges.above[r]);
}

// A block a chunk. All threads fetch; the sums are 16 chains in the CPU's order, behind other blocks' loads.
template <Fetch kFetch>
__global__ void __launch_bounds__(kThreads, 4)
    moments_kernel(Accumulate accumulate, bool base_aligned, SelectRanges ranges, GaussianKWork work,
                   const StepParameters* parameters) {
  await_previous();
  __shared__ float4 tile4[kSelectTile / 4];
  __shared__ double sums[kLanes], squares[kLanes];
  const float* tile = reinterpret_cast<const float*>(tile4);
  const RangeBlock block = range_block(work.blocks);
  const std::size_t from = ranges.range[block.range].begin, n = ranges.range[block.range].n;
  const Accumulate a = accumulate.from(from);
  const bool aligned = base_aligned && from % 4 == 0;
  GaussianKState* const state = work.states + block.range;
  const std::size_t begin = std::size_t{block.index} * kMomentsChunk;
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
        const MagnitudeKey key = key_of(x[4 * q + c]);
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
  if (threadIdx.x == 0) {
    ChunkMoments result = {0, 0};
    for (int lane = 0; lane < kLanes / 2; ++lane) {
      result.sum += sums[lane] + sums[lane + kLanes / 2];
      result.squares += squares[lane] + squares[lane + kLanes / 2];
    }
    result.sum += tail_sum;
    result.squares += tail_square;
    work.chunks[blockIdx.x] = result;
    if (broken) atomicOr(&state->broken, 1u);
    if (nonzero) atomicOr(&state->nonzero, 1u);
  }
  if (is_last_block(&state->calls, block.count))
    fit_range(ranges, work, block.range, parameters, reinterpret_cast<double*>(tile4));
}

struct LevelCounts {
  const std::uint32_t* counts;
  TOPKNOT_HOST_DEVICE std::uint32_t operator()(int, int level) const { return counts[level]; }
};

// `multiple`: compress.capacity.
__device__ void decide(const SelectRanges& ranges, std::uint32_t r, GaussianKState& state, double multiple) {
  const SelectRange& range = ranges.range[r];
  const std::uint32_t capacity = range.taken.capacity;
  const std::uint32_t k = state.k;
  Choice choice;
  std::uint32_t kept = 0, over = 0;
  float threshold = 0;
  choice.skip = 1;
  if (state.way == Way::exact) {
    kept = k < capacity ? k : capacity;
    choice.skip = 0;
    choice.whole = 1;
    choice.k = kept;
  } else if (state.way == Way::rule) {
    const int level = gaussiank::last_level(k, LevelCounts{state.counts});
    state.next = level;
    const std::uint32_t count = state.counts[level];
    choose_within(multiple, k, count, state.above[level], choice, kept, over);
    choice.whole = level != state.carried || count > range.list.limit;
    threshold = static_cast<float>(state.threshold.level[level]);
  }
  ranges.choices[r] = choice;
  range.stats->count = kept < capacity ? kept : capacity;
  range.stats->finite = !state.broken;
  range.stats->over = over;
  range.stats->threshold = threshold;  // of an exact selection, when it is known
}

__global__ void __launch_bounds__(kThreads, 4)
    levels_kernel(SelectRanges ranges, GaussianKState* states, const float* u, bool base_aligned,
                  double multiple) {
  await_previous();
  const RangeBlock block = range_block(ranges.shares);
  const SelectRange& range = ranges.range[block.range];
  GaussianKState* const state = states + block.range;
  const TileMemory tiles = range.tiles;
  const std::size_t n = range.n, count = (n + kSelectTile - 1) / kSelectTile;
  const bool aligned = base_aligned && range.begin % 4 == 0;
  const bool rule = state->way == Way::rule;
  for (std::size_t tile = block.index; !rule && tile < count; tile += block.count)
    if (threadIdx.x == 0) tiles.counts[tile] = 0;
  Accumulate read;
  read.u = const_cast<float*>(u + range.begin);  // Fetch::read writes nothing
  MagnitudeKey above[kLevels];
  std::uint32_t counts[kLevels];
#pragma unroll
  for (int r = 0; r < kLevels; ++r) above[r] = state->above[r], counts[r] = 0;
  const MagnitudeKey list_above = ranges.above[block.range];
  for (std::size_t tile = block.index; rule && tile < count; tile += block.count) {
    const std::size_t base = tile * kSelectTile;
    float x[kTileShare];
    fetch_tile<Fetch::read>(read, base, n, aligned, x);
#pragma unroll
    for (int q = 0; q < kQuads; ++q)
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const bool there = quad_at(base, q) + static_cast<std::size_t>(c) < n;
        const MagnitudeKey key = there ? key_of(x[4 * q + c]) : -1;
#pragma unroll
        for (int r = 0; r < kLevels; ++r) counts[r] += key > above[r];
      }
    list_tile(x, base, n, list_above, tiles, nullptr);
  }
#pragma unroll
  for (int r = 0; rule && r < kLevels; ++r) {
    std::uint32_t total;
    block_exclusive_sum(counts[r], total);
    if (threadIdx.x == 0 && total > 0) atomicAdd(&state->counts[r], total);
  }
  if (finish_list(range, block) && threadIdx.x == 0) decide(ranges, block.range, *state, multiple);
}

// A thread per range.
__global__ void commit_kernel(SelectRanges ranges, GaussianKState* states, const StepStatus* status) {
  await_previous();
  const std::uint32_t r = range_of_thread();
  if (r < ranges.count && !status->bad) states[r].carried = states[r].next;
}

class DeviceGaussianK final : public DeviceSelector {
 public:
  DeviceGaussianK(const CompressOptions& options, const std::vector<DeviceRange>& ranges)
      : multiple_(options.capacity), states_(on_device(std::vector<GaussianKState>(ranges.size()))) {
    std::vector<std::size_t> chunks;
    for (const DeviceRange& range : ranges) chunks.push_back((range.n + kMomentsChunk - 1) / kMomentsChunk);
    table_ = BlockTable(chunks);
    chunks_ = DeviceArray<ChunkMoments>(table_.blocks().count);
  }

  std::size_t capacity(std::size_t n, double density) const override {
    return capacity_within(multiple_, target_count(density, n), n);
  }
  std::size_t list_limit(std::size_t n, double density) const override {
    return 16 * target_count(density, n) + 4096;
  }
  void set_density(const std::vector<double>& densities) override {
    std::vector<DensityQuantile> quantiles;
    for (const double density : densities) quantiles.push_back({density, -normal_quantile(density / 2)});
    quantiles_ = on_device(quantiles);
  }

  // u = accumulate(i), and its moments by chunk, in double, over 16 lanes, as accumulate_with_moments() of
  // compress/select/passes/passes.h (12 bytes per element); the thresholds; what reaches each (4 bytes per
  // element); the rule's evaluations, and the choices, under compress.capacity.
  void select(cudaStream_t stream, const SelectRanges& ranges, const Accumulate& accumulate,
              const StepParameters* parameters) override {
    const GaussianKWork work{states_.data(), quantiles_.data(), table_.blocks(), chunks_.data()};
    launch(begin_kernel, thread_per_range(ranges), kThreads, stream, ranges, work.states, parameters,
           accumulate);
    with_fetch(accumulate, [&](auto fetch) {
      launch(moments_kernel<fetch()>, work.blocks.count, kThreads, stream, accumulate, aligned(accumulate),
             ranges, work, parameters);
    });
    Accumulate made;
    made.u = accumulate.u;
    launch(levels_kernel, ranges.shares.count, kThreads, stream, ranges, work.states, accumulate.u,
           aligned(made), multiple_);
    gather_tiles(stream, ranges, accumulate.u);
    take_largest(stream, ranges, accumulate.u);
  }

  void commit(cudaStream_t stream, const SelectRanges& ranges, const StepStatus* status,
              const DeviceOutcome&) override {
    launch(commit_kernel, thread_per_range(ranges), kThreads, stream, ranges, states_.data(), status);
  }

  DeviceDiagnostics diagnostics(std::size_t range) const override {
    const GaussianKState state = on_host(states_.data() + range, 1).front();
    DeviceDiagnostics told;
    told.level = state.carried;
    told.thresholds.assign(state.threshold.level, state.threshold.level + kLevels);
    told.counts.assign(state.counts, state.counts + kLevels);
    for (const ChunkMoments& chunk : on_host(chunks_.data(), chunks_.size()))
      told.moments.emplace_back(chunk.sum, chunk.squares);
    return told;
  }

 private:
  double multiple_;  // compress.capacity
  DeviceArray<GaussianKState> states_;
  BlockTable table_;
  DeviceArray<ChunkMoments> chunks_;
  DeviceArray<DensityQuantile> quantiles_;
};

const bool gaussiank_registered = add_device_selector<DeviceGaussianK>("gaussiank");

}  // namespace
}  // namespace topknot::cuda

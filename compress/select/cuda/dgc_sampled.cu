#include "compress/select/cuda/dgc_sampled_kernels.h"
#include "nn/core/cuda/kernel_tools.h"

namespace topknot::cuda {
namespace {

constexpr int kLevels = dgc::kAdaptations;

// |x| >= t as key > key_before(t); NaN and Inf are found in any case.
__device__ GpuKey key_before(GpuKey t) {
  return t - 1 < kLargestFinite ? t - 1 : kLargestFinite;
}

__global__ void plan_kernel(DgcRule rule, const StepParameters* parameters, DgcControl* control) {
  DgcControl& c = *control;
  c = DgcControl();
  const double density = parameters->density;
  const SampleGeometry g = dgc::geometry_of(rule.n, density, rule.sample_ratio);
  const std::size_t k = g.selects < rule.capacity ? g.selects : rule.capacity;
  c.k = static_cast<std::uint32_t>(k);
  c.all = k == rule.n;
  c.stride = g.stride;
  c.final.skip = c.of_samples.skip = c.of_vector.skip = 1;
  c.of_vector.whole = 1;
  c.of_samples.k = static_cast<std::uint32_t>(g.top_samples);
  c.of_vector.k = c.k;
  if (c.all) return;
  if (g.stride == 1) {
    c.of_vector.skip = 0;
    return;
  }
  PhiloxStream stream = rule.stream;
  stream.a = static_cast<std::uint32_t>(parameters->step);
  stream.b = static_cast<std::uint32_t>(parameters->rank);
  const PhiloxBlock block = stream.block(rule.position / 4);
  const unsigned word = rule.position % 4;
  const std::uint32_t bits = word == 0   ? block.words[0]
                             : word == 1 ? block.words[1]
                             : word == 2 ? block.words[2]
                                         : block.words[3];
  c.start = below_of(bits, static_cast<std::uint32_t>(g.stride));
  c.samples = static_cast<std::uint32_t>((rule.n - c.start + g.stride - 1) / g.stride);
  c.of_samples.skip = 0;
}

__global__ void __launch_bounds__(kThreads)
    sample_kernel(Accumulate accumulate, const DgcControl* control, float* samples) {
  const std::size_t count = control->samples, start = control->start, stride = control->stride;
  for (std::size_t i = std::size_t{blockIdx.x} * kThreads + threadIdx.x; i < count;
       i += std::size_t{gridDim.x} * kThreads)
    samples[i] = accumulate.peek(start + i * stride);
}

__global__ void bound_kernel(DgcControl* control) {
  if (control->of_samples.skip) return;
  const GpuKey kth = control->of_samples.kth;
  control->t = control->first_t = magnitude_of<float>(kth);
  control->above = key_before(kth);
}

// The choice, now that the threshold is known; `exact`: the k largest in place of all that reach it.
__device__ void choose(DgcControl& c, const DgcRule& rule, const EntryList& list, bool exact,
                       const StatsOut& stats) {
  exact |= c.count > c.k && !rule.lowest;
  const std::uint32_t kept = c.count < c.k ? c.count : c.k;
  c.final.skip = kept == 0;
  c.final.whole = list.stats->count > list.limit || c.t < c.first_t;  // else the list holds all that reach t
  c.final.known = !exact;
  c.final.k = kept;
  c.final.bound = key_before(key_of(c.t));  // of more than k the first k count
  *stats.count = kept;
  *stats.threshold = c.t;  // where the selection is exact, its least magnitude follows
}

// Changes t as the loop of the CPU's selector does, as far as it is known how many reach the thresholds to come;
// else says which are to be counted. With resampling t only falls, so that one count tells all.
__device__ void adapt(DgcControl& c, const DgcRule& rule, const EntryList& list, const StatsOut& stats) {
  int next = 0;
  bool exact = false;
  for (;; ++c.adaptations) {
    const bool many = dgc::far_too_many(c.count, c.k), few = dgc::far_too_few(c.count, c.k);
    if ((!many && !few) || c.adaptations == dgc::kAdaptations) break;
    exact = many && rule.resample;
    if (exact) break;
    const float largest = magnitude_of<float>(kLargestFinite);
    const float moved = dgc::moved_threshold(c.t, many, largest);
    if (moved == c.t) {  // zero and the least denormals
      exact = many;
      break;
    }
    if (next == c.levels) {
      const int levels = rule.resample ? dgc::kAdaptations - c.adaptations : 1;
      float t = c.t;
      for (int r = 0; r < levels; ++r) {
        t = dgc::moved_threshold(t, many, largest);
        c.level[r] = t;
        c.reach[r] = 0;
      }
      c.levels = levels;
      c.pending = true;
      return;
    }
    c.t = c.level[next];
    c.count = c.reach[next++];
  }
  c.pending = false;
  choose(c, rule, list, exact, stats);
}

__global__ void judge_kernel(DgcRule rule, EntryList list, DgcControl* control, StatsOut stats) {
  DgcControl& c = *control;
  *stats.count = *stats.over = 0;
  *stats.finite = list.stats->finite;
  *stats.threshold = 0;
  if (!list.stats->finite) return;
  if (c.all) {
    c.final.skip = c.final.known = 0;
    c.final.whole = 1;
    c.final.k = *stats.count = c.k;
    return;
  }
  if (!c.of_vector.skip) {  // t is the k-th magnitude
    c.final.skip = 0;
    c.final.whole = 1;
    c.final.known = rule.lowest;
    c.final.k = *stats.count = c.k;
    c.final.bound = key_before(c.of_vector.kth);
    *stats.threshold = magnitude_of<float>(c.of_vector.kth);
    return;
  }
  c.count = list.stats->count;
  adapt(c, rule, list, stats);
}

__global__ void __launch_bounds__(kThreads)
    adapt_kernel(DgcRule rule, const float* u, EntryList list, DgcControl* control, StatsOut stats) {
  if (!control->pending) return;
  GpuKey above[kLevels];
  std::uint32_t reach[kLevels];
  const int levels = control->levels;
#pragma unroll
  for (int r = 0; r < kLevels; ++r) {
    above[r] = r < levels ? key_before(key_of(control->level[r])) : 0x7fffffff;
    reach[r] = 0;
  }
  const bool listed = list.stats->count <= list.limit && control->level[0] >= control->first_t;
  const float* from = listed ? list.values : u;
  const std::size_t n = listed ? list.stats->count : rule.n;
  for (std::size_t i = std::size_t{blockIdx.x} * kThreads + threadIdx.x; i < n;
       i += std::size_t{gridDim.x} * kThreads) {
    const GpuKey key = key_of(from[i]);
#pragma unroll
    for (int r = 0; r < kLevels; ++r) reach[r] += key > above[r];
  }
#pragma unroll
  for (int r = 0; r < kLevels; ++r) {
    const std::uint32_t sum = block_sum(reach[r]);
    if (threadIdx.x == 0 && sum > 0) atomicAdd(&control->reach[r], sum);
  }
  if (threadIdx.x != 0) return;
  __threadfence();
  if (atomicAdd(&control->blocks_done, 1u) != gridDim.x - 1) return;
  // The last block: all have counted.
  __threadfence();
  control->blocks_done = 0;
  adapt(*control, rule, list, stats);
}

}  // namespace

void dgc_plan(cudaStream_t stream, const DgcRule& rule, const StepParameters* parameters,
              DgcControl* control) {
  launch(plan_kernel, 1, 1, stream, rule, parameters, control);
}

void dgc_sample(cudaStream_t stream, const Accumulate& accumulate, const DgcControl* control, float* samples,
                std::size_t most) {
  launch(sample_kernel, grid_for(most, kThreads, 1024), kThreads, stream, accumulate, control, samples);
}

void dgc_bound(cudaStream_t stream, DgcControl* control) {
  launch(bound_kernel, 1, 1, stream, control);
}

void dgc_judge(cudaStream_t stream, const DgcRule& rule, const EntryList& list, DgcControl* control,
               const StatsOut& stats) {
  launch(judge_kernel, 1, 1, stream, rule, list, control, stats);
}

void dgc_adapt(cudaStream_t stream, const DgcRule& rule, const float* u, const EntryList& list,
               DgcControl* control, const StatsOut& stats) {
  launch(adapt_kernel, grid_for(rule.n, kThreads * 16, 1024), kThreads, stream, rule, u, list, control,
         stats);
}

}  // namespace topknot::cuda

// CUDA counterpart of compress/select/dgc_sampled.cpp.
#include <topknot_kernel.h>

#include <vector>

#include "compress/select/cuda/device_selector.h"
#include "compress/select/cuda/gpu_tiles.h"
#include "compress/select/dgc_rule.h"
#include "nn/core/cuda/kernel_tools.h"
#include "nn/core/rng.h"

namespace topknot::cuda {
namespace {

constexpr int kLevels = dgc::kAdaptations;

struct DgcRule : DgcSampledOptions {
  PhiloxStream stream;  // of the seed; step and rank follow from the step's parameters
};

// A range's state during a step, in GPU memory.
struct DgcControl {
  std::uint64_t stride = 1;
  std::uint32_t start = 0, samples = 0;  // what is sampled; none if t comes from the whole vector
  std::uint32_t k = 0;
  bool all = false;          // every entry is sent
  bool pending = false;      // the levels are to be counted
  float t = 0, first_t = 0;  // the threshold, and the one of the sample
  std::uint32_t count = 0;   // how many reach t
  int adaptations = 0;
  int levels = 0;  // thresholds to come, and how many reach them
  float level[dgc::kAdaptations] = {};
  std::uint32_t reach[dgc::kAdaptations] = {};
  std::uint32_t calls = 0;  // of is_last_block()
};

// One of each per range, in GPU memory.
struct DgcWork {
  DgcControl* controls;
  const Source* samples;
  Choice *of_samples, *of_vector;  // where the threshold comes from: one of them is skipped, or both
};

// |x| >= t as key > key_before(t); NaN and Inf are found in any case.
__device__ MagnitudeKey key_before(MagnitudeKey t) {
  return t - 1 < kLargestFinite ? t - 1 : kLargestFinite;
}

// A thread per range.
__global__ void plan_kernel(DgcRule rule, SelectRanges ranges, DgcWork work,
                            const StepParameters* parameters) {
  await_previous();
  const std::uint32_t r = range_of_thread();
  if (r >= ranges.count) return;
  const SelectRange& range = ranges.range[r];
  DgcControl& c = work.controls[r];
  Choice &of_samples = work.of_samples[r], &of_vector = work.of_vector[r], &final = ranges.choices[r];
  c = DgcControl();
  of_samples = of_vector = final = Choice();
  const SampleGeometry g = dgc::geometry_of(range.n, range.density(*parameters), rule.sample_ratio);
  const std::size_t k = g.selects < range.taken.capacity ? g.selects : range.taken.capacity;
  c.k = static_cast<std::uint32_t>(k);
  c.all = k == range.n;
  c.stride = g.stride;
  final.skip = of_samples.skip = of_vector.skip = 1;
  of_vector.whole = 1;
  of_samples.k = static_cast<std::uint32_t>(g.top_samples);
  of_vector.k = c.k;
  ranges.above[r] = kLargestFinite;
  if (c.all) return;
  if (g.stride == 1) {
    of_vector.skip = 0;
    return;
  }
  PhiloxStream stream = rule.stream;
  stream.a = static_cast<std::uint32_t>(parameters->step);
  stream.b = static_cast<std::uint32_t>(parameters->rank);
  const PhiloxBlock block = stream.block(range.position / 4);
  const unsigned word = range.position % 4;
  const std::uint32_t bits = word == 0   ? block.words[0]
                             : word == 1 ? block.words[1]
                             : word == 2 ? block.words[2]
                                         : block.words[3];
  c.start = below_of(bits, static_cast<std::uint32_t>(g.stride));
  c.samples = static_cast<std::uint32_t>((range.n - c.start + g.stride - 1) / g.stride);
  of_samples.skip = 0;
}

__global__ void __launch_bounds__(kThreads)
    sample_kernel(SelectRanges ranges, DgcWork work, Accumulate accumulate) {
  await_previous();
  const RangeBlock block = range_block(ranges.shares);
  const DgcControl& control = work.controls[block.range];
  const std::size_t count = control.samples, start = control.start, stride = control.stride;
  const Accumulate a = accumulate.from(ranges.range[block.range].begin);
  float* const samples = const_cast<float*>(work.samples[block.range].values);
  for (std::size_t i = std::size_t{block.index} * kThreads + threadIdx.x; i < count;
       i += std::size_t{block.count} * kThreads)
    samples[i] = a.peek(start + i * stride);
}

// A thread per range.
__global__ void bound_kernel(SelectRanges ranges, DgcWork work) {
  await_previous();
  const std::uint32_t r = range_of_thread();
  if (r >= ranges.count || work.of_samples[r].skip) return;
  const MagnitudeKey kth = work.of_samples[r].kth;
  work.controls[r].t = work.controls[r].first_t = magnitude_of(kth);
  ranges.above[r] = key_before(kth);
}

// The choice, now that the threshold is known; `exact`: the k largest in place of all that reach it.
__device__ void choose(DgcControl& c, const DgcRule& rule, const SelectRange& range, Choice& final,
                       bool exact) {
  exact |= c.count > c.k && !rule.lowest;
  const std::uint32_t kept = c.count < c.k ? c.count : c.k;
  final.skip = kept == 0;
  final.whole =
      range.list.stats->count > range.list.limit || c.t < c.first_t;  // else the list holds all that reach t
  final.known = !exact;
  final.k = kept;
  final.bound = key_before(key_of(c.t));  // of more than k the first k count
  range.stats->count = kept;
  range.stats->threshold = c.t;  // where the selection is exact, its least magnitude follows
}

// Changes t as the loop of the CPU's selector does, as far as it is known how many reach the thresholds to
// come; else says which are to be counted. With resampling t only falls, so that one count tells all.
__device__ void adapt(DgcControl& c, const DgcRule& rule, const SelectRange& range, Choice& final) {
  int next = 0;
  bool exact = false;
  for (;; ++c.adaptations) {
    const bool many = dgc::far_too_many(c.count, c.k), few = dgc::far_too_few(c.count, c.k);
    if ((!many && !few) || c.adaptations == dgc::kAdaptations) break;
    exact = many && rule.resample;
    if (exact) break;
    const float largest = magnitude_of(kLargestFinite);
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
  choose(c, rule, range, final, exact);
}

// A thread per range.
__global__ void judge_kernel(DgcRule rule, SelectRanges ranges, DgcWork work) {
  await_previous();
  const std::uint32_t r = range_of_thread();
  if (r >= ranges.count) return;
  const SelectRange& range = ranges.range[r];
  SelectStats& stats = *range.stats;
  const ListStats found = *range.list.stats;
  DgcControl& c = work.controls[r];
  Choice& final = ranges.choices[r];
  stats.count = stats.over = 0;
  stats.finite = found.finite;
  stats.threshold = 0;
  if (!found.finite) return;
  if (c.all) {
    final.skip = final.known = 0;
    final.whole = 1;
    final.k = stats.count = c.k;
    return;
  }
  const Choice& of_vector = work.of_vector[r];
  if (!of_vector.skip) {  // t is the k-th magnitude
    final.skip = 0;
    final.whole = 1;
    final.known = rule.lowest;
    final.k = stats.count = c.k;
    final.bound = key_before(of_vector.kth);
    stats.threshold = magnitude_of(of_vector.kth);
    return;
  }
  c.count = found.count;
  adapt(c, rule, range, final);
}

__global__ void __launch_bounds__(kThreads)
    adapt_kernel(DgcRule rule, SelectRanges ranges, DgcWork work, const float* u) {
  await_previous();
  const RangeBlock block = range_block(ranges.shares);
  DgcControl* const control = work.controls + block.range;
  if (!control->pending) return;
  const SelectRange& range = ranges.range[block.range];
  MagnitudeKey above[kLevels];
  std::uint32_t reach[kLevels];
  const int levels = control->levels;
#pragma unroll
  for (int r = 0; r < kLevels; ++r) {
    above[r] = r < levels ? key_before(key_of(control->level[r])) : 0x7fffffff;
    reach[r] = 0;
  }
  const EntryList list = range.list;
  const bool listed = list.stats->count <= list.limit && control->level[0] >= control->first_t;
  const float* from = listed ? list.values : u + range.begin;
  const std::size_t n = listed ? list.stats->count : range.n;
  for (std::size_t i = std::size_t{block.index} * kThreads + threadIdx.x; i < n;
       i += std::size_t{block.count} * kThreads) {
    const MagnitudeKey key = key_of(from[i]);
#pragma unroll
    for (int r = 0; r < kLevels; ++r) reach[r] += key > above[r];
  }
#pragma unroll
  for (int r = 0; r < kLevels; ++r) {
    const std::uint32_t sum = block_sum(reach[r]);
    if (threadIdx.x == 0 && sum > 0) atomicAdd(&control->reach[r], sum);
  }
  if (is_last_block(&control->calls, block.count) && threadIdx.x == 0)
    adapt(*control, rule, range, ranges.choices[block.range]);
}

// Samples of a range of n elements, at most.
std::size_t dgc_most_samples(std::size_t n) {
  return n / 9 + 1;  // the least stride above 1 is 9
}

class DgcSampledOnGpu final : public DeviceSelector {
 public:
  DgcSampledOnGpu(const CompressOptions& options, const std::vector<DeviceRange>& ranges)
      : rule_{dgc_sampled_options(options), CounterRng(options.seed, RngUse::compress).stream()},
        controls_(on_device(std::vector<DgcControl>(ranges.size()))),
        choices_(2 * ranges.size()) {
    std::size_t most = 0;
    for (const DeviceRange& range : ranges) most += dgc_most_samples(range.n);
    samples_ = DeviceArray<float>(most);
    std::vector<Source> sources;
    float* at = samples_.data();
    for (const DeviceRange& range : ranges) {
      const std::size_t room = dgc_most_samples(range.n);
      sources.push_back({at, nullptr, &controls_.data()[sources.size()].samples, room});
      at += room;
    }
    sources_ = on_device(sources);
  }

  std::size_t capacity(std::size_t n, double density) const override {
    return dgc::selected_count(density, n);
  }
  std::size_t list_limit(std::size_t n, double density) const override {
    return 4 * dgc::selected_count(density, n) + 4096;
  }

  // The samples' threshold; u and the list of what exceeds it; the changes of the threshold; what is taken.
  void select(cudaStream_t stream, const SelectRanges& ranges, const Accumulate& accumulate,
              const StepParameters* parameters) override {
    const DgcWork work{controls_.data(), sources_.data(), choices_.data(), choices_.data() + ranges.count};
    const dim3 by_range = thread_per_range(ranges);
    const std::uint32_t shares = ranges.shares.count;
    const float* const u = accumulate.u;
    launch(plan_kernel, by_range, kThreads, stream, rule_, ranges, work, parameters);
    launch(sample_kernel, shares, kThreads, stream, ranges, work, accumulate);
    find_kth(stream, ranges, work.samples, u, work.of_samples);
    launch(bound_kernel, by_range, kThreads, stream, ranges, work);
    accumulate_and_list(stream, ranges, accumulate);
    find_kth(stream, ranges, nullptr, u, work.of_vector);
    launch(judge_kernel, by_range, kThreads, stream, rule_, ranges, work);
    // With resampling one count tells all changes.
    for (int i = 0; i < (rule_.resample ? 1 : dgc::kAdaptations); ++i)
      launch(adapt_kernel, shares, kThreads, stream, rule_, ranges, work, u);
    take_largest(stream, ranges, u);
  }

 private:
  DgcRule rule_;
  DeviceArray<float> samples_;
  DeviceArray<DgcControl> controls_;
  DeviceArray<Source> sources_;
  DeviceArray<Choice> choices_;
};

const bool dgc_sampled_registered = add_device_selector<DgcSampledOnGpu>("dgc_sampled");

}  // namespace
}  // namespace topknot::cuda

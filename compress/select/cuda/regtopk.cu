// CUDA counterpart of compress/select/regtopk.cpp: Top-k, and O(k) work on the entries sent in the last step.
// Scores hold tanh in double: a GPU's may differ from the host's in the last bit, and the score, rounded to
// float, about once in 2^28; rarely does that change the k-th entry.
#include <topknot_kernel.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>
#include <utility>
#include <vector>

#include "compress/select/cuda/device_selector.h"
#include "compress/select/cuda/gpu_tiles.h"
#include "compress/select/regtopk_score.h"
#include "compress/state.h"
#include "nn/core/cuda/kernel_tools.h"

namespace topknot::cuda {
namespace {

// A range's state, in GPU memory.
struct RegTopKControl {
  // State of the last committed step.
  CarriedBound bound;
  double weight = 0;       // of this rank in the average
  std::uint32_t last = 0;  // entries sent
  // State of the current step.
  CarriedBound next_bound;
  std::uint32_t k = 0;
  bool all = false;        // every entry is sent
  bool fell_back = false;  // the answer comes from the vector
  ListState list = ListState::good;
  MagnitudeKey above = kLargestFinite;  // scores beyond it are known to be listed
  std::uint32_t enough = 0;             // listed scores beyond `above`
  std::uint32_t calls = 0;              // of is_last_block()
};

// The entries sent in the last step, by ascending index: RegTopKControl::last of them.
struct RegTopKLast {
  std::uint32_t* indices = nullptr;
  double* own = nullptr;      // w p
  double* surplus = nullptr;  // avg - w p
  float* kept = nullptr;      // scratch: what stood in u where scores stand for a while
  std::uint32_t capacity = 0;
};

// One of each per range, in GPU memory.
struct RegTopKWork {
  RegTopKControl* controls;
  const RegTopKLast* last;
};

__device__ float score_of(const RegTopKScore& rule, const RegTopKLast& last, std::uint32_t i, float u,
                          double weight) {
  return rule(u, weight, last.own[i], last.surplus[i], magnitude_of(kLargestFinite));
}

// A thread per range.
__global__ void plan_kernel(RegTopKScore rule, SelectRanges ranges, RegTopKWork work,
                            const StepParameters* parameters) {
  await_previous();
  const std::uint32_t r = range_of_thread();
  if (r >= ranges.count) return;
  const SelectRange& range = ranges.range[r];
  RegTopKControl& c = work.controls[r];
  const std::uint32_t k = static_cast<std::uint32_t>(density_count(range.density(*parameters), range.n));
  const std::uint32_t room = work.last[r].capacity;
  const std::uint32_t capacity = range.taken.capacity < room ? range.taken.capacity : room;
  c.k = k < capacity ? k : capacity;
  c.all = c.k == range.n;
  c.fell_back = false;
  c.next_bound = c.bound;
  c.enough = 0;
  c.above = c.bound.above(c.all);
  ranges.above[r] = rule.listed_above(c.bound, c.all);
}

// `rest`: RegTopKScore's.
__device__ void judge(RegTopKControl& c, const SelectRange& range, double rest, Choice& choice) {
  const ListStats found = *range.list.stats;
  range.stats->finite = found.finite;
  range.stats->over = 0;
  range.stats->threshold = 0;
  range.stats->count = found.finite ? c.k : 0;
  choice = Choice();
  choice.skip = !found.finite;
  choice.k = c.k;
  choice.of_kth = c.all ? 0 : rest;  // the k-th magnitude is a score
  // If all are sent the bound stays as it is.
  c.list = c.all ? ListState::good : list_state(found.count <= range.list.limit, c.enough, c.k);
  c.fell_back = c.list != ListState::good;
  choice.whole = c.all || c.fell_back;
}

__global__ void __launch_bounds__(kThreads)
    judge_kernel(RegTopKScore rule, SelectRanges ranges, RegTopKWork work) {
  await_previous();
  const RangeBlock block = range_block(ranges.shares);
  const SelectRange& range = ranges.range[block.range];
  const EntryList list = range.list;
  const RegTopKLast last = work.last[block.range];
  RegTopKControl* const control = work.controls + block.range;
  const std::uint32_t count = list.stats->count, known = control->last;
  const double weight = control->weight;
  const MagnitudeKey above = control->above;
  std::uint32_t enough = 0;
  if (!control->all && count <= list.limit)
    for (std::size_t i = std::size_t{block.index} * kThreads + threadIdx.x; i < count;
         i += std::size_t{block.count} * kThreads) {
      const std::uint32_t index = list.indices[i];
      float value = list.values[i];
      const std::uint32_t at = lower_bound(last.indices, known, index);
      if (at < known && last.indices[at] == index) {
        value = score_of(rule, last, at, value, weight);
        list.values[i] = value;
      }
      enough += key_of(value) > above;
    }
  enough = block_sum(enough);
  if (threadIdx.x == 0 && enough > 0) atomicAdd(&control->enough, enough);
  if (is_last_block(&control->calls, block.count) && threadIdx.x == 0)
    judge(*control, range, rule.rest, ranges.choices[block.range]);
}

// Puts the scores of the last step's entries over them in u, or takes them back.
__global__ void __launch_bounds__(kThreads)
    swap_scores_kernel(bool put, RegTopKScore rule, SelectRanges ranges, RegTopKWork work, float* group) {
  await_previous();
  const RangeBlock block = range_block(ranges.shares);
  const RegTopKControl& control = work.controls[block.range];
  if (!control.fell_back) return;
  const RegTopKLast last = work.last[block.range];
  float* const u = group + ranges.range[block.range].begin;
  const std::uint32_t count = control.last;
  const double weight = control.weight;
  for (std::uint32_t i = block.index * kThreads + threadIdx.x; i < count; i += block.count * kThreads) {
    float& value = u[last.indices[i]];
    if (put) last.kept[i] = value;
    value = put ? score_of(rule, last, i, value, weight) : last.kept[i];
  }
}

__global__ void __launch_bounds__(kThreads)
    finish_kernel(SelectRanges ranges, RegTopKWork work, const float* group) {
  await_previous();
  const RangeBlock block = range_block(ranges.shares);
  const SelectRange& range = ranges.range[block.range];
  const float* const u = group + range.begin;
  const Taken taken = range.taken;
  const std::uint32_t count = range.stats->count;
  const JoinedList& joined = ranges.joined;
  for (std::uint32_t i = block.index * kThreads + threadIdx.x; i < count; i += block.count * kThreads) {
    const float value = u[taken.indices[i]];
    taken.values[i] = value;
    if (joined.values) joined.values[joined.starts[block.range] + i] = value;
  }
  const Choice& choice = ranges.choices[block.range];
  RegTopKControl& control = work.controls[block.range];
  if (block.index != 0 || threadIdx.x != 0 || choice.skip || control.all) return;
  control.next_bound = control.bound.after(choice.kth, control.list);
}

__global__ void __launch_bounds__(kThreads)
    commit_kernel(SelectRanges ranges, const StepStatus* status, DeviceOutcome outcome, RegTopKWork work) {
  await_previous();
  if (status->bad != 0) return;
  const RangeBlock block = range_block(ranges.shares);
  const SelectRange& range = ranges.range[block.range];
  const RegTopKLast last = work.last[block.range];
  const float* const sent = outcome.sent + range.slot;
  const float* const average = outcome.average + range.begin;
  const std::uint32_t count = range.stats->count < last.capacity ? range.stats->count : last.capacity;
  const double weight = static_cast<double>(*outcome.weight) / outcome.ranks;
  for (std::uint32_t i = block.index * kThreads + threadIdx.x; i < count; i += block.count * kThreads) {
    const std::uint32_t index = range.taken.indices[i];
    const double own = weight * static_cast<double>(sent[i]);
    last.indices[i] = index;
    last.own[i] = own;
    last.surplus[i] = static_cast<double>(average[index]) - own;
  }
  if (block.index != 0 || threadIdx.x != 0) return;
  RegTopKControl& control = work.controls[block.range];
  control.last = count;
  control.weight = weight;
  control.bound = control.next_bound;
}

// The entries of the last step, by range, in GPU memory.
class LastMemory {
 public:
  LastMemory() = default;
  explicit LastMemory(const std::vector<std::size_t>& capacities) {
    const std::size_t all = std::accumulate(capacities.begin(), capacities.end(), std::size_t{0});
    indices_ = DeviceArray<std::uint32_t>(all);
    own_ = DeviceArray<double>(all);
    surplus_ = DeviceArray<double>(all);
    kept_ = DeviceArray<float>(all);
    std::size_t at = 0;
    for (const std::size_t capacity : capacities) {
      last_.push_back({indices_.data() + at, own_.data() + at, surplus_.data() + at, kept_.data() + at,
                       static_cast<std::uint32_t>(capacity)});
      at += capacity;
    }
    table_ = on_device(last_);
  }
  const RegTopKLast* on_gpu() const { return table_.data(); }
  const RegTopKLast& operator[](std::size_t range) const { return last_[range]; }

 private:
  DeviceArray<std::uint32_t> indices_;
  DeviceArray<double> own_, surplus_;
  DeviceArray<float> kept_;
  std::vector<RegTopKLast> last_;
  DeviceArray<RegTopKLast> table_;
};

template <class T>
void copy(T* to, const T* from, std::size_t count, cudaMemcpyKind kind) {
  if (count == 0) return;
  TOPKNOT_CUDA(cudaMemcpyAsync(to, from, count * sizeof(T), kind, Context::current().stream()));
}

class RegTopKOnGpu final : public DeviceSelector {
 public:
  RegTopKOnGpu(const CompressOptions& options, const std::vector<DeviceRange>& ranges)
      : ranges_(ranges),
        rule_(regtopk_score(options)),
        last_(std::vector<std::size_t>(ranges.size())),
        controls_(on_device(std::vector<RegTopKControl>(ranges.size()))) {}

  void set_density(const std::vector<double>& densities) override {
    std::vector<std::size_t> capacities;
    for (std::size_t r = 0; r < ranges_.size(); ++r)
      capacities.push_back(capacity(ranges_[r].n, densities[r]));
    reserve(capacities);
  }

  // Lists what may be among the k largest scores, puts scores over the listed values and takes the k largest;
  // where the list does not hold them, scores stand in u for a while.
  void select(cudaStream_t stream, const SelectRanges& ranges, const Accumulate& accumulate,
              const StepParameters* parameters) override {
    const std::uint32_t shares = ranges.shares.count;
    float* const u = accumulate.u;
    launch(plan_kernel, thread_per_range(ranges), kThreads, stream, rule_, ranges, work(), parameters);
    accumulate_and_list(stream, ranges, accumulate);
    launch(judge_kernel, shares, kThreads, stream, rule_, ranges, work());
    launch(swap_scores_kernel, shares, kThreads, stream, true, rule_, ranges, work(), u);
    take_largest(stream, ranges, u);
    launch(swap_scores_kernel, shares, kThreads, stream, false, rule_, ranges, work(), u);
    launch(finish_kernel, shares, kThreads, stream, ranges, work(), u);
  }

  // If the status is good: keeps what was sent, and what the average made of it.
  void commit(cudaStream_t stream, const SelectRanges& ranges, const StepStatus* status,
              const DeviceOutcome& outcome) override {
    launch(commit_kernel, ranges.shares.count, kThreads, stream, ranges, status, outcome, work());
  }

  void save(StateWriter& writer) const override {
    const std::vector<RegTopKControl> controls = on_host(controls_.data(), controls_.size());
    for (std::size_t r = 0; r < ranges_.size(); ++r) {
      const std::size_t count = controls[r].last;
      writer.put_list(on_host(last_[r].indices, count));
      writer.put_list(on_host(last_[r].own, count));
      writer.put_list(on_host(last_[r].surplus, count));
      writer.put(controls[r].weight);
    }
  }

  void load(StateReader& reader) override {
    std::vector<RegTopKControl> controls = on_host(controls_.data(), controls_.size());
    std::vector<std::size_t> counts(ranges_.size());
    for (std::size_t r = 0; r < ranges_.size(); ++r) {
      const auto indices = reader.get_list<std::uint32_t>();
      const auto own = reader.get_finite_list<double>();
      const auto surplus = reader.get_finite_list<double>();
      const auto weight = reader.get<double>();
      if (own.size() != indices.size() || surplus.size() != indices.size() || !std::isfinite(weight))
        StateReader::fail("has no valid entries of regtopk's last step");
      if (std::adjacent_find(indices.begin(), indices.end(), std::greater_equal<>()) != indices.end())
        StateReader::fail("names the entries of regtopk's last step out of order");
      if (!indices.empty() && indices.back() >= ranges_[r].n)
        StateReader::fail("names entries of regtopk's last step beyond the vector");
      counts[r] = indices.size();
      reserve(counts);
      copy(last_[r].indices, indices.data(), indices.size(), cudaMemcpyHostToDevice);
      copy(last_[r].own, own.data(), own.size(), cudaMemcpyHostToDevice);
      copy(last_[r].surplus, surplus.data(), surplus.size(), cudaMemcpyHostToDevice);
      Context::current().synchronize();
      controls[r].last = static_cast<std::uint32_t>(indices.size());
      controls[r].weight = weight;
    }
    copy(controls_.data(), controls.data(), controls.size(), cudaMemcpyHostToDevice);
    Context::current().synchronize();
  }

 private:
  RegTopKWork work() const { return {controls_.data(), last_.on_gpu()}; }

  // Room for so many entries of each range at least; the last step's stay. A fall of density leaves it as it
  // is, because more were sent in the last step than will be in the next.
  void reserve(std::vector<std::size_t> capacities) {
    bool enough = true;
    for (std::size_t r = 0; r < capacities.size(); ++r) {
      enough &= capacities[r] <= last_[r].capacity;
      capacities[r] = std::max<std::size_t>(capacities[r], last_[r].capacity);
    }
    if (enough) return;
    LastMemory larger(capacities);
    for (std::size_t r = 0; r < capacities.size(); ++r) {
      const RegTopKLast from = last_[r], to = larger[r];
      copy(to.indices, from.indices, from.capacity, cudaMemcpyDeviceToDevice);
      copy(to.own, from.own, from.capacity, cudaMemcpyDeviceToDevice);
      copy(to.surplus, from.surplus, from.capacity, cudaMemcpyDeviceToDevice);
    }
    last_ = std::move(larger);
  }

  std::vector<DeviceRange> ranges_;
  RegTopKScore rule_;
  LastMemory last_;
  DeviceArray<RegTopKControl> controls_;
};

const bool regtopk_registered = add_device_selector<RegTopKOnGpu>("regtopk");

}  // namespace
}  // namespace topknot::cuda

// CUDA counterparts of compress/select/topk.cpp and threshold.cpp. In steady state topk reads the
// gradient and the residual, writes u, and looks at a list of little more than k entries.
#include <topknot_kernel.h>

#include <optional>
#include <string>

#include "compress/compressor.h"
#include "compress/select/cuda/device_selector.h"
#include "compress/select/cuda/gpu_tiles.h"
#include "compress/select/selector.h"
#include "nn/core/cuda/kernel_tools.h"
#include "nn/core/cuda/trial.h"

namespace topknot::cuda {
namespace {

// A range's state, in GPU memory.
struct TopKState {
  CarriedBound carried;
  std::uint32_t updates_bound = 0;   // 1: the step's k-th key becomes the bound
  ListState list = ListState::good;  // what this step's list was like
};

struct TopKListing {
  TopKState* states;
  const StepParameters* parameters;

  __device__ std::uint32_t k_of(const SelectRange& range) const {
    return static_cast<std::uint32_t>(density_count(range.density(*parameters), range.n));
  }
  __device__ MagnitudeKey bound(const SelectRanges& ranges, std::uint32_t r) const {
    const SelectRange& range = ranges.range[r];
    return states[r].carried.above(k_of(range) == range.n);
  }
  __device__ void listed(const SelectRanges& ranges, std::uint32_t r) const {
    const SelectRange& range = ranges.range[r];
    TopKState& state = states[r];
    const ListStats found = *range.list.stats;
    const std::uint32_t asked = k_of(range), k = asked < range.taken.capacity ? asked : range.taken.capacity;
    state.list = list_state(found.count <= list_limit(k) && found.count <= range.list.limit, found.count, k);
    state.updates_bound = found.finite && k < range.n;
    Choice choice;
    choice.skip = !found.finite;
    choice.whole = state.list != ListState::good;
    choice.k = k;
    ranges.choices[r] = choice;
    range.stats->count = found.finite ? k : 0;
    range.stats->finite = found.finite;
    range.stats->over = 0;
    range.stats->threshold = 0;  // until the k-th magnitude is known
  }
};

// A thread per range.
__global__ void topk_commit_kernel(SelectRanges ranges, TopKState* states, const StepStatus* status) {
  await_previous();
  const std::uint32_t r = range_of_thread();
  if (r >= ranges.count || status->bad || !states[r].updates_bound) return;
  states[r].carried = states[r].carried.after(ranges.choices[r].kth, states[r].list);
}

const TrialSubject kTopKTrials("topk");
constexpr std::size_t kMostEntries = 1 << 17, kMostElements = 1 << 27;  // for one block

// The k largest, from the list of what exceeds the last bound where it holds them. Of a single range a trial chooses,
// for its length and k, who takes them: "many blocks", by take_largest(), or "one block", by finish_topk().
class DeviceTopK final : public DeviceSelector {
 public:
  DeviceTopK(const CompressOptions&, const std::vector<DeviceRange>& ranges)
      : range_(ranges.size() == 1 ? ranges[0].n : 0),
        states_(on_device(std::vector<TopKState>(ranges.size()))) {}

  void set_density(const std::vector<double>& densities) override {
    one_block_.reset();
    const std::size_t k = range_ == 0 ? 0 : capacity(range_, densities[0]);
    trial_ = range_ == 0 || range_ > kMostElements || k > kMostEntries
                 ? ""
                 : kTopKTrials.name + (" of " + std::to_string(range_)) + " entries, k " + std::to_string(k);
  }
  void select(cudaStream_t stream, const SelectRanges& ranges, const Accumulate& accumulate,
              const StepParameters* parameters) override {
    if (!one_block_)
      one_block_ = !trial_.empty() && chooses_one_block(stream, ranges, accumulate.u, parameters);
    put(*one_block_, stream, ranges, accumulate, {states_.data(), parameters});
  }
  bool writes_message() const override { return one_block_.value_or(false); }

  void commit(cudaStream_t stream, const SelectRanges& ranges, const StepStatus* status,
              const DeviceOutcome&) override {
    launch(topk_commit_kernel, thread_per_range(ranges), kThreads, stream, ranges, states_.data(), status);
  }

  DeviceDiagnostics diagnostics(std::size_t range) const override {
    const TopKState state = on_host(states_.data() + range, 1).front();
    DeviceDiagnostics told;
    told.carried = state.carried;
    told.list = state.list;
    return told;
  }

 private:
  static void put(bool one_block, cudaStream_t stream, const SelectRanges& ranges,
                  const Accumulate& accumulate, const TopKListing& listing) {
    if (one_block) {
      accumulate_and_list<Then::finish>(stream, ranges, accumulate, listing);
      return finish_topk(stream, ranges, accumulate.u);
    }
    accumulate_and_list(stream, ranges, accumulate, listing);
    take_largest(stream, ranges, accumulate.u);
  }

  // A trial selects from the gradient and leaves it; by its own bound all runs but the first list well.
  bool chooses_one_block(cudaStream_t stream, SelectRanges ranges, float* u,
                         const StepParameters* parameters) const {
    ranges.joined.status = nullptr;
    Accumulate plain;
    plain.u = u;
    DeviceArray<TopKState> states;
    DeviceArray<StepStatus> good;
    const auto run = [&](bool one_block) {
      if (states.size() == 0) {
        states = on_device(std::vector<TopKState>(1));
        good = on_device(std::vector<StepStatus>(1));
      }
      put(one_block, stream, ranges, plain, {states.data(), parameters});
      launch(topk_commit_kernel, 1u, kThreads, stream, ranges, states.data(), good.data());
      return true;
    };
    const TrialCandidate candidates[] = {{"many blocks", [&] { return run(false); }},
                                         {"one block", [&] { return run(true); }}};
    return Trial::pick(trial_, candidates) == 1;
  }

  std::size_t range_;              // elements of the only range; 0: there are several
  std::string trial_;              // key of the trial; empty: there is no choice
  std::optional<bool> one_block_;  // chosen
  DeviceArray<TopKState> states_;
};

struct ThresholdListing {
  const StepParameters* parameters;
  double threshold, multiple;  // compress.threshold; compress.capacity

  __device__ MagnitudeKey bound(const SelectRanges& ranges, std::uint32_t r) const {
    return ranges.range[r].density(*parameters) >= 1 ? -1 : key_below(threshold);
  }
  __device__ void listed(const SelectRanges& ranges, std::uint32_t r) const {
    const SelectRange& range = ranges.range[r];
    const ListStats found = *range.list.stats;
    const MagnitudeKey above = bound(ranges, r);
    const std::size_t k = density_count(range.density(*parameters), range.n);
    Choice choice;
    std::uint32_t kept = 0, over = 0;
    choose_within(multiple, static_cast<std::uint32_t>(k), found.finite ? found.count : 0, above, choice,
                  kept, over);
    choice.whole = found.count > range.list.limit;
    ranges.choices[r] = choice;
    range.stats->count = kept < range.taken.capacity ? kept : range.taken.capacity;
    range.stats->finite = found.finite;
    range.stats->over = over;
    range.stats->threshold = found.finite && above >= 0 ? static_cast<float>(threshold) : 0.0f;
  }
};

// Selects the entries above compress.threshold, within compress.capacity.
class DeviceThreshold final : public DeviceSelector {
 public:
  DeviceThreshold(const CompressOptions& options, const std::vector<DeviceRange>&)
      : multiple_(options.capacity), threshold_(fixed_threshold(options)) {}

  // How many exceed the threshold is data-dependent; a list longer than list_limit() is taken from u by two more passes.
  std::size_t capacity(std::size_t n, double density) const override {
    return capacity_within(multiple_, target_count(density, n), n);
  }
  void select(cudaStream_t stream, const SelectRanges& ranges, const Accumulate& accumulate,
              const StepParameters* parameters) override {
    accumulate_and_list(stream, ranges, accumulate, ThresholdListing{parameters, threshold_, multiple_});
    take_largest(stream, ranges, accumulate.u);
  }

 private:
  double multiple_, threshold_;  // compress.capacity; compress.threshold
};

const bool topk_registered[] = {add_device_selector<DeviceTopK>("topk"),
                                add_device_selector<DeviceThreshold>("threshold")};

}  // namespace
}  // namespace topknot::cuda

// Selection + memory + code on a GPU, the CUDA counterpart of compress/sparse.h, with the same bits in
// blocks, averages, residuals and states; and the choice of a compressor with kernels.
//
// A block that the CPU throws Error for is a bad step here: the status names its rank. So is a sum that could
// overflow (SparseCompressor::summable), which names none.
#include <algorithm>
#include <utility>

#include "compress/codec/cuda/device_codec.h"
#include "compress/cuda/device_compressor.h"
#include "compress/memory/cuda/device_memory.h"
#include "compress/select/cuda/device_selector.h"
#include "compress/select/cuda/gpu_tiles.h"
#include "compress/sparse.h"
#include "compress/state.h"
#include "nn/base/check.h"
#include "nn/core/cuda/kernel_tools.h"

namespace topknot::cuda {
namespace {

// The list that the ranges' selections make, in GPU memory.
struct JoinedList {
  std::uint32_t* starts = nullptr;  // by range: where its entries begin
  std::uint32_t* count = nullptr;   // of all: 0 if a range is not finite
  std::uint32_t* finite = nullptr;
};

// Finds out where the ranges' entries begin; adds to what the status says of selections. One block of
// threads.
__global__ void __launch_bounds__(kThreads)
    join_kernel(SelectRanges ranges, JoinedList joined, StepStatus* status) {
  __shared__ float lowest[kThreads];
  std::uint32_t count = 0, over = 0;
  float threshold = float_of(0x7F800000);
  int broken = 0;
  for (std::uint32_t first = 0; first < ranges.count; first += kThreads) {
    const std::uint32_t r = first + threadIdx.x;
    SelectStats stats;
    if (r < ranges.count) {
      stats = *ranges.range[r].stats;
      over += stats.over;
      if (stats.finite == 0) broken = 1;
      if (stats.finite != 0 && stats.threshold < threshold) threshold = stats.threshold;
    }
    std::uint32_t total = 0;
    const std::uint32_t start = count + block_exclusive_sum(stats.count, total);
    if (r < ranges.count) joined.starts[r] = start;
    count += total;
  }
  over = block_sum(over);
  lowest[threadIdx.x] = threshold;
  broken = __syncthreads_or(broken);
  if (threadIdx.x != 0) return;
  for (int i = 1; i < kThreads; ++i)
    if (lowest[i] < threshold) threshold = lowest[i];
  *joined.count = broken ? 0 : count;
  *joined.finite = broken ? 0 : 1;
  status->selected += broken ? 0 : count;
  status->over_capacity += over;
  status->threshold = broken || ranges.count == 0 ? 0.0 : static_cast<double>(threshold);
}

// The list: positions in the group and values.
__global__ void __launch_bounds__(kThreads)
    concatenate_kernel(SelectRanges ranges, JoinedList joined, std::uint32_t* indices, float* values) {
  if (*joined.finite == 0) return;
  const RangeBlock block = range_block(ranges.shares);
  const SelectRange& range = ranges.range[block.range];
  const std::uint32_t count = range.stats->count, start = joined.starts[block.range];
  for (std::uint32_t i = block.index * kThreads + threadIdx.x; i < count; i += block.count * kThreads) {
    indices[start + i] = range.taken.indices[i] + static_cast<std::uint32_t>(range.begin);
    values[start + i] = range.taken.values[i];
  }
}

// This rank's values as decoded, as a list (`list`) and where the selected ones are (`by_slot`). `decoded`:
// of all ranks, room for `capacity` each.
__global__ void __launch_bounds__(kThreads)
    take_own_kernel(SelectRanges ranges, JoinedList joined, const StepParameters* step, const float* decoded,
                    std::size_t capacity, float* list, float* by_slot) {
  if (*joined.finite == 0) return;
  const RangeBlock block = range_block(ranges.shares);
  const SelectRange& range = ranges.range[block.range];
  const float* const own = decoded + static_cast<std::size_t>(step->rank) * capacity;
  const std::uint32_t count = range.stats->count, start = joined.starts[block.range];
  for (std::uint32_t i = block.index * kThreads + threadIdx.x; i < count; i += block.count * kThreads) {
    const float value = own[start + i];
    list[start + i] = value;
    by_slot[range.slot + i] = value;
  }
}

// judge(). One block of threads; thread 0 adds in rank order, as the CPU does.
__global__ void __launch_bounds__(kThreads)
    judge_kernel(const DecodedStats* stats, int ranks, const float* weights, const StepParameters* step,
                 float* kept_weights, StepStatus* status) {
  __shared__ double terms[kThreads];  // negative: not finite, or damaged
  double bound = 0;
  int bad_rank = -1;
  for (int first = 0; first < ranks; first += kThreads) {
    const int mine = first + static_cast<int>(threadIdx.x);
    if (mine < ranks) {
      const DecodedStats found = stats[mine];
      const float weight = weights[mine];
      kept_weights[mine] = weight;
      terms[threadIdx.x] = found.finite == 0 || found.damaged != 0
                               ? -1.0
                               : static_cast<double>(weight) * static_cast<double>(float_of(found.largest));
    }
    __syncthreads();
    for (int i = 0; threadIdx.x == 0 && i < kThreads && first + i < ranks; ++i) {
      if (terms[i] < 0 && bad_rank < 0) bad_rank = first + i;
      bound += terms[i];
    }
    __syncthreads();
  }
  if (threadIdx.x != 0) return;
  kept_weights[ranks] = weights[step->rank];
  if (bad_rank >= 0 && (status->bad_rank < 0 || bad_rank < status->bad_rank)) status->bad_rank = bad_rank;
  if (bad_rank >= 0 || !(bound <= static_cast<double>(float_of(0x7F7FFFFF)))) status->bad = 1;
}

constexpr std::uint32_t kTile = 4096;  // floats; 16 KiB
constexpr int kRanks = kThreads / 2;   // whose entries are looked up at a time

// The average of sparse contributions, bit for bit average_sparse() of compress/sparse.h: overwrites
// `average`, n floats, if the status is good; else leaves it. `lists`: of `ranks` ranks, room for `capacity`
// entries each. A block of threads makes one tile of the average in shared memory: filled with zeros, the
// ranks' entries added one rank after the other, multiplied and written. A rank has a position once at most,
// so no two threads meet.
__global__ void __launch_bounds__(kThreads)
    average_kernel(const StepStatus* status, DecodedEntries lists, std::size_t capacity, int ranks,
                   const float* weights, float factor, float* average, std::size_t n) {
  __shared__ float tile[kTile];
  __shared__ std::uint32_t bounds[kThreads];  // of each rank's entries in the tile: begin, end
  if (status->bad != 0) return;
  const std::size_t first = std::size_t{blockIdx.x} * kTile;
  for (std::uint32_t i = threadIdx.x; i < kTile; i += kThreads) tile[i] = 0;
  for (int from = 0; from < ranks; from += kRanks) {
    const int mine = from + static_cast<int>(threadIdx.x / 2);
    if (mine < ranks)
      bounds[threadIdx.x] = lower_bound(lists.indices + mine * capacity, lists.stats[mine].count,
                                        first + (threadIdx.x & 1) * kTile);
    __syncthreads();
    for (int rank = from; rank < ranks && rank < from + kRanks; ++rank) {
      const std::uint32_t begin = bounds[2 * (rank - from)], end = bounds[2 * (rank - from) + 1];
      if (begin == end) continue;
      const float weight = weights[rank];
      for (std::uint32_t i = begin + threadIdx.x; i < end; i += kThreads)
        tile[lists.indices[rank * capacity + i] - first] += weight * lists.values[rank * capacity + i];
      __syncthreads();
    }
    __syncthreads();
  }
  for (std::uint32_t i = threadIdx.x; i < kTile && first + i < n; i += kThreads)
    average[first + i] = ranks > 1 ? tile[i] * factor : tile[i];
}

template <class T>
void at_least(DeviceArray<T>& array, std::size_t size) {
  if (array.size() < size) array = DeviceArray<T>(size);
}

std::vector<DeviceRange> ranges_of(const GroupSpec& group) {
  TOPKNOT_CHECK(group.densities.empty() || group.densities.size() == group.segments.size(),
                "one density per segment");
  std::vector<DeviceRange> ranges;
  for (const auto& [begin, end] : group.segments)
    ranges.push_back({begin, end - begin, group.offset + begin,
                      group.densities.empty() ? 0 : group.densities[ranges.size()]});
  return ranges;
}

class DeviceSparseCompressor final : public Compressor {
 public:
  // `selector`: of the group's segments. The density is 1 until reserve().
  DeviceSparseCompressor(std::unique_ptr<DeviceSelector> selector, std::unique_ptr<DeviceMemory> memory,
                         std::unique_ptr<DeviceCodec> code, bool lr_inside, const GroupSpec& group);

  std::size_t reserve(double density) override;
  Message encode(Slice slice, const StepContext& context) override;
  std::optional<Message> decode(const Round& round) override;
  std::span<float> commit(std::span<const std::uint32_t>) override;
  Applied applied() const override;
  void save(StateWriter& writer) const override;
  void load(StateReader& reader) override;

 private:
  std::vector<double> densities() const;  // by segment
  DeviceSent list() const;                // what this rank selected

  GroupSpec group_;
  std::unique_ptr<DeviceSelector> selector_;
  std::unique_ptr<DeviceMemory> memory_;
  std::unique_ptr<DeviceCodec> code_;
  bool lr_inside_ = false;

  double density_ = 1;
  std::vector<DeviceRange> ranges_;
  SelectMemory selected_;
  DeviceArray<std::byte> block_;       // this rank's
  DeviceArray<std::uint32_t> starts_;  // then count and finite
  JoinedList joined_;
  DeviceArray<std::uint32_t> indices_;  // the list, of several ranges
  DeviceArray<float> values_;
  DeviceArray<float> sent_by_slot_, sent_;       // as decoded, if the code is not exact
  DeviceArray<std::uint32_t> received_indices_;  // of all ranks
  DeviceArray<float> received_values_;
  DeviceArray<DecodedStats> received_;
  DeviceArray<float> weights_;  // by rank, then this rank's

  // Of the step under way; its parameters are null outside.
  Slice slice_;
  StepContext step_;
};

DeviceSparseCompressor::DeviceSparseCompressor(std::unique_ptr<DeviceSelector> selector,
                                               std::unique_ptr<DeviceMemory> memory,
                                               std::unique_ptr<DeviceCodec> code, bool lr_inside,
                                               const GroupSpec& group)
    : group_(group),
      selector_(std::move(selector)),
      memory_(std::move(memory)),
      code_(std::move(code)),
      lr_inside_(lr_inside),
      ranges_(ranges_of(group)) {
  const std::size_t ranks = static_cast<std::size_t>(group_.ranks);
  received_ = DeviceArray<DecodedStats>(ranks);
  weights_ = DeviceArray<float>(ranks + 1);
  starts_ = DeviceArray<std::uint32_t>(ranges_.size() + 2);
  joined_ = {starts_.data(), starts_.data() + ranges_.size(), starts_.data() + ranges_.size() + 1};
}

std::vector<double> DeviceSparseCompressor::densities() const {
  std::vector<double> all;
  for (const DeviceRange& range : ranges_) all.push_back(std::max(density_, range.least_density));
  return all;
}

std::size_t DeviceSparseCompressor::reserve(double density) {
  density_ = density;
  selector_->set_density(densities());
  selected_ = {};
  selected_ = SelectMemory(ranges_, densities(), *selector_);
  const std::size_t capacity = selected_.capacity();
  code_->set_capacity(capacity);
  if (ranges_.size() > 1) {
    at_least(indices_, capacity);
    at_least(values_, capacity);
  }
  if (!code_->exact()) {
    at_least(sent_by_slot_, capacity);
    at_least(sent_, capacity);
  }
  at_least(received_indices_, capacity * static_cast<std::size_t>(group_.ranks));
  at_least(received_values_, capacity * static_cast<std::size_t>(group_.ranks));
  block_ = {};  // the old memory first, so that the new may take its place
  block_ = DeviceArray<std::byte>(code_->block_bytes());
  return block_.size();
}

// The only range's selection is the list.
DeviceSent DeviceSparseCompressor::list() const {
  const bool one = ranges_.size() <= 1;
  return {one ? selected_.taken_indices() : indices_.data(), one ? selected_.taken_values() : values_.data(),
          joined_.count, selected_.capacity()};
}

Message DeviceSparseCompressor::encode(Slice slice, const StepContext& context) {
  TOPKNOT_CHECK(slice.gradient.size() == group_.numel, "a slice of another length than the group's");
  if (block_.size() == 0) reserve(density_);
  slice_ = slice;
  step_ = context;
  const cudaStream_t stream = Context::current().stream();
  const Accumulate accumulate = memory_->accumulate(slice, step_.parameters);
  const SelectRanges& ranges = selected_.ranges();
  if (ranges.count > 0) selector_->select(stream, ranges, accumulate, step_.parameters);
  launch(join_kernel, dim3(1), kThreads, stream, ranges, joined_, step_.status);
  if (ranges.count > 1)
    launch(concatenate_kernel, ranges.shares.count, kThreads, stream, ranges, joined_, indices_.data(),
           values_.data());
  code_->write(stream, {list().positions, list().values, joined_.count, joined_.finite}, block_.data());
  return gpu_block_message({block_.data(), block_.size()});
}

std::optional<Message> DeviceSparseCompressor::decode(const Round& round) {
  TOPKNOT_CHECK(step_.parameters != nullptr, "decode without encode");
  const cudaStream_t stream = Context::current().stream();
  code_->read(stream, round.gpu_blocks.data(),
              {received_indices_.data(), received_values_.data(), received_.data()});
  judge(stream, received_.data(), group_.ranks, step_.weights.data(), step_.parameters, weights_.data(),
        step_.status);
  return std::nullopt;
}

std::span<float> DeviceSparseCompressor::commit(std::span<const std::uint32_t>) {
  TOPKNOT_CHECK(step_.parameters != nullptr, "commit without encode");
  const cudaStream_t stream = Context::current().stream();
  const StepStatus* const status = step_.status;
  const SelectRanges& ranges = selected_.ranges();
  const std::size_t capacity = selected_.capacity();
  DeviceSent sent = list();
  DeviceOutcome outcome;
  outcome.sent = selected_.taken_values();
  if (!code_->exact()) {
    if (ranges.count > 0)
      launch(take_own_kernel, ranges.shares.count, kThreads, stream, ranges, joined_, step_.parameters,
             received_values_.data(), capacity, sent_.data(), sent_by_slot_.data());
    sent.values = sent_.data();
    outcome.sent = sent_by_slot_.data();
  }
  const std::span<float> average = memory_->commit(stream, status, slice_, sent);
  if (!average.empty())
    launch(average_kernel, grid_for(average.size(), kTile), kThreads, stream, status,
           DecodedEntries{received_indices_.data(), received_values_.data(), received_.data()}, capacity,
           group_.ranks, weights_.data(), 1.0f / static_cast<float>(group_.ranks), average.data(),
           average.size());
  outcome.average = average.data();
  outcome.weight = weights_.data() + group_.ranks;
  outcome.ranks = group_.ranks;
  if (ranges.count > 0) selector_->commit(stream, ranges, status, outcome);
  step_.parameters = nullptr;
  return average;
}

Applied DeviceSparseCompressor::applied() const {
  if (lr_inside_) return Applied::learning_rate;
  return memory_->owns_momentum() ? Applied::momentum : Applied::nothing;
}

void DeviceSparseCompressor::save(StateWriter& writer) const {
  writer.put<std::uint64_t>(group_.numel);
  writer.put<std::uint64_t>(ranges_.size());
  selector_->save(writer);
  memory_->save(writer);
}

void DeviceSparseCompressor::load(StateReader& reader) {
  reader.expect_group(group_.numel, ranges_.size());
  selector_->load(reader);
  memory_->load(reader);
}

}  // namespace

void judge(cudaStream_t stream, const DecodedStats* stats, int ranks, const float* weights,
           const StepParameters* step, float* kept_weights, StepStatus* status) {
  launch(judge_kernel, dim3(1), kThreads, stream, stats, ranks, weights, step, kept_weights, status);
}

Registry<DeviceMethod>& device_methods() {
  static Registry<DeviceMethod> registry("method on a GPU (compress.name)");
  return registry;
}

Registry<DeviceSelectorFactory>& device_selectors() {
  static Registry<DeviceSelectorFactory> registry("selection on a GPU (compress.select)");
  return registry;
}

std::unique_ptr<DeviceSelector> make_device_selector(const std::string& select,
                                                     const CompressOptions& options,
                                                     const std::vector<DeviceRange>& ranges) {
  if (!device_selectors().contains(select)) return nullptr;
  return device_selectors().find(select)(options, ranges);
}

std::unique_ptr<Compressor> make_device_compressor(const CompressOptions& options, const GroupSpec& group) {
  planned_message_bytes(options, group, 1.0);  // refuses what the CPU refuses, in the same words
  if (device_methods().contains(options.name))
    return device_methods().find(options.name).make(options, group);
  const std::optional<SparsePreset> parts = pieces_of(options);
  if (!parts || parts->aggregate != "ranks" || parts->feedback_decay != 1 || parts->transform != "none")
    return nullptr;
  std::unique_ptr<DeviceCodec> code =
      make_device_codec(parts->codec, parts->values, group.numel, group.ranks);
  if (!code) return nullptr;
  const std::vector<DeviceRange> ranges = ranges_of(group);
  std::unique_ptr<DeviceSelector> selector = make_device_selector(parts->select, options, ranges);
  if (!selector) return nullptr;
  std::unique_ptr<DeviceMemory> memory = make_device_memory(parts->memory, options, group.numel);
  if (!memory) return nullptr;
  return std::make_unique<DeviceSparseCompressor>(std::move(selector), std::move(memory), std::move(code),
                                                  options.lr_inside, group);
}

}  // namespace topknot::cuda

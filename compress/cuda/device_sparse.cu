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

// This rank's decoded values as a list (`list`) and by slot. `decoded`: of all ranks, `capacity` each.
__global__ void __launch_bounds__(kThreads)
    take_own_kernel(SelectRanges ranges, JoinedList joined, const StepParameters* step, const float* decoded,
                    std::size_t capacity, float* list, float* by_slot) {
  await_previous();
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
                         std::unique_ptr<DeviceCodec> code, bool lr_inside, const GroupSpec& group)
      : group_(group),
        selector_(std::move(selector)),
        memory_(std::move(memory)),
        code_(std::move(code)),
        lr_inside_(lr_inside),
        ranges_(ranges_of(group)) {
    if (memory_->owns_momentum()) applied_ = Applied::momentum;
    if (lr_inside_) applied_ = Applied::learning_rate;
    const std::size_t ranks = static_cast<std::size_t>(group_.ranks);
    received_ = DeviceArray<DecodedStats>(ranks);
    weights_ = DeviceArray<float>(ranks + 1);
    std::vector<std::uint32_t> nothing(ranges_.size() + 2);
    nothing.back() = ranges_.empty();  // finite, unless a selection that there is does not say so
    starts_ = on_device(nothing);
    joined_.starts = starts_.data();
    joined_.count = joined_.starts + ranges_.size();
    joined_.finite = joined_.count + 1;
  }

  std::size_t reserve(double density) override {
    density_ = density;
    selector_->set_density(densities());
    selected_ = {};
    selected_ = SelectMemory(ranges_, densities(), *selector_);
    const std::size_t capacity = selected_.capacity();
    code_->set_capacity(capacity);
    if (ranges_.size() > 1) {
      at_least(indices_, capacity);
      at_least(values_, capacity);
      joined_.indices = indices_.data(), joined_.values = values_.data();
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
  Message encode(Slice slice, const StepContext& context) override {
    TOPKNOT_CHECK(slice.gradient.size() == group_.numel, "a slice of another length than the group's");
    if (block_.size() == 0) reserve(density_);
    slice_ = slice;
    step_ = context;
    const cudaStream_t stream = Context::current().stream();
    const Accumulate accumulate = memory_->accumulate(slice, step_.parameters);
    SelectRanges ranges = selected_.ranges();
    ranges.joined = joined_;
    ranges.joined.status = step_.status;
    ranges.joined.message = code_->plain() ? block_.data() : nullptr;
    ranges.joined.message_bytes = block_.size();
    ranges.joined.numel = static_cast<std::uint32_t>(group_.numel);
    if (ranges.count > 0)
      selector_->select(stream, ranges, accumulate, step_.parameters);
    else
      TOPKNOT_CUDA(cudaMemsetAsync(&step_.status->threshold, 0, sizeof step_.status->threshold, stream));
    if (!code_->plain() || !selector_->writes_message())
      code_->write(stream, {list().positions, list().values, joined_.count, joined_.finite}, block_.data());
    return gpu_block_message({block_.data(), block_.size()});
  }
  std::optional<Message> decode(const Round& round) override {
    TOPKNOT_CHECK(step_.parameters != nullptr, "decode without encode");
    const cudaStream_t stream = Context::current().stream();
    code_->read(stream, round.gpu_blocks.data(),
                {received_indices_.data(), received_values_.data(), received_.data()},
                {step_.weights.data(), step_.parameters, weights_.data(), step_.status});
    return std::nullopt;
  }
  std::span<float> commit(std::span<const std::uint32_t>) override {
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
    const DecodedEntries received{received_indices_.data(), received_values_.data(), received_.data()};
    const std::span<float> average =
        memory_->commit(stream, status, slice_, sent, {received, capacity, group_.ranks, weights_.data()});
    outcome.average = average.data();
    outcome.weight = weights_.data() + group_.ranks;
    outcome.ranks = group_.ranks;
    if (ranges.count > 0) selector_->commit(stream, ranges, status, outcome);
    step_.parameters = nullptr;
    return average;
  }
  void save(StateWriter& writer) const override {
    writer.put<std::uint64_t>(group_.numel);
    writer.put<std::uint64_t>(ranges_.size());
    selector_->save(writer);
    memory_->save(writer);
  }
  void load(StateReader& reader) override {
    reader.expect_group(group_.numel, ranges_.size());
    selector_->load(reader);
    memory_->load(reader);
  }

 private:
  // The density of each segment.
  std::vector<double> densities() const {
    std::vector<double> all;
    for (const DeviceRange& range : ranges_) all.push_back(std::max(density_, range.least_density));
    return all;
  }
  // Returns what this rank selected. The only range's selection is the list.
  DeviceSent list() const {
    const bool one = ranges_.size() <= 1;
    return {one ? selected_.taken_indices() : indices_.data(),
            one ? selected_.taken_values() : values_.data(), joined_.count};
  }

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

  // State of the current step; its parameters are null between steps.
  Slice slice_;
  StepContext step_;
};

}  // namespace

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

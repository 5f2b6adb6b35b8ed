#include "compress/cuda/device_sparse.h"

#include <algorithm>

#include "compress/sparse.h"
#include "compress/state.h"
#include "nn/base/check.h"

namespace topknot::cuda {
namespace {

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

}  // namespace

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

std::size_t DeviceSparseCompressor::block_bytes() const {
  std::size_t capacity = 0;
  for (const DeviceRange& range : ranges_)
    capacity += selector_->capacity(range.n, std::max(density_, range.least_density));
  return code_->block_bytes(capacity);
}

void DeviceSparseCompressor::set_density(double density) {
  density_ = density;
  prepared_ = false;
  prepare();
}

void DeviceSparseCompressor::prepare() {
  if (prepared_) return;
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
  prepared_ = true;
}

// The only range's selection is the list.
DeviceSent DeviceSparseCompressor::list() const {
  const bool one = ranges_.size() <= 1;
  return {one ? selected_.taken_indices() : indices_.data(), one ? selected_.taken_values() : values_.data(),
          joined_.count, selected_.capacity()};
}

void DeviceSparseCompressor::encode(cudaStream_t stream, DeviceSlice slice, const StepParameters* step,
                                    StepStatus* status, std::byte* block) {
  TOPKNOT_CHECK(slice.gradient.size() == group_.numel, "a slice of another length than the group's");
  prepare();
  slice_ = slice;
  step_ = step;
  const Accumulate accumulate = memory_->accumulate(slice, step);
  const SelectRanges& ranges = selected_.ranges();
  if (ranges.count > 0) selector_->select(stream, ranges, accumulate, step);
  join_ranges(stream, ranges, joined_, status);
  if (ranges.count > 1) concatenate(stream, ranges, joined_, indices_.data(), values_.data());
  code_->write(stream, {list().positions, list().values, joined_.count, joined_.finite}, block);
}

void DeviceSparseCompressor::decode(cudaStream_t stream, const std::byte* blocks, const float* weights,
                                    StepStatus* status) {
  TOPKNOT_CHECK(step_ != nullptr, "decode without encode");
  code_->read(stream, blocks, {received_indices_.data(), received_values_.data(), received_.data()});
  judge(stream, received_.data(), group_.ranks, weights, step_, weights_.data(), status);
}

std::span<float> DeviceSparseCompressor::commit(cudaStream_t stream, const StepStatus* status) {
  TOPKNOT_CHECK(step_ != nullptr, "commit without encode");
  const SelectRanges& ranges = selected_.ranges();
  const std::size_t capacity = selected_.capacity();
  DeviceSent sent = list();
  DeviceOutcome outcome;
  outcome.sent = selected_.taken_values();
  if (!code_->exact()) {
    take_own(stream, ranges, joined_, step_, received_values_.data(), capacity, sent_.data(),
             sent_by_slot_.data());
    sent.values = sent_.data();
    outcome.sent = sent_by_slot_.data();
  }
  const std::span<float> average = memory_->commit(stream, status, slice_, sent);
  average_entries(stream, status, {received_indices_.data(), received_values_.data(), received_.data()},
                  capacity, group_.ranks, weights_.data(), average.data(), average.size());
  outcome.average = average.data();
  outcome.weight = weights_.data() + group_.ranks;
  outcome.ranks = group_.ranks;
  if (ranges.count > 0) selector_->commit(stream, ranges, status, outcome);
  step_ = nullptr;
  return average;
}

GradientForm DeviceSparseCompressor::form() const {
  if (lr_inside_) return GradientForm::has_lr;
  return memory_->owns_momentum() ? GradientForm::has_momentum : GradientForm::plain;
}

void DeviceSparseCompressor::save(StateWriter& writer) const {
  writer.put<std::uint64_t>(group_.numel);
  writer.put<std::uint64_t>(ranges_.size());
  selector_->save(writer);
  memory_->save(writer);
}

std::vector<std::byte> DeviceCompressor::state() const {
  StateWriter writer;
  save(writer);
  return writer.take();
}

void DeviceSparseCompressor::load_state(std::span<const std::byte> bytes) {
  StateReader reader(bytes);
  reader.expect_group(group_.numel, ranges_.size());
  selector_->load(reader);
  memory_->load(reader);
  reader.finish();
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

std::unique_ptr<DeviceCompressor> make_device_compressor(const CompressOptions& options,
                                                         const GroupSpec& group) {
  planned_bytes(options, group, 1.0);  // refuses what the CPU refuses, in the same words
  if (device_methods().contains(options.name))
    return device_methods().find(options.name).make(options, group);
  const std::optional<SparsePreset> parts = pieces_of(options);
  if (!parts) return nullptr;
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

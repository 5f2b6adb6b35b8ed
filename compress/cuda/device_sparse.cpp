#include "compress/cuda/device_sparse.h"

#include <algorithm>
#include <numeric>

#include "compress/sparse_step.h"
#include "compress/state.h"
#include "nn/core/base/check.h"

namespace topknot::cuda {
namespace {

using Stats = DeviceSelected::Stats;
static_assert(sizeof(Stats) == sizeof(SegmentStats) &&
              offsetof(Stats, count) == offsetof(SegmentStats, count) &&
              offsetof(Stats, finite) == offsetof(SegmentStats, finite) &&
              offsetof(Stats, over) == offsetof(SegmentStats, over) &&
              offsetof(Stats, threshold) == offsetof(SegmentStats, threshold));

template <class T>
void at_least(DeviceArray<T>& array, std::size_t size) {
  if (array.size() < size) array = DeviceArray<T>(size);
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
      lr_inside_(lr_inside) {
  const std::size_t ranks = static_cast<std::size_t>(group_.ranks);
  stats_ = DeviceArray<Stats>(group_.segments.size());
  received_ = DeviceArray<DecodedStats>(ranks);
  weights_ = DeviceArray<float>(ranks + 1);
}

std::vector<double> DeviceSparseCompressor::densities() const {
  std::vector<double> all(group_.segments.size(), density_);
  for (std::size_t s = 0; s < group_.densities.size(); ++s) all[s] = std::max(density_, group_.densities[s]);
  return all;
}

std::vector<std::size_t> DeviceSparseCompressor::capacities() const {
  std::vector<std::size_t> all;
  for (const double density : densities()) {
    const auto [begin, end] = group_.segments[all.size()];
    all.push_back(selector_->capacity(end - begin, density));
  }
  return all;
}

std::size_t DeviceSparseCompressor::block_bytes() const {
  const std::vector<std::size_t> all = capacities();
  return code_->block_bytes(std::accumulate(all.begin(), all.end(), std::size_t{0}));
}

void DeviceSparseCompressor::set_density(double density) {
  density_ = density;
  prepared_ = false;
  prepare();
}

void DeviceSparseCompressor::prepare() {
  if (prepared_) return;
  const std::vector<std::size_t> rooms = capacities();
  const std::size_t segments = rooms.size(), ranks = static_cast<std::size_t>(group_.ranks);
  capacity_ = std::accumulate(rooms.begin(), rooms.end(), std::size_t{0});
  code_->set_capacity(capacity_);
  at_least(slot_indices_, capacity_);
  at_least(slot_values_, capacity_);
  if (segments > 1) {
    at_least(indices_, capacity_);
    at_least(values_, capacity_);
  }
  if (!code_->exact()) {
    at_least(sent_by_slot_, capacity_);
    at_least(sent_, capacity_);
  }
  at_least(received_indices_, capacity_ * ranks);
  at_least(received_values_, capacity_ * ranks);
  std::vector<std::uint32_t> table;  // begins, slots; then room for starts, count and finite
  std::vector<DeviceSelected> selected;
  for (const auto& [begin, end] : group_.segments) table.push_back(static_cast<std::uint32_t>(begin));
  longest_ = 0;
  std::size_t slot = 0;
  for (const std::size_t room : rooms) {
    const auto capacity = static_cast<std::uint32_t>(room);
    selected.push_back(
        {slot_indices_.data() + slot, slot_values_.data() + slot, capacity, stats_.data() + selected.size()});
    table.push_back(static_cast<std::uint32_t>(slot));
    longest_ = std::max(longest_, capacity);
    slot += room;
  }
  table.resize(3 * segments + 2);
  table_ = on_device(table);
  selector_->set_density(densities(), selected);
  prepared_ = true;
}

Segments DeviceSparseCompressor::segments() const {
  Segments made;
  const std::size_t number = group_.segments.size();
  made.number = static_cast<std::uint32_t>(number);
  made.longest = longest_;
  made.begins = table_.data();
  made.slots = made.begins + number;
  made.starts = table_.data() + 2 * number;
  made.count = made.starts + number;
  made.finite = made.count + 1;
  made.stats = reinterpret_cast<const SegmentStats*>(stats_.data());
  made.indices = slot_indices_.data();
  made.values = slot_values_.data();
  return made;
}

void DeviceSparseCompressor::encode(cudaStream_t stream, DeviceSlice slice, const StepParameters* step,
                                    StepStatus* status, std::byte* block) {
  TOPKNOT_CHECK(slice.gradient.size() == group_.numel, "a slice of another length than the group's");
  prepare();
  slice_ = slice;
  step_ = step;
  const Accumulate accumulate = memory_->accumulate(slice, step);
  if (group_.numel > 0) selector_->select(stream, accumulate, step);
  const Segments all = segments();
  join_segments(stream, all, status);
  // The only segment's selection is the list.
  if (all.number > 1) concatenate(stream, all, indices_.data(), values_.data());
  const bool one = all.number <= 1;
  code_->write(stream,
               {one ? slot_indices_.data() : indices_.data(), one ? slot_values_.data() : values_.data(),
                all.count, all.finite},
               block);
}

void DeviceSparseCompressor::decode(cudaStream_t stream, const std::byte* blocks, const float* weights,
                                    StepStatus* status) {
  TOPKNOT_CHECK(step_ != nullptr, "decode without encode");
  code_->read(stream, blocks, {received_indices_.data(), received_values_.data(), received_.data()});
  judge(stream, received_.data(), group_.ranks, weights, step_, weights_.data(), status);
}

std::span<float> DeviceSparseCompressor::commit(cudaStream_t stream, const StepStatus* status) {
  TOPKNOT_CHECK(step_ != nullptr, "commit without encode");
  const Segments all = segments();
  const bool one = all.number <= 1;
  DeviceSent sent{one ? slot_indices_.data() : indices_.data(), one ? slot_values_.data() : values_.data(),
                  all.count, capacity_};
  const float* by_slot = slot_values_.data();
  if (!code_->exact()) {
    take_own(stream, all, step_, received_values_.data(), capacity_, sent_.data(), sent_by_slot_.data());
    sent.values = sent_.data();
    by_slot = sent_by_slot_.data();
  }
  const std::span<float> average = memory_->commit(stream, status, slice_, sent);
  average_entries(stream, status, {received_indices_.data(), received_values_.data(), received_.data()},
                  capacity_, group_.ranks, weights_.data(), average.data(), average.size());
  if (group_.numel > 0)
    selector_->commit(stream, status, by_slot, average.data(), weights_.data() + group_.ranks, group_.ranks);
  step_ = nullptr;
  return average;
}

GradientForm DeviceSparseCompressor::form() const {
  if (lr_inside_) return GradientForm::has_lr;
  return memory_->owns_momentum() ? GradientForm::has_momentum : GradientForm::plain;
}

void DeviceSparseCompressor::save(StateWriter& writer) const {
  writer.put<std::uint64_t>(group_.numel);
  writer.put<std::uint64_t>(group_.segments.size());
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
  reader.expect_group(group_.numel, group_.segments.size());
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
  TOPKNOT_CHECK(group.densities.empty() || group.densities.size() == group.segments.size(),
                "one density per segment");
  std::vector<DeviceRange> ranges;
  for (const auto& [begin, end] : group.segments)
    ranges.push_back({begin, end - begin, group.offset + begin,
                      group.densities.empty() ? 0 : group.densities[ranges.size()]});
  std::unique_ptr<DeviceSelector> selector = make_device_selector(parts->select, options, ranges);
  if (!selector) return nullptr;
  std::unique_ptr<DeviceMemory> memory = make_device_memory(parts->memory, options, group.numel);
  if (!memory) return nullptr;
  return std::make_unique<DeviceSparseCompressor>(std::move(selector), std::move(memory), std::move(code),
                                                  options.lr_inside, group);
}

}  // namespace topknot::cuda

#include "compress/cuda/device_sparse.h"

#include <algorithm>

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

template <class T>
void upload(const DeviceArray<T>& to, const std::vector<T>& from) {
  if (from.empty()) return;
  const cudaStream_t stream = Context::current().stream();
  TOPKNOT_CUDA(
      cudaMemcpyAsync(to.data(), from.data(), from.size() * sizeof(T), cudaMemcpyHostToDevice, stream));
  TOPKNOT_CUDA(cudaStreamSynchronize(stream));
}

}  // namespace

DeviceSparseCompressor::DeviceSparseCompressor(std::vector<std::unique_ptr<DeviceSelector>> selectors,
                                               std::unique_ptr<DeviceMemory> memory,
                                               std::unique_ptr<DeviceCodec> code, bool lr_inside,
                                               const GroupSpec& group)
    : group_(group),
      selectors_(std::move(selectors)),
      memory_(std::move(memory)),
      code_(std::move(code)),
      lr_inside_(lr_inside) {
  TOPKNOT_CHECK(selectors_.size() == group_.segments.size(), "one selector a segment");
  TOPKNOT_CHECK(group_.densities.empty() || group_.densities.size() == group_.segments.size(),
                "one density per segment");
  const std::size_t segments = group_.segments.size(), ranks = static_cast<std::size_t>(group_.ranks);
  stats_ = DeviceArray<Stats>(segments);
  table_ = DeviceArray<std::uint32_t>(3 * segments + 2);
  received_ = DeviceArray<DecodedStats>(ranks);
  weights_ = DeviceArray<float>(ranks + 1);
  if (group_.densities.empty()) return;
  densities_ = DeviceArray<double>(segments);
  parameters_ = DeviceArray<StepParameters>(segments);
  upload(densities_, group_.densities);
}

double DeviceSparseCompressor::density_of(std::size_t segment) const {
  return group_.densities.empty() ? density_ : std::max(density_, group_.densities[segment]);
}

std::size_t DeviceSparseCompressor::capacity_of(std::size_t segment) const {
  return selectors_[segment]->capacity(density_of(segment));
}

std::size_t DeviceSparseCompressor::capacity() const {
  std::size_t total = 0;
  for (std::size_t s = 0; s < selectors_.size(); ++s) total += capacity_of(s);
  return total;
}

std::size_t DeviceSparseCompressor::block_bytes() const {
  return code_->block_bytes(capacity());
}

void DeviceSparseCompressor::set_density(double density) {
  density_ = density;
  prepared_ = false;
  prepare();
}

void DeviceSparseCompressor::prepare() {
  if (prepared_) return;
  const std::size_t segments = selectors_.size(), ranks = static_cast<std::size_t>(group_.ranks);
  capacity_ = capacity();
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
  std::vector<std::uint32_t> begins, table;
  selected_.clear();
  longest_ = 0;
  std::size_t slot = 0;
  for (std::size_t s = 0; s < segments; ++s) {
    selectors_[s]->set_density(density_of(s));
    const auto room = static_cast<std::uint32_t>(capacity_of(s));
    selected_.push_back({slot_indices_.data() + slot, slot_values_.data() + slot, room, stats_.data() + s});
    begins.push_back(static_cast<std::uint32_t>(group_.segments[s].first));
    table.push_back(static_cast<std::uint32_t>(slot));
    longest_ = std::max(longest_, room);
    slot += room;
  }
  table.insert(table.begin(), begins.begin(), begins.end());
  upload(table_, table);
  prepared_ = true;
}

Segments DeviceSparseCompressor::segments() const {
  Segments made;
  const std::size_t number = selectors_.size();
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
  if (densities_.size() > 0)
    step_parameters_of_segments(stream, step, densities_.data(),
                                static_cast<std::uint32_t>(selectors_.size()), parameters_.data());
  const Accumulate accumulate = memory_->accumulate(slice, step);
  for (std::size_t s = 0; s < selectors_.size(); ++s)
    selectors_[s]->select(stream, accumulate.from(group_.segments[s].first),
                          densities_.size() > 0 ? parameters_.data() + s : step, selected_[s]);
  const Segments all = segments();
  join_segments(stream, all, status);
  // The only segment's selection is the list.
  if (selectors_.size() > 1) concatenate(stream, all, indices_.data(), values_.data());
  const bool one = selectors_.size() <= 1;
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
  const bool one = selectors_.size() <= 1;
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
  for (std::size_t s = 0; s < selectors_.size(); ++s)
    selectors_[s]->commit(stream, status, selected_[s], by_slot + (selected_[s].values - slot_values_.data()),
                          average.data() + group_.segments[s].first, weights_.data() + group_.ranks,
                          group_.ranks);
  step_ = nullptr;
  return average;
}

GradientForm DeviceSparseCompressor::form() const {
  if (lr_inside_) return GradientForm::has_lr;
  return memory_->owns_momentum() ? GradientForm::has_momentum : GradientForm::plain;
}

void DeviceSparseCompressor::save(StateWriter& writer) const {
  writer.put<std::uint64_t>(group_.numel);
  writer.put<std::uint64_t>(selectors_.size());
  for (const auto& selector : selectors_) selector->save(writer);
  memory_->save(writer);
}

std::vector<std::byte> DeviceCompressor::state() const {
  StateWriter writer;
  save(writer);
  return writer.take();
}

void DeviceSparseCompressor::load_state(std::span<const std::byte> bytes) {
  StateReader reader(bytes);
  reader.expect_group(group_.numel, selectors_.size());
  for (auto& selector : selectors_) selector->load(reader);
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
                                                     const CompressOptions& options, std::size_t n,
                                                     std::size_t position) {
  if (!device_selectors().contains(select)) return nullptr;
  return device_selectors().find(select)(options, n, position);
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
  std::vector<std::unique_ptr<DeviceSelector>> selectors;
  for (const auto& [begin, end] : group.segments) {
    selectors.push_back(make_device_selector(parts->select, options, end - begin, group.offset + begin));
    if (!selectors.back()) return nullptr;
  }
  std::unique_ptr<DeviceMemory> memory = make_device_memory(parts->memory, options, group.numel);
  if (!memory) return nullptr;
  return std::make_unique<DeviceSparseCompressor>(std::move(selectors), std::move(memory), std::move(code),
                                                  options.lr_inside, group);
}

}  // namespace topknot::cuda

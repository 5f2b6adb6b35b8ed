#include "dist/exchange/cuda/device_pipeline.h"
#include "compress/state.h"
#include "dist/exchange/cuda/device_exchange_kernels.h"
#include "nn/core/base/check.h"

namespace topknot::cuda {

DevicePipeline::DevicePipeline(const Group& group, std::unique_ptr<DeviceCompressor> compressor, bool narrow,
                               int rank, int ranks)
    : group_(&group),
      compressor_(std::move(compressor)),
      narrow_(narrow && !compressor_),
      rank_(rank),
      ranks_(ranks) {
  if (narrow_) narrowed_ = DeviceArray<std::uint16_t>(group.numel());
}

void DevicePipeline::set_density(double density) {
  if (!compressor_) return;
  compressor_->set_density(density);
  const std::size_t bytes = compressor_->block_bytes(), ranks = static_cast<std::size_t>(ranks_);
  TOPKNOT_CHECK(bytes > 0 && bytes % 16 == 0, "a block's length is a multiple of 16");
  mine_ = {}, all_ = {};  // the old memory first, so that the new may take its place
  mine_ = DeviceArray<std::byte>(bytes);
  if (ranks > 1) all_ = DeviceArray<std::byte>(ranks * bytes);
}

void DevicePipeline::encode(cudaStream_t stream, DeviceSlice slice, const DeviceStep& step) {
  if (compressor_) {
    compressor_->encode(stream, slice, step.parameters(), step.status(), mine_.data());
    return;
  }
  gradient_ = slice.gradient.data();
  const float* weight = step.weights() + rank_;
  if (narrow_)
    narrow_by_weight(stream, gradient_, group_->numel(), weight, narrowed_.data());
  else
    multiply_by_weight(stream, gradient_, group_->numel(), weight);
}

void DevicePipeline::send(cudaStream_t stream, DeviceCommunicator& communicator, SumOrder order) {
  if (ranks_ == 1) return;
  if (compressor_)
    communicator.all_gather(mine_.data(), all_.data(), mine_.size(), stream);
  else if (narrow_)
    communicator.all_reduce_bfloat16(narrowed_.data(), group_->numel(), order, stream);
  else
    communicator.all_reduce(gradient_, group_->numel(), order, stream);
}

void DevicePipeline::decode(cudaStream_t stream, DeviceSlice slice, const DeviceStep& step) {
  const float factor = 1.0f / static_cast<float>(ranks_);
  float* const gradient = slice.gradient.data();
  if (compressor_)
    compressor_->decode(stream, ranks_ > 1 ? all_.data() : mine_.data(), step.weights(), step.status());
  else if (narrow_)
    average_sum_bfloat16(stream, narrowed_.data(), gradient, group_->numel(), factor, step.status());
  else
    average_sum(stream, gradient, group_->numel(), factor, step.status());
}

void DevicePipeline::commit(cudaStream_t stream, DeviceSlice slice, const DeviceStep& step) {
  if (!compressor_) return;
  const std::span<float> average = compressor_->commit(stream, step.status());
  TOPKNOT_CHECK(average.size() == group_->numel(), "an average of another length than its group");
  swaps_ = average.data() == slice.spare.data();
}

GradientForm DevicePipeline::form() const {
  return compressor_ ? compressor_->form() : GradientForm::plain;
}

std::uint64_t DevicePipeline::bytes_sent() const {
  if (compressor_) return mine_.size();
  return group_->numel() * (narrow_ ? sizeof(std::uint16_t) : sizeof(float));
}

std::uint64_t DevicePipeline::bytes_received() const {
  if (ranks_ == 1) return 0;
  return compressor_ ? mine_.size() * static_cast<std::size_t>(ranks_ - 1) : bytes_sent();
}

void DevicePipeline::save(StateWriter& writer) const {
  // A dense compressor carries nothing, and says so in as many bytes.
  writer.put_list(compressor_ ? compressor_->state() : std::vector<std::byte>());
}

void DevicePipeline::load(StateReader& reader) {
  const auto bytes = reader.get_list<std::byte>();
  if (compressor_)
    compressor_->load_state(bytes);
  else if (!bytes.empty())
    StateReader::fail("has bytes for a group that is not compressed");
}

}  // namespace topknot::cuda

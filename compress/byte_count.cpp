#include "compress/byte_count.h"

#include <cmath>

#include "compress/codec/codec.h"
#include "nn/core/base/check.h"
#include "nn/core/base/text.h"

namespace topknot {
namespace {

void check_density(double density) {
  if (!(density > 0 && density <= 1))
    throw UserError("density " + short_text(density) + ": it must be above 0 and at most 1");
}

ByteCount of_upload(std::uint64_t upload, std::span<const TensorShape> tensors, int ranks) {
  ByteCount bytes;
  const std::vector<std::uint64_t> blocks(static_cast<std::size_t>(ranks), upload);
  bytes.add_gather(blocks, 0);
  for (const TensorShape& tensor : tensors) bytes.dense += sizeof(float) * tensor.numel;
  return bytes;
}

}  // namespace

void ByteCount::add_gather(std::span<const std::uint64_t> block_bytes, int rank) {
  TOPKNOT_CHECK(rank >= 0 && static_cast<std::size_t>(rank) < block_bytes.size(), "a rank without a block");
  for (std::size_t r = 0; r < block_bytes.size(); ++r)
    (r == static_cast<std::size_t>(rank) ? upload : download) += block_bytes[r];
}

void ByteCount::add_sum(std::uint64_t bytes) {
  upload += bytes;
  download += bytes;
}

ByteCount& ByteCount::operator+=(const ByteCount& other) {
  upload += other.upload;
  download += other.download;
  dense += other.dense;
  return *this;
}

double ByteCount::ratio() const {
  return upload == 0 ? 0.0 : static_cast<double>(dense) / static_cast<double>(upload);
}

std::vector<PlannedMessage> planned_messages(std::span<const TensorShape> tensors, const WirePlan& plan) {
  check_density(plan.density);
  using OneDimensional = WirePlan::OneDimensional;
  std::vector<PlannedMessage> messages;
  PlannedMessage sparse{0, 0, plan.codec, plan.values};
  PlannedMessage dense{0, 0, "auto", plan.one_dimensional == OneDimensional::dense_fp16 ? "fp16" : "fp32"};
  const auto close = [&](PlannedMessage& message, bool all) {
    if (message.numel == 0) return;
    message.count = all ? message.numel : target_count(plan.density, message.numel);
    messages.push_back(message);
    message.numel = 0;
  };
  for (const TensorShape& tensor : tensors) {
    const bool all = tensor.one_dimensional && plan.one_dimensional != OneDimensional::sparse;
    PlannedMessage& message = all ? dense : sparse;
    message.numel += tensor.numel;
    if (!plan.merged) close(message, all);
  }
  close(sparse, false);
  close(dense, true);
  return messages;
}

ByteCount planned_bytes(std::span<const TensorShape> tensors, const WirePlan& plan, int ranks) {
  std::uint64_t upload = 0;
  for (const PlannedMessage& message : planned_messages(tensors, plan))
    upload += expected_block_bytes(message.codec, message.values, {}, message.count, message.numel);
  return of_upload(upload, tensors, ranks);
}

ByteCount dgc_paper_bytes(std::span<const TensorShape> tensors, double density, int ranks) {
  check_density(density);
  std::uint64_t upload = 0;
  for (const TensorShape& tensor : tensors)
    upload += tensor.one_dimensional
                  ? 4 * tensor.numel
                  : 6 * static_cast<std::uint64_t>(std::ceil(density * static_cast<double>(tensor.numel)));
  return of_upload(upload, tensors, ranks);
}

}  // namespace topknot

#include "compress/sparse_compressor.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "compress/average.h"
#include "nn/core/check.h"
#include "nn/core/text.h"

namespace topknot {

SparseCompressor::SparseCompressor(Parts parts, const GroupSpec& group, double capacity)
    : parts_(std::move(parts)), group_(group), capacity_(capacity) {
  TOPKNOT_CHECK(parts_.selectors.size() == group_.segments.size(), "one selector a segment");
  TOPKNOT_CHECK(capacity_ == 0 || capacity_ >= 1, "a capacity below k");
}

Message SparseCompressor::encode(Slice slice, const StepInfo& info) {
  TOPKNOT_CHECK(phase_ == Phase::idle, "encode before the last step was committed or discarded");
  TOPKNOT_CHECK(slice.gradient.size() == group_.numel, "a slice of another length than the group's");
  TOPKNOT_CHECK(info.weights.empty() || info.weights.size() == static_cast<std::size_t>(group_.ranks),
                "one weight a rank");
  TOPKNOT_CHECK(info.rank >= 0 && info.rank < group_.ranks, "rank outside the group");
  slice_ = slice;
  rank_ = info.rank;
  weights_.assign(info.weights.begin(), info.weights.end());
  weights_.resize(static_cast<std::size_t>(group_.ranks), 1.0f);
  const std::span<const float> addend = parts_.memory->addend(slice.gradient, slice.spare);

  sent_.finite = true;
  sent_.indices.clear();
  sent_.values.clear();
  cuts_.clear();
  threshold_ = std::numeric_limits<double>::infinity();
  over_capacity_ = 0;
  for (std::size_t s = 0; s < group_.segments.size(); ++s) {
    const auto [begin, end] = group_.segments[s];
    SelectStep step;
    step.k = target_count(info.density, end - begin);
    step.density = info.density;
    step.step = info.step;
    step.rank = info.rank;
    parts_.selectors[s]->select(slice.gradient.subspan(begin, end - begin),
                                addend.empty() ? addend : addend.subspan(begin, end - begin), step,
                                selected_);
    sent_.finite &= selected_.finite;
    if (capacity_ > 0) {
      const double bound = capacity_ * static_cast<double>(step.k);
      const std::size_t count = selected_.indices.size();
      if (static_cast<double>(count) > bound) keep_largest(selected_, static_cast<std::size_t>(bound));
      over_capacity_ += count - selected_.indices.size();
    }
    if (selected_.finite) threshold_ = std::min(threshold_, selected_.threshold);
    const std::size_t first = sent_.indices.size();
    for (const std::uint32_t index : selected_.indices)
      sent_.indices.push_back(index + static_cast<std::uint32_t>(begin));
    sent_.values.insert(sent_.values.end(), selected_.values.begin(), selected_.values.end());
    cuts_.emplace_back(first, sent_.indices.size());
  }
  if (!sent_.finite) {
    sent_.indices.clear();
    sent_.values.clear();
    threshold_ = 0;
  }
  Message message;
  message.kind = Message::Kind::block;
  message.block = write_block(sent_, group_.numel, *parts_.index_code, *parts_.value_code);
  phase_ = Phase::encoded;
  return message;
}

std::optional<Message> SparseCompressor::decode(const Round& round) {
  TOPKNOT_CHECK(phase_ == Phase::encoded, "decode without encode");
  TOPKNOT_CHECK(round.blocks.size() == static_cast<std::size_t>(group_.ranks), "one block a rank");
  received_.resize(round.blocks.size());
  finite_ = true;
  for (std::size_t r = 0; r < round.blocks.size(); ++r) {
    read_block(round.blocks[r], group_.numel, *parts_.index_code, *parts_.value_code, received_[r]);
    finite_ &= received_[r].finite;
  }
  TOPKNOT_CHECK(received_[static_cast<std::size_t>(rank_)].indices == sent_.indices,
                "this rank's own block came back changed");
  phase_ = Phase::decoded;
  return std::nullopt;
}

std::span<float> SparseCompressor::commit(const Outcome& outcome) {
  TOPKNOT_CHECK(phase_ == Phase::decoded && finite_, "commit without a decoded, finite step");
  const Entries& own = received_[static_cast<std::size_t>(rank_)];
  parts_.memory->commit(slice_.gradient, own.indices, own.values, outcome.rejected);

  const std::span<float> average = parts_.memory->keeps() ? slice_.spare : slice_.gradient;
  std::vector<Contribution<float>> contributions(received_.size());
  for (std::size_t r = 0; r < received_.size(); ++r)
    contributions[r] = {received_[r].indices, received_[r].values, weights_[r]};
  average_sparse<float>(contributions, average);

  std::vector<std::uint32_t> relative;
  for (std::size_t s = 0; s < group_.segments.size(); ++s) {
    const auto [begin, end] = group_.segments[s];
    const auto [first, last] = cuts_[s];
    relative.assign(own.indices.begin() + static_cast<std::ptrdiff_t>(first),
                    own.indices.begin() + static_cast<std::ptrdiff_t>(last));
    for (std::uint32_t& index : relative) index -= static_cast<std::uint32_t>(begin);
    SelectOutcome<float> result;
    result.indices = relative;
    result.sent = std::span(own.values).subspan(first, last - first);
    result.average = average.subspan(begin, end - begin);
    result.weight = static_cast<double>(weights_[static_cast<std::size_t>(rank_)]) / group_.ranks;
    parts_.selectors[s]->commit(result);
  }
  phase_ = Phase::idle;
  return average;
}

void SparseCompressor::discard() {
  for (auto& selector : parts_.selectors) selector->discard();
  parts_.memory->discard();
  phase_ = Phase::idle;
}

std::size_t SparseCompressor::planned_bytes(double density) const {
  std::size_t entries = 0;
  for (const auto& [begin, end] : group_.segments) entries += target_count(density, end - begin);
  return kBlockHeaderBytes + parts_.index_code->least_bytes(entries) + parts_.value_code->bytes(entries);
}

std::unique_ptr<Compressor> make_sparse(const SparsePreset& preset, const CompressOptions& options,
                                        const GroupSpec& group) {
  const auto pick = [](const std::string& key, const std::string& own) { return key.empty() ? own : key; };
  if (options.capacity != 0 && !(options.capacity >= 1 && std::isfinite(options.capacity)))
    throw UserError("compress.capacity is " + short_text(options.capacity) +
                    ": it must be none, or a multiple of k of at least 1, because less would cut what the "
                    "density asks for");
  const SelectorFactory selector = selectors().find(pick(options.select, preset.select));
  SparseCompressor::Parts parts;
  for (std::size_t s = 0; s < group.segments.size(); ++s) parts.selectors.push_back(selector(options));
  parts.memory = memories().find(pick(options.memory, preset.memory))(options);
  parts.index_code = index_codes().find(pick(options.code, preset.code))(options);
  parts.value_code = value_codes().find(pick(options.values, preset.values))(options);
  return std::make_unique<SparseCompressor>(std::move(parts), group, options.capacity);
}

}  // namespace topknot

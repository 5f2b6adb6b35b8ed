#include "compress/sparse_compressor.h"

#include "nn/core/base/check.h"

namespace topknot {

SparseCompressor::SparseCompressor(const SparsePreset& parts, const CompressOptions& options,
                                   const GroupSpec& group)
    : numel_(group.numel),
      index_codec_(index_codecs().find(parts.codec)(options)),
      value_codec_(value_codecs().find(parts.values)(options)),
      step_(parts, options, group),
      received_(static_cast<std::size_t>(group.ranks)) {}

Message SparseCompressor::encode(Slice slice, const StepInfo& info) {
  TOPKNOT_CHECK(phase_ == Phase::idle, "encode before the last step was committed or discarded");
  rank_ = info.rank;
  density_ = info.density;
  Message message;
  message.kind = Message::Kind::block;
  message.block =
      write_block(step_.encode(slice.gradient, slice.spare, info), numel_, *index_codec_, *value_codec_);
  phase_ = Phase::encoded;
  return message;
}

std::optional<EntryMessage> SparseCompressor::entries() const {
  if (!value_codec_->exact()) return std::nullopt;
  return EntryMessage{&step_.sent(), step_.target(density_)};
}

std::optional<Message> SparseCompressor::decode(const Round& round) {
  TOPKNOT_CHECK(phase_ == Phase::encoded, "decode without encode");
  phase_ = Phase::decoded;
  summed_ = round.entries != nullptr;
  if (summed_) {
    sum_ = *round.entries;
    finite_ = sum_.finite;
    return std::nullopt;
  }
  TOPKNOT_CHECK(round.blocks.size() == received_.size(), "one block per rank");
  finite_ = true;
  for (std::size_t r = 0; r < round.blocks.size(); ++r) {
    read_block(round.blocks[r], numel_, *index_codec_, *value_codec_, received_[r]);
    finite_ &= received_[r].finite;
  }
  TOPKNOT_CHECK(received_[static_cast<std::size_t>(rank_)].indices == step_.sent().indices,
                "this rank's own block came back changed");
  finite_ = finite_ && step_.summable(received_);
  return std::nullopt;
}

std::span<float> SparseCompressor::commit(const Outcome& outcome) {
  TOPKNOT_CHECK(phase_ == Phase::decoded && finite_, "commit without a decoded, finite step");
  const std::span<float> average =
      summed_ ? step_.commit_sum(sum_, outcome) : step_.commit(received_, outcome);
  phase_ = Phase::idle;
  return average;
}

void SparseCompressor::discard() {
  step_.discard();
  phase_ = Phase::idle;
}

std::unique_ptr<Compressor> make_sparse(const SparsePreset& preset, const CompressOptions& options,
                                        const GroupSpec& group) {
  return std::make_unique<SparseCompressor>(resolve(preset, options), options, group);
}

void add_sparse(const std::string& name, const std::string& help, const SparsePreset& preset) {
  sparse_presets().add(name, help, preset);
  compressors().add(name, help,
                    {[](const CompressOptions& options, const GroupSpec& group) {
                       return make_sparse(sparse_presets().find(options.name), options, group);
                     },
                     [](const CompressOptions& options, const GroupSpec& group, double density) {
                       const SparsePreset parts = *pieces_of(options);
                       check_combination(parts, options);
                       const std::size_t entries =
                           planned_entries(selectors().find(parts.select).traits, group, density);
                       return expected_block_bytes(parts.codec, parts.values, options, entries, group.numel);
                     }});
}

}  // namespace topknot

#pragma once
// Selection + memory + codec as one compressor that sends blocks. compress.name picks the three (and the value
// code) as a preset; the keys compress.select, .memory, .codec and .values override them one by one.

#include <memory>
#include <string>
#include <vector>

#include "compress/codec/codec.h"
#include "compress/compressor.h"
#include "compress/sparse_step.h"

namespace topknot {

class SparseCompressor final : public Compressor {
 public:
  // compress.capacity: beyond capacity * k entries per segment, the exact largest of those selected are sent, the
  // rest stays with the memory; 0 means none, else at least 1.
  SparseCompressor(const SparsePreset& parts, const CompressOptions& options, const GroupSpec& group);

  Message encode(Slice slice, const StepInfo& info) override;
  std::optional<EntryMessage> entries() const override;
  std::optional<Message> decode(const Round& round) override;
  bool finite() const override { return finite_; }
  std::span<float> commit(const Outcome& outcome) override;
  void discard() override;
  GradientForm form() const override { return step_.form(); }
  std::span<const float> accumulated() const override { return step_.accumulated(); }
  std::optional<Contributed> contributed() const override {
    const Entries<float>& own = summed_ ? step_.sent() : received_[static_cast<std::size_t>(rank_)];
    return Contributed{own.indices, own.values};
  }
  std::size_t selected() const override { return step_.sent().indices.size(); }
  double threshold() const override { return step_.threshold(); }
  std::size_t over_capacity() const override { return step_.over_capacity(); }

 private:
  enum class Phase { idle, encoded, decoded };
  void save(StateWriter& writer) const override { step_.save(writer); }
  void load(StateReader& reader) override { step_.load(reader); }

  std::size_t numel_ = 0;
  std::unique_ptr<IndexCodec> index_codec_;
  std::unique_ptr<ValueCodec> value_codec_;
  SparseStep<float> step_;
  Phase phase_ = Phase::idle;
  int rank_ = 0;
  double density_ = 1;
  std::vector<Entries<float>> received_;  // by rank
  bool summed_ = false;                   // what came back is sum_, not received_
  Entries<float> sum_;
  bool finite_ = false;
};

// The compressor that `options` describe, with what `preset` names for each key that is empty.
std::unique_ptr<Compressor> make_sparse(const SparsePreset& preset, const CompressOptions& options,
                                        const GroupSpec& group);

// Registers a method that is a combination of pieces: a compressor, and a preset for studies in double.
void add_sparse(const std::string& name, const std::string& help, const SparsePreset& preset);

}  // namespace topknot

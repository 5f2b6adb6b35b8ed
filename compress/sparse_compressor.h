#pragma once
// Selection + memory + code as one compressor that sends blocks. compress.name picks the three (and the value
// code) as a preset; the keys compress.select, .memory, .code and .values override them one by one.

#include <memory>
#include <string>
#include <vector>

#include "compress/code/code.h"
#include "compress/compressor.h"
#include "compress/memory/memory.h"
#include "compress/select/selector.h"

namespace topknot {

class SparseCompressor final : public Compressor {
 public:
  struct Parts {
    std::vector<std::unique_ptr<Selector<float>>> selectors;  // one a segment of the group
    std::unique_ptr<Memory<float>> memory;
    std::unique_ptr<IndexCode> index_code;
    std::unique_ptr<ValueCode> value_code;
  };
  // capacity: beyond capacity * k entries a segment, the exact largest of those selected travel, the rest
  // stays with the memory; 0 means none, else at least 1.
  SparseCompressor(Parts parts, const GroupSpec& group, double capacity);

  Message encode(Slice slice, const StepInfo& info) override;
  std::optional<Message> decode(const Round& round) override;
  bool finite() const override { return finite_; }
  std::span<float> commit(const Outcome& outcome) override;
  void discard() override;
  std::size_t selected() const override { return sent_.indices.size(); }
  double threshold() const override { return threshold_; }
  std::size_t over_capacity() const override { return over_capacity_; }
  std::size_t planned_bytes(double density) const override;

 private:
  enum class Phase { idle, encoded, decoded };

  Parts parts_;
  GroupSpec group_;
  double capacity_ = 0;
  Phase phase_ = Phase::idle;
  Slice slice_;
  int rank_ = 0;
  std::vector<float> weights_;                             // by rank
  Entries sent_;                                           // positions in the group
  std::vector<std::pair<std::size_t, std::size_t>> cuts_;  // each segment's entries in sent_
  std::vector<Entries> received_;                          // by rank
  Selected<float> selected_;                               // scratch
  bool finite_ = false;
  double threshold_ = 0;
  std::size_t over_capacity_ = 0;
};

// The compressor that `options` describe, with what `preset` names for each key that is empty.
struct SparsePreset {
  std::string select, memory = "residual", code = "raw", values = "fp32";
};
std::unique_ptr<Compressor> make_sparse(const SparsePreset& preset, const CompressOptions& options,
                                        const GroupSpec& group);

}  // namespace topknot

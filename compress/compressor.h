#pragma once
// A compressor turns one group's gradient into a message and the ranks' messages into their average. It is
// local: it never sees a communicator. One instance per group and rank. The exchange
// (dist/exchange/exchange.h) drives it through a step:
//
//   encode(slice) -> Message
//   decode(round) -> nothing, or a Message for one more round (PowerSGD needs two sums)
//   finite()      -> whether every rank's contribution was finite; the exchange combines this over the groups
//   commit(rejected), or discard() if any group of any rank was not finite or the step is skipped
//
// Between encode and commit the residual is untouched. With a residual, encode writes the accumulated
// gradient u = g + residual over slice.gradient; commit turns that memory into the new residual and writes
// the average over slice.residual, which held the old one. Without (dense, memory none) the average goes to
// slice.gradient. The returned span says which of the two holds the average; if it is slice.residual, the
// exchange lets the two swap roles. discard() forgets the step: all is as before encode.
//
// If encode() or decode() throws, nothing that state() saves has changed: encode() leaves the compressor
// idle, and after an error of decode() the step can be discarded. commit() allocates nothing unless entries
// were rejected, so that several compressors commit or none does: encode() and decode() make its room.
//
// Gradients in GPU memory have compressors of the same interface (compress/cuda/device_compressor.h).

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "nn/base/check.h"
#include "nn/base/registry.h"
#include "nn/core/bfloat16.h"
#include "nn/core/step.h"

namespace topknot {

class StateReader;
class StateWriter;

// Entries of a group or of a selection range: selected, as sent, as received, or a sum of several ranks'.
struct SparseVector {
  bool finite = true;  // false: a NaN or Inf was in the vector that they are from; there are none then
  std::vector<std::uint32_t> indices;  // positions, strictly ascending
  std::vector<float> values;
};
// One rank's part of an average, in somebody else's memory.
struct SparseView {
  std::span<const std::uint32_t> indices;  // positions in the group, strictly ascending
  std::span<const float> values;           // at the indices, before the weight
  float weight = 1;

  SparseView() = default;
  SparseView(std::span<const std::uint32_t> indices, std::span<const float> values, float weight = 1)
      : indices(indices), values(values), weight(weight) {}
  SparseView(const SparseVector& entries, float weight = 1)
      : SparseView(entries.indices, entries.values, weight) {}
};

// One rank's contribution to one round of a group.
struct Message {
  enum class Kind {
    block,         // bytes of any length, gathered from all ranks
    gpu_block,     // bytes of one length on all ranks, in GPU memory, gathered
    sum,           // floats of one length on all ranks, summed over the ranks in place
    sum_bfloat16,  // the same of bfloat16
  };
  Kind kind = Kind::block;
  std::vector<std::byte> block;
  // Above 0: the block consists of so many pieces of one length, and rank r needs the ranks' r-th ones alone. Collectives
  // may gather whole blocks all the same: decode() takes either.
  int pieces = 0;
  // The compressor's memory, as those below: a multiple of 16 bytes, of which the last kTrailerBytes
  // (compress/codec/cuda/device_codec.h) are zero, room for what the exchange sends with it.
  std::span<std::byte> gpu_block;
  std::span<float> sum;
  std::span<BFloat16> sum_bfloat16;
  // The block's entries without their weight, valid until decode(), if the method sends unrounded values; else null.
  // Used by collectives that add in the network (gTop-k, Ok-Topk).
  const SparseVector* entries = nullptr;

  std::size_t bytes() const {
    if (kind == Kind::block) return pieces > 0 ? block.size() - block.size() / pieces : block.size();
    if (kind == Kind::gpu_block) return gpu_block.size();
    return kind == Kind::sum ? sum.size_bytes() : sum_bfloat16.size_bytes();
  }
};

// The result of the collective for one round. Valid during decode() only.
using Blocks = std::vector<std::vector<std::byte>>;
std::vector<std::span<const std::byte>> views_of(const Blocks& blocks);

struct Round {
  std::span<const std::span<const std::byte>> blocks = {};  // Kind::block: by rank, own included
  std::span<const std::byte> gpu_blocks = {};               // Kind::gpu_block: the ranks' one after the other
  std::span<const float> sum = {};                          // Kind::sum: the memory that was sent, now summed
  std::span<const BFloat16> sum_bfloat16 = {};              // likewise
  // In place of blocks, where the collective added the ranks' entries: sum_r(weight[r] * entries[r]) at
  // the positions that it kept, the same on all ranks.
  const SparseVector* entries = nullptr;
};

// `values` stays the sender's memory and holds the sum afterwards.
inline Message sum_message(std::span<float> values) {
  Message message;
  message.kind = Message::Kind::sum;
  message.sum = values;
  return message;
}

// `block` stays the sender's memory.
inline Message gpu_block_message(std::span<std::byte> block) {
  Message message;
  message.kind = Message::Kind::gpu_block;
  message.gpu_block = block;
  return message;
}

inline void check_sum(const Round& round, std::span<const float> sent) {
  TOPKNOT_CHECK(round.sum.data() == sent.data() && round.sum.size() == sent.size(),
                "the sum is not in the memory that was sent");
}

// A group's two spans of the parameter arena, of its length. A committed step swaps their roles.
struct Slice {
  std::span<float> gradient, residual;
};

struct StepContext {
  std::int64_t step = 0;  // 0-based, the same on all ranks
  double density = 1.0;   // of this step, after warm-up; in (0, 1]
  // Aggregation weights by rank, relative: 1 for each rank with equal shards, always with mean 1. The average
  // is sum_r(weight[r] * g_r) / P. In the gradients' memory.
  std::span<const float> weights = {};
  int rank = 0;
  double lr = 1.0;  // the step's learning rate, for compress.lr_inside
  // For gradients in GPU memory, there too: kernels read the parameters and write to the status.
  const StepParameters* parameters = nullptr;
  StepStatus* status = nullptr;
};

// Returns the parameters that the step's optimizer and kernels read.
inline StepParameters parameters_of(const StepContext& context) {
  return {.step = context.step, .lr = context.lr, .density = context.density, .rank = context.rank};
}

class Compressor {
 public:
  virtual ~Compressor() = default;
  // On a GPU, between steps: sizes memory and grids for steps of this density or less, which changes what a
  // graph has captured. Returns Message::bytes() of these steps; 0 on a host: the data decide there.
  virtual std::size_t reserve(double) { return 0; }
  virtual Message encode(Slice slice, const StepContext& context) = 0;
  // Throws Error on damaged blocks (count, order, range, length).
  virtual std::optional<Message> decode(const Round& round) = 0;
  // True on a GPU, where StepContext::status knows: all steps are committed, and bad ones discarded there.
  virtual bool finite() const { return true; }
  // `rejected`: positions in the group, in any order, of entries that this rank sent and the collective did
  // not accept; they go back to the residual. Returns the memory that holds the average: the slice's gradient
  // or residual, the same in every step.
  virtual std::span<float> commit(std::span<const std::uint32_t> rejected) = 0;
  virtual void discard() {}

  // The parts of the update rule that the average contains already; the same in every step.
  Applied applied() const { return applied_; }

  // Everything that a later step depends on but the residual, which the arena holds: velocities, carried
  // thresholds, masks. Between steps only. load_state() throws Error if the bytes are damaged or another
  // method's; the compressor is then of no use. On a CPU velocities are multiplied by `velocity_factor`.
  std::vector<std::byte> state() const;
  void load_state(std::span<const std::byte> bytes, float velocity_factor = 1);
  // The same by a writer, which may leave out long lists of GPU memory; else waits for the GPU.
  virtual void save(StateWriter&) const {}  // a compressor that carries nothing has nothing to save
  virtual void load(StateReader&) {}

  // Figures of the last encode, for metrics, logs and studies; on a GPU StepStatus has the counts.
  struct Diagnostics {
    std::size_t selected = 0;       // entries sent
    std::size_t over_capacity = 0;  // entries selected that compress.capacity kept back
    std::size_t target = 0;         // entries that the density asks for; 0 if the method sends no entries
    double threshold = 0;  // topk's k-th magnitude, gaussiank's last threshold; the least of several segments
    std::span<const float> accumulated = {};  // u, between encode and commit, if the method has one
  };
  virtual Diagnostics diagnostics() const { return {}; }
  // This rank's contribution as the ranks decoded it, between the last decode and commit, if the method knows
  // it; for studies. Values without indices cover the whole group.
  virtual std::optional<SparseView> contributed() const { return std::nullopt; }

 protected:
  Applied applied_ = Applied::nothing;
};

struct GroupSpec;

// A compressor of gradients in host memory: a step's inputs and state, and the checks of the order of calls.
class HostCompressor : public Compressor {
 public:
  HostCompressor(const GroupSpec& group, bool has_residual);
  bool finite() const final { return finite_; }
  void discard() override { phase_ = Phase::idle; }

 protected:
  enum class Phase { idle, encoded, decoded };
  // The checks at the beginning of encode(), decode() and commit(); the first notes the inputs.
  void check_encode(Slice slice, const StepContext& context);
  void check_decode() const { TOPKNOT_CHECK(phase_ == Phase::encoded, "decode without encode"); }
  void check_commit() const {
    TOPKNOT_CHECK(phase_ == Phase::decoded && finite_, "commit without a decoded, finite step");
  }
  void check_blocks(const Round& round) const {
    TOPKNOT_CHECK(round.blocks.size() == ranks_, "one block per rank");
  }
  // The slice's residual, if the method has one.
  std::span<const float> residual() const {
    return has_residual_ ? slice_.residual : std::span<const float>();
  }
  std::span<float> average() const { return has_residual_ ? slice_.residual : slice_.gradient; }

  const std::size_t numel_, ranks_;
  const bool has_residual_;
  Phase phase_ = Phase::idle;
  Slice slice_;
  std::size_t rank_ = 0;
  std::vector<float> weights_;  // by rank
  bool finite_ = false;
};

// A tensor of a group as the matrix [first dimension, the others]; cols is 1 for what has fewer dimensions.
struct TensorSpec {
  std::size_t begin = 0;  // in the group
  std::size_t rows = 0, cols = 1;
};

// Describes one group of the arena for its compressor.
struct GroupSpec {
  std::size_t numel = 0;
  // Selection ranges [begin, end) that cover the group in order: one, or one per parameter for scope tensor.
  std::vector<std::pair<std::size_t, std::size_t>> segments;
  int ranks = 1;
  std::size_t offset = 0;  // the group's first element in the arena: numbers its random streams
  // The tensors, ascending and covering the group; empty: one vector. For methods that see matrices.
  std::vector<TensorSpec> tensors = {};
  // A density of its own for each segment (LAGS-SGD), which holds if it exceeds the step's; or empty.
  std::vector<double> densities = {};
};

// Section `compress` as the registries' factories get it: the keys that all methods share, and the values of
// the options that methods declare (OptionValues). Empty strings: the preset's choice.
struct CompressOptions : OptionValues {
  CompressOptions() : OptionValues("compress") {}

  std::string name = "dense";
  std::string select, memory, codec, values;
  std::string aggregate = "auto";             // ranks, contributors; auto: the preset's choice
  std::string transform = "auto";             // none, block, dct; auto: the preset's choice
  std::optional<double> feedback_decay = {};  // in [0, 1]; or the preset's choice
  double capacity = 0.0;                      // a multiple of k; 0 means none
  std::uint64_t seed = 0;
  double momentum = 0.0;  // optimizer.momentum and .nesterov, for memories that own momentum
  bool nesterov = false;
  bool lr_inside = false;  // accumulate lr * gradient (LAGS-SGD)
};

// The keys of section `compress` that no single method owns and that both `train` and libtopknot have: names, ranges and
// help; defaults are CompressOptions' and those of who reads them.
const std::vector<Option>& shared_options();
const Option& shared_option(const std::string& name);

// Whether this method sums gradients as they are or as bfloat16: dense without another value codec.
inline bool sums_plainly(const std::string& name, const std::string& values) {
  return name == "dense" && (values.empty() || values == "fp32" || values == "bf16");
}

struct CompressorType {
  std::unique_ptr<Compressor> (*make)(const CompressOptions& options, const GroupSpec& group);
  // planned_message_bytes() below, without a compressor; null: not known.
  std::size_t (*message_bytes)(const CompressOptions& options, const GroupSpec& group,
                               double density) = nullptr;
  bool sums = false;  // every message is a sum of floats
};
Registry<CompressorType>& compressors();

// Throws UserError for an unknown name or a combination that makes no sense, with the reason.
std::unique_ptr<Compressor> make_compressor(const CompressOptions& options, const GroupSpec& group);
// Bytes of one rank's first message at this density, header included, if counts are known beforehand; else 0.
// Validates the options as make_compressor() does.
std::size_t planned_message_bytes(const CompressOptions& options, const GroupSpec& group, double density);

// Throws UserError naming the key and the reason where `options` give a selection, index codec, value codec,
// capacity or lr_inside, or a memory other than residual and none. `sends` ends the sentence "NAME sends
// ...", for example "two factors of each matrix". A value codec of fp32 passes if `sums` is true.
void reject_sparse_options(const CompressOptions& options, const std::string& sends, bool sums);

// For registries of a method's pieces: makes one from the options, if its constructor takes them.
template <class Interface, class Implementation>
std::unique_ptr<Interface> make_piece(const CompressOptions& options) {
  if constexpr (std::is_constructible_v<Implementation, const CompressOptions&>)
    return std::make_unique<Implementation>(options);
  else
    return std::make_unique<Implementation>();
}

// Refuses one value of a key of section compress.
[[noreturn]] void refuse_key(const CompressOptions& options, const std::string& key, const std::string& value,
                             const std::string& reason);

// density_count() (compress/select/passes/keys.h); throws Error if density is not above 0.
std::size_t target_count(double density, std::size_t d);

}  // namespace topknot

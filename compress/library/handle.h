#pragma once
// What the handles of include/topknot.h are, and what its calls are made of. Functions here throw; the calls of the interface (topknot.cpp) hold the
// compressor's mutex and turn what is thrown into results.

#include <cstdint>
#include <cstdlib>
#include <list>
#include <memory>
#include <mutex>
#include <new>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "compress/compressor.h"
#include "include/topknot.h"
#include "nn/base/check.h"
#include "nn/core/bfloat16.h"

namespace topknot {

struct LibrarySettings {
  CompressOptions options;
  double density = 0.001;
  bool dense_1d = true;
  std::int64_t min_numel = 0;
  bool whole = false;  // scope=model
  int threads = 0;     // 0: OpenMP's number
  bool undo = false;
  std::string carried;  // the given keys on which a state depends
};

// Zeros of pages that take no memory before they are written.
class Floats {
 public:
  Floats() = default;
  explicit Floats(std::size_t count) : memory_(std::calloc(count + 16, sizeof(float))), count_(count) {
    if (!memory_) throw std::bad_alloc();
  }
  std::span<float> span() const {
    const auto address = reinterpret_cast<std::uintptr_t>(memory_.get());
    return {reinterpret_cast<float*>((address + 63) & ~std::uintptr_t{63}), count_};
  }

 private:
  struct Free {
    void operator()(void* memory) const { std::free(memory); }
  };
  std::unique_ptr<void, Free> memory_;
  std::size_t count_ = 0;
};

struct Tensor {
  std::string name;
  std::vector<std::int64_t> shape;
  std::size_t numel = 1, offset = 0;  // the offset in the part
  std::size_t part = 0;
};

// A part before a step.
struct Snapshot {
  std::int64_t step = -1;
  std::vector<float> residual;
  std::vector<std::byte> state;
};

// What is compressed for itself: a tensor, or with scope=model all that are compressed.
struct Part {
  GroupSpec spec;
  CompressOptions options;
  std::unique_ptr<Compressor> compressor;
  Floats gradient, residual;
  bool has_residual = false;  // as keeps_residual()
  bool busy = false;          // in a round
  // With undo=true.
  Snapshot before_round;   // of the one under way
  Snapshot before_commit;  // of the last one that was committed
};

}  // namespace topknot

struct topknot_round {
  topknot_compressor* owner = nullptr;
  std::vector<std::size_t> tensors, parts;
  std::vector<std::optional<topknot::Message>> messages;  // by part: what it sends now, or nothing more
  bool blocks = false;                                    // the message is a block, in which sums are too
  std::vector<std::byte> block;
  std::vector<float> sum;  // of several parts
  std::vector<topknot::BFloat16> sum_bfloat16;
  topknot_message message = {};
  topknot_result state = TOPKNOT_MORE;  // or DONE, NOT_FINITE, INVALID after an error
};

struct topknot_compressor {
  topknot::LibrarySettings settings;
  int rank = 0, ranks = 1;
  std::vector<float> weights;  // by rank, of mean 1; empty: equal
  std::vector<topknot::Tensor> tensors;
  std::vector<topknot::Part> parts;
  std::list<topknot_round> rounds;
  std::mutex mutex;
};

namespace topknot {

[[noreturn]] inline void refuse(const std::string& text) {
  throw UserError(text);
}

// settings.cpp. From "name=value" texts. Throws UserError for an unknown method or key, a value outside its range, a
// combination that makes no sense.
LibrarySettings library_settings(const std::string& method, std::span<const std::string> keys);
// The JSON of topknot_methods().
std::string methods_json();

// values.cpp. to[i] = from[i] * scale. A half is rounded to nearest, ties to even; what is too large becomes an infinity.
void read_values(const void* from, topknot_type type, float scale, std::span<float> to);
void write_values(std::span<const float> from, float scale, topknot_type type, void* to);

// state.cpp. The parts of compressor.tensors, by its settings.
void make_parts(topknot_compressor& compressor);
// Throws UserError if a round is under way.
void require_no_round(const topknot_compressor& compressor);

// round.cpp. Brings what the parts send together in round.message: one block, each part's behind its length, or one row
// of numbers.
void pack(topknot_round& round);
// As topknot_decode().
topknot_result decode(topknot_compressor& compressor, topknot_round& round, const void* const* blocks,
                      const std::size_t* block_bytes);
// Ends the round; its parts are discarded, or have been committed.
void end(topknot_compressor& compressor, topknot_round* round, bool discard);

// state.cpp too. As topknot_save() and topknot_load().
std::vector<std::byte> saved(const topknot_compressor& compressor);
void load(topknot_compressor& compressor, std::span<const std::byte> bytes);
// Of one part; the snapshot is its own.
void restore(Part& part, const Snapshot& snapshot);

}  // namespace topknot

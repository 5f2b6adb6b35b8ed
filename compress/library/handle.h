#pragma once
// The types of the handles of include/topknot.h, and the functions that implement its calls. These functions
// throw; the calls (topknot.cpp) hold the compressor's mutex and turn exceptions into results.

#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "compress/compressor.h"
#include "include/topknot.h"
#include "nn/base/check.h"

namespace topknot {

struct LibrarySettings {
  CompressOptions options;
  double density = 0.001;
  bool dense_1d = true;
  std::int64_t min_numel = 0;
  bool whole = false;  // scope=model
  int threads = 0;     // 0: OpenMP's number
  bool undo = false;
  std::string device = "cpu";
  std::string carried;  // the given keys on which a state depends
};

// Floats in a place's memory (Place).
class Floats {
 public:
  Floats() = default;
  Floats(std::shared_ptr<float> data, std::size_t count) : data_(std::move(data)), count_(count) {}
  std::span<float> span() const { return {data_.get(), count_}; }

 private:
  std::shared_ptr<float> data_;
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
  Floats residual;
  std::vector<std::byte> state;
};

// The unit of compression: a tensor, or with scope=model all compressed tensors.
struct Part {
  GroupSpec spec;
  CompressOptions options;
  std::unique_ptr<Compressor> compressor;
  Floats gradient, residual;
  bool has_residual = false;  // the average is made in the residual's memory
  bool keeps_memory =
      false;            // what that memory holds counts in the next step: a residual, or ef21's estimate
  bool busy = false;    // in a round
  double reserved = 0;  // the density that a GPU's compressor has memory for
  // With undo=true.
  Snapshot before_round;   // of the one under way
  Snapshot before_commit;  // of the last one that was committed
};

// Memory of a place for one round.
struct RoundMemory {
  virtual ~RoundMemory() = default;
};

}  // namespace topknot

struct topknot_round {
  topknot_compressor* owner = nullptr;
  std::vector<std::size_t> tensors, parts;
  std::vector<std::optional<topknot::Message>> messages;  // by part: what it sends now, or nothing more
  bool blocks = false;                                    // the message is a block, in which sums are too
  std::size_t pieces = 0;  // as Message::pieces; in every piece is what all ranks need
  std::shared_ptr<topknot::RoundMemory> memory;
  topknot_message message = {};
  topknot_result state = TOPKNOT_MORE;  // or DONE, NOT_FINITE, INVALID after an error
};

namespace topknot {

// The memory that holds a compressor's tensors and messages: the host's or a GPU's. Calls come under the
// compressor's mutex. They are complete when they return, except that read() is complete after the round's
// first pack(), and write() after finish().
class Place {
 public:
  virtual ~Place() = default;
  // Before any other call; until the end of what it returns the thread works there.
  virtual std::shared_ptr<void> enter() { return nullptr; }
  // Throws UserError as topknot::make_compressor(), and for a method that cannot run there.
  virtual std::unique_ptr<Compressor> make_compressor(const CompressOptions& options,
                                                      const GroupSpec& group) const = 0;
  virtual Floats zeros(std::size_t count) const = 0;
  // Between the host's memory and the place's, in any direction.
  virtual void copy(const float* from, float* to, std::size_t count) const = 0;
  // to[i] = from[i] * scale. A half is rounded to nearest, ties to even; what is too large becomes an infinity.
  virtual void read(const void* from, topknot_type type, float scale, std::span<float> to) const = 0;
  virtual void write(std::span<const float> from, float scale, topknot_type type, void* to) const = 0;

  // A round begins; what its parts are given.
  virtual StepContext begin(topknot_round& round, const StepContext& context) = 0;
  // Brings what the parts send together in round.message: one block, or one row of numbers.
  virtual void pack(topknot_round& round) = 0;
  // All ranks' messages to the parts; their next ones to round.messages. `blocks`: by rank, if the message is a block.
  virtual void decode(topknot_round& round, std::span<const std::span<const std::byte>> blocks) = 0;
  virtual bool finite(const topknot_round& round) const = 0;  // after the last decode()
  // Everything of the part is as before the round.
  virtual void discard(Part& part, topknot_round& round) = 0;
  virtual void finish() const {}
};

// round.cpp.
std::unique_ptr<Place> make_host();
// cuda/gpu.cu or gpu_stub.cpp. GPU `index`; -1: the thread's. `rank`: for messages. UserError: there is none.
std::unique_ptr<Place> make_gpu(int index, int rank);

}  // namespace topknot

struct topknot_compressor {
  topknot::LibrarySettings settings;
  int rank = 0, ranks = 1;
  std::unique_ptr<topknot::Place> place;  // outlives what lies there
  std::vector<float> weights;             // by rank, of mean 1; empty: equal
  std::vector<topknot::Tensor> tensors;
  std::vector<topknot::Part> parts;
  std::list<topknot_round> rounds;
  std::mutex mutex;
};

namespace topknot {

[[noreturn]] inline void refuse(const std::string& text) {
  throw UserError(text);
}

// The bytes of a message that is a sum.
inline std::span<std::byte> summed_bytes(Message& message) {
  return message.kind == Message::Kind::sum ? std::as_writable_bytes(message.sum)
                                            : std::as_writable_bytes(message.sum_bfloat16);
}

// settings.cpp. From "name=value" texts. UserError: an unknown method or key, a bad value or combination.
LibrarySettings library_settings(const std::string& method, std::span<const std::string> keys);
// The JSON of topknot_methods().
std::string methods_json();

// values.cpp. As Place's, in the host's memory.
void read_values(const void* from, topknot_type type, float scale, std::span<float> to);
void write_values(std::span<const float> from, float scale, topknot_type type, void* to);

// state.cpp. The parts of compressor.tensors, by its settings.
void make_parts(topknot_compressor& compressor);
// Throws UserError if a round is under way.
void require_no_round(const topknot_compressor& compressor);

// round.cpp. Makes round.message from round.messages.
void pack(topknot_round& round);
topknot_result decode(topknot_round& round, const void* const* blocks, const std::size_t* block_bytes);
// Ends the round; its parts are discarded, or have been committed.
void end(topknot_compressor& compressor, topknot_round* round, bool discard);

// state.cpp. Implement topknot_save() and topknot_load().
std::vector<std::byte> saved(const topknot_compressor& compressor);
void load(topknot_compressor& compressor, std::span<const std::byte> bytes);
void undo(topknot_compressor& compressor, std::int64_t step);
// A new compressor of the part, which goes on from this state.
std::unique_ptr<Compressor> renewed(const Place& place, const Part& part, std::span<const std::byte> state);

}  // namespace topknot

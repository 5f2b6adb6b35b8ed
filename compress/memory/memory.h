#pragma once
// Memory: what happens to the part of the gradient that is not sent. One per group and rank.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include "compress/compressor.h"
#include "compress/memory/accumulate.h"
#include "nn/base/registry.h"

namespace topknot {

// A memory's input to the pass that selects, which writes u over the gradient g in one read (on a GPU:
// cuda::Accumulate). With momentum m and velocity v:
//   neither residual nor velocity   u = g
//   a residual                      u = g + residual
//   both (DGC)                      u = v' + residual, v' = m v + g; Nesterov: u = v' + g + residual, v' = m (v + g)
struct FeedbackInput {
  std::span<const float> residual;  // as long as the gradient; empty: nothing is added
  const float* velocity = nullptr;  // v, as committed; null: there is none
  float* next_velocity = nullptr;   // v', where the pass writes it
  float momentum = 0;
  bool nesterov = false;
  bool every_entry = false;  // this step must send every entry (EF21's first)

  FeedbackInput() = default;
  template <class Residual>
  requires std::is_convertible_v<Residual, std::span<const float>> FeedbackInput(Residual&& residual_)
      : residual(residual_) {}

  // Computes u[i].
  float made(std::span<const float> gradient, std::size_t i) const {
    float sum = gradient[i], moved = 0;
    if (velocity) sum = momentum_corrected(sum, velocity[i], moved, momentum, nesterov);
    return residual.empty() ? sum : sum + residual[i];
  }
  void prefetch(std::size_t i) const {
    if (!residual.empty()) __builtin_prefetch(residual.data() + i);
    if (velocity) __builtin_prefetch(velocity + i);
  }
  FeedbackInput part(std::size_t begin, std::size_t size) const {
    FeedbackInput part = *this;
    if (!residual.empty()) part.residual = residual.subspan(begin, size);
    if (velocity) part.velocity += begin, part.next_velocity += begin;
    return part;
  }
  // u becomes the sum: for selectors without a pass of their own (compress/select/passes/passes.h).
  void add_to(std::span<float> u) const;
};

class Memory {
 public:
  explicit Memory(bool has_residual) : has_residual_(has_residual) {}
  virtual ~Memory() = default;

  // Returns the terms that selection adds to the gradient, in its own pass, to make u in the gradient's
  // memory. `residual`: the arena's memory that lasts from step to step.
  virtual FeedbackInput input(std::span<float> gradient, std::span<const float> residual) = 0;

  // Turns the step's memories into what the next step starts from. `sent`: the entries as the other ranks
  // decoded them, whose weight does not count; those at `rejected` (positions, any order) were not accepted. Allocates
  // nothing unless there are some, and that before it changes anything.
  virtual void commit(std::span<float> u, std::span<float> residual, const SparseView& sent,
                      std::span<const std::uint32_t> rejected) = 0;
  // After commit: the average of what was sent, to be turned into the average gradient in place (EF21). Allocates nothing.
  virtual void finish(std::span<float> average) { static_cast<void>(average); }
  // The largest magnitude that finish() adds to where an entry was sent.
  virtual float largest_kept(std::span<const SparseView>) const { return 0; }
  // Restores the state before input().
  virtual void discard() {}

  // Whether u's memory lives on as the residual. The average then goes to the residual's memory, else over u.
  bool has_residual() const { return has_residual_; }

  virtual void save(StateWriter&) const {}
  virtual void load(StateReader&) {}

 private:
  const bool has_residual_;
};

struct MemoryTraits {
  // Applies optimizer.momentum; the optimizer then keeps it for weight decay and dense slices alone.
  bool owns_momentum = false;
  bool sends_differences = false;  // what is sent is a difference to an estimate, not gradient (EF21)
  // State that would mix several steps' learning rates under compress.lr_inside; empty: none.
  const char* depends_on_lr = "";
};
struct MemoryFactory {
  std::unique_ptr<Memory> (*make)(const CompressOptions& options);
  MemoryTraits traits;
};
Registry<MemoryFactory>& memories();  // compress.memory
inline std::unique_ptr<Memory> make_memory(const std::string& name, const CompressOptions& options = {}) {
  return memories().find(name).make(options);
}

template <class Implementation>
bool add_memory(const std::string& name, const std::string& help, MemoryTraits traits = {},
                std::vector<Option> options = {}) {
  return memories().add(name, help, {make_piece<Memory, Implementation>, traits}, std::move(options));
}

// For commit(): from -= sent, but for the entries at `rejected`; if `velocity` is not null, what left loses
// its velocity too. u - sent is +0 if values are sent exactly, else the coding error.
void take_sent(std::span<float> from, const SparseView& sent, std::span<const std::uint32_t> rejected,
               float* velocity = nullptr);

// compress.momentum_masking, of memory dgc and its kernels.
bool momentum_masking(const CompressOptions& options);

}  // namespace topknot

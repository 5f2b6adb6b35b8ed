#pragma once
// Memory: what happens to the part of the gradient that is not sent. One per group and rank.

#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "compress/compressor.h"
#include "compress/memory/feedback_input.h"
#include "nn/base/registry.h"

namespace topknot {

class Memory {
 public:
  virtual ~Memory() = default;

  // What selection adds to the gradient in its own pass, to make u over the gradient's memory. `spare` is what the arena
  // keeps from step to step (the residual).
  virtual FeedbackInput input(std::span<float> gradient, std::span<const float> spare) = 0;

  // Turns the step's memories into what the next step starts from. `sent` are the values at `indices` as the
  // other ranks decoded them; the entries at `rejected` (positions, any order) did not count.
  virtual void commit(std::span<float> u, std::span<float> spare, std::span<const std::uint32_t> indices,
                      std::span<const float> sent, std::span<const std::uint32_t> rejected) = 0;
  // After commit: the average of what was sent, to be turned into the average gradient in place (EF21).
  virtual void finish(std::span<float> average) { static_cast<void>(average); }
  // As before input().
  virtual void discard() {}

  // Whether u's memory lives on as the residual. The average then goes to the spare memory, else over u.
  virtual bool has_residual() const = 0;
  // Whether this step must send every entry (EF21's first).
  virtual bool requires_dense_step() const { return false; }

  virtual void save(StateWriter&) const {}
  virtual void load(StateReader&) {}
};

struct MemoryTraits {
  // optimizer.momentum is applied in here; the optimizer then keeps it only for weight decay and dense slices.
  bool owns_momentum = false;
  bool sends_differences = false;  // what is sent is a difference to an estimate, not gradient (EF21)
  // What would mix the learning rates of several steps under compress.lr_inside; empty: nothing would.
  const char* depends_on_lr = "";
};
struct MemoryFactory {
  std::unique_ptr<Memory> (*make)(const CompressOptions& options);
  MemoryTraits traits;
};
Registry<MemoryFactory>& memories();  // compress.memory

template <class Implementation>
void add_memory(const std::string& name, const std::string& help, MemoryTraits traits = {},
                std::vector<Option> options = {}) {
  memories().add(name, help, {make_piece<Memory, Implementation>, traits}, std::move(options));
}

}  // namespace topknot

// The memory of Deep Gradient Compression (Lin, Han, Mao, Wang, Dally, ICLR 2018, arXiv 1712.01887, sections
// 3.1 and 3.2; Nesterov's form as in the authors' code, dgc/memory.py of synxlin/deep-gradient-compression):
// momentum is applied before the selection.
//
//   velocity = m velocity + g;        u = residual + velocity            (optimizer.momentum m)
//   velocity = m (velocity + g);      u = residual + (velocity + g)      (optimizer.nesterov)
//
// u is what is selected from, and what is kept. Momentum factor masking (compress.momentum_masking): the
// velocity of what was sent is zero; without it only u is. Thus at density 1 with masking nothing is left of
// momentum (but the factor 1 + m of Nesterov's form), and without it the average is torch.optim.SGD's
// direction bit for bit on one rank. What a value codec loses stays in u; the velocity is zeroed all the
// same. Entries that the collective rejected keep both.
//
// The rest of u is the arena's residual. The velocity is kept twice, so that a step can be undone: the new
// one is written next to the old, past the caches, in the one pass that writes u over the gradient.
// Without momentum both are left out: this is then the residual memory.
//
// Preset dgc: Deep Gradient Compression (Lin, Han, Mao, Wang, Dally, ICLR 2018, arXiv 1712.01887), whole. Its
// parts, and the key that turns each of them off or changes it:
//
//   momentum correction      compress.memory: dgc; residual leaves momentum to the
//                            optimizer, after the average
//   Nesterov's form          optimizer.nesterov (the authors' code; with nothing masked it is torch's)
//   momentum factor masking  compress.momentum_masking
//   local gradient clipping  compress.clip: thr_G. The paper clips gradients that are divided by N already at
//                            N^-1/2 thr_G; here gradients are means of a rank and the average divides, so
//                            each rank's is clipped at sqrt(N) thr_G, over all its parameters as in the paper
//                            (the code's helpers work tensor by tensor, and are off) (train/step.cpp)
//   sampled selection        compress.select: dgc_sampled (compress/select/dgc_sampled.cpp), with
//                            compress.sample_ratio, .resample, .truncate; compress.scope: tensor selects in each
//                            tensor, as paper and code do
//   warm-up of the density   compress.warmup lists it, [0.25, 0.0625, 0.015625, 0.004] as in the paper; or
//                            compress.warmup_epochs E: density^((e + 1) / (E + 1)), as in the code. In epochs
//                            of density 1 the code does not compress; we send everything, and masking takes
//                            the momentum off
//   1-D tensors dense        compress.dense_1d (the code): plain all-reduce, with the optimizer's momentum
//   weight decay             optimizer.weight_decay: outside, with a momentum of its own, never compressed
//                            (the code; optim/sgd.cpp, Applied::momentum)
//   32-bit values, 16-bit    compress.codec and compress.values (the paper; the code sends 64-bit positions)
//   runs of zeros
//
// The code selects |v| >= t, the paper |v| > t; we follow the code.

#include <sys/mman.h>

#include <algorithm>
#include <memory>
#include <new>
#include <string>
#include <vector>

#include "compress/memory/memory.h"
#include "compress/parallel.h"
#include "compress/sparse.h"
#include "compress/state.h"
#include "nn/base/check.h"
#include "nn/core/simd.h"

namespace topknot {
namespace {

constexpr std::size_t kAlignment = 64, kHugePage = std::size_t{1} << 21;

const Option kMomentumMasking{
    .name = "momentum_masking", .standard = true, .help = "what is sent loses its velocity"};

class DgcMemory final : public Memory {
 public:
  explicit DgcMemory(const CompressOptions& options)
      : Memory(true),
        momentum_(static_cast<float>(options.momentum)),
        nesterov_(options.nesterov),
        masking_(momentum_masking(options)) {}

  FeedbackInput input(std::span<float> gradient, std::span<const float> residual) override {
    const std::size_t n = gradient.size();
    TOPKNOT_CHECK(residual.size() == n, "momentum correction needs a residual as long as the gradient");
    FeedbackInput result(residual);
    if (momentum_ == 0) return result;
    if (size_ != 0 && size_ != n)
      StateReader::fail("has a velocity of " + std::to_string(size_) + " values where " + std::to_string(n) +
                        " are needed");
    if (!next_) next_ = allocate(n);
    if (!velocity_) {
      velocity_ = allocate(n);
      // The threads that will read it fill it, so that its pages lie near them.
      for_parts(n, part_count(n), [&](std::size_t, std::size_t begin, std::size_t end) {
        std::fill(velocity_.get() + begin, velocity_.get() + end, 0.0f);
      });
    }
    result.velocity = velocity_.get();
    result.next_velocity = next_.get();
    result.momentum = momentum_;
    result.nesterov = nesterov_;
    return result;
  }

  void commit(std::span<float> u, std::span<float>, const SparseView& sent,
              std::span<const std::uint32_t> rejected) override {
    take_sent(u, sent, rejected, momentum_ != 0 && masking_ ? next_.get() : nullptr);
    if (momentum_ == 0) return;
    velocity_.swap(next_);
    size_ = u.size();
  }

  void save(StateWriter& writer) const override {
    writer.put_list(std::span<const float>(velocity_.get(), size_));
  }

  // Throws Error for a velocity of another length, at the latest in the next step.
  void load(StateReader& reader) override {
    const std::vector<float> velocity = reader.get_finite_list<float>();
    if (momentum_ == 0 && !velocity.empty()) StateReader::fail("has a velocity, and optimizer.momentum is 0");
    const std::size_t length = reader.range > 0 ? reader.range : size_;
    if (length != 0 && !velocity.empty() && velocity.size() != length)
      StateReader::fail("has a velocity of another length");
    next_.reset();
    velocity_.reset();
    size_ = velocity.size();
    if (size_ == 0) return;
    velocity_ = allocate(size_);
    std::transform(velocity.begin(), velocity.end(), velocity_.get(),
                   [&](float value) { return reader.velocity_factor * value; });
  }

 private:
  struct Free {
    std::align_val_t unit;
    void operator()(float* p) const { ::operator delete(p, unit); }
  };
  using Buffer = std::unique_ptr<float[], Free>;  // aligned for stores past the caches
  static Buffer allocate(std::size_t size) {
    const std::size_t unit = size * sizeof(float) >= kHugePage ? kHugePage : kAlignment;
    const std::size_t bytes = (size * sizeof(float) + unit - 1) / unit * unit;
    Buffer buffer(static_cast<float*>(::operator new(bytes, std::align_val_t(unit))),
                  {std::align_val_t(unit)});
    // A quarter off the pass, if the system has such pages; a hint, so its failure does not matter.
    if (unit == kHugePage) madvise(buffer.get(), bytes, MADV_HUGEPAGE);
    return buffer;
  }

  float momentum_;
  bool nesterov_, masking_;
  std::size_t size_ = 0;    // of the velocity; 0: no step was committed yet
  Buffer velocity_, next_;  // as committed, and of the step that is under way
};

const bool dgc_registered[] = {
    add_memory<DgcMemory>("dgc",
                          "momentum before selection: velocities are accumulated, what is sent loses its own",
                          {.owns_momentum = true, .depends_on_lr = "the velocity"}, {kMomentumMasking}),
    add_sparse("dgc",
               "Deep Gradient Compression: momentum before selection, a threshold from a sample, masking",
               {.select = "dgc_sampled",
                .memory = "dgc",
                .settings = {{"compress.density", "0.001"},
                             {"compress.warmup", "[0.25, 0.0625, 0.015625, 0.004]"},  // section 4.1
                             {"compress.scope", "tensor"}}})};

}  // namespace

bool momentum_masking(const CompressOptions& options) {
  return options.get<bool>(kMomentumMasking);
}

}  // namespace topknot

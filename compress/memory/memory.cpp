#include "compress/memory/memory.h"

#include <algorithm>

#include "compress/parallel.h"
#include "compress/select/passes/pass_kernels.h"
#include "nn/base/check.h"

namespace topknot {

void FeedbackInput::add_to(std::span<float> u) const {
  for_parts(u.size(), part_count(u.size()), [&](std::size_t, std::size_t begin, std::size_t end) {
    if (const float* added = pass::add_velocity(u, *this, begin, end))
      for (std::size_t i = begin; i < end; ++i) u[i] += added[i];
  });
}

void take_sent(std::span<float> from, const SparseView& sent, std::span<const std::uint32_t> rejected,
               float* velocity) {
  const std::span<const std::uint32_t> indices = sent.indices;
  std::vector<std::uint32_t> stay(rejected.begin(), rejected.end());
  std::sort(stay.begin(), stay.end());
  const auto take = [&](std::size_t begin, std::size_t end) {
    // The entries lie about a page apart: memory decides the time, so addresses are asked for ahead.
    constexpr std::size_t ahead = 24;
    for (std::size_t i = begin; i < end; ++i) {
      if (i + ahead < end) {
        __builtin_prefetch(&from[indices[i + ahead]], 1);
        if (velocity) __builtin_prefetch(velocity + indices[i + ahead], 1);
      }
      if (!stay.empty() && std::binary_search(stay.begin(), stay.end(), indices[i])) continue;
      from[indices[i]] -= sent.values[i];
      if (velocity) velocity[indices[i]] = 0.0f;
    }
  };
  const std::size_t n = indices.size(), parts = std::min<std::size_t>(part_count(from.size()), n / 1024 + 1);
#pragma omp parallel for num_threads(static_cast <int>(parts)) schedule(static, 1) if (parts > 1)
  for (std::size_t part = 0; part < parts; ++part) take(n * part / parts, n * (part + 1) / parts);
}

namespace {

// No memory: the average is decoded over the gradient; the residual memory is never touched.
class NoMemory final : public Memory {
 public:
  NoMemory() : Memory(false) {}
  FeedbackInput input(std::span<float>, std::span<const float>) override { return {}; }
  void commit(std::span<float>, std::span<float>, const SparseView&,
              std::span<const std::uint32_t>) override {}
};

// Error feedback (Seide et al., Interspeech 2014; Karimireddy et al., ICML 2019): u = gradient + residual;
// what is sent leaves u, the rest is the next residual. With exact values, sent + residual == u bit for bit.
// compress.feedback_decay beta: u = gradient + beta * rest, as SparseLoCo has it (Sarfi et al., arXiv 2508.15706); the
// residual is kept times beta, so that a step that is discarded changes nothing.
class ResidualMemory final : public Memory {
 public:
  explicit ResidualMemory(const CompressOptions& options = {})
      : Memory(true), decay_(static_cast<float>(options.feedback_decay.value_or(1))) {}
  FeedbackInput input(std::span<float> gradient, std::span<const float> residual) override {
    TOPKNOT_CHECK(residual.size() == gradient.size(),
                  "error feedback needs a residual as long as the gradient");
    return residual;
  }
  void commit(std::span<float> u, std::span<float>, const SparseView& sent,
              std::span<const std::uint32_t> rejected) override {
    take_sent(u, sent, rejected);
    multiply_all(u, decay_);
  }

 private:
  const float decay_;
};

const bool memories_registered[] = {
    add_memory<NoMemory>("none", "what is not sent is lost"),
    add_memory<ResidualMemory>("residual", "error feedback: what is not sent is added to the next gradient")};

}  // namespace
}  // namespace topknot

// SGD with momentum, Nesterov's variant and weight decay, as torch.optim.SGD defines them (dampening 0):
//
//   d = g + weight_decay * w
//   b = momentum * b + d
//   w = w - lr * b                        (Nesterov: w - lr * (d + momentum * b))
//
// b starts at zero, which gives PyTorch's first b = d. One pass over weights, gradient and momentum.
//
// If the gradient has momentum already, the optimizer's is for weight decay alone (the optimizer of Lin et
// al., "Deep Gradient Compression", ICLR 2018, in their code):
//
//   d = weight_decay * w;  b = momentum * b + d;  w = w - lr * (b + g)   (Nesterov: d + momentum * b + g)
//
// If it has the learning rate already (LAGS-SGD), w = w - (g + lr * weight_decay * w).

#include <algorithm>
#include <cstdint>

#include "nn/base/check.h"
#include "nn/core/simd.h"
#include "optim/optimizer.h"
#include "optim/rules.h"

namespace topknot {
namespace {

// Elements of one thread's chunk: large enough to amortise the dispatch, small enough to share out.
constexpr std::size_t kChunk = 1 << 14;
constexpr std::size_t kParallelUpdate = 1 << 16;  // elements

template <SgdRule rule>
TOPKNOT_INLINE void step_chunk(float* weights, const float* gradient, float* buffer, std::size_t n,
                               SgdRates rates) {
  std::size_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    Lanes w = load(weights + i), b = {};
    if constexpr (kHasMomentum<rule>) b = load(buffer + i);
    sgd_step<rule>(w, load(gradient + i), b, rates);
    store(weights + i, w);
    if constexpr (kHasMomentum<rule>) store(buffer + i, b);
  }
  for (; i < n; ++i) {
    float unused = 0;
    sgd_step<rule>(weights[i], gradient[i], kHasMomentum<rule> ? buffer[i] : unused, rates);
  }
}

template <SgdRule kRule = SgdRule::lr_applied>
TOPKNOT_INLINE void step_by(SgdRule rule, float* w, const float* g, float* b, std::size_t n, SgdRates rates) {
  if (rule == kRule) return step_chunk<kRule>(w, g, b, n, rates);
  if constexpr (kRule != SgdRule::plain)
    step_by<static_cast<SgdRule>(static_cast<int>(kRule) - 1)>(rule, w, g, b, n, rates);
}
TOPKNOT_MULTIVERSION void step_of(SgdRule rule, float* w, const float* g, float* b, std::size_t n,
                                  SgdRates rates) {
  step_by(rule, w, g, b, n, rates);
}

void sgd_update(SgdRule rule, const ArenaSlice& slice, float* buffer, SgdOptions options,
                const StepState& state) {
  if (state.status && state.status->bad) return;
  const StepParameters& now = *state.parameters;
  for_decay_runs(slice, [&](std::size_t from, std::size_t to, bool decays) {
    const SgdRates rates{static_cast<float>(now.lr), options.momentum, decays ? options.decay : 0.0f,
                         static_cast<float>(now.gradient_scale)};
    const std::int64_t chunks = static_cast<std::int64_t>((to - from + kChunk - 1) / kChunk);
#pragma omp parallel for schedule(static) if (to - from >= kParallelUpdate)
    for (std::int64_t chunk = 0; chunk < chunks; ++chunk) {
      const std::size_t begin = from + static_cast<std::size_t>(chunk) * kChunk;
      step_of(rule, slice.weights + begin, slice.gradient + begin, buffer ? buffer + begin : nullptr,
              std::min(kChunk, to - begin), rates);
    }
  });
}

class Sgd final : public Optimizer {
 public:
  Sgd(const OptimizerOptions& options, ParameterArena& arena)
      : options_(options), kernels_(*find_kernels<SgdKernels>(arena.device().kind)), slices_(options, arena) {
    if (options.momentum > 0) momentum_ = zeros_like(arena);
  }

  void update(std::size_t offset, std::span<const float> gradient, const StepState& state,
              Applied applied) override {
    const ArenaSlice slice = slices_.slice(offset, gradient);
    TOPKNOT_CHECK(applied != Applied::learning_rate || options_.momentum == 0,
                  "a gradient that has the learning rate in it cannot take momentum");
    kernels_.update(sgd_rule(options_.momentum > 0, options_.nesterov, applied), slice,
                    momentum_.defined() ? momentum_.data() + offset : nullptr,
                    {static_cast<float>(options_.momentum), static_cast<float>(options_.weight_decay)},
                    state);
  }

  std::vector<std::span<float>> state() override {
    if (!momentum_.defined()) return {};
    return {span_of(momentum_)};
  }

 private:
  const OptimizerOptions options_;
  const SgdKernels& kernels_;
  ArenaSlices slices_;
  Tensor momentum_;
};

const bool sgd_kernels = add_cpu_kernels<SgdKernels>({sgd_update});
const bool sgd_registered =
    optimizers().add("sgd", "SGD with momentum, Nesterov and weight decay (PyTorch's semantics)",
                     optimizer_type<Sgd, SgdKernels>());

}  // namespace
}  // namespace topknot

// Muon (Jordan et al., "Muon: an optimizer for hidden layers in neural networks", 2024): momentum, made
// orthogonal, for the matrices inside a model (Parameter::hidden(); a convolution is [out, in * kh * kw]).
// With g the averaged gradient of one of [rows, cols]:
//
//   M = mu * M + g                           (averages: mu * M + (1 - mu) * g)
//   X = M                                    (nesterov: g + mu * M; averages: (1 - mu) * g + mu * M)
//   X = X / (||X||_F + epsilon)
//   five times: A = X X^T;  X = a * X + (b * A + c * A A) X
//   w = w - lr * weight_decay * w
//   w = w - lr * shape factor * X
//
// The iteration is Newton and Schulz's with factors a, b, c that lift small singular values fast. It leaves
// all of them near 1, between 0.7 and 1.2 with jordan's factors. If rows > cols, A = X^T X and X (b * A +
// c * A A), which has the smaller squares and the same result.
//
// The published variants differ in these numbers:
//
//   jordan     github.com/KellerJordan/Muon, muon.py. Its shape factor reads the last two sides of a filter;
//              here they are rows and cols of the flattened one.
//   moonshot   Liu et al., "Muon is scalable for LLM training", arXiv 2502.16982, section 2.2, and the
//              program that belongs to it
//   muloco     Therien et al., "MuLoCo: Muon is a practical inner optimizer for DiLoCo", arXiv 2505.23725,
//              and its program; no Nesterov, factors for each step
//
// All else (1-D parameters, embeddings, the first convolution, the output layer) has AdamW's step
// (optim/adamw.cpp) with a learning rate of its own, whose schedule is Muon's. Every rank makes the same step
// of the same average. With n = min(rows, cols) and m = max(rows, cols), the products of a matrix take
// 5 (4 n^2 m + 2 n^3) operations a step, of which the CPU leaves out the halves of symmetric ones: 5 (3 n^2 m
// + n^3). The CPU's arithmetic is in fp32, not in bfloat16 as the published programs'.

#include "optim/muon.h"

#include <algorithm>
#include <cmath>

#include "nn/base/check.h"
#include "optim/optimizer.h"
#include "optim/rules.h"

namespace topknot {
namespace {

constexpr NewtonSchulz same_each_step(std::array<float, 3> factors) {
  return {factors, factors, factors, factors, factors};
}

constexpr NewtonSchulz kJordan = same_each_step({3.4445f, -4.7750f, 2.0315f});
constexpr NewtonSchulz kMuloco = {{{4.0848f, -6.8946f, 2.9270f},
                                   {3.9505f, -6.3029f, 2.6377f},
                                   {3.7418f, -5.5913f, 2.3037f},
                                   {2.8769f, -3.1427f, 1.2046f},
                                   {2.8366f, -3.0525f, 1.2012f}}};

struct Variant {
  const char* name;
  MuonRule rule;  // weight_decay is the run's
  double (*shape_factor)(double rows, double cols);
  double adam_lr;  // 0: as Muon's
  double beta1, beta2, adam_epsilon;
};

const Variant kVariants[] = {
    // MuonRule: momentum, averages, nesterov, epsilon, weight_decay, factors.
    {"jordan",
     {0.95, true, true, 1e-7, 0, kJordan},
     [](double rows, double cols) { return std::sqrt(std::max(1.0, rows / cols)); },
     3e-4,
     0.9,
     0.95,
     1e-10},
    {"moonshot",
     {0.95, false, true, 1e-7, 0, kJordan},
     [](double rows, double cols) { return 0.2 * std::sqrt(std::max(rows, cols)); },
     0,
     0.9,
     0.95,
     1e-8},
    {"muloco",
     {0.95, false, false, 1e-8, 0, kMuloco},
     [](double rows, double cols) { return std::sqrt(rows / cols); },
     0,
     0.9,
     0.99,
     1e-8}};

const Option kVariant{.name = "variant",
                      .standard = "jordan",
                      .help = "which published program's numbers it has (docs/optim.md)",
                      .choices = {"jordan", "moonshot", "muloco"}};
const Option kMomentum{"muon_momentum", std::optional<double>(), "momentum of the matrices; auto: 0.95", 0,
                       0.9999};
const Option kAdamLr{
    "adam_lr",
    std::optional<double>(),
    "learning rate of what is no matrix, by the schedule of optimizer.lr; auto: the variant's",
    0,
    1e6,
    true};

class Muon final : public Optimizer {
 public:
  Muon(const OptimizerOptions& options, ParameterArena& arena)
      : variant_(*std::ranges::find(kVariants, options.get<std::string>(kVariant), &Variant::name)),
        rule_(variant_.rule),
        adamw_constants_{
            options.get<Given>(option::beta1).value_or(variant_.beta1),
            options.get<Given>(option::beta2).value_or(variant_.beta2),
            options.get<Given>(option::epsilon).value_or(variant_.adam_epsilon), options.weight_decay,
            options.get<Given>(kAdamLr).value_or(variant_.adam_lr > 0 ? variant_.adam_lr : options.lr) /
                options.lr},
        kernels_(*find_kernels<MuonKernels>(arena.device().kind)),
        adamw_(*find_kernels<AdamwKernels>(arena.device().kind)),
        slices_(options, arena),
        first_(zeros_like(arena)),
        second_(zeros_like(arena)) {
    rule_.momentum = options.get<Given>(kMomentum).value_or(rule_.momentum);
    rule_.weight_decay = options.weight_decay;
    std::size_t scratch = 0;
    for (const Parameter* p : arena.parameters()) {
      const std::size_t begin = p->offset(), end = begin + p->numel();
      if (p->hidden() && p->numel() > 0) {
        const auto rows = static_cast<std::size_t>(p->shape()[0]);
        parts_.push_back({begin, end, rows, p});
        scratch = std::max(scratch, kernels_.scratch(rows, p->numel() / rows));
      } else if (!parts_.empty() && !parts_.back().matrix) {
        parts_.back().end = end;
      } else {
        parts_.push_back({begin, end, 0, nullptr});
      }
    }
    scratch_ = Tensor::empty({static_cast<std::int64_t>(scratch)}, Layout::plain, arena.device());
  }

  static bool takes(Applied applied) { return applied == Applied::nothing; }

  void update(std::size_t offset, std::span<const float> gradient, const StepState& state,
              Applied applied) override {
    const ArenaSlice slice = slices_.slice(offset, gradient);
    TOPKNOT_CHECK(takes(applied), "muon takes gradients without momentum and learning rate in them");
    const std::size_t end = offset + slice.n;
    const auto first_part = std::partition_point(parts_.begin(), parts_.end(),
                                                 [&](const Part& part) { return part.end <= offset; });
    const auto last_part =
        std::partition_point(first_part, parts_.end(), [&](const Part& part) { return part.begin < end; });
    for (auto part = first_part; part != last_part; ++part)
      TOPKNOT_CHECK(!part->matrix || (part->begin >= offset && part->end <= end),
                    "muon takes whole matrices, and a slice cuts " + part->matrix->name());
    for (auto part = first_part; part != last_part; ++part) {
      const std::size_t from = std::max(part->begin, offset), to = std::min(part->end, end);
      if (!part->matrix) {
        adamw_.update(slices_.slice(from, gradient.subspan(from - offset, to - from)), first_.data() + from,
                      second_.data() + from, adamw_constants_, state);
        continue;
      }
      const std::size_t rows = part->rows, cols = (to - from) / rows;
      kernels_.update(
          {slice.weights + (from - offset), slice.gradient + (from - offset), first_.data() + from, rows,
           cols, variant_.shape_factor(static_cast<double>(rows), static_cast<double>(cols))},
          rule_, scratch_.data(), state);
    }
  }

  std::vector<std::span<float>> state() override { return {span_of(first_), span_of(second_)}; }

 private:
  using Given = std::optional<double>;
  // A matrix, or other parameters side by side.
  struct Part {
    std::size_t begin, end, rows;
    const Parameter* matrix;
  };

  const Variant& variant_;
  MuonRule rule_;
  const AdamwConstants adamw_constants_;
  const MuonKernels& kernels_;
  const AdamwKernels& adamw_;
  ArenaSlices slices_;
  std::vector<Part> parts_;  // in the order of the arena
  Tensor first_, second_;    // AdamW's moments; of a matrix first_ is M, and second_ stays 0
  Tensor scratch_;
};

const bool muon_registered = optimizers().add(
    "muon", "Muon for the matrices inside a model, AdamW for all else", optimizer_type<Muon, MuonKernels>(),
    {option::beta1, option::beta2, option::epsilon, kVariant, kMomentum, kAdamLr});

}  // namespace
}  // namespace topknot

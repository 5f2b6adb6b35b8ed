#pragma once
// An optimizer turns averaged gradients into new weights, slice by slice of the parameter arena. Its result
// does not depend on how the arena is cut into slices nor on the number of threads. It is elementwise, and
// slices may cut a parameter, but for muon, which takes whole ones. An optimizer is one class for all
// devices, in one file (optim/sgd.cpp) with the CPU's loop; a GPU's kernel is next to it (optim/sgd.cu).

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "nn/base/registry.h"
#include "nn/core/device.h"
#include "nn/core/parameter.h"
#include "nn/core/step.h"
#include "optim/rules.h"

namespace topknot {

// The keys of section `optimizer`. An optimizer declares those of its own where it is registered.
struct OptimizerOptions : OptionValues {
  OptimizerOptions() : OptionValues("optimizer") {}
  std::string name = "sgd";
  double lr = 0.1;            // base learning rate, > 0; the schedule starts from it
  double momentum = 0.0;      // sgd: in [0, 1)
  bool nesterov = false;      // sgd: needs momentum
  double weight_decay = 0.0;  // >= 0; of w, added to the averaged gradient (sgd) or taken from w
  bool decay_1d = false;      // whether 1-D parameters (biases, batch-norm scales) decay too
};

// Options that several files declare: AdamW's, which muon has for what is no matrix.
namespace option {
inline const Option beta1{"beta1", std::optional<double>(), "decay of the mean gradient; auto: 0.9", 0,
                          0.9999},
    beta2{"beta2", std::optional<double>(), "decay of the mean square; auto: adamw's 0.999, the variant's", 0,
          0.999999},
    epsilon{"epsilon",
            std::optional<double>(),
            "added to the square root of the mean square; auto: adamw's 1e-8, the variant's",
            0,
            1,
            /*above=*/true};
}  // namespace option

class Optimizer {
 public:
  virtual ~Optimizer() = default;

  // Updates the weights of arena elements [offset, offset + gradient.size()) with this averaged gradient,
  // times the step's gradient_scale. Called once per element and step, in any order of slices; nothing
  // changes if the status is bad. `gradient` and `state` are in the arena's memory: on a GPU the work is put
  // on the stream of the current context. `applied`: what the gradient has in it already. Throws Error if the
  // slice lies outside the arena or cuts what must be whole, or if the rule does not allow `applied`.
  virtual void update(std::size_t offset, std::span<const float> gradient, const StepState& state,
                      Applied applied = Applied::nothing) = 0;
  // The same on a CPU, of a step that is not bad.
  void update(std::size_t offset, std::span<const float> gradient, StepParameters step,
              Applied applied = Applied::nothing) {
    update(offset, gradient, StepState{&step}, applied);
  }

  // Whether update() accepts such gradients. A class that does not accept all has its own.
  static bool takes(Applied) { return true; }

  // State to save and restore, in a fixed order, each buffer of the arena's shape and in its memory, or none.
  virtual std::vector<std::span<float>> state() { return {}; }
};

struct OptimizerType {
  std::unique_ptr<Optimizer> (*make)(const OptimizerOptions& options, ParameterArena& arena);
  bool (*computes_on)(DeviceKind) = [](DeviceKind kind) { return kind == DeviceKind::cpu; };
  bool (*takes)(Applied) = Optimizer::takes;
};
Registry<OptimizerType>& optimizers();

// The type of a class whose functions by device are `Kernels` (nn/core/device.h).
template <class Class, class Kernels>
OptimizerType optimizer_type() {
  return {make_as<Optimizer, Class>, [](DeviceKind kind) { return find_kernels<Kernels>(kind) != nullptr; },
          Class::takes};
}

// The arena as update rules see it, with which elements weight decay is for: those of parameters of two
// dimensions and more, or all with options.decay_1d; none if options.weight_decay is 0.
class ArenaSlices {
 public:
  ArenaSlices(const OptimizerOptions& options, ParameterArena& arena);  // the arena must outlive it
  // Throws Error if the slice lies outside the arena.
  ArenaSlice slice(std::size_t offset, std::span<const float> gradient) const;

 private:
  ParameterArena& arena_;
  Tensor boundaries_;  // ArenaSlice::boundaries
  std::uint32_t boundary_count_ = 0;
  bool first_decays_ = false;
};

Tensor zeros_like(const ParameterArena& arena);
inline std::span<float> span_of(Tensor& buffer) {
  return {buffer.data(), static_cast<std::size_t>(buffer.numel())};
}

// Throws UserError, naming the key, for shared values out of range or that contradict each other.
void check_optimizer(const OptimizerOptions& options);

// Throws as check_optimizer(), and for an unknown name or device. The arena must outlive the result.
std::unique_ptr<Optimizer> make_optimizer(const OptimizerOptions& options, ParameterArena& arena);

}  // namespace topknot

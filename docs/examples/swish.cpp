// An op in one file, and a model that uses it: swish(x) = x s(x) with s(x) = 1 / (1 + exp(-x)) (Ramachandran,
// Zoph, Le, "Searching for activation functions", 2017).
#include <cmath>

#include "nn/layers/layers.h"
#include "nn/models/model.h"
#include "nn/ops/kernels.h"

namespace topknot {

// What a backend supplies: functions on tensors.
struct SwishKernels {
  static constexpr const char* op = "swish";  // for messages
  void (*forward)(const Tensor& x, Tensor& y);
  void (*backward)(const Tensor& x, const Tensor& dy, Tensor& dx);
};

// The op itself, for every device: it checks shapes (any will do here), allocates the value and records how
// gradients go back.
Variable swish(const Variable& x) {
  const auto& kernels = kernels_for<SwishKernels>(x);
  Tensor y = Tensor::empty_like(x.value());
  kernels.forward(x.value(), y);
  return {"swish", y, {x}, [=, &kernels](Tensor dy) {
            Tensor dx = Tensor::empty_like(dy);
            kernels.backward(x.value(), dy, dx);
            x.accumulate_grad(std::move(dx));
          }};
}

namespace {

// The kernels for CPUs.
void forward(const Tensor& x, Tensor& y) {
  for (std::int64_t i = 0; i < x.numel(); ++i) y.data()[i] = x.data()[i] / (1 + std::exp(-x.data()[i]));
}

void backward(const Tensor& x, const Tensor& dy, Tensor& dx) {  // dx = dy s(x) (1 + x (1 - s(x)))
  for (std::int64_t i = 0; i < x.numel(); ++i) {
    const float s = 1 / (1 + std::exp(-x.data()[i]));
    dx.data()[i] = dy.data()[i] * s * (1 + x.data()[i] * (1 - s));
  }
}

const bool swish_registered = add_cpu_kernels<SwishKernels>({.forward = forward, .backward = backward});

class SwishNet final : public Module {
 public:
  SwishNet(ParameterStore& store, const ModelOptions& options)
      : hidden_(store, "hidden", options.input.numel(), 64), output_(store, "output", 64, options.outputs) {}

  Variable forward(const Variable& x, const ForwardContext& context) override {
    return output_.forward(swish(hidden_.forward(flatten(x), context)), context);
  }

 private:
  Linear hidden_, output_;
};

const bool swish_net_registered =
    add_model<SwishNet>("swish_net", "two linear layers and swish: the worked example of docs/extending.md");

}  // namespace
}  // namespace topknot

#pragma once
// The seam between the ops and the backends. An op (nn/ops/x.cpp) checks shapes, allocates its value and records its
// backward function once, for all devices. What a backend supplies is a struct of functions on tensors, which the op's
// header declares:
//
//   struct XKernels {
//     static constexpr const char* op = "x";
//     void (*forward)(const Tensor& x, Tensor& y);
//     void (*backward)(const Tensor& dy, Tensor& dx);
//   };
//
// A backend registers its functions from its own file (nn/ops/cpu/x.cpp, nn/ops/cuda/x.cpp), and a program has the
// backends that are linked into it:
//
//   const RegisterKernels<XKernels> registered(DeviceKind::cpu, {.forward = forward, .backward = backward});
//
// The op looks them up by its input's device: kernels_for<XKernels>(x). No file lists the ops, so that a new op touches
// its own files only, and an op without CUDA kernels throws Error on a GPU.
//
// CPU kernels return when their result is there. They take f32, and bf16 where the struct has a member cpu_bfloat16.
// CUDA kernels put their work on the stream of the current context and never block; they may be captured into a graph.
// On a GPU four-dimensional activations are nhwc and others plain. Activations are f32 or, under train.precision bf16,
// bf16; parameters are f32 in the arena's layout (OIHW), and so are their gradients; losses are f32.

#include <memory>

#include "nn/base/check.h"
#include "nn/core/autograd.h"
#include "nn/core/kernels.h"

namespace topknot {

// Null where the backend of x's device has none.
template <class Kernels>
const Kernels* find_kernels(const Variable& x) {
  return find_kernels<Kernels>(x.value().device().kind);
}
template <class Kernels>
const Kernels& kernels_for(const Tensor& x) {
  if constexpr (!requires { Kernels::cpu_bfloat16; })
    TOPKNOT_CHECK(
        x.device().kind != DeviceKind::cpu || x.dtype() == DType::f32,
        std::string(Kernels::op) +
            " takes fp32 alone on a CPU; its op casts bfloat16 first (needs_f32 in nn/ops/layout.h)");
  const Kernels* kernels = find_kernels<Kernels>(x.device().kind);
  TOPKNOT_CHECK(kernels, std::string(Kernels::op) + " has no kernels for " + x.device().str());
  return *kernels;
}
template <class Kernels>
const Kernels& kernels_for(const Variable& x) {
  return kernels_for<Kernels>(x.value());
}

// What a backend keeps from an op's forward pass for its backward pass, beside the op's own tensors: statistics, a
// converted weight, a workspace. Opaque to the op, made by std::make_shared and read by state_as.
using OpState = std::shared_ptr<const void>;
template <class T>
const T& state_as(const OpState& state) {
  return *static_cast<const T*>(state.get());
}

// Where the gradients of an op with a weight and a bias go.
struct WeightedGradients {
  WeightedGradients(const Variable& x_, const Variable& weight_, const Variable& bias_)
      : weight(weight_.gradient_target()),
        bias(bias_.defined() ? bias_.gradient_target() : GradientTarget()),
        x(x_.input_gradient()) {}
  GradientTarget weight, bias;  // data null: not wanted
  InputGradient x;              // undefined: not wanted
};

// For kernels that write a gradient and cannot add to one: write(tensor), with a tensor of its own where dx holds
// contributions of other ops, to which it is added.
template <class Write>
void write_or_add(InputGradient& dx, const Write& write) {
  if (!dx.accumulate) return write(dx.tensor);
  Tensor term = Tensor::empty_like(dx.tensor);
  write(term);
  backend(term.device())
      .add(term.dtype(), dx.tensor.data(), term.data(), dx.tensor.data(),
           static_cast<std::size_t>(term.numel()));
}

}  // namespace topknot

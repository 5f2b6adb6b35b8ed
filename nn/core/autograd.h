#pragma once
// Reverse-mode differentiation over a graph that the forward pass records.
//
// An op is a free function: it computes its value and, a few lines below, captures its backward as a lambda.
// A hook fires once for each parameter, when its gradient is final, however many ops share it.

#include <functional>
#include <memory>
#include <vector>

#include "nn/core/tensor.h"

namespace topknot {

class Parameter;
class Variable;
struct Node;

// Takes the gradient of the loss with respect to the op's value; hands on gradients to the op's inputs.
using BackwardFn = std::function<void(Tensor grad)>;

// Where in the arena an op writes a parameter's gradient or, with accumulate, adds it. `data` null: nowhere.
struct GradientTarget {
  float* data = nullptr;
  bool accumulate = false;
};
// Copies a gradient to its target, or adds it.
void write_gradient(const GradientTarget& target, const Tensor& gradient);

// An activation's gradient as an op may write it. With accumulate the tensor holds the contributions of other
// ops, and the op adds to it, which saves a pass over memory. Undefined if no gradient is wanted.
struct InputGradient {
  Tensor tensor;
  bool accumulate = false;
};

class Variable {
 public:
  Variable() = default;
  explicit Variable(Tensor value);                        // a constant
  explicit Variable(Parameter& parameter, Tensor value);  // a leaf; the arena makes these
  // An op's result. Records nothing if no input needs a gradient.
  Variable(const char* op, Tensor value, std::vector<Variable> inputs, BackwardFn backward);

  bool defined() const { return node_ != nullptr; }
  const Tensor& value() const;
  Tensor& value();
  const Shape& shape() const { return value().shape(); }
  bool requires_grad() const;
  // True if there is no other handle on this variable and its value has its storage alone: no op can read the
  // value any more, and one that takes the variable by value may write its own over it.
  bool exclusive() const;

  // Adds to this variable's gradient. Ignored if none is needed. The tensor must have the value's
  // shape and layout; an op may hand the same tensor to two inputs.
  void accumulate_grad(Tensor grad) const;
  // Removes and returns the gradient so far, or fresh memory; the op gives it back by accumulate_grad().
  InputGradient input_gradient() const;
  // Memory for a parameter's gradient; data is null if this is a constant.
  GradientTarget gradient_target() const;

 private:
  friend struct Node;
  friend class Tape;
  friend class ParameterArena;
  std::shared_ptr<Node> node_;
};

using GradientHook = std::function<void(Parameter&)>;

// Runs the backward pass from a scalar loss (a tensor of one element) and releases the graph on the way.
// `on_grad_ready`: for the last micro-batch. `scale` multiplies all gradients (1 / number of micro-batches).
void backward(const Variable& loss, const GradientHook& on_grad_ready = {}, float scale = 1.0f);

}  // namespace topknot

#pragma once
// A layer of long short-term memory (Hochreiter, Schmidhuber, 1997; with forget gates and without peepholes, as Zaremba,
// Sutskever, Vinyals, arXiv 1409.2329, section 3). s is the logistic function, gates are in PyTorch's order:
//
//   (i, f, g, o) = x_t W_ih^T + b_ih + h_{t-1} W_hh^T + b_hh
//   c_t = s(f) c_{t-1} + s(i) tanh(g)
//   h_t = s(o) tanh(c_t)

#include "nn/core/parameter.h"
#include "nn/ops/kernels.h"

namespace topknot {

struct LstmWeights {
  Variable input, recurrent;            // W_ih [4 width, in], W_hh [4 width, width]
  Variable input_bias, recurrent_bias;  // [4 width] each
};

// The layer's state between batches: row b of each, of `width` elements, is sequence b's. Buffers may have more rows than
// a batch. Null, both of them: every batch begins with zeros, and nothing is carried.
struct LstmState {
  Buffer *hidden = nullptr, *cell = nullptr;
  bool carried() const { return hidden != nullptr; }
};

// x: [steps * batch, in], step by step: row t * batch + b; value: [steps * batch, width], likewise. Begins from the state
// and leaves the last step's there. Back-propagation through time is truncated: no gradient goes into the state.
Variable lstm(const Variable& x, std::int64_t batch, const LstmWeights& weights, const LstmState& state);

// One call as a backend sees it.
struct LstmCall {
  Tensor x, input, recurrent, input_bias, recurrent_bias;
  LstmState state;
  std::int64_t batch, steps, width;
};

// Where the gradients go; data null or an undefined tensor: not wanted. Under bf16 a bias's gradient is a sum of rounded terms on
// the CPU, of terms in fp32 on a GPU.
struct LstmGradients {
  GradientTarget input, recurrent, input_bias, recurrent_bias;
  InputGradient x;
};

struct LstmKernels {
  static constexpr const char* op = "lstm";
  static constexpr bool cpu_bfloat16 = true;
  Tensor (*forward)(const LstmCall& call, OpState& kept);
  void (*backward)(const LstmCall& call, const OpState& kept, const Tensor& y, const Tensor& dy,
                   LstmGradients& out);
};

}  // namespace topknot

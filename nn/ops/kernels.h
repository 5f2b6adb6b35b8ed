#pragma once
// The seam between the ops and the backends. An op (nn/ops/x.cpp) checks shapes, allocates its value and
// records its backward function once, for all devices. What a backend supplies is a struct of functions on
// tensors, which stands below:
//
//   struct XKernels {
//     static constexpr const char* op = "x";
//     void (*forward)(const Tensor& x, Tensor& y);
//     void (*backward)(const Tensor& dy, Tensor& dx);
//   };
//
// The CPU's functions are registered in the op's file, those for a GPU in nn/ops/cuda/x.cu (or .cpp), and a
// program has the backends that are linked into it:
//
//   const bool x_registered = add_cpu_kernels<XKernels>({.forward = forward, .backward = backward});
//
// The op looks them up by its input's device: kernels_for<XKernels>(x). An op whose struct stands in its own
// file touches no other file. An op without CUDA kernels throws Error on a GPU.
//
// CPU kernels return when their result is there. They take f32, and bf16 where the struct has a member
// cpu_bfloat16. CUDA kernels put their work on the stream of the current context and never block; they may be
// captured into a graph. On a GPU four-dimensional activations are nhwc and others plain. Activations are f32
// or, under train.precision bf16, bf16; parameters are f32 in the arena's layout (OIHW), and so are their
// gradients; losses are f32.

#include <memory>
#include <span>
#include <string>

#include "nn/base/check.h"
#include "nn/ops/activation_rule.h"
#include "nn/ops/ops.h"

namespace topknot {

// Null if the backend of x's device has none.
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
            " takes fp32 alone on a CPU; its op casts bfloat16 first (needs_f32 in nn/ops/kernels.h)");
  const Kernels* kernels = find_kernels<Kernels>(x.device().kind);
  TOPKNOT_CHECK(kernels, std::string(Kernels::op) + " has no kernels for " + x.device().str());
  return *kernels;
}
template <class Kernels>
const Kernels& kernels_for(const Variable& x) {
  return kernels_for<Kernels>(x.value());
}

// A backend's state from an op's forward pass to its backward pass, besides the op's own tensors: statistics,
// a converted weight, a workspace. Opaque to the op, made by std::make_shared and read by state_as.
using OpState = std::shared_ptr<const void>;
template <class T>
const T& state_as(const OpState& state) {
  return *static_cast<const T*>(state.get());
}

// The gradients of an op with a weight and a bias.
struct WeightedGradients {
  WeightedGradients(const Variable& x_, const Variable& weight_, const Variable& bias_)
      : weight(weight_.gradient_target()),
        bias(bias_.defined() ? bias_.gradient_target() : GradientTarget()),
        x(x_.input_gradient()) {}
  GradientTarget weight, bias;  // data null: not wanted
  InputGradient x;              // undefined: not wanted
};

// For kernels that write a gradient and cannot add to one: write(tensor), with a tensor of its own where dx
// holds contributions of other ops, to which it is added.
void write_or_add(InputGradient& dx, const auto& write) {
  if (!dx.accumulate) return write(dx.tensor);
  Tensor term = Tensor::empty_like(dx.tensor);
  write(term);
  backend(term.device())
      .add(term.dtype(), dx.tensor.data(), term.data(), dx.tensor.data(),
           static_cast<std::size_t>(term.numel()));
}

// An op on x alone, whose value is y and whose gradient write(grad, dx) makes.
Variable op_on(const char* op, const Variable& x, const Tensor& y, const auto& write) {
  return {op, y, {x}, [=](Tensor grad) {
            Tensor dx = Tensor::empty_like(x.value());
            write(grad, dx);
            x.accumulate_grad(std::move(dx));
          }};
}

// The same values in another layout and type; x itself if both are its own. bfloat16: nearest, ties to even.
Tensor in_form(const Tensor& x, Layout layout, DType type);
inline Tensor to_layout(const Tensor& x, Layout layout) {
  return in_form(x, layout, x.dtype());
}

// For ops whose CPU kernels take f32 alone: true if x is bf16 on a CPU: the op casts x, and its value back.
bool needs_f32(const Variable& x);

struct LayoutKernels {
  static constexpr const char* op = "a change of layout";
  static constexpr bool cpu_bfloat16 = true;
  // `layout` or `type` differs from x's. The layouts are plain and, on a CPU, blocked or, on a GPU, nhwc.
  Tensor (*convert)(const Tensor& x, Layout layout, DType type);
};

struct ReluKernels {
  static constexpr const char* op = "relu";
  static constexpr bool cpu_bfloat16 = true;
  void (*forward)(const Tensor& x, Tensor& y);
  void (*backward)(const Tensor& y, const Tensor& dy,
                   Tensor& dx);  // dx = dy where y > 0, else 0; dx may be dy
};

struct ActivationKernels {
  static constexpr const char* op = "an activation function";
  static constexpr bool cpu_bfloat16 = true;
  void (*forward)(const ActivationRule& rule, const Tensor& x, Tensor& y);
  void (*backward)(const ActivationRule& rule, const Tensor& x, const Tensor& dy,
                   Tensor& dx);  // dx = dy slope(x); dx may be dy
};

struct SwigluKernels {
  static constexpr const char* op = "swiglu";
  static constexpr bool cpu_bfloat16 = true;
  void (*forward)(const Tensor& x, Tensor& y);
  // da = dy b silu'(a);  db = dy silu(a)
  void (*backward)(const Tensor& x, const Tensor& dy, Tensor& dx);
};

// A row has heads of 2 `pairs` elements, `rotated` of queries and keys, then `kept` of values.
struct RopeCall {
  static constexpr std::int64_t kMostPairs = 256;
  std::int64_t rotated, kept, pairs, batch;
  bool back;                    // by minus the angles: the gradient
  double quarters[kMostPairs];  // pair j's angle from one position to the next, in quarter turns
};

struct RopeKernels {
  static constexpr const char* op = "rope";
  static constexpr bool cpu_bfloat16 = true;
  void (*rotate)(const RopeCall& call, const Tensor& x, Tensor& y);  // y may be x
};

struct DropoutKernels {
  static constexpr const char* op = "dropout";
  static constexpr bool cpu_bfloat16 = true;
  // The mask of a tensor of x's shape and layout, and t times that mask.
  OpState (*mask)(const Tensor& x, float p, const CounterRng& rng, const std::uint32_t* step);
  Tensor (*times_mask)(const Tensor& t, const OpState& mask);
};

struct LinearKernels {
  static constexpr const char* op = "linear";
  static constexpr bool cpu_bfloat16 = true;
  OpState (*forward)(const Tensor& x, const Tensor& weight, const Tensor& bias, Tensor& y);
  // dW = dy^T x;  dx = dy W;  db = sum_n dy
  void (*backward)(const Tensor& x, const Tensor& weight, const Tensor& dy, const OpState& state,
                   WeightedGradients& out);
};

struct ConvKernels {
  static constexpr const char* op = "conv2d";
  static constexpr bool cpu_bfloat16 = true;
  Layout (*output_layout)(const ConvGeometry& geometry);
  OpState (*forward)(const ConvGeometry& geometry, const Tensor& x, const Tensor& weight, const Tensor& bias,
                     Tensor& y);
  // dw[o,c,p,q] = sum_{n,i,j} dy[n,o,i,j] x[n, g in / groups + c, i*s+p-pad, j*s+q-pad];
  // dx = the transposed convolution of dy;  db[o] = sum_{n,i,j} dy[n,o,i,j]
  void (*backward)(const ConvGeometry& geometry, const Tensor& x, const Tensor& weight, const Tensor& dy,
                   const OpState& state, WeightedGradients& out);
};

struct BatchNormArguments {
  Tensor x, gamma, beta, residual;  // residual: undefined if there is none
  BatchNormState state;
  BatchNormOptions options;
};

struct BatchNormGradients {
  GradientTarget gamma, beta;  // data null: not wanted
  InputGradient x;             // undefined: not wanted
  bool want_residual = false;
  Tensor residual;  // out
};

// With xhat = (x - mean) / sqrt(var + eps), M = N H W and g the gradient (with relu where y > 0):
//   dbeta = sum g,  dgamma = sum g xhat,  dresidual = g
//   dx = gamma / sqrt(var + eps) (g - dbeta / M - xhat dgamma / M)
// Outside training mean and var do not depend on x: only the first term of dx is left.
struct BatchNormKernels {
  static constexpr const char* op = "batch_norm";
  static constexpr bool cpu_bfloat16 = true;
  Tensor (*forward)(const BatchNormArguments& call, OpState& state);
  // `grad` may be written over if it is the caller's alone.
  void (*backward)(const BatchNormArguments& call, const OpState& state, Tensor grad,
                   BatchNormGradients& out);
};

// conv_bn in one piece. call.x is the input of the convolution, out.x its gradient.
struct ConvBnKernels {
  Tensor (*forward)(const ConvGeometry& geometry, const Tensor& weight, const BatchNormArguments& call,
                    OpState& state);
  void (*backward)(const ConvGeometry& geometry, const Tensor& weight, const BatchNormArguments& call,
                   const OpState& state, Tensor grad, GradientTarget weight_gradient,
                   BatchNormGradients& out);
};

struct NormCall {
  bool centred;  // layer_norm; else rms_norm, whose mean is taken for 0
  float epsilon;
  Tensor x;             // with a branch: the sum, which forward() writes
  Tensor weight, bias;  // bias: undefined if there is none
};

// With g = dy w, r = 1 / sqrt(var + eps), xhat = (x - mean) r and means over a row:
//   dx = r (g - mean(g) - xhat mean(g xhat));  dw = sum over rows of dy xhat;  db = sum over rows of dy
// For rms_norm mean is 0, var the mean of x^2, and dx has no mean(g).
struct NormKernels {
  static constexpr const char* op = "layer_norm and rms_norm";
  static constexpr bool cpu_bfloat16 = true;
  // `statistics`: [2, rows], f32, out: each row's mean and r. left, branch: if defined, call.x = left +
  // branch is written first, and is y's input as it is stored.
  void (*forward)(NormCall& call, const Tensor& left, const Tensor& branch, Tensor& y, Tensor& statistics);
  void (*backward)(const NormCall& call, const Tensor& statistics, const Tensor& dy, WeightedGradients& out);
};

struct LrnKernels {
  static constexpr const char* op = "local_response_norm";
  OpState (*forward)(const LrnOptions& options, const Tensor& x, Tensor& y);
  // dx_c = dy_c / d_c^beta - 2 alpha beta x_c sum over j of dy_j x_j / d_j^(beta + 1)
  void (*backward)(const LrnOptions& options, const OpState& state, const Tensor& x, const Tensor& dy,
                   Tensor& dx);
};

struct PoolKernels {
  static constexpr const char* op = "pool";
  static constexpr bool cpu_bfloat16 = true;
  OpState (*forward)(const PoolGeometry& geometry, const Tensor& x, Tensor& y);
  void (*backward)(const PoolGeometry& geometry, const OpState& state, const Tensor& x, const Tensor& y,
                   const Tensor& dy, Tensor& dx);
};

struct GlobalAveragePoolKernels {
  static constexpr const char* op = "global_average_pool";
  static constexpr bool cpu_bfloat16 = true;
  void (*forward)(const Tensor& x, Tensor& y);
  void (*backward)(const Tensor& dy, Tensor& dx);  // dx = dy / (H W), everywhere
};

struct PadKernels {
  static constexpr const char* op = "pad_end";
  static constexpr bool cpu_bfloat16 = true;
  void (*forward)(const Tensor& x, float value, Tensor& y);
  void (*backward)(const Tensor& dy, Tensor& dx);  // dx = dy without the rows and columns
};

struct ShortcutKernels {
  static constexpr const char* op = "subsample_and_pad";
  static constexpr bool cpu_bfloat16 = true;
  void (*forward)(const Tensor& x, Tensor& y);
  void (*backward)(const Tensor& dy, Tensor& dx);  // the transpose: pixels that were left out get zero
};

// Channels from + i from_step of one tensor and to + i to_step of another, for i < count.
struct ChannelRun {
  std::int64_t count = 0, from = 0, to = 0, from_step = 1, to_step = 1;
  ChannelRun reversed() const { return {count, to, from, to_step, from_step}; }
};

struct ChannelCopyKernels {
  static constexpr const char* op = "a copy of channels";
  static constexpr bool cpu_bfloat16 = true;
  // A layout in which x's channels can be copied so; x's own if possible.
  Layout (*layout)(const Tensor& x, const ChannelRun& run, std::int64_t other_channels);
  // y's channels of the run become x's, or x's are added to them. Both have that layout.
  void (*copy)(const Tensor& x, Tensor& y, const ChannelRun& run, bool accumulate);
};

struct ScaleChannelsKernels {
  static constexpr const char* op = "scale_channels";
  static constexpr bool cpu_bfloat16 = true;
  void (*forward)(const Tensor& x, const Tensor& s, Tensor& y);  // its own gradient: dx = forward(dy, s)
  void (*scale_gradient)(const Tensor& x, const Tensor& dy,
                         Tensor& ds);  // ds[n,c] = sum over h, w of dy[n,c,h,w] x[n,c,h,w]
};

struct EmbeddingKernels {
  static constexpr const char* op = "embedding";
  Tensor (*forward)(const Tensor& ids, const Tensor& weight);
  // dW[id] = sum of dy over the rows with this id, in their order, 0 if there is none; dense.
  void (*backward)(const Tensor& ids, const Tensor& dy, std::int64_t tokens, const GradientTarget& weight);
};

struct PositionsKernels {
  static constexpr const char* op = "add_positions";
  static constexpr bool cpu_bfloat16 = true;
  void (*forward)(const Tensor& x, std::int64_t batch, const Tensor& weight, Tensor& y);
  // dW[t] = sum_b dy[t * batch + b], in the order of b; 0 for t >= steps
  void (*weight_gradient)(const Tensor& dy, std::int64_t batch, std::int64_t positions,
                          const GradientTarget& weight);
};

struct FramesKernels {
  static constexpr const char* op = "frames_to_rows";
  // x [N, C, H, T] in a layout of its device; rows [T * N, C * H].
  void (*gather)(const Tensor& x, Tensor& rows);
  void (*scatter)(const Tensor& rows, Tensor& x);  // the reverse
};

struct MaskFramesKernels {
  static constexpr const char* op = "mask_frames";
  static constexpr bool cpu_bfloat16 = true;
  void (*mask)(const Tensor& x, std::span<const std::int32_t> frames, Tensor& y);
};

struct LookaheadKernels {
  static constexpr const char* op = "lookahead";
  // y[row] = sum_j w[:,j] x[row + j * shift], of rows that exist: shift is batch, or -batch for dx from dy.
  void (*filter)(const Tensor& x, const Tensor& weight, std::int64_t shift, Tensor& y);
  // dw[f,j] = sum_row dy[row,f] x[row + j * batch, f]
  void (*weight_gradient)(const Tensor& x, const Tensor& dy, std::int64_t batch, Tensor& dw);
};

struct LstmCall {
  Tensor x, input, recurrent, input_bias, recurrent_bias;
  LstmState state;
  std::int64_t batch, steps, width;
};

// The gradients; data null or an undefined tensor: not wanted. Under bf16 a bias's gradient is a sum of
// rounded terms on the CPU, of terms in fp32 on a GPU.
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

struct AttentionShape {
  std::int64_t heads, kv_heads, batch, steps, width;  // width: of a head
  bool causal;
  std::int64_t share() const { return heads / kv_heads; }  // heads of queries to one of keys and values
  // Operations of the forward products, without those that causal attention omits; gradients: twice as many.
  double flops() const {
    const auto t = static_cast<double>(steps);
    return 4 * (causal ? t * (t + 1) / 2 : t * t) * static_cast<double>(batch * heads * width);
  }
};

struct AttentionKernels {
  static constexpr const char* op = "attention";
  static constexpr bool cpu_bfloat16 = true;
  OpState (*forward)(const AttentionShape& shape, const Tensor& qkv, Tensor& y);
  void (*backward)(const AttentionShape& shape, const Tensor& qkv, const Tensor& y, const Tensor& dy,
                   const OpState& state, Tensor& dqkv);
};

struct CrossEntropyKernels {
  static constexpr const char* op = "softmax_cross_entropy";
  static constexpr bool cpu_bfloat16 = true;
  OpState (*forward)(const Tensor& logits, std::span<const std::int32_t> labels, float smoothing,
                     Tensor& loss);
  // dz = (softmax(z) - t) grad[0] / rows that are not masked
  void (*backward)(const Tensor& logits, const OpState& state, float smoothing, const Tensor& grad,
                   Tensor& dz);
  void (*count_correct)(const Tensor& logits, std::span<const std::int32_t> labels, int top, double* sum);
};

struct LinearCrossEntropyCall {
  Tensor x, weight;
  std::span<const std::int32_t> labels;
  float smoothing;
  std::int64_t chunk;  // rows of x whose logits are there at a time, 1 to all
};

struct LinearCrossEntropyKernels {
  static constexpr const char* op = "linear_cross_entropy";
  static constexpr bool cpu_bfloat16 = true;
  // With z = x W^T, chunk by chunk, and dz = (softmax(z) - t) / rows that are not masked:
  //   dx = dz W,  dweight = dz^T x
  // in f32, of the shapes of x and the weight; undefined: not wanted.
  void (*forward)(const LinearCrossEntropyCall& call, Tensor& loss, Tensor& dx, Tensor& dweight);
  // to = by[0] from, or with `accumulate` to += that; `from` is f32, `to` of either type.
  void (*scale)(const Tensor& from, const Tensor& by, bool accumulate, Tensor& to);
};

struct SquaredErrorKernels {
  static constexpr const char* op = "mean_squared_error";
  void (*forward)(const Tensor& y, const Tensor& target, Tensor& loss);
  // dy = (y - target) 2 grad[0] / numel
  void (*backward)(const Tensor& y, const Tensor& target, const Tensor& grad, Tensor& dy);
};

struct CtcKernels {
  static constexpr const char* op = "ctc_loss";
  // `dz`, if defined: sum_n d(-log p)/dlogits, f32, of the logits' shape.
  void (*forward)(const Tensor& logits, const CtcTargets& targets, std::int32_t blank, Tensor& loss,
                  Tensor& dz);
  // out = dz grad[0] / sequences
  void (*backward)(const Tensor& dz, std::int64_t sequences, const Tensor& grad, Tensor& out);
};

}  // namespace topknot

#pragma once
// The ops: free functions on variables. Each checks its inputs, computes its value on the device of the input
// and records its backward function; wrong shapes throw Error. nn/ops/NAME.cpp has an op's value, gradient
// and CPU kernels, nn/ops/kernels.h what a backend supplies.

#include <cstdint>
#include <span>
#include <vector>

#include "nn/core/parameter.h"
#include "nn/core/rng.h"

namespace topknot {

// ---- Types and shapes

// The same values in another type, and so the gradient.
Variable cast(const Variable& x, DType type);

// [N, C, H, W] or [N, F] -> [N, C * H * W], in that order.
Variable flatten(const Variable& x);

// ---- Single elements

Variable relu(const Variable& x);  // max(0, x); a NaN stays one

Variable clamp(const Variable& x, float low, float high);  // min(max(x, low), high): hardtanh
inline Variable relu6(const Variable& x) {
  return clamp(x, 0.0f, 6.0f);
}
Variable hardswish(const Variable& x);  // x relu6(x + 3) / 6
Variable sigmoid(const Variable& x);    // s(x) = 1 / (1 + e^-x)
Variable silu(const Variable& x);       // x s(x)
Variable gelu(const Variable& x);       // x Phi(x), exact: PyTorch's GELU(approximate="none")
Variable gelu_tanh(const Variable& x);  // GPT-2's approximation of it: approximate="tanh"

// silu(a) b, the gate of a feed-forward layer (Shazeer, "GLU variants improve transformer", arXiv 2002.05202,
// equation 6). x: [rows, 2 width], a row's `width` elements of a first, then those of b; value: [rows,
// width].
Variable swiglu(const Variable& x);

// Rotary position embedding (Su et al., "RoFormer", arXiv 2104.09864, equation 34) of a row's queries and keys
// by their position t: with a head of d elements, elements j and j + d / 2 are a pair, as in Hugging Face's
// files (not 2 j and 2 j + 1, as in the paper), and turn by the angle t base^(-2 j / d). Values pass unchanged.
//
// qkv: [steps * batch, (heads + 2 kv_heads) d], tokens step by step: row t * batch + b is token t of sequence
// b; a row has `heads` heads of queries, `kv_heads` of keys and as many of values. d is even and at most 512;
// base is 1 or more. Cosines and sines are within 1e-7 up to position 2^20; code that rounds base^(-2 j / d) to
// fp32, as Hugging Face's does, turns by up to 6e-8 t radians more or less.
//
// A variable that nobody else holds, as in rope(linear(...), ...), is rotated in its own memory.
Variable rope(Variable qkv, std::int64_t heads, std::int64_t kv_heads, std::int64_t batch,
              float base = 10000.0f);

// a + b, of one shape; layouts and types may differ, the result has a's.
Variable add(const Variable& a, const Variable& b);

// Each element is zeroed with probability p, the others are divided by 1 - p (inverted dropout); p in [0, 1).
// The i-th element in N, C, H, W order takes the i-th number of `rng`, for any layout, thread count and
// device. `step`, if not null, is a word in GPU memory that replaces the first number of the stream
// (CounterRng's a), so that a captured graph draws new numbers in each step; for a GPU only.
Variable dropout(const Variable& x, float p, const CounterRng& rng, const std::uint32_t* step = nullptr);

// ---- Layers with weights

// Fully connected layer: y = x W^T + b. x: [N, in]; weight: [out, in]; bias: [out] or undefined; y: [N, out].
Variable linear(const Variable& x, const Variable& weight, const Variable& bias);

// Along the two sides of an image; one number stands for both.
struct Extent {
  std::int64_t height, width;
  constexpr Extent(std::int64_t both) : height(both), width(both) {}
  constexpr Extent(std::int64_t height_, std::int64_t width_) : height(height_), width(width_) {}
  auto operator<=>(const Extent&) const = default;
};

struct ConvGeometry {
  std::int64_t in = 0, out = 0;  // channels
  Extent kernel = 3, stride = 1, padding = 1;
  std::int64_t groups = 1;  // divides in and out

  Shape weight_shape() const { return {out, in / groups, kernel.height, kernel.width}; }
  bool depthwise() const { return groups > 1 && groups == in && groups == out; }
  // Error if the geometry is invalid, x is not [N, in, H, W], or the kernel is larger than the padded x.
  Shape output_shape(const Shape& x) const;
  // Operations of y, and of each gradient of x and w: 2 per multiply-add, those with padding included.
  double flops(const Shape& x) const {
    return 2.0 * static_cast<double>(output_shape(x).numel() * (in / groups) * kernel.height * kernel.width);
  }
  auto operator<=>(const ConvGeometry&) const = default;
};

// Two-dimensional convolution (cross-correlation) with zero padding, in groups: output channel o of group g =
// o / (out / groups) reads the in / groups input channels from g in / groups on.
//
//   y[n,o,i,j] = b[o] + sum_{c,p,q} w[o,c,p,q] x[n, g in / groups + c, i*stride + p - padding, j*stride + q - padding]
//
// with the stride and padding of either direction. groups = in = out is the depthwise convolution.
//
// x: [N, in, H, W]; weight: OIHW, of weight_shape(); bias: [out] or undefined.
Variable conv2d(const Variable& x, const Variable& weight, const Variable& bias,
                const ConvGeometry& geometry);

// ---- Normalisation

// A layer's running statistics; [C] each.
struct BatchNormState {
  Buffer *mean = nullptr, *variance = nullptr;
  float momentum = 0.1f;  // weight of the new batch
  float epsilon = 1e-5f;
};

struct BatchNormOptions {
  bool training = true;
  bool relu = false;
};

// Batch normalisation over N, H, W (Ioffe and Szegedy, 2015), with what usually follows it fused in:
//
//   y = relu(gamma (x - mean) / sqrt(var + eps) + beta + residual)
//
// mean and var are the batch's in training (var biased), the running ones otherwise. The running variance
// takes the unbiased batch variance, as PyTorch's does.
//
// x: [N, C, H, W]; gamma, beta: [C]; residual: as x in shape and layout, or undefined.
Variable batch_norm(const Variable& x, const Variable& gamma, const Variable& beta, const Variable& residual,
                    const BatchNormState& state, const BatchNormOptions& options);

// batch_norm(conv2d(x)), maybe fused (ConvBnKernels); residual: as the convolution's output, or undefined.
Variable conv_bn(const Variable& x, const Variable& weight, const Variable& gamma, const Variable& beta,
                 const Variable& residual, const ConvGeometry& geometry, const BatchNormState& state,
                 const BatchNormOptions& options);

// Layer normalisation (Ba, Kiros, Hinton, arXiv 1607.06450, section 3) of each row, as PyTorch's LayerNorm:
//
//   y = w (x - mean) / sqrt(var + epsilon) + b, mean and var (biased) over the row
//
// x: [rows, width]; weight: [width]; bias: [width] or undefined. Statistics are f32, those of a bf16 row too.
Variable layer_norm(const Variable& x, const Variable& weight, const Variable& bias, float epsilon = 1e-5f);

// Root mean square layer normalisation (Zhang, Sennrich, arXiv 1910.07467, equation 4; epsilon as LLaMA's):
//
//   y = w x / sqrt(mean of x^2 + epsilon), the mean over the row
//
// x: [rows, width]; weight: [width]. Under bf16 x / sqrt(...) is not rounded before it is multiplied by w.
Variable rms_norm(const Variable& x, const Variable& weight, float epsilon = 1e-5f);

// A residual branch's sum, which the next branch is added to, and its norm, which that branch reads.
struct SumAndNorm {
  Variable sum, norm;
};

// {s, layer_norm(s, ...)} and {s, rms_norm(s, ...)} with s = add(x, branch), the same bits; one pass over
// memory. x, branch: [rows, width].
SumAndNorm add_layer_norm(const Variable& x, const Variable& branch, const Variable& weight,
                          const Variable& bias, float epsilon = 1e-5f);
SumAndNorm add_rms_norm(const Variable& x, const Variable& branch, const Variable& weight,
                        float epsilon = 1e-5f);

struct LrnOptions {
  std::int64_t size = 5;  // odd
  float alpha = 1e-4f, beta = 0.75f, k = 2;
  auto operator<=>(const LrnOptions&) const = default;
};

// Local response normalisation across channels (Krizhevsky, Sutskever, Hinton, "ImageNet classification with
// deep convolutional neural networks", NIPS 2012, section 3.3):
//
//   y_c = x_c / d_c^beta,  d_c = k + alpha sum x_j^2 over the `size` channels j around c that there are
//
// x: [N, C, H, W]. Layout as x's.
Variable local_response_norm(const Variable& x, const LrnOptions& options = {});

// ---- Pixels: pooling, padding, shortcuts

enum class PoolKind {
  max,      // the gradient goes to the window's first maximum; oneDNN passes over a NaN in the window
  average,  // of the elements inside the image: padding is not counted
};

struct PoolGeometry {
  PoolKind kind = PoolKind::max;
  std::int64_t window = 2, stride = 2, padding = 0;
  std::int64_t output_size(std::int64_t size) const { return (size + 2 * padding - window) / stride + 1; }
  auto operator<=>(const PoolGeometry&) const = default;
};

// [N, C, H, W] -> [N, C, output_size(H), output_size(W)]; Error for a window larger than the padded image.
Variable pool(const Variable& x, const PoolGeometry& geometry);

// [N, C, H, W] -> [N, C], the mean of each channel.
Variable global_average_pool(const Variable& x);

// Rows and columns of one value after an image: for paddings that a convolution or pooling, which pads alike
// on both sides, does not have (TensorFlow's SAME on an even side, Caffe's pooling that rounds up).
//
// [N, C, H, W] -> [N, C, H + rows, W + columns], x first, `value` elsewhere. Layout as x's.
Variable pad_end(const Variable& x, std::int64_t rows, std::int64_t columns, float value = 0);

// The parameter-free shortcut of He et al., "Deep residual learning for image recognition", CVPR 2016,
// section 4.2, option A: every second pixel, and zero channels on both sides to reach the wider layer.
//
// [N, C, H, W] -> [N, channels, ceil(H / 2), ceil(W / 2)]; channels - C zeros, half first. Layout as x's.
Variable subsample_and_pad(const Variable& x, std::int64_t channels);

// ---- Channels

// [N, C_i, H, W] for each part -> [N, sum C_i, H, W], the parts' channels one after the other.
Variable concat(const std::vector<Variable>& parts);

// Channels [begin, begin + count) of x.
Variable slice_channels(const Variable& x, std::int64_t begin, std::int64_t count);

// Channel g n + i becomes i groups + g, C = groups n (Zhang et al., "ShuffleNet", CVPR 2018, section 3.1).
Variable channel_shuffle(const Variable& x, std::int64_t groups);

// A factor for each channel of each image: the last step of squeeze and excitation (Hu, Shen, Sun,
// "Squeeze-and-excitation networks", CVPR 2018, equation 4).
//
// y[n,c,h,w] = x[n,c,h,w] s[n,c]. x: [N, C, H, W]; s: [N, C]. Layout as x's.
Variable scale_channels(const Variable& x, const Variable& s);

// ---- Sequences: rows of features, step by step; of a picture of sound, [N, C, H, T], a row a frame.

// Embedding: a row of the weight for each token of a batch of sequences.
//
// ids: [batch, steps, 1, 1], f32 that hold integers from 0 to tokens - 1; weight: [tokens, width]. The value
// has the rows step by step, [steps * batch, width]: row t * batch + b is that of sequence b at step t. On a
// CPU an id beyond the weight throws Error. On a GPU, if the host does not read them, its row is NaN.
Variable embedding(const Variable& ids, const Variable& weight);

// Learned positions (Radford et al., "Improving language understanding by generative pre-training", 2018).
//
// y[t * batch + b] = x[t * batch + b] + weight[t]. x: [steps * batch, width], step by step as embedding()
// gives it; weight: [positions, width], positions >= steps. Later positions' gradient is 0.
Variable add_positions(const Variable& x, std::int64_t batch, const Variable& weight);

// [N, C, H, T] -> [T * N, C * H], frame by frame: row t * N + n has x[n, :, :, t], in the order C, H.
Variable frames_to_rows(const Variable& x);

// x with zeros in the frames after a sequence's own: frames[n], 0 to T, of sequence n, on x's device and
// there until the backward pass has been. x is [N, C, H, T], or rows [T * N, F] in the order of
// frames_to_rows(). With no `frames` x itself.
Variable mask_frames(const Variable& x, std::span<const std::int32_t> frames);

// [M, F] -> [M, F, 1, 1], in the device's layout of activations, for ops on channels; flatten() undoes it.
Variable rows_to_images(const Variable& x);

// Lookahead convolution (Wang, Yogatama, Coates, Han, Hannun, Xiao, "Lookahead convolution layer for
// unidirectional recurrent neural networks", ICLR workshop 2016; Deep Speech 2, section 3.5): each feature of
// a frame is a weighted sum of its own and of the next frames'.
//
//   y[t,n,f] = sum_{j < taps, t+j < T} w[f,j] x[t+j,n,f]
//
// x, value: [T * batch, features], frame by frame: row t * batch + n; weight: [features, taps].
Variable lookahead(const Variable& x, std::int64_t batch, const Variable& weight);

struct LstmWeights {
  Variable input, recurrent;            // W_ih [4 width, in], W_hh [4 width, width]
  Variable input_bias, recurrent_bias;  // [4 width] each
};

// The layer's state between batches: row b of each, of `width` elements, is sequence b's. Buffers may have
// more rows than a batch. Null, both of them: every batch begins with zeros, and nothing is carried.
struct LstmState {
  Buffer *hidden = nullptr, *cell = nullptr;
  bool carried() const { return hidden != nullptr; }
};

// A layer of long short-term memory (Hochreiter, Schmidhuber, 1997; with forget gates and without peepholes,
// as Zaremba, Sutskever, Vinyals, arXiv 1409.2329, section 3). s is the logistic function, gates are in
// PyTorch's order:
//
//   (i, f, g, o) = x_t W_ih^T + b_ih + h_{t-1} W_hh^T + b_hh
//   c_t = s(f) c_{t-1} + s(i) tanh(g)
//   h_t = s(o) tanh(c_t)
//
// x: [steps * batch, in], step by step: row t * batch + b; value: [steps * batch, width], likewise. Begins
// from the state and leaves the last step's there. Back-propagation is truncated: none goes into the state.
Variable lstm(const Variable& x, std::int64_t batch, const LstmWeights& weights, const LstmState& state);

// Scaled dot-product attention with several heads (Vaswani et al., "Attention is all you need", NIPS 2017,
// section 3.2), whose key-value heads may be fewer (Ainslie et al., "GQA", EMNLP 2023, section 2.2). Of head
// h, with g = h / (heads / kv_heads):
//
//   y[t,b,h] = sum_u P[t,u] v[u,b,g],  P[t,:] = softmax over u of q[t,b,h] . k[u,b,g] / sqrt(d)
//
// over all tokens u of the sequence b, or with `causal` those up to t.
//
// qkv: [steps * batch, (heads + 2 kv_heads) d], step by step: row t * batch + b has the queries head by head,
// then the keys, then the values; the value: [steps * batch, heads d], likewise. Any number of steps.
//
// Memory beyond the tensors is linear in the steps: blocks of scores are computed one at a time with an
// online softmax, a logarithm is kept for each row and head, and the backward pass computes the scores again
// (Dao, "FlashAttention-2", arXiv 2307.08691, algorithms 1 and 2). Scores, weights and sums are fp32 for
// bfloat16 too, on CPUs and GPUs. A NaN makes the value NaN for every token that sees it; a NaN among the
// values maybe also for some of the tokens before it. On GPUs d is at most kWidestHeadOnGpu.
inline constexpr std::int64_t kWidestHeadOnGpu = 256;  // 8 elements for each lane of a warp
Variable attention(const Variable& qkv, std::int64_t heads, std::int64_t kv_heads, std::int64_t batch,
                   bool causal);

// ---- Losses: a scalar of shape [1], the mean over the batch. Padded sequences mask what is no part of them:
// by labels, and in ctc_loss() by numbers of frames.

// mean_n -sum_c t_c log softmax(logits[n])[c], where t is 1 for labels[n] and 0 else, or with `smoothing` e,
// in [0, 1), 1 - e + e / classes and e / classes (Szegedy et al., "Rethinking the Inception Architecture",
// 2016, section 7; PyTorch's label_smoothing); 0 if all rows are masked. logits: [N, classes]; labels in [0,
// classes) or kNoLabel, in the memory of the logits' device. On a CPU another label throws Error and the
// labels are copied. On a GPU, where the host does not read them, another label makes the loss and its row's
// gradient NaN, and the labels outlive the backward pass.
Variable softmax_cross_entropy(const Variable& logits, std::span<const std::int32_t> labels,
                               float smoothing = 0);

// softmax_cross_entropy(linear(x, weight), labels, smoothing) without a matrix of all logits: those of
// `chunk` rows of x are there at a time. What is lost of a chunk gives its part of the gradients at once, so
// that logits are computed once (Hsu et al., "Liger Kernel", arXiv 2410.10989, section 3.2, "fused linear
// cross entropy"). The backward pass multiplies the gradients by that of the loss.
//
// x: [N, width]; weight: [classes, width], a parameter that other ops may share (an embedding's); labels and
// smoothing as above. Logits are f32, also under bf16. Memory besides the value: chunk x classes logits
// during the pass and, on a CPU with several chunks, copies of the weight; if gradients are wanted, N x width
// + classes x width floats until the backward pass. `chunk` > 0, or 0: by the numbers of rows and classes,
// 2^24 logits at most or 64 rows. Chunks are added in their order.
Variable linear_cross_entropy(const Variable& x, const Variable& weight, std::span<const std::int32_t> labels,
                              float smoothing = 0, std::int64_t chunk = 0);

// mean over all elements of (y - target)^2; both [N, D] in plain layout on one device, the target f32.
Variable mean_squared_error(const Variable& y, const Tensor& target);

// *sum += the rows of logits [N, classes] whose label is among the `top` greatest classes, of equal ones the
// first; a NaN is greater than a number, and a label whose own logit is a NaN comes last. Labels as above (on
// a GPU another one is never found), and `sum` in the memory of the logits' device.
void count_correct(const Tensor& logits, std::span<const std::int32_t> labels, int top, double* sum);

// The targets of N sequences, all in the memory of the logits' device.
struct CtcTargets {
  std::span<const std::int32_t>
      labels;  // [N, longest]: of a sequence the first lengths[n]; classes, but not the blank
  std::span<const std::int32_t> lengths;  // [N], 0 to longest
  std::span<const std::int32_t> frames;   // [N], 1 to T: what lies after them has no part
};

// The frames that an alignment takes at least: one per label, and a blank between equal neighbours.
std::int64_t ctc_frames_needed(std::span<const std::int32_t> labels);

// Connectionist temporal classification (Graves, Fernández, Gomez, Schmidhuber, ICML 2006): the likelihood of
// label sequences that are not aligned to the frames.
//
// 1/N sum_n -log p(labels[n] | softmax(logits[n])), a scalar of shape [1]. logits: [T * N, classes], frame by
// frame: row t * N + n. On a CPU, targets that are out of range or longer than their frames allow throw
// Error. On a GPU, where the host does not read them, they make the loss and the sequence's gradient NaN; the
// targets outlive the backward pass.
Variable ctc_loss(const Variable& logits, const CtcTargets& targets, std::int32_t blank = 0);

}  // namespace topknot

// Logits and outputs are float or bfloat16; all else in double.
#include "nn/core/cuda/context.h"
#include "nn/ops/ctc_rule.h"
#include "nn/ops/cuda/op_tools.h"

namespace topknot::cuda {
namespace {

// N sequences of T frames, frame by frame, as ctc_loss() takes them.
struct CtcBatch {
  const void* logits;  // [T * N, classes]
  std::int64_t frames, sequences, classes, longest;
  const std::int32_t *labels, *lengths, *frame_counts;
  std::int32_t blank;

  TOPKNOT_HOST_DEVICE std::int64_t states() const { return 2 * longest + 1; }
};

template <class T>
__device__ float ctc_logit(const CtcBatch& b, std::int64_t row, std::int64_t c) {
  return as_float(static_cast<const T*>(b.logits)[row * b.classes + c]);
}

// log_sums [T * N]: of each row's softmax. A thread per row.
template <class T>
__global__ void __launch_bounds__(kThreads) ctc_log_sums_kernel(CtcBatch b, double* log_sums) {
  const std::int64_t row = awaited_index<std::int64_t>();
  if (row >= b.frames * b.sequences) return;
  double top = ctc_logit<T>(b, row, 0), sum = 0;
  for (std::int64_t c = 1; c < b.classes; ++c) {
    const double z = ctc_logit<T>(b, row, c);
    top = z > top ? z : top;
  }
  for (std::int64_t c = 0; c < b.classes; ++c) sum += exp(ctc_logit<T>(b, row, c) - top);
  log_sums[row] = top + log(sum);
}

__device__ CtcStates ctc_states_of(const CtcBatch& b, std::int64_t n) {
  return {b.labels + n * b.longest, b.lengths[n], b.blank};
}

// One thread calls it.
__device__ bool ctc_possible(const CtcBatch& b, std::int64_t n) {
  const std::int64_t length = b.lengths[n], frames = b.frame_counts[n];
  if (length < 0 || length > b.longest || frames < 1 || frames > b.frames) return false;
  const std::int32_t* labels = b.labels + n * b.longest;
  std::int64_t needed = length;
  for (std::int64_t s = 0; s < length; ++s) {
    if (labels[s] < 0 || labels[s] >= b.classes || labels[s] == b.blank) return false;
    needed += s > 0 && labels[s] == labels[s - 1];
  }
  return needed <= frames;
}

// losses [N] = -log p, NaN if the targets are out of range or longer than their frames allow. alpha [N, T,
// states], scratch [N, 2, states]. A block per sequence, a thread per state. Where `gradient`, alpha becomes
// the log of the share that a state has in p at a frame.
template <class T>
__global__ void __launch_bounds__(kThreads)
    ctc_variables_kernel(CtcBatch b, const double* log_sums, double* alpha, double* scratch, double* losses,
                         bool gradient) {
  await_previous();
  __shared__ bool possible;
  const std::int64_t n = blockIdx.x;
  if (threadIdx.x == 0) possible = ctc_possible(b, n);
  __syncthreads();
  if (!possible) {
    if (threadIdx.x == 0) losses[n] = nan("");
    return;
  }
  const CtcStates states = ctc_states_of(b, n);
  const int size = states.size(), me = static_cast<int>(threadIdx.x);
  const std::int64_t frames = b.frame_counts[n];
  double* mine = alpha + n * b.frames * b.states();
  const auto own = [&](std::int64_t t, int s) {
    const std::int64_t row = t * b.sequences + n;
    return ctc_logit<T>(b, row, states.label(s)) - log_sums[row];
  };
  for (std::int64_t t = 0; t < frames; ++t) {
    double* now = mine + t * b.states();
    for (int s = me; s < size; s += kThreads)
      now[s] = ctc_forward(states, s, t > 0 ? now - b.states() : nullptr) + own(t, s);
    __syncthreads();
  }
  const double* last = mine + (frames - 1) * b.states();
  const double log_p = size > 1 ? log_add(last[size - 1], last[size - 2]) : last[0];
  __syncthreads();
  if (me == 0) losses[n] = -log_p;
  if (!gradient) return;
  double *now = scratch + 2 * n * b.states(), *after = now + b.states();
  for (std::int64_t t = frames - 1; t >= 0; --t) {
    for (int s = me; s < size; s += kThreads) {
      const double beta = ctc_backward(states, s, t + 1 < frames ? after : nullptr);
      mine[t * b.states() + s] += beta - log_p;
      now[s] = beta + own(t, s);
    }
    __syncthreads();
    double* const swap = after;
    after = now, now = swap;
  }
}

// The gradient of the losses' sum, dz [T * N, classes]: equation 16 of Graves et al. A thread a logit.
template <class T>
__global__ void __launch_bounds__(kThreads)
    ctc_gradient_kernel(CtcBatch b, const double* log_sums, const double* shares, const double* losses,
                        float* dz) {
  const std::int64_t i = awaited_index<std::int64_t>();
  if (i >= b.frames * b.sequences * b.classes) return;
  const std::int64_t row = i / b.classes, c = i % b.classes, t = row / b.sequences, n = row % b.sequences;
  if (losses[n] != losses[n]) {  // NaN
    dz[i] = nanf("");
    return;
  }
  if (t >= b.frame_counts[n]) {
    dz[i] = 0;
    return;
  }
  const CtcStates states = ctc_states_of(b, n);
  const double* share = shares + (n * b.frames + t) * b.states();
  double sum = 0;
  for (int s = 0; s < states.size(); ++s)
    if (states.label(s) == c) sum += exp(share[s]);
  dz[i] = static_cast<float>(exp(ctc_logit<T>(b, row, c) - log_sums[row]) - sum);
}

void forward(const Tensor& logits, const CtcTargets& targets, std::int32_t blank, Tensor& loss, Tensor& dz) {
  const cudaStream_t stream = compute_stream();
  const auto n = static_cast<std::int64_t>(targets.lengths.size());
  const CtcBatch batch = {logits.data(),
                          logits.dim(0) / n,
                          n,
                          logits.dim(1),
                          static_cast<std::int64_t>(targets.labels.size()) / n,
                          targets.labels.data(),
                          targets.lengths.data(),
                          targets.frames.data(),
                          blank};
  const auto words = [](std::int64_t count) { return DeviceArray<double>(static_cast<std::size_t>(count)); };
  const DeviceArray<double> log_sums = words(logits.dim(0)), alpha = words(logits.dim(0) * batch.states()),
                            scratch = words(2 * n * batch.states()), losses = words(n);
  by_type(logits, [&]<class T>(T) {
    launch(ctc_log_sums_kernel<T>, grid_for(static_cast<std::size_t>(logits.dim(0)), kThreads), kThreads,
           stream, batch, log_sums.data());
    launch(ctc_variables_kernel<T>, static_cast<unsigned>(n), kThreads, stream, batch, log_sums.data(),
           alpha.data(), scratch.data(), losses.data(), dz.defined());
    if (dz.defined())
      launch(ctc_gradient_kernel<T>, grid_for(elements(logits), kThreads), kThreads, stream, batch,
             log_sums.data(), alpha.data(), losses.data(), dz.data());
  });
  mean_of(stream, losses.data(), losses.size(), static_cast<double>(n), loss.data());
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    ctc_scale_kernel(const float* dz, std::int64_t n, float sequences, const float* grad, T* out) {
  const std::int64_t i = awaited_index<std::int64_t>();
  if (i < n) out[i] = from_float<T>(dz[i] * (grad[0] / sequences));
}

void backward(const Tensor& dz, std::int64_t sequences, const Tensor& grad, Tensor& out) {
  by_type(out, [&]<class T>(T) {
    launch_each(elements(dz), ctc_scale_kernel<T>, dz.data(), dz.numel(), static_cast<float>(sequences),
                grad.data(), out.as<T>());
  });
}

const bool registered = add_cuda_kernels<CtcKernels>({.forward = forward, .backward = backward});

}  // namespace
}  // namespace topknot::cuda

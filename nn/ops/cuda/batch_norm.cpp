#include <array>
#include <limits>
#include <map>

#include "nn/core/base/check.h"
#include "nn/core/base/log.h"
#include "nn/ops/cuda/batch_norm_method.h"
#include "nn/ops/cuda_ops.h"

namespace topknot::cuda {
namespace {

BatchNormStatistics statistics(const BatchNormKept& kept) {
  float* at = kept.values.data();
  const std::size_t channels = kept.values.size() / 4;
  return {at, at + channels, at + 2 * channels, at + 3 * channels};
}

class KernelBatchNorm : public BatchNormMethod {
 public:
  Tensor forward(const BatchNormCall& call, BatchNormKept& kept) const override {
    Context& context = Context::current();
    const BatchNormTiles tiles = batch_norm_tiles(call.x);
    kept.values = DeviceArray<float>(std::size_t{4} * tiles.channels);
    float* partial = nullptr;
    if (call.training) {
      partial = static_cast<float*>(context.workspace(tiles.partial_floats() * sizeof(float)));
      batch_norm_sums(context.stream(), tiles, call.x.data(), call.parameters.running_mean, partial);
    }
    batch_norm_normalization(context.stream(), tiles, partial, call.parameters, statistics(kept));
    Tensor y = Tensor::empty_like(call.x);
    const void* residual = call.residual.defined() ? call.residual.data() : nullptr;
    batch_norm_apply(context.stream(), tiles, call.x.data(), residual, call.relu, statistics(kept), y.data());
    if (residual && call.relu) kept.y = y;
    return y;
  }

  void backward(const BatchNormCall& call, const BatchNormKept& kept, Tensor grad,
                BatchNormGradients& out) const override {
    Context& context = Context::current();
    const BatchNormTiles tiles = batch_norm_tiles(call.x);
    const BatchNormStatistics n = statistics(kept);
    const std::size_t partial_floats = tiles.partial_floats();
    auto* partial = static_cast<float*>(
        context.workspace((partial_floats + std::size_t{3} * tiles.channels) * sizeof(float)));
    float* coefficients = partial + partial_floats;
    const BatchNormMask mask = !call.relu                ? BatchNormMask::none
                               : call.residual.defined() ? BatchNormMask::stored
                                                         : BatchNormMask::recomputed;
    const bool stored = mask == BatchNormMask::stored;
    Tensor g = !stored || grad.exclusive() ? grad : Tensor::empty_like(call.x);
    batch_norm_backward_sums(context.stream(), tiles, mask, grad.data(), call.x.data(),
                             stored ? kept.y.data() : nullptr, n, stored ? g.data() : nullptr, partial);
    batch_norm_coefficients(context.stream(), tiles, partial, call.parameters.gamma, n, call.training,
                            {out.gamma.data, out.gamma.accumulate}, {out.beta.data, out.beta.accumulate},
                            coefficients);
    if (out.x.tensor.defined())
      batch_norm_backward_apply(context.stream(), tiles, mask, g.data(), call.x.data(), n, coefficients,
                                out.x.tensor.data(), out.x.accumulate);
    if (out.want_residual) out.residual = std::move(g);
  }
};

// The quickest method for each shape, timed at its first use.
struct Choices {
  using Key = std::array<std::int64_t, 8>;
  std::map<Key, std::shared_ptr<const BatchNormMethod>> methods;
};

constexpr int kTimedRuns = 4;

// Milliseconds of kTimedRuns forward and backward passes, on memory of their own.
float time_of(const BatchNormMethod& method, BatchNormCall call) {
  Context& context = Context::current();
  const auto channels = static_cast<std::size_t>(call.x.dim(1));
  DeviceArray<float> moved(4 * channels);  // neither running statistics nor gradients are touched
  for (std::size_t i = 0; i < 2; ++i)
    backend(context.device()).fill(moved.data() + i * channels, channels, static_cast<float>(i));
  call.parameters.running_mean = moved.data();
  call.parameters.running_variance = moved.data() + channels;
  BatchNormGradients out;
  out.gamma = {moved.data() + 2 * channels, false};
  out.beta = {moved.data() + 3 * channels, false};
  out.x.tensor = Tensor::empty_like(call.x);
  out.want_residual = call.residual.defined();
  Event begin(true), end(true);
  for (int run = -1; run < kTimedRuns; ++run) {
    if (run == 0) begin.record(context.stream());
    BatchNormKept kept;
    const Tensor y = method.forward(call, kept);
    method.backward(call, kept, y, out);
  }
  end.record(context.stream());
  end.synchronize();
  return milliseconds_between(begin, end);
}

std::shared_ptr<const BatchNormMethod> quickest(const BatchNormCall& call) {
  std::shared_ptr<const BatchNormMethod> best;
  BatchNormKind which = BatchNormKind::kernels;
  float least = std::numeric_limits<float>::infinity();
  for (const BatchNormKind kind :
       {BatchNormKind::kernels, BatchNormKind::spatial, BatchNormKind::persistent, BatchNormKind::fused}) {
    try {
      std::shared_ptr<const BatchNormMethod> method = make_batch_norm_method(kind, call);
      const float ms = time_of(*method, call);
      if (ms < least) least = ms, which = kind, best = std::move(method);
    } catch (const BatchNormRefused&) {
    } catch (const OutOfMemory&) {  // no room to try things
      break;
    }
  }
  if (!best) best = std::make_shared<KernelBatchNorm>();
  log_debug("batch norm of " + call.x.shape().str() + ": " + name_of(which) + ", " +
            std::to_string(least / kTimedRuns) + " ms forward and back");
  return best;
}

std::shared_ptr<const BatchNormMethod> method_for(const BatchNormCall& call) {
  Context& context = Context::current();
  // One pixel a channel has no variance for cuDNN to correct.
  if (context.options().deterministic || !call.training || call.x.numel() == call.x.dim(1))
    return std::make_shared<KernelBatchNorm>();
  const Tensor& x = call.x;
  auto& method =
      context.keep<Choices>().methods[{x.dim(0), x.dim(1), x.dim(2), x.dim(3), x.dtype() == DType::bf16,
                                       call.relu, call.residual.defined(), aligned_parameters(call)}];
  if (method) return method;
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  TOPKNOT_CUDA(cudaStreamIsCapturing(context.stream(), &capture));
  TOPKNOT_CHECK(capture == cudaStreamCaptureStatusNone,
                "batch_norm of " + x.shape().str() +
                    ": a shape's first pass is timed, which cannot be while a graph is captured");
  return method = quickest(call);
}

}  // namespace

const char* name_of(BatchNormKind kind) {
  switch (kind) {
    case BatchNormKind::kernels:
      return "own kernels";
    case BatchNormKind::spatial:
      return "cuDNN spatial";
    case BatchNormKind::persistent:
      return "cuDNN persistent";
    case BatchNormKind::fused:
      return "cuDNN persistent, fused";
  }
  return "?";
}

std::unique_ptr<BatchNormMethod> make_batch_norm_method(BatchNormKind kind, const BatchNormCall& like) {
  if (kind == BatchNormKind::kernels) return std::make_unique<KernelBatchNorm>();
  return make_cudnn_batch_norm(kind, like);
}

Variable batch_norm(const Variable& x, const Variable& gamma, const Variable& beta, const Variable& residual,
                    const BatchNormState& state, const BatchNormOptions& options) {
  TOPKNOT_CHECK(x.value().layout() == Layout::nhwc && x.value().numel() > 0,
                "batch_norm: an activation on a GPU is nhwc, of at least one element");
  TOPKNOT_CHECK(!residual.defined() || residual.value().dtype() == x.value().dtype(),
                "batch_norm: a residual of the input's type");
  TOPKNOT_CHECK(state.mean_buffer && state.mean_buffer->device && state.variance_buffer &&
                    state.variance_buffer->device,
                "batch_norm: running statistics in the GPU's memory");
  const BatchNormCall call{x.value(),
                           residual.defined() ? residual.value() : Tensor(),
                           {gamma.value().data(), beta.value().data(), state.mean_buffer->device,
                            state.variance_buffer->device, state.momentum, state.epsilon},
                           options.relu,
                           options.training};
  const auto method = method_for(call);
  BatchNormKept kept;
  Tensor y = method->forward(call, kept);
  std::vector<Variable> inputs{x, gamma, beta};
  if (residual.defined()) inputs.push_back(residual);
  return {"batch_norm", std::move(y), std::move(inputs), [=](Tensor grad) {
            BatchNormGradients out;
            out.gamma = gamma.gradient_target();
            out.beta = beta.gradient_target();
            out.x = x.input_gradient();
            out.want_residual = residual.requires_grad();
            method->backward(call, kept, std::move(grad), out);
            if (out.x.tensor.defined()) x.accumulate_grad(std::move(out.x.tensor));
            if (out.want_residual) residual.accumulate_grad(std::move(out.residual));
          }};
}

}  // namespace topknot::cuda

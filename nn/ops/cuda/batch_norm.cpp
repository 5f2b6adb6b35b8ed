// Batch norm on a GPU: cuDNN's modes, and the choice between them and our kernels (batch_norm.cu).
#include "nn/ops/cuda/batch_norm.h"

#include <fmt/format.h>

#include <array>
#include <map>
#include <optional>

#include "nn/core/cuda/trial.h"
#include "nn/ops/cuda/cudnn_descriptor.h"

namespace topknot::cuda {
namespace {

// Whether cuDNN reads parameters in vectors is not documented, so it gets aligned ones only.
bool aligned_for_cudnn(const void* data) {
  return reinterpret_cast<std::uintptr_t>(data) % 16 == 0;
}
bool aligned_parameters(const BatchNormArguments& call) {
  return aligned_for_cudnn(call.gamma.data()) && aligned_for_cudnn(call.beta.data()) &&
         aligned_for_cudnn(call.state.mean->device) && aligned_for_cudnn(call.state.variance->device);
}

void check_supported(cudnnStatus_t status, const char* call, const char* file, int line) {
  if (status == CUDNN_STATUS_SUCCESS) return;
  // cuDNN has both codes for what it does not do.
  const int category = CUDNN_STATUS_CATEGORY(static_cast<int>(status));
  if (category == CUDNN_STATUS_NOT_SUPPORTED || category == CUDNN_STATUS_BAD_PARAM)
    throw BatchNormUnsupported(std::string(call) + ": " + cudnnGetErrorString(status));
  check_cudnn(status, call, file, line);
}
#define TOPKNOT_OR_UNSUPPORTED(call) check_supported((call), #call, __FILE__, __LINE__)

constexpr float kOne = 1, kZero = 0;

class CudnnBatchNorm : public BatchNormMethod {
 public:
  CudnnBatchNorm(BatchNormKind kind, const BatchNormArguments& like)
      : mode_(kind == BatchNormKind::spatial ? CUDNN_BATCHNORM_SPATIAL : CUDNN_BATCHNORM_SPATIAL_PERSISTENT),
        data_(cudnn_activation_tensor(like.x.shape(), like.x.dtype())) {
    if (kind == BatchNormKind::fused) {
      ops_ =
          like.residual.defined() ? CUDNN_BATCHNORM_OPS_BN_ADD_ACTIVATION : CUDNN_BATCHNORM_OPS_BN_ACTIVATION;
      TOPKNOT_CUDNN(
          cudnnSetActivationDescriptor(activation_.get(), CUDNN_ACTIVATION_RELU, CUDNN_PROPAGATE_NAN, 0));
    }
    TOPKNOT_CUDNN(cudnnDeriveBNTensorDescriptor(parameters_.get(), data_.get(), mode_));
    const cudnnHandle_t handle = Context::current().cudnn();
    TOPKNOT_OR_UNSUPPORTED(cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize(
        handle, mode_, ops_, data_.get(), data_.get(), data_.get(), parameters_.get(), activation(),
        &forward_bytes_));
    TOPKNOT_OR_UNSUPPORTED(cudnnGetBatchNormalizationBackwardExWorkspaceSize(
        handle, mode_, ops_, data_.get(), data_.get(), data_.get(), z(), data_.get(), parameters_.get(),
        activation(), &backward_bytes_));
    TOPKNOT_OR_UNSUPPORTED(cudnnGetBatchNormalizationTrainingExReserveSpaceSize(
        handle, mode_, ops_, activation(), data_.get(), &reserve_bytes_));
  }

  Tensor forward(const BatchNormArguments& call, BatchNormKept& kept) const override {
    Context& context = Context::current();
    const BatchNormState& s = call.state;
    const auto channels = static_cast<std::size_t>(call.x.dim(1));
    kept.values = DeviceArray<float>(2 * channels);
    kept.reserve = DeviceArray<std::byte>(reserve_bytes_);
    Tensor y = Tensor::empty_like(call.x);
    TOPKNOT_OR_UNSUPPORTED(cudnnBatchNormalizationForwardTrainingEx(
        context.cudnn(), mode_, ops_, &kOne, &kZero, data_.get(), call.x.data(), z(),
        z() ? call.residual.data() : nullptr, data_.get(), y.data(), parameters_.get(), call.gamma.data(),
        call.beta.data(), s.momentum, s.mean->device, s.variance->device, s.epsilon, kept.values.data(),
        kept.values.data() + channels, activation(), context.workspace(forward_bytes_), forward_bytes_,
        kept.reserve.data(), reserve_bytes_));
    if (!fused()) batch_norm_finish(y, call.residual, call.options.relu);
    if (call.options.relu) kept.y = y;
    return y;
  }

  void backward(const BatchNormArguments& call, const BatchNormKept& kept, Tensor grad,
                BatchNormGradients& out) const override {
    Context& context = Context::current();
    const auto channels = static_cast<std::size_t>(call.x.dim(1));
    if (call.options.relu && !fused()) {
      Tensor masked = grad.exclusive() ? grad : Tensor::empty_like(grad);
      batch_norm_mask(grad, kept.y, masked);
      grad = std::move(masked);
    }
    if (out.want_residual) out.residual = z() ? Tensor::empty_like(call.x) : grad;
    // cuDNN is not asked to add to what is there; it writes elsewhere then.
    const bool elsewhere = !out.x.tensor.defined() || out.x.accumulate;
    Tensor dx = elsewhere ? Tensor::empty_like(call.x) : out.x.tensor;
    Tensor dz = z() ? out.want_residual ? out.residual : Tensor::empty_like(call.x) : Tensor();
    DeviceArray<float> parameter_scratch(2 * channels);
    const auto direct = [](const GradientTarget& t) {
      return t.data && !t.accumulate && aligned_for_cudnn(t.data);
    };
    float* dgamma = direct(out.gamma) ? out.gamma.data : parameter_scratch.data();
    float* dbeta = direct(out.beta) ? out.beta.data : parameter_scratch.data() + channels;
    TOPKNOT_OR_UNSUPPORTED(cudnnBatchNormalizationBackwardEx(
        context.cudnn(), mode_, ops_, &kOne, &kZero, &kOne, &kZero, data_.get(), call.x.data(), activated(),
        fused() ? kept.y.data() : nullptr, data_.get(), grad.data(), z(), dz.defined() ? dz.data() : nullptr,
        data_.get(), dx.data(), parameters_.get(), call.gamma.data(), fused() ? call.beta.data() : nullptr,
        dgamma, dbeta, call.state.epsilon, kept.values.data(), kept.values.data() + channels, activation(),
        context.workspace(backward_bytes_), backward_bytes_, kept.reserve.data(), reserve_bytes_));
    for (const auto& [target, from] : {std::pair(out.gamma, dgamma), std::pair(out.beta, dbeta)})
      if (target.data != from) write_gradient(target, Tensor::view(from, {call.x.dim(1)}, context.device()));
    if (out.x.tensor.defined() && elsewhere)
      backend(context.device())
          .add(dx.dtype(), out.x.tensor.data(), dx.data(), out.x.tensor.data(),
               static_cast<std::size_t>(dx.numel()));
  }

 private:
  bool fused() const { return ops_ != CUDNN_BATCHNORM_OPS_BN; }
  // Descriptors that cuDNN wants for some of its operations only.
  cudnnTensorDescriptor_t z() const {
    return ops_ == CUDNN_BATCHNORM_OPS_BN_ADD_ACTIVATION ? data_.get() : nullptr;
  }
  cudnnTensorDescriptor_t activated() const { return fused() ? data_.get() : nullptr; }
  cudnnActivationDescriptor_t activation() const { return fused() ? activation_.get() : nullptr; }

  cudnnBatchNormMode_t mode_;
  cudnnBatchNormOps_t ops_ = CUDNN_BATCHNORM_OPS_BN;
  CudnnTensor data_, parameters_;
  CudnnActivation activation_;
  std::size_t forward_bytes_ = 0, backward_bytes_ = 0, reserve_bytes_ = 0;
};

const TrialSubject kTrials("batch norm");

// The fastest method for each shape, timed or recalled at its first use.
using Choices = std::map<std::array<std::int64_t, 8>, std::shared_ptr<const BatchNormMethod>>;

// Forward and backward passes on memory of their own: neither running statistics nor gradients are touched.
class TriedBatchNorm {
 public:
  explicit TriedBatchNorm(const BatchNormArguments& call)
      : call_(call), moved_(4 * static_cast<std::size_t>(call.x.dim(1))) {
    const auto channels = static_cast<std::size_t>(call.x.dim(1));
    for (std::size_t i = 0; i < 2; ++i)
      backend(call.x.device()).fill(moved_.data() + i * channels, channels, static_cast<float>(i));
    mean_.device = moved_.data(), variance_.device = moved_.data() + channels;
    call_.state.mean = &mean_, call_.state.variance = &variance_;
    out_.gamma = {moved_.data() + 2 * channels, false};
    out_.beta = {moved_.data() + 3 * channels, false};
    out_.x.tensor = Tensor::empty_like(call.x);
    out_.want_residual = call.residual.defined();
  }
  TriedBatchNorm(const TriedBatchNorm&) = delete;
  TriedBatchNorm& operator=(const TriedBatchNorm&) = delete;

  bool run(BatchNormKind kind) try {
    auto& method = methods_[kind];
    if (!method) method = make_batch_norm_method(kind, call_);
    BatchNormKept kept;
    const Tensor y = method->forward(call_, kept);
    method->backward(call_, kept, y, out_);
    return true;
  } catch (const BatchNormUnsupported&) {
    return false;
  }

 private:
  BatchNormArguments call_;
  DeviceArray<float> moved_;
  Buffer mean_{"", {}, nullptr}, variance_{"", {}, nullptr};
  BatchNormGradients out_;
  std::map<BatchNormKind, std::unique_ptr<BatchNormMethod>> methods_;
};

std::shared_ptr<const BatchNormMethod> choose_method(const BatchNormArguments& call) {
  Context& context = Context::current();
  const std::string key = fmt::format(
      "{} of {} {}{}{}{}{}", kTrials.name, call.x.dtype() == DType::bf16 ? "bf16" : "fp32",
      call.x.shape().str(), call.options.relu ? ", relu" : "", call.residual.defined() ? ", residual" : "",
      aligned_parameters(call) ? "" : ", parameters not aligned", context.options().shared ? ", shared" : "");
  std::optional<TriedBatchNorm> tried;  // has memory only where something is timed
  std::vector<TrialCandidate> candidates;
  for (int i = 0; i < kBatchNormKinds; ++i) {
    const auto kind = static_cast<BatchNormKind>(i);
    const auto run = [&tried, &call, kind] {
      if (!tried) tried.emplace(call);
      return tried->run(kind);
    };
    candidates.push_back({name_of(kind), run, kind == BatchNormKind::kernels});
  }
  return make_batch_norm_method(static_cast<BatchNormKind>(Trial::pick(key, candidates)), call);
}

std::shared_ptr<const BatchNormMethod> method_for(const BatchNormArguments& call) {
  Context& context = Context::current();
  // One pixel per channel has no variance for cuDNN to correct.
  if (context.options().deterministic || !call.options.training || call.x.numel() == call.x.dim(1))
    return make_kernel_batch_norm();
  const Tensor& x = call.x;
  auto& method =
      context.keep<Choices>()[{x.dim(0), x.dim(1), x.dim(2), x.dim(3), x.dtype() == DType::bf16,
                               call.options.relu, call.residual.defined(), aligned_parameters(call)}];
  if (method) return method;
  TOPKNOT_CHECK(
      !capturing(context.stream()),
      fmt::format("batch_norm of {}: the first pass of a shape is timed, which cannot be while a graph is "
                  "captured",
                  x.shape().str()));
  return method = choose_method(call);
}

// The forward pass's state for the backward pass, besides the call.
struct Recorded {
  std::shared_ptr<const BatchNormMethod> method;
  BatchNormKept kept;
};

Tensor forward(const BatchNormArguments& call, OpState& state) {
  TOPKNOT_CHECK(call.x.layout() == Layout::nhwc && call.x.numel() > 0,
                "batch_norm: an activation on a GPU is nhwc, of at least one element");
  TOPKNOT_CHECK(!call.residual.defined() || call.residual.dtype() == call.x.dtype(),
                "batch_norm: a residual of the input's type");
  const BatchNormState& s = call.state;
  TOPKNOT_CHECK(s.mean && s.mean->device && s.variance && s.variance->device,
                "batch_norm: running statistics in the GPU's memory");
  const auto recorded = std::make_shared<Recorded>();
  recorded->method = method_for(call);
  state = recorded;
  return recorded->method->forward(call, recorded->kept);
}

void backward(const BatchNormArguments& call, const OpState& state, Tensor grad, BatchNormGradients& out) {
  const auto& recorded = state_as<Recorded>(state);
  recorded.method->backward(call, recorded.kept, std::move(grad), out);
}

const bool batch_norm_registered =
    add_cuda_kernels<BatchNormKernels>({.forward = forward, .backward = backward});

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

std::unique_ptr<BatchNormMethod> make_batch_norm_method(BatchNormKind kind, const BatchNormArguments& like) {
  if (kind == BatchNormKind::kernels) return make_kernel_batch_norm();
  const bool fusable = like.options.relu && like.x.dtype() == DType::bf16 && like.x.dim(1) % 4 == 0;
  // The blocks of a persistent kernel wait for each other, so all of them must be resident at once. Beside
  // NCCL's kernels or another rank's they stall, two such kernels maybe for ever (pytorch#80259).
  const bool persistent = kind != BatchNormKind::spatial;
  if (!like.options.training || !aligned_parameters(like) || (kind == BatchNormKind::fused && !fusable) ||
      (persistent && Context::current().options().shared))
    throw BatchNormUnsupported(std::string(name_of(kind)) + " does not do this batch norm");
  return std::make_unique<CudnnBatchNorm>(kind, like);
}

}  // namespace topknot::cuda

// Batch norm by cuDNN's classic functions.
#include "nn/core/base/check.h"
#include "nn/ops/cuda/batch_norm_method.h"
#include "nn/ops/cuda/cudnn_descriptor.h"

namespace topknot::cuda {
namespace {

void check(cudnnStatus_t status, const char* call, const char* file, int line) {
  if (status == CUDNN_STATUS_SUCCESS) return;
  // cuDNN has both codes for what it does not do.
  const int category = CUDNN_STATUS_CATEGORY(static_cast<int>(status));
  if (category == CUDNN_STATUS_NOT_SUPPORTED || category == CUDNN_STATUS_BAD_PARAM)
    throw BatchNormRefused(std::string(call) + ": " + cudnnGetErrorString(status));
  check_cudnn(status, call, file, line);
}
#define TOPKNOT_OR_REFUSED(call) check((call), #call, __FILE__, __LINE__)

constexpr float kOne = 1, kZero = 0;

class CudnnBatchNorm : public BatchNormMethod {
 public:
  CudnnBatchNorm(BatchNormKind kind, const BatchNormCall& like)
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
    TOPKNOT_OR_REFUSED(cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize(
        handle, mode_, ops_, data_.get(), data_.get(), data_.get(), parameters_.get(), activation(),
        &forward_bytes_));
    TOPKNOT_OR_REFUSED(cudnnGetBatchNormalizationBackwardExWorkspaceSize(
        handle, mode_, ops_, data_.get(), data_.get(), data_.get(), z(), data_.get(), parameters_.get(),
        activation(), &backward_bytes_));
    TOPKNOT_OR_REFUSED(cudnnGetBatchNormalizationTrainingExReserveSpaceSize(handle, mode_, ops_, activation(),
                                                                            data_.get(), &reserve_bytes_));
  }

  Tensor forward(const BatchNormCall& call, BatchNormKept& kept) const override {
    Context& context = Context::current();
    const BatchNormParameters& p = call.parameters;
    const auto channels = static_cast<std::size_t>(call.x.dim(1));
    kept.values = DeviceArray<float>(2 * channels);
    kept.reserve = DeviceArray<std::byte>(reserve_bytes_);
    Tensor y = Tensor::empty_like(call.x);
    TOPKNOT_OR_REFUSED(cudnnBatchNormalizationForwardTrainingEx(
        context.cudnn(), mode_, ops_, &kOne, &kZero, data_.get(), call.x.data(), z(),
        z() ? call.residual.data() : nullptr, data_.get(), y.data(), parameters_.get(), p.gamma, p.beta,
        p.momentum, p.running_mean, p.running_variance, p.epsilon, kept.values.data(),
        kept.values.data() + channels, activation(), context.workspace(forward_bytes_), forward_bytes_,
        kept.reserve.data(), reserve_bytes_));
    if (!fused())
      batch_norm_finish(context.stream(), batch_norm_tiles(call.x), y.data(),
                        call.residual.defined() ? call.residual.data() : nullptr, call.relu);
    if (call.relu) kept.y = y;
    return y;
  }

  void backward(const BatchNormCall& call, const BatchNormKept& kept, Tensor grad,
                BatchNormGradients& out) const override {
    Context& context = Context::current();
    const auto channels = static_cast<std::size_t>(call.x.dim(1));
    if (call.relu && !fused()) {
      Tensor masked = grad.exclusive() ? grad : Tensor::empty_like(grad);
      batch_norm_mask(context.stream(), batch_norm_tiles(call.x), grad.data(), kept.y.data(), masked.data());
      grad = std::move(masked);
    }
    if (out.want_residual) out.residual = z() ? Tensor::empty_like(call.x) : grad;
    // cuDNN is not asked to add to what is there; it writes elsewhere then.
    const bool elsewhere = !out.x.tensor.defined() || out.x.accumulate;
    Tensor dx = elsewhere ? Tensor::empty_like(call.x) : out.x.tensor;
    Tensor dz = z() ? out.want_residual ? out.residual : Tensor::empty_like(call.x) : Tensor();
    DeviceArray<float> parameter_scratch(2 * channels);
    const auto straight = [](const GradientTarget& t) {
      return t.data && !t.accumulate && aligned_for_cudnn(t.data);
    };
    float* dgamma = straight(out.gamma) ? out.gamma.data : parameter_scratch.data();
    float* dbeta = straight(out.beta) ? out.beta.data : parameter_scratch.data() + channels;
    TOPKNOT_OR_REFUSED(cudnnBatchNormalizationBackwardEx(
        context.cudnn(), mode_, ops_, &kOne, &kZero, &kOne, &kZero, data_.get(), call.x.data(), activated(),
        fused() ? kept.y.data() : nullptr, data_.get(), grad.data(), z(), dz.defined() ? dz.data() : nullptr,
        data_.get(), dx.data(), parameters_.get(), call.parameters.gamma,
        fused() ? call.parameters.beta : nullptr, dgamma, dbeta, call.parameters.epsilon, kept.values.data(),
        kept.values.data() + channels, activation(), context.workspace(backward_bytes_), backward_bytes_,
        kept.reserve.data(), reserve_bytes_));
    hand_on(out.gamma, dgamma, channels);
    hand_on(out.beta, dbeta, channels);
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

  static void hand_on(const GradientTarget& target, const float* from, std::size_t n) {
    if (!target.data || target.data == from) return;
    DeviceBackend& device = backend(Context::current().device());
    if (target.accumulate)
      device.add(DType::f32, target.data, from, target.data, n);
    else
      device.copy(from, target.data, n);
  }

  cudnnBatchNormMode_t mode_;
  cudnnBatchNormOps_t ops_ = CUDNN_BATCHNORM_OPS_BN;
  CudnnTensor data_, parameters_;
  CudnnActivation activation_;
  std::size_t forward_bytes_ = 0, backward_bytes_ = 0, reserve_bytes_ = 0;
};

}  // namespace

std::unique_ptr<BatchNormMethod> make_cudnn_batch_norm(BatchNormKind kind, const BatchNormCall& like) {
  const bool fusable = like.relu && like.x.dtype() == DType::bf16 && like.x.dim(1) % 4 == 0;
  if (!like.training || !aligned_parameters(like) || (kind == BatchNormKind::fused && !fusable))
    throw BatchNormRefused(std::string(name_of(kind)) + " does not do this batch norm");
  return std::make_unique<CudnnBatchNorm>(kind, like);
}

}  // namespace topknot::cuda

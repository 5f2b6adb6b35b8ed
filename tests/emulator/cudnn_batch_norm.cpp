// cuDNN's batch normalisation with its activation, on the machine of machine.h: from NVIDIA's documentation,
// in double.
#include <cmath>
#include <vector>

#include "tests/emulator/cudnn_descriptors.h"
#include "tests/emulator/machine.h"

using namespace topknot::emulator;

struct cudnnActivationStruct {
  bool set = false;
};

namespace {

constexpr std::size_t kWorkspace = 64;  // bytes; cuDNN's own need is not documented

// What does not fit together is refused, as far as the documentation says so.
cudnnStatus_t refused(cudnnBatchNormMode_t mode, cudnnBatchNormOps_t ops, cudnnTensorDescriptor_t x,
                      cudnnTensorDescriptor_t z, cudnnActivationDescriptor_t activation) {
  if (!x || x->strides[1] != 1) return CUDNN_STATUS_NOT_SUPPORTED;
  if (ops == CUDNN_BATCHNORM_OPS_BN) return CUDNN_STATUS_SUCCESS;
  if (!activation || !activation->set) return CUDNN_STATUS_BAD_PARAM;
  if (ops == CUDNN_BATCHNORM_OPS_BN_ADD_ACTIVATION && !z) return CUDNN_STATUS_BAD_PARAM;
  const bool possible =
      mode == CUDNN_BATCHNORM_SPATIAL_PERSISTENT && x->type == CUDNN_DATA_BFLOAT16 && x->dims[1] % 4 == 0;
  return possible ? CUDNN_STATUS_SUCCESS : CUDNN_STATUS_NOT_SUPPORTED;
}

std::size_t reserve_bytes(cudnnBatchNormOps_t ops, const cudnnTensorStruct& x) {
  return ops == CUDNN_BATCHNORM_OPS_BN ? 0 : elements(x);  // what relu let through
}

// Blending is not done here: alpha is 1 and beta 0.
bool plain(const void* alpha, const void* beta) {
  return *static_cast<const float*>(alpha) == 1 && *static_cast<const float*>(beta) == 0;
}

template <class Fn>
void each_of_channel(const cudnnTensorStruct& t, int c, const Fn& fn) {
  for (int n = 0; n < t.dims[0]; ++n)
    for (int h = 0; h < t.dims[2]; ++h)
      for (int w = 0; w < t.dims[3]; ++w) fn(offset(t, n, c, h, w));
}

bool is_parameter(cudnnTensorDescriptor_t d, cudnnTensorDescriptor_t x) {
  return d && d->type == CUDNN_DATA_FLOAT && d->dims == std::array<int, 4>{1, x->dims[1], 1, 1};
}

}  // namespace

extern "C" {

cudnnStatus_t cudnnCreateActivationDescriptor(cudnnActivationDescriptor_t* descriptor) {
  *descriptor = new cudnnActivationStruct;
  return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnDestroyActivationDescriptor(cudnnActivationDescriptor_t descriptor) {
  delete descriptor;
  return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnSetActivationDescriptor(cudnnActivationDescriptor_t descriptor, cudnnActivationMode_t mode,
                                           cudnnNanPropagation_t, double) {
  if (mode != CUDNN_ACTIVATION_RELU) return CUDNN_STATUS_NOT_SUPPORTED;
  descriptor->set = true;
  return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnDeriveBNTensorDescriptor(cudnnTensorDescriptor_t derived, const cudnnTensorDescriptor_t x,
                                            cudnnBatchNormMode_t) {
  if (const int error = injected("cudnnDeriveBNTensorDescriptor")) return static_cast<cudnnStatus_t>(error);
  return cudnnSetTensor4dDescriptor(derived, CUDNN_TENSOR_NHWC, CUDNN_DATA_FLOAT, 1, x->dims[1], 1, 1);
}

cudnnStatus_t cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize(
    cudnnHandle_t, cudnnBatchNormMode_t mode, cudnnBatchNormOps_t ops, const cudnnTensorDescriptor_t x,
    const cudnnTensorDescriptor_t z, const cudnnTensorDescriptor_t y,
    const cudnnTensorDescriptor_t parameters, const cudnnActivationDescriptor_t activation,
    std::size_t* bytes) {
  if (!y || !is_parameter(parameters, x)) return CUDNN_STATUS_BAD_PARAM;
  *bytes = kWorkspace;
  return refused(mode, ops, x, z, activation);
}

cudnnStatus_t cudnnGetBatchNormalizationBackwardExWorkspaceSize(
    cudnnHandle_t, cudnnBatchNormMode_t mode, cudnnBatchNormOps_t ops, const cudnnTensorDescriptor_t x,
    const cudnnTensorDescriptor_t y, const cudnnTensorDescriptor_t dy, const cudnnTensorDescriptor_t dz,
    const cudnnTensorDescriptor_t dx, const cudnnTensorDescriptor_t parameters,
    const cudnnActivationDescriptor_t activation, std::size_t* bytes) {
  if (!dy || !dx || !is_parameter(parameters, x)) return CUDNN_STATUS_BAD_PARAM;
  if (ops != CUDNN_BATCHNORM_OPS_BN && !y) return CUDNN_STATUS_BAD_PARAM;
  *bytes = kWorkspace;
  return refused(mode, ops, x, dz, activation);
}

cudnnStatus_t cudnnGetBatchNormalizationTrainingExReserveSpaceSize(cudnnHandle_t, cudnnBatchNormMode_t,
                                                                   cudnnBatchNormOps_t ops,
                                                                   const cudnnActivationDescriptor_t,
                                                                   const cudnnTensorDescriptor_t x,
                                                                   std::size_t* bytes) {
  *bytes = reserve_bytes(ops, *x);
  return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnBatchNormalizationForwardTrainingEx(
    cudnnHandle_t handle, cudnnBatchNormMode_t mode, cudnnBatchNormOps_t ops, const void* alpha,
    const void* beta, const cudnnTensorDescriptor_t x, const void* x_data, const cudnnTensorDescriptor_t z,
    const void* z_data, const cudnnTensorDescriptor_t y, void* y_data,
    const cudnnTensorDescriptor_t parameters, const void* gamma, const void* shift, double factor,
    void* running_mean, void* running_variance, double epsilon, void* save_mean, void* save_inverse,
    cudnnActivationDescriptor_t activation, void* workspace, std::size_t workspace_bytes, void* reserve,
    std::size_t reserved) {
  if (const int error = injected("cudnnBatchNormalizationForwardTrainingEx"))
    return static_cast<cudnnStatus_t>(error);
  if (const cudnnStatus_t no = refused(mode, ops, x, z, activation)) return no;
  if (!plain(alpha, beta) || !workspace || workspace_bytes < kWorkspace ||
      reserved < reserve_bytes(ops, *x) || !is_parameter(parameters, x) || y->dims != x->dims ||
      (z && (z->dims != x->dims || !z_data)))
    return CUDNN_STATUS_BAD_PARAM;
  enqueue(handle->stream, [=, x = *x, z = z ? *z : cudnnTensorStruct(), y = *y] {
    const double count = double(elements(x)) / x.dims[1];
    const auto* scale = static_cast<const float*>(gamma);
    const auto* bias = static_cast<const float*>(shift);
    auto *mean_out = static_cast<float*>(running_mean), *variance_out = static_cast<float*>(running_variance);
    for (int c = 0; c < x.dims[1]; ++c) {
      double mean = 0, variance = 0;
      each_of_channel(x, c, [&](std::size_t i) { mean += load(x.type, x_data, i) / count; });
      each_of_channel(x, c, [&](std::size_t i) {
        variance += (load(x.type, x_data, i) - mean) * (load(x.type, x_data, i) - mean) / count;
      });
      const double inverse = 1 / std::sqrt(variance + epsilon);
      static_cast<float*>(save_mean)[c] = float(mean);
      static_cast<float*>(save_inverse)[c] = float(inverse);
      const auto moved = [&](double old, double now) { return float(old + factor * (now - old)); };
      mean_out[c] = moved(mean_out[c], mean);
      variance_out[c] = moved(variance_out[c], variance * count / (count - 1));
      each_of_channel(x, c, [&](std::size_t i) {
        double v = scale[c] * (load(x.type, x_data, i) - mean) * inverse + bias[c];
        if (ops == CUDNN_BATCHNORM_OPS_BN_ADD_ACTIVATION) v += load(z.type, z_data, i);
        if (ops != CUDNN_BATCHNORM_OPS_BN) {
          static_cast<unsigned char*>(reserve)[i] = !(v <= 0);
          v = v <= 0 ? 0 : v;
        }
        store(y.type, y_data, i, float(v));
      });
    }
  });
  return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnBatchNormalizationBackwardEx(
    cudnnHandle_t handle, cudnnBatchNormMode_t mode, cudnnBatchNormOps_t ops, const void* alpha,
    const void* beta, const void* parameter_alpha, const void* parameter_beta,
    const cudnnTensorDescriptor_t x, const void* x_data, const cudnnTensorDescriptor_t y, const void* y_data,
    const cudnnTensorDescriptor_t dy, const void* dy_data, const cudnnTensorDescriptor_t dz, void* dz_data,
    const cudnnTensorDescriptor_t dx, void* dx_data, const cudnnTensorDescriptor_t parameters,
    const void* gamma, const void* bias, void* dgamma, void* dbeta, double epsilon, const void* saved_mean,
    const void* saved_inverse, cudnnActivationDescriptor_t activation, void* workspace,
    std::size_t workspace_bytes, void* reserve, std::size_t reserved) {
  if (const int error = injected("cudnnBatchNormalizationBackwardEx"))
    return static_cast<cudnnStatus_t>(error);
  if (const cudnnStatus_t no = refused(mode, ops, x, dz, activation)) return no;
  if (!plain(alpha, beta) || !plain(parameter_alpha, parameter_beta) || !workspace ||
      workspace_bytes < kWorkspace || reserved < reserve_bytes(ops, *x) || !is_parameter(parameters, x) ||
      dy->dims != x->dims || dx->dims != x->dims || !dgamma || !dbeta || !(epsilon >= CUDNN_BN_MIN_EPSILON))
    return CUDNN_STATUS_BAD_PARAM;
  if (ops != CUDNN_BATCHNORM_OPS_BN && (!y || !y_data || !bias)) return CUDNN_STATUS_BAD_PARAM;
  if (ops == CUDNN_BATCHNORM_OPS_BN_ADD_ACTIVATION && !dz_data) return CUDNN_STATUS_BAD_PARAM;
  enqueue(handle->stream, [=, x = *x, dy = *dy, dx = *dx] {
    const double count = double(elements(x)) / x.dims[1];
    for (int c = 0; c < x.dims[1]; ++c) {
      const double mean = static_cast<const float*>(saved_mean)[c],
                   inverse = static_cast<const float*>(saved_inverse)[c],
                   scale = static_cast<const float*>(gamma)[c];
      const auto gradient = [&](std::size_t i) {
        const bool dead = ops != CUDNN_BATCHNORM_OPS_BN && !static_cast<const unsigned char*>(reserve)[i];
        return dead ? 0.0f : load(dy.type, dy_data, i);
      };
      const auto normal = [&](std::size_t i) { return (load(x.type, x_data, i) - mean) * inverse; };
      double sum = 0, product = 0;
      each_of_channel(x, c, [&](std::size_t i) {
        sum += gradient(i);
        product += gradient(i) * normal(i);
      });
      static_cast<float*>(dbeta)[c] = float(sum);
      static_cast<float*>(dgamma)[c] = float(product);
      each_of_channel(x, c, [&](std::size_t i) {
        const double v = scale * inverse * (gradient(i) - sum / count - normal(i) * product / count);
        if (ops == CUDNN_BATCHNORM_OPS_BN_ADD_ACTIVATION) store(dy.type, dz_data, i, gradient(i));
        store(dx.type, dx_data, i, float(v));
      });
    }
  });
  return CUDNN_STATUS_SUCCESS;
}

}  // extern "C"

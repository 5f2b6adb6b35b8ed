#pragma once
// cuDNN's descriptors as values that destroy themselves. Host code of the CUDA backend.

#include <limits>
#include <utility>

#include "nn/core/cuda/libraries.h"
#include "nn/core/tensor.h"

namespace topknot::cuda {

template <class T, auto create, auto destroy>
class CudnnDescriptor {
 public:
  template <class... Arguments>
  explicit CudnnDescriptor(Arguments... arguments) {
    check_cudnn(create(arguments..., &value_), "creating a cuDNN descriptor", __FILE__, __LINE__);
  }
  ~CudnnDescriptor() {
    if (value_) destroy(value_);
  }
  CudnnDescriptor(CudnnDescriptor&& other) noexcept : value_(std::exchange(other.value_, nullptr)) {}
  CudnnDescriptor(const CudnnDescriptor&) = delete;
  T get() const { return value_; }

 private:
  T value_ = nullptr;
};

using CudnnTensor =
    CudnnDescriptor<cudnnTensorDescriptor_t, cudnnCreateTensorDescriptor, cudnnDestroyTensorDescriptor>;
using CudnnActivation = CudnnDescriptor<cudnnActivationDescriptor_t, cudnnCreateActivationDescriptor,
                                        cudnnDestroyActivationDescriptor>;
using CudnnPooling =
    CudnnDescriptor<cudnnPoolingDescriptor_t, cudnnCreatePoolingDescriptor, cudnnDestroyPoolingDescriptor>;

// The descriptor of an nhwc activation.
inline CudnnTensor cudnn_activation_tensor(const Shape& shape, DType type) {
  for (int i = 0; i < 4; ++i)
    TOPKNOT_CHECK(shape[i] <= std::numeric_limits<int>::max(), "cuDNN's sizes are ints: " + shape.str());
  CudnnTensor tensor;
  TOPKNOT_CUDNN(cudnnSetTensor4dDescriptor(tensor.get(), CUDNN_TENSOR_NHWC,
                                           type == DType::bf16 ? CUDNN_DATA_BFLOAT16 : CUDNN_DATA_FLOAT,
                                           static_cast<int>(shape[0]), static_cast<int>(shape[1]),
                                           static_cast<int>(shape[2]), static_cast<int>(shape[3])));
  return tensor;
}

}  // namespace topknot::cuda

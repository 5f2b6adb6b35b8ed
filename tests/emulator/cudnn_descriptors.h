#pragma once
// cuDNN's handle, and its tensor, filter and convolution descriptors as the emulator of its operations read
// them: dense, in four dimensions, float or bfloat16. What cuDNN refuses on creation is refused here.

#include <cuda_bf16.h>
#include <cudnn.h>

#include <array>
#include <cstddef>

struct cudnnContext {  // the handle
  cudaStream_t stream = nullptr;
};

struct cudnnTensorStruct {
  cudnnDataType_t type = CUDNN_DATA_FLOAT;
  std::array<int, 4> dims{};     // N, C, H, W
  std::array<int, 4> strides{};  // in elements, of N, C, H, W; all 0 before it is set
};

struct cudnnFilterStruct {
  cudnnDataType_t type = CUDNN_DATA_FLOAT;
  cudnnTensorFormat_t format = CUDNN_TENSOR_NCHW;
  std::array<int, 4> dims{};  // K (output channels), C, R, S
  std::array<int, 4> strides{};
};

struct cudnnConvolutionStruct {
  std::array<int, 2> padding{}, stride{1, 1};  // height, width
  int groups = 1;
  cudnnMathType_t math = CUDNN_DEFAULT_MATH;
};

namespace topknot::emulator {

inline std::size_t offset(const std::array<int, 4>& strides, int a, int b, int c, int d) {
  const auto at = [&](int i, int by) { return std::size_t(strides[std::size_t(i)]) * std::size_t(by); };
  return at(0, a) + at(1, b) + at(2, c) + at(3, d);
}
// Where element (n, c, h, w) of a tensor, or (k, c, r, s) of a filter, stands.
inline std::size_t offset(const cudnnTensorStruct& t, int n, int c, int h, int w) {
  return offset(t.strides, n, c, h, w);
}
inline std::size_t offset(const cudnnFilterStruct& f, int k, int c, int r, int s) {
  return offset(f.strides, k, c, r, s);
}

// One element of float or bfloat16 memory; rounded to nearest even when stored.
inline float load(cudnnDataType_t type, const void* data, std::size_t i) {
  return type == CUDNN_DATA_BFLOAT16 ? __bfloat162float(static_cast<const __nv_bfloat16*>(data)[i])
                                     : static_cast<const float*>(data)[i];
}
inline void store(cudnnDataType_t type, void* data, std::size_t i, float value) {
  if (type == CUDNN_DATA_BFLOAT16)
    static_cast<__nv_bfloat16*>(data)[i] = __float2bfloat16_rn(value);
  else
    static_cast<float*>(data)[i] = value;
}
inline std::size_t size_of(cudnnDataType_t type) {
  return type == CUDNN_DATA_BFLOAT16 ? 2 : 4;
}

// Elements of a tensor or filter; 0 before it is set.
template <class Descriptor>
std::size_t elements(const Descriptor& d) {
  std::size_t n = 1;
  for (const int dim : d.dims) n *= std::size_t(dim);
  return n;
}

}  // namespace topknot::emulator

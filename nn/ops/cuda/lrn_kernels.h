#pragma once
// The kernels of local_response_norm on a GPU: tensors of [pixels, channels].

#include <cuda_runtime_api.h>

#include <cstdint>

namespace topknot::cuda {

struct LrnShape {
  std::uint32_t elements, channels;
  std::uint32_t half;  // channels on either side
  float alpha, beta, k;
};
void lrn_forward(cudaStream_t stream, bool bf16, const void* x, void* y, LrnShape shape);
void lrn_backward(cudaStream_t stream, bool bf16, const void* x, const void* dy, void* dx, LrnShape shape);

}  // namespace topknot::cuda

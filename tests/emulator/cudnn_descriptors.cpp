// cuDNN's handle and its descriptors of tensors, filters and convolutions, on the machine of machine.h.
#include "tests/emulator/cudnn_descriptors.h"

#include "tests/emulator/machine.h"

using namespace topknot::emulator;

namespace {

template <class Descriptor>
cudnnStatus_t create(const char* call, Descriptor** descriptor) {
  if (const int error = injected(call)) return static_cast<cudnnStatus_t>(error);
  *descriptor = new Descriptor;
  return CUDNN_STATUS_SUCCESS;
}

bool known(cudnnDataType_t type) {
  return type == CUDNN_DATA_FLOAT || type == CUDNN_DATA_BFLOAT16;
}

// Strides in the order N, C, H, W; false where cuDNN would refuse.
bool set_dims(cudnnTensorFormat_t format, const std::array<int, 4>& dims, std::array<int, 4>& strides) {
  for (const int dim : dims)
    if (dim <= 0) return false;
  const auto [n, c, h, w] = dims;
  if (format == CUDNN_TENSOR_NHWC)
    strides = {h * w * c, 1, w * c, c};
  else if (format == CUDNN_TENSOR_NCHW)
    strides = {c * h * w, h * w, w, 1};
  else
    return false;
  return true;
}

}  // namespace

extern "C" {

cudnnStatus_t cudnnCreate(cudnnHandle_t* handle) {
  return create("cudnnCreate", handle);
}
cudnnStatus_t cudnnDestroy(cudnnHandle_t handle) {
  delete handle;
  return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnSetStream(cudnnHandle_t handle, cudaStream_t stream) {
  handle->stream = stream;
  return CUDNN_STATUS_SUCCESS;
}
const char* cudnnGetErrorString(cudnnStatus_t status) {
  return status == CUDNN_STATUS_SUCCESS ? "success" : "cuDNN failed";
}
std::size_t cudnnGetVersion() {
  return CUDNN_VERSION;
}

cudnnStatus_t cudnnCreateTensorDescriptor(cudnnTensorDescriptor_t* descriptor) {
  return create("cudnnCreateTensorDescriptor", descriptor);
}
cudnnStatus_t cudnnDestroyTensorDescriptor(cudnnTensorDescriptor_t descriptor) {
  delete descriptor;
  return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnSetTensor4dDescriptor(cudnnTensorDescriptor_t descriptor, cudnnTensorFormat_t format,
                                         cudnnDataType_t type, int n, int c, int h, int w) {
  if (const int error = injected("cudnnSetTensor4dDescriptor")) return static_cast<cudnnStatus_t>(error);
  if (!known(type)) return CUDNN_STATUS_NOT_SUPPORTED;
  descriptor->type = type;
  descriptor->dims = {n, c, h, w};
  return set_dims(format, descriptor->dims, descriptor->strides) ? CUDNN_STATUS_SUCCESS
                                                                 : CUDNN_STATUS_BAD_PARAM;
}

cudnnStatus_t cudnnCreateFilterDescriptor(cudnnFilterDescriptor_t* descriptor) {
  return create("cudnnCreateFilterDescriptor", descriptor);
}
cudnnStatus_t cudnnDestroyFilterDescriptor(cudnnFilterDescriptor_t descriptor) {
  delete descriptor;
  return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnSetFilter4dDescriptor(cudnnFilterDescriptor_t descriptor, cudnnDataType_t type,
                                         cudnnTensorFormat_t format, int k, int c, int r, int s) {
  if (const int error = injected("cudnnSetFilter4dDescriptor")) return static_cast<cudnnStatus_t>(error);
  if (!known(type)) return CUDNN_STATUS_NOT_SUPPORTED;
  descriptor->type = type;
  descriptor->format = format;
  descriptor->dims = {k, c, r, s};
  return set_dims(format, descriptor->dims, descriptor->strides) ? CUDNN_STATUS_SUCCESS
                                                                 : CUDNN_STATUS_BAD_PARAM;
}

cudnnStatus_t cudnnCreateConvolutionDescriptor(cudnnConvolutionDescriptor_t* descriptor) {
  return create("cudnnCreateConvolutionDescriptor", descriptor);
}
cudnnStatus_t cudnnDestroyConvolutionDescriptor(cudnnConvolutionDescriptor_t descriptor) {
  delete descriptor;
  return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnSetConvolution2dDescriptor(cudnnConvolutionDescriptor_t descriptor, int pad_h, int pad_w,
                                              int stride_h, int stride_w, int dilation_h, int dilation_w,
                                              cudnnConvolutionMode_t mode, cudnnDataType_t compute) {
  if (const int error = injected("cudnnSetConvolution2dDescriptor")) return static_cast<cudnnStatus_t>(error);
  if (pad_h < 0 || pad_w < 0 || stride_h <= 0 || stride_w <= 0) return CUDNN_STATUS_BAD_PARAM;
  // What this project never asks for is not there.
  if (dilation_h != 1 || dilation_w != 1 || mode != CUDNN_CROSS_CORRELATION || compute != CUDNN_DATA_FLOAT)
    return CUDNN_STATUS_NOT_SUPPORTED;
  descriptor->padding = {pad_h, pad_w};
  descriptor->stride = {stride_h, stride_w};
  return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnSetConvolutionGroupCount(cudnnConvolutionDescriptor_t descriptor, int groups) {
  if (const int error = injected("cudnnSetConvolutionGroupCount")) return static_cast<cudnnStatus_t>(error);
  descriptor->groups = groups;
  return groups > 0 ? CUDNN_STATUS_SUCCESS : CUDNN_STATUS_BAD_PARAM;
}
cudnnStatus_t cudnnSetConvolutionMathType(cudnnConvolutionDescriptor_t descriptor, cudnnMathType_t math) {
  if (const int error = injected("cudnnSetConvolutionMathType")) return static_cast<cudnnStatus_t>(error);
  descriptor->math = math;
  return CUDNN_STATUS_SUCCESS;
}

}  // extern "C"

// cuDNN's handle on the machine of machine.h.
#include "tests/cuda/stand_in/cudnn_handle.h"

#include "tests/cuda/stand_in/machine.h"

using namespace topknot::stand_in;

extern "C" {

cudnnStatus_t cudnnCreate(cudnnHandle_t* handle) {
  if (const int error = injected("cudnnCreate")) return static_cast<cudnnStatus_t>(error);
  *handle = new cudnnContext;
  return CUDNN_STATUS_SUCCESS;
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

}  // extern "C"

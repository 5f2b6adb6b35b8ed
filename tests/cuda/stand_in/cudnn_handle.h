#pragma once
// What the stand-ins of cuDNN's parts share.

#include <cudnn.h>

struct cudnnContext {
  cudaStream_t stream = nullptr;
};

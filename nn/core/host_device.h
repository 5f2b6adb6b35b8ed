#pragma once
// For arithmetic that is written once and runs in a CPU loop and in a CUDA kernel. C++17, as all that a .cu file
// includes.

#if defined(__CUDACC__)
#define TOPKNOT_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define TOPKNOT_HOST_DEVICE inline
#endif

#pragma once
// Marks functions that run in CPU loops and in CUDA kernels.

#if defined(__CUDACC__)
#define TOPKNOT_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define TOPKNOT_HOST_DEVICE inline
#endif

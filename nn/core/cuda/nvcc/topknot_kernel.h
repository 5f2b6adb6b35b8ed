#pragma once
// The header that nvcc compiles .cu files against: CUDA C++ itself, and launch(). Another header of this name
// runs them on the CPU in tests (tests/emulator), so kernels keep to static shared memory and its intrinsics.

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "nn/core/cuda/check.h"

namespace topknot::cuda {

// The first line of every kernel, ahead of any access to global memory and of any return: launch() may start a
// kernel while the one before it on the stream still runs (programmatic dependent launch; CUDA programming
// guide, from compute capability 9.0 on). The thread waits until that one is complete and its writes are seen;
// after an ordinary launch it need not. Every thread of every kernel waits, so one that is complete had all
// before it complete, however early they began. What libraries launch, copies and fills begin only when the
// work before them is complete, or, if a library launches its own kernels early, wait as these do.
// From then on the next kernel's blocks may take the room that this one's last blocks leave. They begin when all
// of this one's have: they take room from no block of the stream, and no more than two of its kernels are under way.
// Kernels whose parameters are `const` and `__restrict__` are started by launch_in_turn(): the compiler may read what
// they point to as memory that nobody writes while the kernel lives, the time before the wait included.
__device__ inline void await_previous() {
#if __CUDA_ARCH__ >= 900
  cudaGridDependencySynchronize();
  cudaTriggerProgrammaticLaunchCompletion();
#endif
}

__device__ inline std::uint64_t global_nanoseconds() {
  std::uint64_t time;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(time));
  return time;
}

// 2^x within two units in the last place; results below 2^-126 are 0 (PTX ISA, ex2.approx.ftz).
__device__ inline float power_of_two(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Two floats, rounded to bfloat16, as the halves of a word.
__device__ inline unsigned two_words(float low, float high) {
  unsigned both;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}

// A warp's product on the tensor cores: c += a b, a [16, 16] and b [16, 8] of bfloat16, c [16, 8] of float
// (PTX ISA, mma.m16n8k16). Of lane l, with g = l / 4 and p = l % 4:
//   a[0]: row g, columns 2 p and 2 p + 1; a[1]: row g + 8; a[2], a[3]: the same rows, columns 2 p + 8 and + 9
//   b[0]: column g, rows 2 p and 2 p + 1; b[1]: rows 2 p + 8 and + 9
//   c[0], c[1]: row g, columns 2 p and 2 p + 1; c[2], c[3]: row g + 8
__device__ inline void multiply_add(const unsigned* a, const unsigned* b, float* c) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Four 8 x 8 matrices of 16-bit numbers from shared memory (PTX ISA, ldmatrix): lane 8 m + i says where row i
// of matrix m begins, at a multiple of 16 bytes. Lane l gets of each, in m[matrix], row l / 4, columns
// 2 (l % 4) and the next; transposed, column l / 4, rows 2 (l % 4) and the next.
template <bool kTransposed>
__device__ inline void load_matrices(const __nv_bfloat16* row, unsigned* m) {
  const auto at = static_cast<unsigned>(__cvta_generic_to_shared(row));
  if (kTransposed)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
                 : "r"(at)
                 : "memory");
  else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
                 : "r"(at)
                 : "memory");
}

// 16 bytes to shared memory, or 16 zeros, while the thread goes on (PTX ISA, cp.async). What a thread has
// begun since its last close_copies() is a group; await_copies<n>() waits for all of its groups but the last n.
__device__ inline void begin_copy(void* to_shared, const void* from, bool real) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
               :
               : "r"(static_cast<unsigned>(__cvta_generic_to_shared(to_shared))), "l"(from),
                 "r"(real ? 16 : 0)
               : "memory");
}
__device__ inline void close_copies() {
  asm volatile("cp.async.commit_group;" : : : "memory");
}
template <int kLeft>
__device__ inline void await_copies() {
  asm volatile("cp.async.wait_group %0;" : : "n"(kLeft) : "memory");
}

bool early_launches();  // of the current context (nn/core/cuda/context.h)

// Starts a kernel when all before it on the stream, not the default one, is complete. Throws CudaError.
template <class... P, class... A>
void launch_in_turn(void (*kernel)(P...), dim3 grid, dim3 block, cudaStream_t stream, A&&... arguments) {
  kernel<<<grid, block, 0, stream>>>(static_cast<P>(arguments)...);
  check_launch(reinterpret_cast<const void*>(kernel), grid.x, block.x);
}

// The same, maybe early. Early launches become programmatic edges of a graph (CUDA 12.3 and later), ordinary ones
// after what is no kernel; a query of edges (cudaGraphGetEdges) has to ask for their data then.
template <class... P, class... A>
void launch(void (*kernel)(P...), dim3 grid, dim3 block, cudaStream_t stream, A&&... arguments) {
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid, config.blockDim = block, config.stream = stream;
  config.attrs = &early, config.numAttrs = early_launches() ? 1 : 0;
  cudaLaunchKernelEx(&config, kernel, static_cast<P>(arguments)...);  // notes an error for check_launch()
  check_launch(reinterpret_cast<const void*>(kernel), grid.x, block.x);
}

}  // namespace topknot::cuda

#pragma once
// A CUDA emulator: CUDA's run-time calls, and the blocks and threads of kernels, carried out by the CPU, so
// that the CUDA backend's own code runs in tests on machines without one. What is put on a stream waits there
// until somebody waits for it (a synchronisation, or an event that the host asks about), as late as a GPU
// might be: code that reads a result too early reads old memory here. Fresh memory holds NaNs. Work on the
// default stream is refused. Graphs are captured and replayed.
//
// Tests set what the machine is like, and which calls fail.

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>

namespace topknot::emulator {

struct Machine {
  int devices = 1;
  bool driver_too_old = false;
  std::size_t memory = std::size_t{4} << 30;  // bytes per device
  int major = 9, minor = 0;
  int code = 90;         // what kernels were compiled for, cudaFuncAttributes::ptxVersion
  bool reverse = false;  // blocks and threads run in descending order
  // Not 0: blocks begin in an order of this seed, and a few at a time take turns at barriers, fences and
  // atomic operations.
  unsigned interleave = 0;
};

// As tests want it; reset() is as at the start. Memory that is still held stays valid.
Machine& machine();
void reset();

// The `after`+1-th call of this name from now returns `error` ("cudaMalloc", "ncclAllGather", ...), and so do
// the later ones until reset(). Stand-ins of other libraries ask injected() with their own codes.
void fail(const std::string& call, int error, int after = 0);
int injected(const char* call);  // 0: none
// From now on every call of the run time fails, as after an unrecoverable fault.
void lose_device();

// Since reset().
struct Counts {
  std::size_t bytes_in_use = 0, most_bytes_in_use = 0;  // of those from before it too
  std::size_t allocations = 0;                          // cudaMalloc and cudaHostAlloc
  std::size_t kernels = 0, early_kernels = 0;  // run; those of them that were launched to begin early
  std::size_t uploaded = 0, downloaded = 0;    // bytes, by cudaMemcpyAsync
  std::size_t graphs = 0, most_graphs = 0;     // executable ones at a time
  std::size_t graph_nodes = 0;  // kernels, copies and library calls of the graph that was made last
};
Counts counts();

// Puts work on a stream: at its turn, or into the graph that is being captured. For the emulator of cuBLAS,
// cuDNN and NCCL.
void enqueue(cudaStream_t stream, std::function<void()> work);
// Work that may have to wait for another stream: false where it must, and then it has done nothing. The
// streams behind it stand still meanwhile, and the machine's lock is free.
void enqueue_when(cudaStream_t stream, std::function<bool()> attempt);
// Carries out what is on a stream.
void drain(cudaStream_t stream);

// For topknot_kernel.h.
struct Place {
  uint3 thread, block;
  dim3 block_size, grid_size;
};
const Place& place();
int lane();
void enqueue_kernel(cudaStream_t stream, dim3 grid, dim3 block, const void* kernel, bool early,
                    std::function<void()> body);
void run_kernel(const void* kernel, dim3 grid, dim3 block, const std::function<void()>& body);
void run_block(dim3 grid, dim3 size, std::uint64_t number, bool reverse, const std::function<void()>& body);
// By the thread that runs: the kernel before this one is complete from here on. A thread that ends without it
// ends the program. (The emulator runs one kernel after the other, be they launched early or not.)
void await_previous();
bool has_awaited();
// Where another block may go on: it does once in so many calls, if blocks are interleaved.
void give_way(unsigned once_in);
// Whether any thread of the block has a predicate that is not 0. All have to come to it, on the same line.
int block_barrier(int predicate, unsigned line);
// Every lane of `mask` brings a word and sees all of them. Valid until the thread's next call. `orders`: what
// the lanes did before, each of them sees behind it.
const std::uint64_t* warp_exchange(unsigned mask, std::uint64_t mine, bool orders = false);
void thread_fence();
// 16 bytes to shared memory, or 16 zeros, carried out as late as they may be: when the thread waits for them.
void begin_copy(void* to_shared, const void* from, bool real);
void close_copies();
void await_copies(std::size_t left);

}  // namespace topknot::emulator

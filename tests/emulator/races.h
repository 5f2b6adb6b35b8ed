#pragma once
// Races between the threads of a kernel. In a program whose kernels are compiled with -fsanitize=thread
// (test_cuda_races) every access of theirs to device and shared memory comes here, and what orders them from
// the emulator. Two accesses to a place race if one writes, not both are atomic, different threads made
// them, and nothing orders them:
//   in a block, __syncthreads; in a warp, __syncwarp of both lanes (a shuffle orders nothing);
//   between blocks, a __threadfence before an atomic operation, which another block's thread has read by an
//   atomic operation of its own before its __threadfence (CUDA C++ programming guide, memory fence functions).
// Whether a race shows in the result does not matter, nor in which order the emulator runs the threads.
// A read of shared memory that nothing in the block has written is reported too, and an access to device memory
// before await_previous().

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace topknot::emulator::races {

// From now on. Without it all calls below do nothing.
void watch();
// What was found since the last call, a paragraph each. What nobody takes makes the program's exit status 1.
std::vector<std::string> take();

// The kernel's name, and where it stands in the sources.
std::string place_of(const void* kernel);

// By blocks.cpp and fibres.cpp, of the kernel that runs; there is one at a time, and one block of it.
void begin_kernel(const void* kernel);
// Of the block that this thread of the operating system runs.
void begin_block(std::uint32_t number, std::size_t threads);
void end_block();
void run_thread(int thread, const char* stack, std::size_t stack_bytes);
void pass_barrier();
void pass_warp_barrier(int warp, unsigned mask);

// By the thread that runs.
enum class Access { read, write, atomic_read, atomic_write };
void access(const void* at, std::size_t bytes, Access kind, const void* code);
void fence();

}  // namespace topknot::emulator::races

#pragma once
// What a test sets of the emulator is undone at its end; an error within a capture.

#include "nn/core/cuda/context.h"
#include "tests/emulator/machine.h"
#include "tests/support/test.h"

namespace topknot::emulator {

struct Settings {
  Settings() = default;
  ~Settings() { reset(); }
  Settings(const Settings&) = delete;
  Settings& operator=(const Settings&) = delete;
};

// Blocks, threads and the branches of graphs run in the other order.
struct Reversed : Settings {
  Reversed() { machine().reverse = true; }
};

// The same, or, with a seed, blocks that take turns.
struct Reordered : Settings {
  explicit Reordered(unsigned seed) {
    machine().reverse = seed == 0;
    machine().interleave = seed;
  }
};

// What `work` throws while the stream is captured.
template <class Work>
std::string error_in_capture(cudaStream_t stream, const Work& work) {
  TOPKNOT_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  const std::string error = error_text(work);
  cudaGraph_t graph = nullptr;
  TOPKNOT_CUDA(cudaStreamEndCapture(stream, &graph));
  TOPKNOT_CUDA(cudaGraphDestroy(graph));
  return error;
}

struct Gpus : Settings {
  explicit Gpus(int count) { machine().devices = count; }
};

}  // namespace topknot::emulator

#pragma once
// Shared by all uses of oneDNN: the 2.x API (operation descriptors). oneDNN is used in nn/ops/cpu only.

#include <omp.h>

#include <initializer_list>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <oneapi/dnnl/dnnl.hpp>

#include "nn/core/tensor.h"

namespace topknot {

const dnnl::engine& dnnl_cpu_engine();
std::string onednn_version();  // "2.6.3"

dnnl::memory::data_type onednn_type(DType type);
// The descriptor of an activation in its layout; blocked, the channels are padded with zeros to whole blocks.
dnnl::memory::desc activation_desc(const Shape& shape, Layout layout, DType type = DType::f32);

// A primitive with its memory objects prepared for each thread that will run it, so that a call only sets
// pointers: creating them anew costs more than a small convolution. The scratchpad is cached memory.
class DnnlKernel {
 public:
  using Arguments = std::vector<std::pair<int, dnnl::memory::desc>>;
  // reads_unwritten: of a primitive that reads parts of its scratchpad which it did not write, and after its
  // inputs. Both are zeros then, in copies of the inputs.
  DnnlKernel(const dnnl::primitive& primitive, const Arguments& arguments,
             const dnnl::memory::desc& scratchpad, int threads, bool reads_unwritten = false);
  ~DnnlKernel();
  // Pointers in the order of the arguments; `last`: the last one, null if the list has it. Different threads
  // may run at once, each under its own number.
  void run(int thread, std::initializer_list<const void*> pointers, const void* last = nullptr) const;

 private:
  struct PerThread;
  dnnl::primitive primitive_;
  std::size_t scratchpad_floats_ = 0;
  bool reads_unwritten_;
  std::vector<std::unique_ptr<PerThread>> threads_;
};

// An op's forward and backward primitives, threaded by oneDNN, and the workspace from one to the other.
class DnnlPair {
 public:
  // The arguments are without the workspace, which comes last.
  DnnlPair(const dnnl::primitive_desc& forward, DnnlKernel::Arguments forward_arguments,
           const dnnl::primitive_desc& backward, DnnlKernel::Arguments backward_arguments);
  // Pointers in the order of the arguments. forward() returns the pair and its workspace for backward().
  static std::shared_ptr<const void> forward(std::shared_ptr<const DnnlPair> pair,
                                             std::initializer_list<const void*> pointers);
  static void backward(const std::shared_ptr<const void>& state, std::initializer_list<const void*> pointers);

 private:
  struct Kept;
  std::unique_ptr<DnnlKernel> forward_, backward_;
  std::int64_t workspace_floats_ = 0;
};

// A primitive keeps the number of threads under which it is made: one, while this lives.
class MadeForOneThread {
 public:
  MadeForOneThread() { omp_set_num_threads(1); }
  ~MadeForOneThread() { omp_set_num_threads(threads_); }
  MadeForOneThread(const MadeForOneThread&) = delete;
  MadeForOneThread& operator=(const MadeForOneThread&) = delete;

 private:
  const int threads_ = omp_get_max_threads();
};

// Throws OutOfMemory if too little is left for a kernel: oneDNN 2.6 does not check all of its allocations.
void check_kernel_room();
// Attributes that every primitive here is made with.
dnnl::primitive_attr user_scratchpad();

}  // namespace topknot

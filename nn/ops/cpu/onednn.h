#pragma once
// What every use of oneDNN needs: the 2.x API (operation descriptors). oneDNN is used in nn/ops/cpu and
// nn/core/device_cpu.cpp only.

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
// pointers: creating them anew costs more than a small convolution. The scratchpad comes from the caching
// allocator.
class DnnlKernel {
 public:
  using Arguments = std::vector<std::pair<int, dnnl::memory::desc>>;
  DnnlKernel(const dnnl::primitive& primitive, const Arguments& arguments,
             const dnnl::memory::desc& scratchpad, int threads);
  ~DnnlKernel();
  // Pointers in the order of the arguments. Different threads may run at once, each under its own number.
  void run(int thread, std::initializer_list<const void*> pointers) const;

 private:
  struct PerThread;
  dnnl::primitive primitive_;
  std::size_t scratchpad_floats_ = 0;
  std::vector<std::unique_ptr<PerThread>> threads_;
};

// Attributes that every primitive here is made with.
dnnl::primitive_attr user_scratchpad();

}  // namespace topknot

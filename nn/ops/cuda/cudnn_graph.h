#pragma once
// A convolution's weight gradient in fp32 from bfloat16 x and dy, which cuDNN's graph API has and its older
// interface lacks. cuDNN's engines for this product alone have dw in the type of x. Its engines for fused
// graphs, which it compiles at run time by NVRTC, also write fp32:
//
//   inner = conv_backward_filter(x, dy)   virtual, fp32
//   dw    = identity(inner)               fp32
//
// cuDNN 9.19 offers plans for one group and whole eights of channels, for every GPU that Topknot supports.

#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "nn/ops/cuda/cudnn_descriptor.h"
#include "nn/ops/kernels.h"

namespace topknot::cuda {

using CudnnGraphDescriptor =
    CudnnDescriptor<cudnnBackendDescriptor_t, cudnnBackendCreateDescriptor, cudnnBackendDestroyDescriptor>;

// One engine of cuDNN's, configured and compiled for a shape and a GPU. Made by WeightGradientGraph.
class WeightGradientPlan {
 public:
  std::size_t workspace() const { return workspace_; }  // bytes

  // dw [out, height, width, in / groups] (KRSC) = the gradient, on the handle's stream. x, dy: nhwc, bfloat16.
  // All three lie at multiples of kCudnnGraphAlignment. One thread at a time: cuDNN does not promise more.
  cudnnStatus_t run(cudnnHandle_t handle, const void* x, const void* dy, void* workspace, void* dw) const;

 private:
  friend class WeightGradientGraph;
  CudnnGraphDescriptor plan_{CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR};
  std::size_t workspace_ = 0;
};

inline constexpr std::int64_t kCudnnGraphAlignment = 16;  // bytes

// At most as many plans of a shape are looked at: cuDNN may name more, and compiles each while the run waits.
inline constexpr int kMostWeightGradientPlans = 2;

// The plans for one shape, in the order of cuDNN's heuristics, which GPU model and version of cuDNN decide.
class WeightGradientGraph {
 public:
  // x: [N, C, H, W]. Throws CudaError if cuDNN fails in another way than by offering no plan.
  WeightGradientGraph(cudnnHandle_t handle, const ConvGeometry& geometry, const Shape& x);
  int plans() const { return static_cast<int>(configurations_.size()); }
  std::int64_t engine(int number) const;  // cuDNN's number of a plan's engine
  // Compiled at the first call. Null if there are not as many, or cuDNN cannot make it.
  const WeightGradientPlan* plan(int number);

 private:
  std::unique_ptr<const WeightGradientPlan> compile(int number) const;
  cudnnHandle_t handle_;
  std::vector<CudnnGraphDescriptor> configurations_;
  std::map<int, std::unique_ptr<const WeightGradientPlan>> plans_;
};

}  // namespace topknot::cuda

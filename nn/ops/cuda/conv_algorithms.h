#pragma once
// One convolution of a layer by cuDNN: its descriptors, and which of cuDNN's algorithms serves each of its
// three products, found out once per shape. Everything NHWC, filters KRSC (OIHW shapes in nhwc order).
//
// The choice. Each product's first use times cuDNN's algorithms on the GPU and keeps the fastest, next to
// slower ones that need less workspace, which take over when memory is short; the host waits for this. What
// an earlier process chose with enough memory is taken from Context::algorithm_cache() instead. With
// ContextOptions::conv_plans the plans of cudnn_graph.h compete for a weight's gradient in bfloat16, which write
// fp32; the times compared are those until the gradient is in the arena. Under ContextOptions::deterministic, or if timing fails, nothing is timed: the
// first algorithm that cuDNN's heuristics name and call deterministic is taken, and no plan, so that runs
// repeat (unless one is short of memory and another is not). Choices are kept for the process, by shape, type,
// precision, determinism and GPU; ranks that share a process share them, and each compiles its own plans. A
// first use while a CUDA graph is captured is an Error, since nothing can be timed or compiled then.

#include <cstddef>
#include <cstdint>

#include "nn/core/cuda/context.h"
#include "nn/ops/cuda/cudnn_descriptor.h"
#include "nn/ops/cuda/cudnn_graph.h"
#include "nn/ops/cuda/products.h"
#include "nn/ops/kernels.h"

namespace topknot::cuda {

// Bytes of one product's workspace, at most. Algorithms that need more are not considered.
inline constexpr std::size_t kConvWorkspaceLimit = std::size_t{512} << 20;

// How often all algorithms of a product are timed; the shortest time of each counts. The first run of an
// algorithm also loads its code, which takes longer than many a convolution.
inline constexpr int kConvTimings = 4;

enum class ConvProduct {
  output,           // y = conv(x, w)
  input_gradient,   // dx from w, dy
  weight_gradient,  // dw from x, dy
};

struct ConvAlgorithm {
  int algorithm = 0;  // of the product's cuDNN enumeration, or of cudnn_graph.h's plans
  cudnnMathType_t math = CUDNN_DEFAULT_MATH;
  std::size_t workspace = 0;  // bytes
  int engine = -1;            // of a plan; -1: no plan
  bool is_plan() const { return engine >= 0; }
};

using CudnnFilter =
    CudnnDescriptor<cudnnFilterDescriptor_t, cudnnCreateFilterDescriptor, cudnnDestroyFilterDescriptor>;
using CudnnConvolution = CudnnDescriptor<cudnnConvolutionDescriptor_t, cudnnCreateConvolutionDescriptor,
                                         cudnnDestroyConvolutionDescriptor>;

// cuDNN does not do a product: Convolution::supported() knows from now on, and nothing was written.
class ConvUnsupported : public Error {
 public:
  using Error::Error;
};

// For one op of a graph; used by one thread.
class Convolution {
 public:
  // x: [N, C, H, W], an activation's shape.
  Convolution(const ConvGeometry& geometry, const Shape& x, DType type);

  // Puts the output or the input's gradient on the current context's stream: out = product(a, b) + beta * out,
  // with beta 0 or 1. (a, b): (x, w) or (w, dy); all of the convolution's type, out too. Throws CudaError if a
  // call fails, ConvUnsupported where cuDNN has no algorithm, or named some and supports none.
  void run(ConvProduct product, const void* a, const void* b, float beta, void* out) const;
  // The weight's gradient, in fp32 and OIHW. Throws as run() does.
  void weight_gradient(const void* x, const void* dy, const GradientTarget& dw) const;

  // Whether cuDNN's heuristics name an algorithm for the product; asked once per shape, as for choices.
  bool supported(ConvProduct product) const;

 private:
  friend class ConvChooser;
  cudnnStatus_t execute(ConvProduct product, const ConvAlgorithm& with, void* workspace, const void* a,
                        const void* b, float beta, void* out) const;
  // `plan` as `with` says, or null.
  cudnnStatus_t execute_weight_gradient(const ConvAlgorithm& with, const WeightGradientPlan* plan,
                                        void* workspace, const void* x, const void* dy,
                                        const GradientTarget& dw) const;
  // execute(algorithm, workspace) by the best algorithm that can. A choice writes over `out`, or over scratch
  // if that is null.
  template <class Execute>
  void run_best(ConvProduct product, const void* a, const void* b, void* out, const Execute& execute) const;
  DeviceArray<std::byte> scratch(ConvProduct product) const;
  std::size_t elements_of_output(ConvProduct product) const;
  FilterShape filter_shape() const;

  ConvGeometry geometry_;
  Shape shape_;
  DType type_;
  CudnnTensor x_, y_;
  CudnnFilter w_;
  CudnnConvolution convolution_;
};

// Forgets all choices: the next use of each shape chooses again. For tests and measurements.
void forget_conv_algorithms();

}  // namespace topknot::cuda

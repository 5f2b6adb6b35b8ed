#pragma once
// One convolution of a layer by cuDNN: its descriptors, and which of cuDNN's algorithms computes each of its
// three products. Everything NHWC, filters KRSC (OIHW shapes in nhwc order).
//
// A product's algorithms are those that cuDNN's heuristics name, in their order. With ContextOptions::conv_plans
// the plans of cudnn_graph.h follow for a weight's gradient in bfloat16, which write fp32. The first use of a
// product is a trial of all (nn/core/cuda/trial.h), for which the host waits. An algorithm that fails later, or
// for which memory has run short, is dropped, and another trial chooses among the others. Deterministic runs have
// only algorithms that cuDNN calls deterministic, in the heuristics' order, and no plans; they repeat unless one
// is short of memory and another is not. A first use while a CUDA graph is captured is an Error, since nothing
// can be timed or compiled then.

#include <array>
#include <cstddef>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "nn/ops/cuda/cudnn_descriptor.h"
#include "nn/ops/cuda/cudnn_graph.h"
#include "nn/ops/cuda/products.h"
#include "nn/ops/kernels.h"

namespace topknot::cuda {

// Bytes of one product's workspace, at most. Algorithms that need more are not considered.
inline constexpr std::size_t kConvWorkspaceLimit = std::size_t{512} << 20;

enum class ConvProduct {
  output,           // y = conv(x, w)
  input_gradient,   // dx from w, dy
  weight_gradient,  // dw from x, dy
};

struct ConvAlgorithm {
  std::string name;
  int number = 0;  // in the product's cuDNN enumeration, or of the plan
  cudnnMathType_t math = CUDNN_DEFAULT_MATH;
  std::size_t workspace = 0;  // bytes; a plan has its own
  bool is_plan = false;
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

class Convolution {
 public:
  // The current context's convolution of x, [N, C, H, W], made at its first use.
  static Convolution& of(const ConvGeometry& geometry, const Shape& x, DType type);

  Convolution(cudnnHandle_t handle, const ConvGeometry& geometry, const Shape& x, DType type);

  // Puts a product on the current context's stream: out = product(a, b), or out += that with `accumulate`.
  // (a, b): (x, w), (w, dy) or (x, dy). All are of the convolution's type, but the weight's gradient is fp32
  // and OIHW. Throws CudaError if a call fails, ConvUnsupported if cuDNN has no algorithm that it supports.
  void run(ConvProduct product, const void* a, const void* b, bool accumulate, void* out);

  // Whether there is an algorithm for the product; cuDNN's heuristics are asked at the first call.
  bool supported(ConvProduct product) { return !algorithms(product).left.empty(); }

 private:
  struct Algorithms {
    std::vector<ConvAlgorithm> left;  // the choice first
    bool asked = false, chosen = false;
  };
  using Workspace = std::function<void*(std::size_t bytes)>;

  Algorithms& algorithms(ConvProduct product);
  std::vector<ConvAlgorithm> named(ConvProduct product, cudnnMathType_t math) const;
  template <class Result, class Name, class Size, class... Descriptors>
  std::vector<ConvAlgorithm> named_by(cudnnMathType_t math, const char* call, Name name, Size size,
                                      Descriptors... descriptors) const;
  void add_plans(std::vector<ConvAlgorithm>& to);
  void choose(ConvProduct product, const void* a, const void* b, bool accumulate, void* out);

  // These return false if the algorithm does not do it; nothing was written then.
  bool compute(ConvProduct product, const ConvAlgorithm& by, const Workspace& workspace, const void* a,
               const void* b, bool accumulate, void* out);
  bool weight_gradient(const ConvAlgorithm& by, const Workspace& workspace, const void* x, const void* dy,
                       const GradientTarget& dw);
  bool execute(ConvProduct product, const ConvAlgorithm& by, void* workspace, const void* a, const void* b,
               bool accumulate, void* out) const;
  bool succeeded(cudnnStatus_t status, const char* call, ConvProduct product) const;

  std::string name(ConvProduct product) const;
  std::size_t output_elements(ConvProduct product) const;

  cudnnHandle_t handle_;
  ConvGeometry geometry_;
  Shape shape_;
  DType type_;
  CudnnTensor x_, y_;
  CudnnFilter w_;
  CudnnConvolution convolution_;
  std::array<Algorithms, 3> algorithms_;
  std::optional<WeightGradientGraph> plans_;  // which CUDA graphs may run
};

}  // namespace topknot::cuda

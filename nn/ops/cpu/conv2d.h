#pragma once
// A convolution on CPUs that lets its neighbours work where the data is in the cache: it goes through a batch in chunks
// of images.

#include <functional>

#include "nn/ops/kernels.h"

namespace topknot {

class ChunkedConv {
 public:
  // Called for each chunk [begin, end) of images, from the thread that works on it.
  using ChunkFn = std::function<void(std::int64_t begin, std::int64_t end)>;
  // Writes the gradient of the output for images [begin, end) to `out`, contiguous, in the type of the activations.
  using FillFn = std::function<void(std::int64_t begin, std::int64_t end, void* out)>;

  virtual ~ChunkedConv() = default;
  virtual Layout output_layout() const = 0;
  // y = conv(x, weight). `weight` is OIHW. `after` (may be empty) runs for each chunk of y when it is complete.
  virtual void forward(const Tensor& x, const float* weight, Tensor& y, const ChunkFn& after) = 0;
  // Gradients from the output's gradient, which is `grad`, or comes from `fill` a chunk at a time where grad is
  // undefined. The tensor of `input_gradient` may be undefined.
  virtual void backward(const Tensor& x, const float* weight, const Tensor& grad, const FillFn& fill,
                        GradientTarget weight_gradient, InputGradient& input_gradient) = 0;
};

// The calling thread's, with its primitives prepared by shape and thread count; layers of one geometry share them.
ChunkedConv& chunked_conv(const ConvGeometry& geometry);

// Images per chunk: about 1 MiB of input and output, at least one.
std::int64_t images_per_chunk(const ConvGeometry& geometry, const Tensor& x);

}  // namespace topknot

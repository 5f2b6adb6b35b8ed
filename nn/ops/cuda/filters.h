#pragma once
// Weights in the order and type of a product (cuDNN's filters, bfloat16 copies of matrices), and a filter's
// gradient in the arena's. Within Filters::Scope one launch makes all filters of a model.

#include <cuda_runtime_api.h>

#include <compare>
#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <tuple>

#include "nn/core/tensor.h"

namespace topknot::cuda {

struct FilterShape {
  std::int64_t out, in, taps;                     // taps: height times width of the kernel
  std::int64_t weight_out = out, weight_in = in;  // of the weight; what the filter has beyond them is zero
  std::size_t size() const { return static_cast<std::size_t>(out * in * taps); }
  auto operator<=>(const FilterShape&) const = default;
};

// filter [out, taps, in] (KRSC, which cuDNN wants with NHWC activations), rounded to bfloat16 if asked for,
// from the arena's weight [weight_out, weight_in, taps] (OIHW).
void filter_from_weight(cudaStream_t stream, const float* weight, void* filter, bool bf16, FilterShape shape);
// The way back, of shapes without zeros: weight = filter, or weight += filter.
void weight_from_filter(cudaStream_t stream, const void* filter, bool bf16, float* weight, bool accumulate,
                        FilterShape shape);

// The filters of a model's parameters, kept from scope to scope, in the memory of the current context. Must
// outlive the graphs that were captured in its scopes.
class Filters {
 public:
  // `parameters`: all that there are, which outlive the last scope.
  explicit Filters(std::span<const float> parameters) : parameters_(parameters) {}

  // In the current context, while it lives, weights do not change: between a forward pass' begin and its
  // backward pass' end, or for an evaluation. Its begin makes the filters that earlier scopes have met, by one
  // launch (for each 72) that a capture records.
  class Scope {
   public:
    explicit Scope(Filters& filters);
    ~Scope();
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    Filters*& open_;
    Filters* const before_;
  };

 private:
  friend Tensor filter_of(const Tensor& weight, DType type, const FilterShape& shape);
  bool has(const Tensor& weight) const;
  void make_all() const;

  std::span<const float> parameters_;
  std::map<std::tuple<const float*, DType, FilterShape>, Tensor> made_;
};

// The filter's elements, [size]: in a scope those that it has; else made now. That of a parameter stays for
// later scopes. Of other tensors none stays: an op may have computed them.
Tensor filter_of(const Tensor& weight, DType type, const FilterShape& shape);
// A weight in the given type: itself, or a copy.
Tensor weight_as(DType type, const Tensor& weight);

}  // namespace topknot::cuda

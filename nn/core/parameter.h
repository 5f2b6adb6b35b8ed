#pragma once
// Parameters, and the arena that holds all of them in one piece.

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "nn/core/autograd.h"
#include "nn/core/tensor.h"

namespace topknot {

// Fills a new parameter. The layer captures what it needs (`fan_in`) in the function.
using Initializer = std::function<void(std::span<float> values, const class CounterRng& rng)>;

class Parameter {
 public:
  const std::string& name() const { return name_; }
  const Shape& shape() const { return shape_; }
  std::size_t numel() const { return static_cast<std::size_t>(shape_.numel()); }
  bool compressible() const { return compressible_; }
  bool trained() const { return trained_; }  // false: frozen, it keeps its values
  // Whether this is a matrix inside the model, or filters of a convolution, which is one of {out, in * kh *
  // kw}: of two dimensions or more, and neither an embedding nor what mark_outer() says.
  bool hidden() const { return shape_.rank() > 1 && !outer_; }
  // Says that this is an embedding (of tokens or positions) or an output layer. A model that marks none has
  // its first convolution and the last weight that it registers marked, at build().
  Parameter& mark_outer() {
    outer_ = true;
    return *this;
  }
  std::size_t offset() const { return offset_; }  // of its slice in the arena, in elements

  // Views of the arena; OIHW for convolutions, {out, in} for linear layers, on every device.
  float* value() const { return value_; }
  float* gradient() const { return gradient_[side_]; }  // null if it is frozen

  // The leaf of the graph for this parameter; a constant where it is frozen.
  const Variable& variable() const { return variable_; }

 private:
  friend class ParameterArena;
  friend class ParameterStore;
  std::string name_;
  Shape shape_;
  Initializer init_;
  bool compressible_ = false, trained_ = true, outer_ = false;
  std::size_t offset_ = 0;
  float* value_ = nullptr;
  float* gradient_[2] = {nullptr, nullptr};
  int side_ = 0;
  Variable variable_;
};

// Untrained output of forward passes: a statistic (batch norm's), or a recurrent layer's carried state.
struct Buffer {
  std::string name;
  std::vector<float> values;  // on a GPU: as of the last ParameterStore::statistics_to_host()
  float* device = nullptr;    // on a GPU: where they are kept up to date, from build() on
  bool recurrent = false;     // a state: of this rank's sequences, not of the model
};

// Decides by shape alone whether a parameter may be compressed.
using CompressiblePredicate = std::function<bool(const Parameter&)>;
// Decides by name whether a parameter is frozen.
using FrozenPredicate = std::function<bool(const Parameter&)>;

// All weights in one contiguous buffer, and two gradient-sized buffers that take turns: one holds the
// gradient of the step, the other the residual of error feedback, where there is one. Slices swap roles at
// commit. Order: reverse order of registration, compressible parameters first, then those that stay dense; in
// both, sizes that are no multiple of 4 last, so that the others begin at 16 bytes, as vector loads and cuDNN
// want it (those that stay dense if the compressible ones are together a multiple of 4). Frozen parameters
// lie after the trained ones and have no gradients: sizes, slices and parameters() are without them.
class ParameterArena {
 public:
  // `zero`: whether the residuals begin as zeros; else all memory is left untouched.
  ParameterArena(const std::vector<Parameter*>& registered, const CompressiblePredicate& compressible,
                 const FrozenPredicate& frozen, Device device, bool zero = true);
  ParameterArena(const ParameterArena&) = delete;
  ~ParameterArena();

  std::size_t size() const { return size_; }                            // elements
  std::size_t compressible_size() const { return compressible_size_; }  // elements before the first dense one
  std::span<Parameter* const> parameters() const { return order_; }     // in arena order
  std::span<Parameter* const> frozen() const { return frozen_; }

  Device device() const { return device_; }
  std::span<float> weights() { return {weights_, size_}; }
  std::span<float> all_weights() { return {weights_, whole_size_}; }  // with the frozen ones at the end
  std::vector<float> host_weights() const;  // a copy, from any device, with the frozen ones at the end
  // The slice [begin, end), on parameter boundaries, of the buffer that backward writes to and of the other
  // one. All parameters of the slice must be on the same side, which holds for the groups of the exchange.
  std::span<float> gradient(std::size_t begin, std::size_t end) {
    return {gradients_[side_of(begin, end)] + begin, end - begin};
  }
  std::span<float> residual(std::size_t begin, std::size_t end) {
    return {gradients_[1 - side_of(begin, end)] + begin, end - begin};
  }
  // For one slice: the memory of the gradient becomes the residual's, and the reverse.
  void swap_gradient_and_residual(std::size_t begin, std::size_t end);

  // The next contribution to each gradient overwrites it. Touches no gradient.
  void mark_gradients_unwritten();
  // Zeroes gradients not written since mark_gradients_unwritten(), and returns their parameters.
  std::vector<Parameter*> zero_unwritten_gradients();

 private:
  int side_of(std::size_t begin, std::size_t end) const;
  std::vector<Parameter*> order_, frozen_;
  std::size_t size_ = 0, compressible_size_ = 0, whole_size_ = 0;  // whole: with the frozen ones
  Device device_;
  float* weights_ = nullptr;
  float* gradients_[2] = {nullptr, nullptr};
};

// A model's parameters and buffers, registered by layers in forward order; fixed after build().
class ParameterStore {
 public:
  explicit ParameterStore(Device device = {}) : device_(device) {}
  ~ParameterStore();
  Device device() const { return device_; }
  Parameter& add(const std::string& name, const Shape& shape, Initializer init);
  Buffer& add_buffer(const std::string& name, std::size_t size, float value);
  Buffer& add_state(const std::string& name, std::size_t size);  // recurrent, of zeros

  // Lays out the arena and initialises every weight from (seed, order of registration). `frozen`: none by
  // default. `initialise` false: sizes and places alone, without values, in no time.
  ParameterArena& build(const CompressiblePredicate& compressible, std::uint64_t seed,
                        const FrozenPredicate& frozen = {}, bool initialise = true);
  ParameterArena& arena();
  const std::vector<std::unique_ptr<Parameter>>& parameters() const {
    return parameters_;
  }  // registration order
  const std::vector<std::unique_ptr<Buffer>>& buffers() const { return buffers_; }
  // All buffers in order, in the device's memory; on a GPU they lie in one piece.
  std::vector<std::span<float>> statistics();
  // Between the device's memory and Buffer::values; on a CPU, where these are the same, a no-op.
  void statistics_to_host();
  void statistics_to_device();
  // Zeros in every recurrent state, on any device; in the order of the GPU's stream.
  void reset_states();

 private:
  void mark_ends();  // Parameter::mark_outer()
  Device device_;
  float* statistics_ = nullptr;
  std::size_t statistics_size_ = 0;
  std::vector<std::unique_ptr<Parameter>> parameters_;
  std::vector<std::unique_ptr<Buffer>> buffers_;
  std::unique_ptr<ParameterArena> arena_;
};

// The checksum (nn/base/checksum.h) of weights in host memory.
std::uint64_t parameter_checksum(std::span<const float> weights);

}  // namespace topknot

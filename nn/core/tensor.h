#pragma once
// A dense array on one device: a shape over shared storage, fp32 or, for activations, bfloat16.

#include <array>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <string>
#include <vector>

#include "nn/core/device.h"

namespace topknot {

// Up to four dimensions, outermost first: images {N, C, H, W}, features {N, C}, filters {O, I, H, W}.
class Shape {
 public:
  Shape() = default;
  Shape(std::initializer_list<std::int64_t> dims);
  int rank() const { return rank_; }
  std::int64_t operator[](int i) const { return dims_[static_cast<std::size_t>(i)]; }
  std::int64_t numel() const;
  bool operator==(const Shape&) const = default;
  std::string str() const;  // "[128, 3, 32, 32]"

 private:
  std::array<std::int64_t, 4> dims_{};
  int rank_ = 0;
};

// The physical order of a four-dimensional activation, chosen by the backend. All else is always plain.
enum class Layout {
  nhwc,     // N, H, W, C, for cuDNN
  plain,    // N, C, H, W
  blocked,  // N, C/B, H, W, B with B = channel_block(), for oneDNN; C is a multiple of B
};

// Channels per block on this CPU, as oneDNN has it (nn/ops/cpu/onednn.cpp): 16 with AVX-512, 8 without.
int channel_block();
// Whether this CPU multiplies bfloat16: AVX-512 BF16.
bool cpu_has_bfloat16();

class Tensor {
 public:
  Tensor() = default;  // undefined
  static Tensor empty(const Shape& shape, Layout layout = Layout::plain, Device device = {},
                      DType dtype = DType::f32);
  static Tensor empty_like(const Tensor& other) {
    return empty(other.shape(), other.layout(), other.device(), other.dtype());
  }
  static Tensor zeros(const Shape& shape, Layout layout = Layout::plain, Device device = {}) {
    Tensor t = empty(shape, layout, device);
    backend(device).fill_zero(t.data_, static_cast<std::size_t>(t.numel()));
    return t;
  }
  static Tensor from(const std::vector<float>& values, const Shape& shape, Device device = {});  // plain
  // A view of memory with another owner that outlives it (the parameter arena).
  static Tensor view(float* data, const Shape& shape, Device device = {});

  bool defined() const { return data_ != nullptr; }
  const Shape& shape() const { return shape_; }
  std::int64_t dim(int i) const { return shape_[i]; }
  std::int64_t numel() const { return shape_.numel(); }
  Layout layout() const { return layout_; }
  Device device() const { return device_; }
  DType dtype() const { return dtype_; }
  std::size_t bytes() const { return static_cast<std::size_t>(numel()) * size_of(dtype_); }
  float* data() { return data_; }  // of bfloat16 tensors only an address
  const float* data() const { return data_; }
  // The elements as they are stored: T is float or BFloat16, by dtype().
  template <class T>
  T* as() {
    return reinterpret_cast<T*>(data_);
  }
  template <class T>
  const T* as() const {
    return reinterpret_cast<const T*>(data_);
  }

  // True if no other tensor holds this storage, so that an op may write its result over it.
  bool exclusive() const { return storage_ && storage_.use_count() == 1; }
  // The same storage under another shape of as many elements; plain tensors only.
  Tensor reshaped(const Shape& shape) const;
  // Elements in storage order, from any device, as floats. Waits for the device.
  std::vector<float> to_vector() const;

 private:
  std::shared_ptr<float> storage_;  // null for a view
  float* data_ = nullptr;
  Shape shape_;
  Layout layout_ = Layout::plain;
  Device device_;
  DType dtype_ = DType::f32;
};

// Labels are the numbers of classes, from 0 on. This stands in the place of a label where a padded sequence
// has none: losses, their means and what is counted pass it over.
inline constexpr std::int32_t kNoLabel = -1;

}  // namespace topknot

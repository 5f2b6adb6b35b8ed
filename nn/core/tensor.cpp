#include "nn/core/tensor.h"

#include <fmt/format.h>

#include <cstring>

#include "nn/base/check.h"
#include "nn/core/bfloat16.h"
#include "nn/core/pass_cost.h"

namespace topknot {

Shape::Shape(std::initializer_list<std::int64_t> dims) {
  TOPKNOT_CHECK(dims.size() <= 4, "a shape has at most four dimensions");
  for (std::int64_t dim : dims) {
    TOPKNOT_CHECK(dim >= 0, "a dimension cannot be negative");
    dims_[static_cast<std::size_t>(rank_++)] = dim;
  }
}

std::int64_t Shape::numel() const {
  std::int64_t n = 1;
  for (int i = 0; i < rank_; ++i) n *= (*this)[i];
  return n;
}

std::string Shape::str() const {
  std::string text = "[";
  for (int i = 0; i < rank_; ++i) text += fmt::format("{}{}", i ? ", " : "", (*this)[i]);
  return text + "]";
}

Tensor Tensor::empty(const Shape& shape, Layout layout, Device device, DType dtype) {
  TOPKNOT_CHECK(layout != Layout::blocked || (shape.rank() == 4 && shape[1] % channel_block() == 0),
                "a blocked layout needs [N, C, H, W] with C a multiple of the block, not " + shape.str());
  TOPKNOT_CHECK(layout != Layout::nhwc || shape.rank() == 4, "layout nhwc needs [N, C, H, W]");
  const std::size_t floats = (static_cast<std::size_t>(shape.numel()) * size_of(dtype) + 3) / 4;
  Tensor t;
  t.shape_ = shape;
  t.layout_ = layout;
  t.device_ = device;
  t.dtype_ = dtype;
  const DeviceBackend* owner = &backend(device);
  t.data_ = owner->allocate(floats);
  const auto bytes = static_cast<std::int64_t>(floats * sizeof(float));
  const std::uint64_t counted = PassCost::allocated(bytes);
  t.storage_ = std::shared_ptr<float>(t.data_, [owner, floats, bytes, counted](float* data) {
    PassCost::released(bytes, counted);
    owner->release(data, floats);
  });
  return t;
}

Tensor Tensor::from(const std::vector<float>& values, const Shape& shape, Device device) {
  TOPKNOT_CHECK(static_cast<std::int64_t>(values.size()) == shape.numel(),
                "as many values as the shape " + shape.str() + " has elements");
  Tensor t = empty(shape, Layout::plain, device);
  backend(device).to_device(t.data(), values.data(), values.size());
  return t;
}

Tensor Tensor::view(float* data, const Shape& shape, Device device) {
  Tensor t;
  t.data_ = data;
  t.shape_ = shape;
  t.device_ = device;
  return t;
}

Tensor Tensor::reshaped(const Shape& shape) const {
  TOPKNOT_CHECK(layout_ == Layout::plain, "only a plain tensor can be reshaped");
  TOPKNOT_CHECK(shape.numel() == numel(), "reshape from " + shape_.str() + " to " + shape.str());
  Tensor t = *this;
  t.shape_ = shape;
  return t;
}

std::vector<float> Tensor::to_vector() const {
  const auto n = static_cast<std::size_t>(numel());
  std::vector<float> values((bytes() + 3) / 4);
  backend(device_).to_host(values.data(), data_, values.size());
  if (dtype_ == DType::f32) return values;
  std::vector<float> wide(n);
  for (std::size_t i = 0; i < n; ++i) {
    BFloat16 narrow;
    std::memcpy(&narrow.bits, reinterpret_cast<const std::byte*>(values.data()) + 2 * i, sizeof narrow.bits);
    wide[i] = to_float(narrow);
  }
  return wide;
}

}  // namespace topknot

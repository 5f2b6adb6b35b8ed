#include "nn/core/tensor.h"

#include "nn/core/check.h"

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
  for (int i = 0; i < rank_; ++i) text += (i ? ", " : "") + std::to_string((*this)[i]);
  return text + "]";
}

Tensor Tensor::empty(const Shape& shape, Layout layout, Device device) {
  TOPKNOT_CHECK(layout == Layout::plain || (shape.rank() == 4 && shape[1] % channel_block() == 0),
                "a blocked layout needs [N, C, H, W] with C a multiple of the block, not " + shape.str());
  const auto floats = static_cast<std::size_t>(shape.numel());
  Tensor t;
  t.shape_ = shape;
  t.layout_ = layout;
  t.device_ = device;
  DeviceBackend* owner = &backend(device);
  t.data_ = owner->allocate(floats);
  t.storage_ =
      std::shared_ptr<float>(t.data_, [owner, floats](float* data) { owner->release(data, floats); });
  return t;
}

Tensor Tensor::zeros(const Shape& shape, Layout layout, Device device) {
  Tensor t = empty(shape, layout, device);
  backend(device).fill_zero(t.data_, static_cast<std::size_t>(t.numel()));
  return t;
}

Tensor Tensor::from(const std::vector<float>& values, const Shape& shape) {
  TOPKNOT_CHECK(static_cast<std::int64_t>(values.size()) == shape.numel(),
                "as many values as the shape " + shape.str() + " has elements");
  Tensor t = empty(shape);
  std::copy(values.begin(), values.end(), t.data());
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
  TOPKNOT_CHECK(device_.kind == DeviceKind::cpu, "to_vector reads CPU tensors");
  return {data_, data_ + numel()};
}

}  // namespace topknot

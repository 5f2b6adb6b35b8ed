#pragma once
// A data set for tests: small pictures that differ in every pixel, and a sample that cannot be read, at all
// or at first, on request.

#include "data/dataset.h"
#include "tests/support/test.h"

namespace topknot {

class SmallDataset : public Dataset {
 public:
  SmallDataset(std::int64_t size, bool as_bytes, Shape shape = {2, 6, 7}, std::int64_t unreadable = -1,
               int failures = 1 << 30)
      : size_(size), as_bytes_(as_bytes), shape_(shape), unreadable_(unreadable), failures_(failures) {
    for (std::int64_t i = 0; i < size * shape.numel(); ++i)
      pixels_.push_back(static_cast<std::uint8_t>(i * 37 + 1));
  }
  const std::string& name() const override { return name_; }
  std::int64_t size() const override { return size_; }
  Shape sample_shape() const override { return shape_; }
  int classes() const override { return 5; }
  void get(std::int64_t index, float* sample) const override {
    if (index == unreadable_ && failures_-- > 0)
      throw UserError("sample " + std::to_string(index) + " cannot be read");
    for (std::int64_t i = 0; i < shape_.numel(); ++i)
      sample[i] = static_cast<float>(pixels_[index * shape_.numel() + i]) / 255.0f;
  }
  const std::uint8_t* bytes(std::int64_t index) const override {
    return as_bytes_ ? pixels_.data() + index * shape_.numel() : nullptr;
  }
  std::int32_t label(std::int64_t index) const override { return static_cast<std::int32_t>(index % 5); }
  std::vector<float> channel_mean() const override { return std::vector<float>(shape_[0], 0.4f); }
  std::vector<float> channel_std() const override { return std::vector<float>(shape_[0], 0.3f); }
  bool augment_helps() const override { return true; }

 private:
  const std::string name_ = "small";
  std::int64_t size_;
  bool as_bytes_;
  Shape shape_;
  std::int64_t unreadable_;
  mutable std::atomic<int> failures_;  // that are to come
  std::vector<std::uint8_t> pixels_;
};

}  // namespace topknot

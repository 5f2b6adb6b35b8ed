#pragma once
// The data set broken_sample, for runs in which one step is not finite.

#include "data/dataset.h"
#include "nn/core/rng.h"
#include "tests/support/test.h"

namespace topknot::testing {

// Small pictures of noise; sample 5 of the training split is broken.
class BrokenSample : public Dataset {
 public:
  explicit BrokenSample(Split split, std::string name = "broken_sample")
      : name_(std::move(name)), broken_(split == Split::train ? 5 : -1) {}
  const std::string& name() const override { return name_; }
  std::int64_t size() const override { return 32; }
  Shape sample_shape() const override { return {3, 8, 8}; }
  int classes() const override { return 2; }
  std::int32_t label(std::int64_t index) const override { return static_cast<std::int32_t>(index % 2); }
  void get(std::int64_t index, float* sample) const override {
    const CounterRng rng(1, RngUse::test, static_cast<std::uint32_t>(index));
    for (std::uint64_t i = 0; i < 192; ++i)
      sample[i] = index == broken_ ? std::numeric_limits<float>::quiet_NaN() : rng.normal(i);
  }

 private:
  std::string name_;
  std::int64_t broken_;
};

// Registers the class `Set`, which is made of its split.
template <class Set>
bool add_test_dataset(const char* name) {
  datasets().add(name, "of the tests", [](const DatasetOptions&, Split split) {
    return std::unique_ptr<Dataset>(std::make_unique<Set>(split));
  });
  return true;
}
inline const bool broken_sample_registered = add_test_dataset<BrokenSample>("broken_sample");

}  // namespace topknot::testing

// Linear regression with a known answer: inputs x ~ N(0, 1), a teacher W with elements N(0, 1 / features),
// targets y = W x + noise * N(0, 1). So y - noise has variance about 1, and the least possible mean squared
// error is noise^2. Noise is 0 to 1: at most as large as what there is to learn.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "data/dataset.h"
#include "nn/base/memory.h"
#include "nn/core/rng.h"

namespace topknot {
namespace {

constexpr std::uint32_t kTeacher = 0x7465;  // a stream number that no split uses

class SyntheticRegression final : public Dataset {
 public:
  SyntheticRegression(const DatasetOptions& options, Split split)
      : features_(options.features),
        targets_(options.targets),
        noise_(options.get<std::optional<double>>(option::noise).value_or(0.1)) {
    if (features_ < 1)
      throw UserError(
          fmt::format("synthetic_regression: a sample needs at least 1 input, not {}", features_));
    if (targets_ < 1)
      throw UserError(
          fmt::format("synthetic_regression: a sample needs at least 1 target, not {}", targets_));
    const std::int64_t wanted = split == Split::train ? options.train_size : options.test_size;
    size_ = wanted == 0 ? (split == Split::train ? 8192 : 2048) : limited_size(options, split, wanted);

    check_fits(split, size_, 4 * (features_ + targets_));
    const CounterRng teacher(options.seed, RngUse::dataset, 0, kTeacher);
    std::vector<double> weight(static_cast<std::size_t>(features_ * targets_));
    const double scale = 1.0 / std::sqrt(static_cast<double>(features_));
    for (std::size_t i = 0; i < weight.size(); ++i) weight[i] = scale * teacher.normal(i);

    with_memory("the samples of synthetic_regression",
                4.0 * static_cast<double>(size_ * (features_ + targets_)), [&] {
                  inputs_.resize(static_cast<std::size_t>(size_ * features_));
                  values_.resize(static_cast<std::size_t>(size_ * targets_));
                });
    for (std::int64_t n = 0; n < size_; ++n) {
      const CounterRng rng(options.seed, RngUse::dataset, static_cast<std::uint32_t>(n),
                           split == Split::train ? 0x100u : 0x101u);
      float* x = inputs_.data() + n * features_;
      for (std::int64_t i = 0; i < features_; ++i) x[i] = rng.normal(static_cast<std::uint64_t>(i));
      for (std::int64_t t = 0; t < targets_; ++t) {
        double y = noise_ * rng.normal(static_cast<std::uint64_t>(features_ + t));
        for (std::int64_t i = 0; i < features_; ++i)
          y += weight[static_cast<std::size_t>(t * features_ + i)] * x[i];
        values_[static_cast<std::size_t>(n * targets_ + t)] = static_cast<float>(y);
      }
    }
  }

  const std::string& name() const override { return name_; }
  std::int64_t size() const override { return size_; }
  Shape sample_shape() const override { return {features_, 1, 1}; }
  int classes() const override { return 0; }
  std::int64_t targets() const override { return targets_; }
  void get(std::int64_t index, float* sample) const override {
    std::copy_n(inputs_.data() + index * features_, features_, sample);
  }
  void target(std::int64_t index, float* values) const override {
    std::copy_n(values_.data() + index * targets_, targets_, values);
  }

 private:
  const std::string name_ = "synthetic_regression";
  std::int64_t features_, targets_, size_ = 0;
  double noise_;
  std::vector<float> inputs_, values_;
};

const bool synthetic_regression_registered = add_dataset<SyntheticRegression>(
    "synthetic_regression", "a noisy linear teacher on normal inputs; mean squared error, needs no files",
    {option::noise});

}  // namespace
}  // namespace topknot

#pragma once
// The model test_dropout, and the data set same_samples, for runs whose ranks and micro-batches differ in
// nothing but what dropout leaves out.

#include "data/dataset.h"
#include "nn/core/rng.h"
#include "nn/layers/layers.h"
#include "nn/models/model.h"
#include "tests/support/test.h"

namespace topknot::testing {

class SameSamples final : public Dataset {
 public:
  const std::string& name() const override { return name_; }
  std::int64_t size() const override { return 32; }
  Shape sample_shape() const override { return {3, 8, 8}; }
  int classes() const override { return 2; }
  std::int32_t label(std::int64_t) const override { return 1; }
  void get(std::int64_t, float* sample) const override {
    const CounterRng rng(1, RngUse::test);
    for (std::uint64_t i = 0; i < 192; ++i) sample[i] = rng.normal(i);
  }

 private:
  std::string name_ = "same_samples";
};
inline const bool same_samples_registered =
    (datasets().add("same_samples", "of the tests",
                    [](const DatasetOptions&, Split) {
                      return std::unique_ptr<Dataset>(std::make_unique<SameSamples>());
                    }),
     true);

inline ModulePtr make_dropout_model(ParameterStore& store, const ModelOptions& options) {
  auto model = std::make_unique<Sequential>();
  model->add<Flatten>();
  model->add<Dropout>(0.5f, 0);
  model->add<Linear>(store, "output", options.input.numel(), options.outputs);
  return model;
}
inline const bool dropout_model_registered =
    (add_model("test_dropout", "of the tests", make_dropout_model), true);

}  // namespace topknot::testing

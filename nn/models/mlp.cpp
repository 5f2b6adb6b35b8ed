// Fully connected models: `linear`, and `mlp` with ReLU between its layers (784-200-200-10 on MNIST by
// default, the fcn5net of the GaussianK-SGD experiments).
#include <fmt/format.h>

#include "nn/layers/layers.h"
#include "nn/models/model.h"

namespace topknot {
namespace {

ModulePtr make_mlp(ParameterStore& store, const ModelOptions& options, const std::vector<int>& hidden) {
  auto model = std::make_unique<Sequential>();
  model->add<Flatten>();
  std::int64_t in = options.input.numel();
  for (std::size_t i = 0; i < hidden.size(); ++i) {
    model->add<Linear>(store, fmt::format("hidden{}", i + 1), in, hidden[i]);
    model->add<Relu>();
    in = hidden[i];
  }
  model->add<Linear>(store, "output", in, options.outputs);
  return model;
}

const RegisterModel linear_model("linear", "one linear layer: the baseline that everything must beat",
                                 [](ParameterStore& store, const ModelOptions& options) {
                                   return make_mlp(store, options, {});
                                 });
const RegisterModel mlp_model("mlp", "fully connected layers with ReLU, widths from model.hidden",
                              [](ParameterStore& store, const ModelOptions& options) {
                                return make_mlp(store, options, options.hidden);
                              });

}  // namespace
}  // namespace topknot

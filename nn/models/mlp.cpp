// Fully connected models: `linear`, and `mlp` with ReLU between its layers (784-200-200-10 on MNIST by
// default, the fcn5net of the GaussianK-SGD experiments). And what all models share.
#include <fmt/format.h>

#include "nn/models/model.h"

namespace topknot {

void require_images(const ModelOptions& options, const char* model, std::int64_t least) {
  const Shape& x = options.input;
  if (x.rank() != 3 || x[1] < least || x[2] < least)
    throw UserError(fmt::format("model.name: {0} needs images of at least {1}x{1} pixels, not {2}", model,
                                least, x.str()));
}

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

const Option kHidden{"hidden", std::vector<int>{200, 200}, "widths of the hidden layers", 1, 1e6};

const bool mlp_registered[] = {
    add_model(
        "linear", "one linear layer: the baseline that everything must beat",
        [](ParameterStore& store, const ModelOptions& options) { return make_mlp(store, options, {}); }),
    add_model("mlp", "fully connected layers with ReLU, widths from model.hidden",
              [](ParameterStore& store, const ModelOptions& options) {
                return make_mlp(store, options, options.get<std::vector<int>>(kHidden));
              },
              {kHidden})};

}  // namespace
}  // namespace topknot

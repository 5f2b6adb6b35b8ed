// LeNet-5 (LeCun, Bottou, Bengio, Haffner, 1998) as it is built today: ReLU, max pooling, softmax.
#include "nn/models/model.h"

namespace topknot {
namespace {

ModulePtr make_lenet(ParameterStore& store, const ModelOptions& options) {
  require_images(options, "lenet", 12);
  const std::int64_t channels = options.input[0], height = options.input[1], width = options.input[2];
  const ConvGeometry first{channels, 6, 5, 1, 2}, second{6, 16, 5, 1, 0};
  const auto size = [](std::int64_t s) { return (s / 2 - 4) / 2; };
  auto model = std::make_unique<Sequential>();
  model->add<Conv2d>(store, "conv1", first);
  model->add<Relu>();
  model->add<Pool>(PoolGeometry{});
  model->add<Conv2d>(store, "conv2", second);
  model->add<Relu>();
  model->add<Pool>(PoolGeometry{});
  model->add<Flatten>();
  model->add<Linear>(store, "fc1", 16 * size(height) * size(width), 120);
  model->add<Relu>();
  model->add<Linear>(store, "fc2", 120, 84);
  model->add<Relu>();
  model->add<Linear>(store, "fc3", 84, options.outputs);
  return model;
}

const bool lenet_registered = add_model("lenet", "LeNet-5 with ReLU and max pooling, for MNIST", make_lenet);

}  // namespace
}  // namespace topknot

// SqueezeNet 1.0 (Iandola, Han, Moskewicz, Ashraf, Dally, Keutzer, arXiv 1602.07360, table 1), as torchvision
// has it: 1,248,424 parameters for 1000 classes.
#include <fmt/format.h>

#include <limits>

#include "nn/models/model.h"

namespace topknot {
namespace {

// Windows of 3 pixels every 2, the last of which may reach beyond the image: Caffe rounds sizes up.
Variable squeezenet_pool(const Variable& x) {
  const auto beyond = [](std::int64_t size) { return size % 2 == 0 ? std::int64_t{1} : std::int64_t{0}; };
  return pool(pad_end(x, beyond(x.shape()[2]), beyond(x.shape()[3]), -std::numeric_limits<float>::infinity()),
              {PoolKind::max, 3, 2, 0});
}

ModulePtr conv_relu(ParameterStore& store, const std::string& name, const ConvGeometry& geometry) {
  auto both = std::make_unique<Sequential>();
  both->add<Conv2d>(store, name, geometry);
  both->add<Relu>();
  return both;
}

ModulePtr make_squeezenet(ParameterStore& store, const ModelOptions& options) {
  require_images(options, "squeezenet", 21);
  auto model = std::make_unique<Sequential>();
  model->add(conv_relu(store, "conv1", {options.input[0], 96, 7, 2, 0}));
  std::int64_t in = 96;
  int layer = 1;
  for (const std::int64_t squeeze : {16, 16, 32, 32, 48, 48, 64, 64}) {
    ++layer;
    if (layer == 2 || layer == 5 || layer == 9) model->add<Apply<squeezenet_pool>>();
    const std::string name = fmt::format("fire{}", layer);
    model->add(conv_relu(store, name + ".squeeze", {in, squeeze, 1, 1, 0}));
    auto expand = std::make_unique<Branches>();
    expand->add(conv_relu(store, name + ".expand1", {squeeze, 4 * squeeze, 1, 1, 0}));
    expand->add(conv_relu(store, name + ".expand3", {squeeze, 4 * squeeze, 3, 1, 1}));
    model->add(std::move(expand));
    in = 8 * squeeze;
  }
  model->add<Dropout>(options.dropout, 1);
  model->add(conv_relu(store, "conv10", {in, options.outputs, 1, 1, 0}));
  model->add<GlobalAveragePool>();
  return model;
}

const bool squeezenet_registered = add_model("squeezenet", "SqueezeNet 1.0", make_squeezenet);

}  // namespace
}  // namespace topknot

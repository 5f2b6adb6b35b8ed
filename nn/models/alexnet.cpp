// AlexNet.
//  - alexnet: the one-column variant that torchvision has (Krizhevsky, "One weird trick for parallelizing
//    convolutional neural networks", arXiv 1404.5997), 61,100,840 parameters for 224x224 images and 1000
//    classes.
//  - alexnet_grouped: Krizhevsky, Sutskever, Hinton, NIPS 2012, section 3: two groups in convolutions 2, 4
//    and 5, local response normalisation after the first two; 60,965,224 parameters.
#include <fmt/format.h>

#include "nn/models/model.h"

namespace topknot {
namespace {

struct AlexNetLayer {
  ConvGeometry geometry;
  bool normalized, pooled;
};

const PoolGeometry kAlexNetPool{PoolKind::max, 3, 2, 0};

Variable alexnet_norm(const Variable& x) {
  return local_response_norm(x);
}

ModulePtr make_alexnet_of(ParameterStore& store, const ModelOptions& options,
                          const std::vector<AlexNetLayer>& layers, bool dropout_first) {
  require_images(options, "an alexnet", 63);
  auto model = std::make_unique<Sequential>();
  Shape x{1, options.input[0], options.input[1], options.input[2]};
  for (std::size_t i = 0; i < layers.size(); ++i) {
    const AlexNetLayer& layer = layers[i];
    model->add<Conv2d>(store, fmt::format("conv{}", i + 1), layer.geometry);
    model->add<Relu>();
    x = layer.geometry.output_shape(x);
    if (layer.normalized) model->add<Apply<alexnet_norm>>();
    if (layer.pooled) {
      model->add<Pool>(kAlexNetPool);
      x = {1, x[1], kAlexNetPool.output_size(x[2]), kAlexNetPool.output_size(x[3])};
    }
  }
  model->add<Flatten>();
  std::int64_t in = x.numel();
  for (const std::uint32_t i : {1u, 2u}) {
    if (dropout_first) model->add<Dropout>(options.dropout, i);
    model->add<Linear>(store, fmt::format("fc{}", i), in, 4096);
    model->add<Relu>();
    if (!dropout_first) model->add<Dropout>(options.dropout, i);
    in = 4096;
  }
  model->add<Linear>(store, "fc3", in, options.outputs);
  return model;
}

ModulePtr make_alexnet(ParameterStore& store, const ModelOptions& options) {
  return make_alexnet_of(store, options,
                         {{{options.input[0], 64, 11, 4, 2}, false, true},
                          {{64, 192, 5, 1, 2}, false, true},
                          {{192, 384, 3, 1, 1}, false, false},
                          {{384, 256, 3, 1, 1}, false, false},
                          {{256, 256, 3, 1, 1}, false, true}},
                         true);
}

// The paper's 224x224 images and 55x55 outputs of the first layer go together with 2 pixels of padding.
ModulePtr make_alexnet_grouped(ParameterStore& store, const ModelOptions& options) {
  return make_alexnet_of(store, options,
                         {{{options.input[0], 96, 11, 4, 2}, true, true},
                          {{96, 256, 5, 1, 2, 2}, true, true},
                          {{256, 384, 3, 1, 1}, false, false},
                          {{384, 384, 3, 1, 1, 2}, false, false},
                          {{384, 256, 3, 1, 1, 2}, false, true}},
                         false);
}

const bool alexnet_registered[] = {
    add_model("alexnet", "AlexNet in one column, as torchvision has it", make_alexnet),
    add_model("alexnet_grouped", "AlexNet of 2012: groups, local response normalisation",
              make_alexnet_grouped)};

}  // namespace
}  // namespace topknot

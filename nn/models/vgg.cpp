// VGG-16 (Simonyan and Zisserman, ICLR 2015, configuration D) for 32x32 images: batch norm, no convolution
// bias, one linear layer, as in the GaussianK-SGD and MGS-SGD experiments.
#include <fmt/format.h>

#include "nn/layers/layers.h"
#include "nn/models/model.h"

namespace topknot {
namespace {

ModulePtr make_vgg16(ParameterStore& store, const ModelOptions& options) {
  if (options.input.rank() != 3 || options.input[1] % 32 != 0 || options.input[2] % 32 != 0)
    throw UserError("model.name: vgg16 needs images whose sides are multiples of 32, not " +
                    options.input.str());
  constexpr std::int64_t pooling = 0;
  auto model = std::make_unique<Sequential>();
  std::int64_t in = options.input[0];
  int layer = 0;
  for (std::int64_t width : {64l, 64l, pooling, 128l, 128l, pooling, 256l, 256l, 256l, pooling, 512l, 512l,
                             512l, pooling, 512l, 512l, 512l, pooling}) {
    if (width == pooling) {
      model->add<Pool>(PoolGeometry{});
      continue;
    }
    model->add<ConvBn>(store, fmt::format("conv{}", ++layer), ConvGeometry{in, width, 3, 1, 1});
    in = width;
  }
  model->add<Flatten>();
  model->add<Linear>(store, "fc", in * (options.input[1] / 32) * (options.input[2] / 32), options.outputs);
  return model;
}

const RegisterModel vgg16("vgg16", "VGG-16 with batch norm for CIFAR", make_vgg16);

}  // namespace
}  // namespace topknot

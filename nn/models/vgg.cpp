// VGG-16 (Simonyan and Zisserman, ICLR 2015, configuration D).
//  - vgg16: for CIFAR, batch norm, no convolution biases, one linear layer: 14,724,042 parameters.
//  - vgg16_bias: that with convolution biases, 14,728,266 parameters, as the GaussianK-SGD and MGS-SGD
//    experiments have it. Batch norm takes a bias out again, so that it changes nothing but the number of
//    parameters.
//  - vgg16_imagenet: the paper's, without batch norm: 138,357,544 parameters for 224x224 images and 1000
//    classes.
#include <fmt/format.h>

#include "nn/models/model.h"

namespace topknot {
namespace {

enum class VggKind { cifar, cifar_bias, imagenet };

template <VggKind kKind>
ModulePtr make_vgg16(ParameterStore& store, const ModelOptions& options) {
  const Shape& input = options.input;
  if (input.rank() != 3 || input[1] % 32 != 0 || input[2] % 32 != 0)
    throw UserError("model.name: a vgg16 needs images whose sides are multiples of 32, not " + input.str());
  constexpr std::int64_t pooling = 0;
  auto model = std::make_unique<Sequential>();
  std::int64_t in = input[0];
  int layer = 0;
  for (std::int64_t width : {64l, 64l, pooling, 128l, 128l, pooling, 256l, 256l, 256l, pooling, 512l, 512l,
                             512l, pooling, 512l, 512l, 512l, pooling}) {
    if (width == pooling) {
      model->add<Pool>(PoolGeometry{});
      continue;
    }
    const std::string name = fmt::format("conv{}", ++layer);
    const ConvGeometry geometry{in, width, 3, 1, 1};
    if (kKind == VggKind::cifar) {
      model->add<ConvBn>(store, name, geometry);
    } else {
      model->add<Conv2d>(store, name, geometry);
      if (kKind == VggKind::cifar_bias)
        model->add<BatchNorm>(store, name + ".bn", width, /*relu=*/true);
      else
        model->add<Relu>();
    }
    in = width;
  }
  model->add<Flatten>();
  in *= (input[1] / 32) * (input[2] / 32);
  if (kKind != VggKind::imagenet) {
    model->add<Linear>(store, "fc", in, options.outputs);
    return model;
  }
  for (const std::uint32_t i : {1u, 2u}) {
    model->add<Linear>(store, fmt::format("fc{}", i), in, 4096);
    model->add<Relu>();
    model->add<Dropout>(options.dropout, i);
    in = 4096;
  }
  model->add<Linear>(store, "fc3", in, options.outputs);
  return model;
}

const bool vgg_registered[] = {
    add_model("vgg16", "VGG-16 with batch norm for CIFAR, no convolution biases", make_vgg16<VggKind::cifar>),
    add_model("vgg16_bias", "VGG-16 with batch norm and convolution biases for CIFAR",
              make_vgg16<VggKind::cifar_bias>),
    add_model("vgg16_imagenet", "VGG-16 for ImageNet, without batch norm", make_vgg16<VggKind::imagenet>)};

}  // namespace
}  // namespace topknot

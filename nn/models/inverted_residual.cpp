// Networks of inverted residuals: 1x1 convolution to a wider layer, depthwise convolution, 1x1 convolution
// back, and a shortcut around them where the shape stays.
//  - mobilenet_v2: Sandler, Howard, Zhu, Zhmoginov, Chen, CVPR 2018, table 2, as torchvision has it:
//    3,504,872 parameters for 1000 classes.
//  - efficientnet_b0: Tan and Le, ICML 2019, table 1, as torchvision has it: 5,288,548 parameters. Its
//    training in torchvision also drops whole blocks (stochastic depth), which is not here.
//  - efficientnet_lite0: TensorFlow's variant without squeeze and excitation, with ReLU6 and TensorFlow's
//    padding SAME: 4,652,008 parameters.
#include <fmt/format.h>

#include "nn/models/model.h"

namespace topknot {
namespace {

struct InvertedResidualStyle {
  Activation activation;
  bool squeeze = false;     // squeeze and excitation after the depthwise convolution
  bool tensorflow = false;  // padding SAME: of an even side and stride 2, one pixel less before than after
  float epsilon = 1e-5f;    // of batch norm
};

// Sigmoid(W2 silu(W1 mean(x) + b1) + b2) as a factor for each channel.
class SqueezeExcitation final : public Module {
 public:
  SqueezeExcitation(ParameterStore& store, const std::string& name, std::int64_t channels,
                    std::int64_t squeezed)
      : first_(store, name + ".1", channels, squeezed), second_(store, name + ".2", squeezed, channels) {}

  Variable forward(const Variable& x, const ForwardContext& context) override {
    const Variable hidden = silu(first_.forward(global_average_pool(x), context));
    return scale_channels(x, sigmoid(second_.forward(hidden, context)));
  }

 private:
  Linear first_, second_;
};

// A convolution with batch norm of a kernel of odd size. `size`: of the image, before and after.
class SamePaddedConv final : public Module {
 public:
  SamePaddedConv(ParameterStore& store, const std::string& name, const InvertedResidualStyle& style,
                 ConvGeometry geometry, Extent& size)
      : extra_{more_behind(style, geometry, size.height), more_behind(style, geometry, size.width)},
        conv_(store, name, padded(geometry), style.activation, style.epsilon) {
    size.height = (size.height - 1) / geometry.stride.height + 1;
    size.width = (size.width - 1) / geometry.stride.width + 1;
  }
  Variable forward(const Variable& x, const ForwardContext& context) override {
    return conv_.forward(pad_end(x, extra_.height, extra_.width), context);
  }

 private:
  static std::int64_t more_behind(const InvertedResidualStyle& style, const ConvGeometry& g,
                                  std::int64_t size) {
    return style.tensorflow && g.stride == 2 && size % 2 == 0;
  }
  ConvGeometry padded(ConvGeometry g) const {
    const std::int64_t around = (g.kernel.height - 1) / 2;
    g.padding = {around - extra_.height, around - extra_.width};
    return g;
  }
  Extent extra_;
  ConvBn conv_;
};

struct InvertedResidualShape {
  std::int64_t expansion, kernel, stride, out;
  int blocks;
};

class InvertedResidual final : public Module {
 public:
  InvertedResidual(ParameterStore& store, const std::string& name, const InvertedResidualStyle& style,
                   std::int64_t in, const InvertedResidualShape& s, std::int64_t stride, Extent& size)
      : shortcut_(stride == 1 && in == s.out) {
    const std::int64_t wide = in * s.expansion;
    if (wide != in)
      body_.add<ConvBn>(store, name + ".expand", ConvGeometry{in, wide, 1, 1, 0}, style.activation,
                        style.epsilon);
    body_.add<SamePaddedConv>(store, name + ".depthwise", style,
                              ConvGeometry{wide, wide, s.kernel, stride, 0, wide}, size);
    if (style.squeeze)
      body_.add<SqueezeExcitation>(store, name + ".squeeze", wide, std::max<std::int64_t>(1, in / 4));
    project_ = std::make_unique<ConvBn>(store, name + ".project", ConvGeometry{wide, s.out, 1, 1, 0},
                                        Activation::none, style.epsilon);
  }

  Variable forward(const Variable& x, const ForwardContext& context) override {
    return project_->forward(body_.forward(x, context), shortcut_ ? x : Variable(), context);
  }

 private:
  bool shortcut_;
  Sequential body_;
  std::unique_ptr<ConvBn> project_;
};

ModulePtr make_inverted_residuals(ParameterStore& store, const ModelOptions& options, const char* name,
                                  const InvertedResidualStyle& style,
                                  const std::vector<InvertedResidualShape>& shapes) {
  require_images(options, name, 32);
  auto model = std::make_unique<Sequential>();
  Extent size{options.input[1], options.input[2]};
  std::int64_t in = 32;
  model->add<SamePaddedConv>(store, "stem", style, ConvGeometry{options.input[0], in, 3, 2, 0}, size);
  for (std::size_t stage = 0; stage < shapes.size(); ++stage)
    for (int block = 1; block <= shapes[stage].blocks; ++block) {
      model->add<InvertedResidual>(store, fmt::format("stage{}.block{}", stage + 1, block), style, in,
                                   shapes[stage], block == 1 ? shapes[stage].stride : 1, size);
      in = shapes[stage].out;
    }
  model->add<ConvBn>(store, "head", ConvGeometry{in, 1280, 1, 1, 0}, style.activation, style.epsilon);
  model->add<GlobalAveragePool>();
  model->add<Dropout>(options.dropout, 1);
  model->add<Linear>(store, "fc", 1280, options.outputs);
  return model;
}

// Expansion, kernel, stride, channels, blocks.
const std::vector<InvertedResidualShape> kMobileNetV2{{1, 3, 1, 16, 1}, {6, 3, 2, 24, 2}, {6, 3, 2, 32, 3},
                                                      {6, 3, 2, 64, 4}, {6, 3, 1, 96, 3}, {6, 3, 2, 160, 3},
                                                      {6, 3, 1, 320, 1}};
const std::vector<InvertedResidualShape> kEfficientNet{{1, 3, 1, 16, 1}, {6, 3, 2, 24, 2},  {6, 5, 2, 40, 2},
                                                       {6, 3, 2, 80, 3}, {6, 5, 1, 112, 3}, {6, 5, 2, 192, 4},
                                                       {6, 3, 1, 320, 1}};

const bool inverted_residual_registered[] = {
    add_model("mobilenet_v2", "MobileNetV2",
              [](ParameterStore& store, const ModelOptions& options) {
                return make_inverted_residuals(store, options, "mobilenet_v2", {Activation::relu6},
                                               kMobileNetV2);
              }),
    add_model("efficientnet_b0", "EfficientNet-B0, without stochastic depth",
              [](ParameterStore& store, const ModelOptions& options) {
                return make_inverted_residuals(store, options, "efficientnet_b0", {Activation::silu, true},
                                               kEfficientNet);
              }),
    add_model("efficientnet_lite0", "EfficientNet-Lite0, padded as TensorFlow does",
              [](ParameterStore& store, const ModelOptions& options) {
                return make_inverted_residuals(store, options, "efficientnet_lite0",
                                               {Activation::relu6, false, true, 1e-3f}, kEfficientNet);
              })};

}  // namespace
}  // namespace topknot

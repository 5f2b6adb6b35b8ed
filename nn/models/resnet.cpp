// Residual networks (He, Zhang, Ren, Sun, "Deep residual learning for image recognition", CVPR 2016).
//  - resnet20/32/44/56/110: section 4.2: 6n + 2 layers of 16, 32 and 64 channels, parameter-free shortcuts
//    (option A).
//  - resnet18: table 1's network of basic blocks with a CIFAR stem (3x3, no pooling) and projection shortcuts
//    (option B), as CIFAR studies use it.
//  - resnet18_imagenet, resnet34: table 1's networks of basic blocks, option B.
//  - resnet50, resnet152: table 1's networks of bottlenecks, option B; the 3x3 convolution has the stride, as
//    in torchvision ("version 1.5"), not the 1x1 before it, as in the paper.
#include <fmt/format.h>

#include "nn/models/model.h"

namespace topknot {
namespace {

enum class ShortcutKind { pad, project };  // options A and B

class BasicBlock final : public Module {
 public:
  static constexpr std::int64_t kExpansion = 1;
  BasicBlock(ParameterStore& store, const std::string& name, std::int64_t in, std::int64_t out,
             std::int64_t stride, ShortcutKind shortcut = ShortcutKind::project)
      : out_(out),
        pad_(shortcut == ShortcutKind::pad && (stride != 1 || in != out)),
        first_(store, name + ".1", {in, out, 3, stride, 1}),
        second_(store, name + ".2", {out, out, 3, 1, 1}) {
    if (shortcut == ShortcutKind::project && (stride != 1 || in != out))
      projection_ = std::make_unique<ConvBn>(store, name + ".shortcut", ConvGeometry{in, out, 1, stride, 0},
                                             Activation::none);
  }

  Variable forward(const Variable& x, const ForwardContext& context) override {
    const Variable hidden = first_.forward(x, context);
    const Variable shortcut = pad_          ? subsample_and_pad(x, out_)
                              : projection_ ? projection_->forward(x, context)
                                            : x;
    return second_.forward(hidden, shortcut, context);
  }

 private:
  std::int64_t out_;
  bool pad_;
  ConvBn first_, second_;
  std::unique_ptr<ConvBn> projection_;
};

// 1x1, 3x3, 1x1; four times as wide outside as inside.
class Bottleneck final : public Module {
 public:
  static constexpr std::int64_t kExpansion = 4;
  Bottleneck(ParameterStore& store, const std::string& name, std::int64_t in, std::int64_t width,
             std::int64_t stride)
      : first_(store, name + ".1", {in, width, 1, 1, 0}),
        second_(store, name + ".2", {width, width, 3, stride, 1}),
        third_(store, name + ".3", {width, 4 * width, 1, 1, 0}) {
    if (stride != 1 || in != 4 * width)
      projection_ = std::make_unique<ConvBn>(store, name + ".shortcut",
                                             ConvGeometry{in, 4 * width, 1, stride, 0}, Activation::none);
  }

  Variable forward(const Variable& x, const ForwardContext& context) override {
    const Variable hidden = second_.forward(first_.forward(x, context), context);
    return third_.forward(hidden, projection_ ? projection_->forward(x, context) : x, context);
  }

 private:
  ConvBn first_, second_, third_;
  std::unique_ptr<ConvBn> projection_;
};

// The stem's convolution, with pooling after it or without, then blocks[i] blocks of widths[i] channels
// inside; a stage but the first begins with a stride of 2.
template <class Block, class... Shortcut>
ModulePtr make_resnet(ParameterStore& store, const ModelOptions& options, const ConvGeometry& stem,
                      bool pooled, const std::vector<std::int64_t>& widths, const std::vector<int>& blocks,
                      Shortcut... shortcut) {
  require_images(options, "a resnet", 8);
  auto model = std::make_unique<Sequential>();
  model->add<ConvBn>(store, "stem", stem);
  if (pooled) model->add<Pool>(PoolGeometry{PoolKind::max, 3, 2, 1});
  std::int64_t in = stem.out;
  for (std::size_t stage = 0; stage < widths.size(); ++stage)
    for (int block = 0; block < blocks[stage]; ++block) {
      const std::string name = fmt::format("stage{}.block{}", stage + 1, block + 1);
      model->add<Block>(store, name, in, widths[stage], stage > 0 && block == 0 ? 2 : 1, shortcut...);
      in = Block::kExpansion * widths[stage];
    }
  model->add<GlobalAveragePool>();
  model->add<Linear>(store, "fc", in, options.outputs);
  return model;
}

template <int kDepth>
ModulePtr make_cifar_resnet(ParameterStore& store, const ModelOptions& options) {
  return make_resnet<BasicBlock>(store, options, {options.input[0], 16, 3, 1, 1}, false, {16, 32, 64},
                                 std::vector(3, (kDepth - 2) / 6), ShortcutKind::pad);
}

ModulePtr make_resnet18(ParameterStore& store, const ModelOptions& options) {
  return make_resnet<BasicBlock>(store, options, {options.input[0], 64, 3, 1, 1}, false, {64, 128, 256, 512},
                                 {2, 2, 2, 2});
}

template <class Block, int... kBlocks>
ModulePtr make_imagenet_resnet(ParameterStore& store, const ModelOptions& options) {
  return make_resnet<Block>(store, options, {options.input[0], 64, 7, 2, 3}, true, {64, 128, 256, 512},
                            {kBlocks...});
}

const bool resnet_registered[] = {
    add_model("resnet20", "CIFAR ResNet-20, option A shortcuts", make_cifar_resnet<20>),
    add_model("resnet32", "CIFAR ResNet-32, option A shortcuts", make_cifar_resnet<32>),
    add_model("resnet44", "CIFAR ResNet-44, option A shortcuts", make_cifar_resnet<44>),
    add_model("resnet56", "CIFAR ResNet-56, option A shortcuts", make_cifar_resnet<56>),
    add_model("resnet110", "CIFAR ResNet-110, option A shortcuts", make_cifar_resnet<110>),
    add_model("resnet18", "ResNet-18 with a CIFAR stem", make_resnet18),
    add_model("resnet18_imagenet", "ResNet-18 for ImageNet; takes smaller images too",
              make_imagenet_resnet<BasicBlock, 2, 2, 2, 2>),
    add_model("resnet34", "ResNet-34 for ImageNet; takes smaller images too",
              make_imagenet_resnet<BasicBlock, 3, 4, 6, 3>),
    add_model("resnet50", "ResNet-50 for ImageNet (version 1.5); takes smaller images too",
              make_imagenet_resnet<Bottleneck, 3, 4, 6, 3>),
    add_model("resnet152", "ResNet-152 for ImageNet (version 1.5); takes smaller images too",
              make_imagenet_resnet<Bottleneck, 3, 8, 36, 3>)};

}  // namespace
}  // namespace topknot

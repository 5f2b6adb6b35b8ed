// ShuffleNetV2 1.0 (Ma, Zhang, Zheng, Sun, ECCV 2018, table 5 and figure 3), as torchvision has it: 2,278,604
// parameters for 1000 classes.
#include <fmt/format.h>

#include "nn/models/model.h"

namespace topknot {
namespace {

// Half of the channels pass by. A unit of stride 2 takes all channels on both ways, and halves the image.
class ShuffleUnit final : public Module {
 public:
  ShuffleUnit(ParameterStore& store, const std::string& name, std::int64_t in, std::int64_t out,
              std::int64_t stride)
      : half_(out / 2) {
    if (stride > 1) {
      passing_ = std::make_unique<Sequential>();
      passing_->add<ConvBn>(store, name + ".passing1", ConvGeometry{in, in, 3, stride, 1, in},
                            Activation::none);
      passing_->add<ConvBn>(store, name + ".passing2", ConvGeometry{in, half_, 1, 1, 0});
    }
    main_.add<ConvBn>(store, name + ".1", ConvGeometry{stride > 1 ? in : half_, half_, 1, 1, 0});
    main_.add<ConvBn>(store, name + ".2", ConvGeometry{half_, half_, 3, stride, 1, half_}, Activation::none);
    main_.add<ConvBn>(store, name + ".3", ConvGeometry{half_, half_, 1, 1, 0});
  }

  Variable forward(const Variable& x, const ForwardContext& context) override {
    const Variable passing = passing_ ? passing_->forward(x, context) : slice_channels(x, 0, half_);
    const Variable main = main_.forward(passing_ ? x : slice_channels(x, half_, half_), context);
    return channel_shuffle(concat({passing, main}), 2);
  }

 private:
  std::int64_t half_;
  std::unique_ptr<Sequential> passing_;
  Sequential main_;
};

ModulePtr make_shufflenet_v2(ParameterStore& store, const ModelOptions& options) {
  require_images(options, "shufflenet_v2", 32);
  auto model = std::make_unique<Sequential>();
  model->add<ConvBn>(store, "stem", ConvGeometry{options.input[0], 24, 3, 2, 1});
  model->add<Pool>(PoolGeometry{PoolKind::max, 3, 2, 1});
  std::int64_t in = 24;
  int stage = 1;
  for (const auto& [units, out] : {std::pair{4, 116}, std::pair{8, 232}, std::pair{4, 464}}) {
    ++stage;
    for (int unit = 1; unit <= units; ++unit) {
      model->add<ShuffleUnit>(store, fmt::format("stage{}.unit{}", stage, unit), in, out, unit == 1 ? 2 : 1);
      in = out;
    }
  }
  model->add<ConvBn>(store, "head", ConvGeometry{in, 1024, 1, 1, 0});
  model->add<GlobalAveragePool>();
  model->add<Linear>(store, "fc", 1024, options.outputs);
  return model;
}

const bool shufflenet_registered = add_model("shufflenet_v2", "ShuffleNetV2 1.0", make_shufflenet_v2);

}  // namespace
}  // namespace topknot

// A model in one file: two convolutions with batch norm, one of them with a shortcut around it, and a
// classifier.
#include "nn/layers/layers.h"
#include "nn/models/model.h"

namespace topknot {
namespace {

// A module owns its layers and says what they compute; backward follows from the ops.
class WideNet final : public Module {
 public:
  WideNet(ParameterStore& store, const ModelOptions& options)
      : stem_(store, "stem", ConvGeometry{options.input[0], kWidth, 3, 2, 1}),
        body_(store, "body", ConvGeometry{kWidth, kWidth, 3, 1, 1}),
        output_(store, "output", kWidth, options.outputs) {}

  Variable forward(const Variable& x, const ForwardContext& context) override {
    const Variable features = stem_.forward(x, context);
    const Variable deeper = body_.forward(features, /*residual=*/features, context);
    return output_.forward(pool_.forward(deeper, context), context);
  }

 private:
  static constexpr std::int64_t kWidth = 32;
  ConvBn stem_, body_;
  GlobalAveragePool pool_;
  Linear output_;
};

const bool wide_net_registered =
    add_model<WideNet>("wide_net", "two convolutions: the worked example of docs/extending.md");

}  // namespace
}  // namespace topknot

// The network of the papers for AN4, a Deep Speech 2 (Amodei et al., ICML 2016, sections 3.2 to 3.5) of the
// size and order that its public PyTorch version has, which GaussianK-SGD trains: two convolutions over the
// spectrogram, recurrent layers of one direction with batch norm between them, a lookahead convolution of 21
// frames, batch norm, and a layer without bias. 27,569,568 parameters (5 layers of 800 units, 29 characters).
#include <fmt/format.h>

#include "nn/models/model.h"

namespace topknot {
namespace {

constexpr std::int64_t kLookahead = 21;  // taps

Variable hardtanh20(const Variable& x) {
  return clamp(x, 0.0f, 20.0f);
}

class DeepSpeech final : public Module {
 public:
  DeepSpeech(ParameterStore& store, const ModelOptions& options)
      : bins_(options.input[1]),
        width_(options.get<int>(option::width)),
        first_{1, 32, {41, 11}, 2, {20, 5}},
        second_{32, 32, {21, 11}, {2, 1}, {10, 5}},
        first_conv_(store, "conv.1", first_),
        first_norm_(store, "conv.1.bn", 32),
        second_conv_(store, "conv.2", second_),
        second_norm_(store, "conv.2.bn", 32) {
    if (options.input.rank() != 3 || options.input[0] != 1)
      throw UserError("model.name: deep_speech needs spectrograms, not samples of " + options.input.str());
    const Shape maps = second_.output_shape(first_.output_shape({1, 1, bins_, 1 << 10}));
    std::int64_t in = maps[1] * maps[2];
    const Initializer start = uniform(1.0f / std::sqrt(static_cast<float>(width_)));
    for (std::int64_t i = 1; i <= options.get<int>(option::layers); ++i, in = width_) {
      Layer& layer = layers_.emplace_back();
      if (i > 1) layer.norm = std::make_unique<BatchNorm>(store, fmt::format("rnn{}.bn", i), in);
      const auto add = [&](const char* name, const Shape& shape) {
        return &store.add(fmt::format("rnn{}.{}", i, name), shape, start);
      };
      layer.input = add("weight_ih", {4 * width_, in});
      layer.recurrent = add("weight_hh", {4 * width_, width_});
      layer.input_bias = add("bias_ih", {4 * width_});
      layer.recurrent_bias = add("bias_hh", {4 * width_});
    }
    lookahead_ = &store.add("lookahead.weight", {width_, kLookahead},
                            uniform(1.0f / std::sqrt(static_cast<float>(kLookahead))));
    last_norm_ = std::make_unique<BatchNorm>(store, "fc.bn", width_);
    output_ = &store.add("fc.weight", {options.outputs, width_}, start);
  }

  std::int64_t output_frames(std::int64_t frames) const override {
    return second_.output_shape(first_.output_shape({1, 1, bins_, frames}))[3];
  }

  Variable forward(const Variable& x, const ForwardContext& context) override {
    const std::int64_t batch = x.shape()[0];
    const auto normed = [&](BatchNorm& norm, const Variable& rows) {
      return flatten(norm.forward(rows_to_images(rows), context));
    };
    // Padding is zero wherever it is read, so that a recording gives the same output in any batch, and batch
    // norm sees zeros there, as in the PyTorch version. The second convolution keeps the number of frames.
    const auto masked = [&](const Variable& to) { return mask_frames(to, context.frames); };
    Variable y = masked(first_conv_.forward(x, context));
    y = masked(hardtanh20(first_norm_.forward(y, context)));
    y = masked(second_conv_.forward(y, context));
    y = frames_to_rows(hardtanh20(second_norm_.forward(y, context)));
    for (const Layer& layer : layers_) {
      if (layer.norm) y = normed(*layer.norm, y);
      y = masked(lstm(y, batch,
                      {context.use(*layer.input), context.use(*layer.recurrent),
                       context.use(*layer.input_bias), context.use(*layer.recurrent_bias)},
                      {}));
    }
    y = hardtanh20(lookahead(y, batch, context.use(*lookahead_)));
    return linear(normed(*last_norm_, y), context.use(*output_), {});
  }

 private:
  struct Layer {
    std::unique_ptr<BatchNorm> norm;  // before it; none before the first
    Parameter *input, *recurrent, *input_bias, *recurrent_bias;
  };
  std::int64_t bins_, width_;
  ConvGeometry first_, second_;
  Conv2d first_conv_;
  BatchNorm first_norm_;
  Conv2d second_conv_;
  BatchNorm second_norm_;
  std::vector<Layer> layers_;
  Parameter* lookahead_;
  std::unique_ptr<BatchNorm> last_norm_;
  Parameter* output_;
};

const bool deep_speech_registered = add_model<DeepSpeech>(
    "deep_speech",
    "Deep Speech 2 as for AN4: model.layers LSTM layers of model.width units, for data.name=speech",
    {option::width, option::layers});

}  // namespace
}  // namespace topknot

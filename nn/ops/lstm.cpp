#include <fmt/format.h>

#include "nn/core/pass_cost.h"
#include "nn/ops/kernels.h"

namespace topknot {

Variable lstm(const Variable& x, std::int64_t batch, const LstmWeights& weights, const LstmState& state) {
  const Shape &in = x.shape(), &w = weights.input.shape();
  const std::int64_t width = w[0] / 4;
  TOPKNOT_CHECK(
      in.rank() == 2 && batch > 0 && in[0] > 0 && in[0] % batch == 0 && w == Shape({4 * width, in[1]}),
      fmt::format("lstm: input {} for a batch of {}, weight {}", in.str(), batch, w.str()));
  TOPKNOT_CHECK(
      weights.recurrent.shape() == Shape({4 * width, width}) &&
          weights.input_bias.shape() == Shape({4 * width}) &&
          weights.recurrent_bias.shape() == Shape({4 * width}),
      fmt::format("lstm: recurrent weight {} for a width of {}", weights.recurrent.shape().str(), width));
  for (const Buffer* buffer : {state.hidden, state.cell})
    TOPKNOT_CHECK(state.carried()
                      ? buffer && static_cast<std::int64_t>(buffer->values.size()) >= batch * width
                      : !buffer,
                  fmt::format("lstm: the state has no room for a batch of {}", batch));
  const auto& kernels = kernels_for<LstmKernels>(x);
  const LstmCall call{x.value(),
                      weights.input.value(),
                      weights.recurrent.value(),
                      weights.input_bias.value(),
                      weights.recurrent_bias.value(),
                      state,
                      batch,
                      in[0] / batch,
                      width};
  const double of_input = 2.0 * static_cast<double>(in[0] * w.numel()),
               recurrent = 2.0 * static_cast<double>(in[0] * 4 * width * width);
  PassCost::add_flops(of_input + recurrent);
  OpState kept;
  const Tensor y = kernels.forward(call, kept);
  return {"lstm",
          y,
          {x, weights.input, weights.recurrent, weights.input_bias, weights.recurrent_bias},
          [=, &kernels](const Tensor& dy) {
            PassCost::add_flops(of_input * (weights.input.requires_grad() + x.requires_grad()) +
                                recurrent * (weights.recurrent.requires_grad() + 1));
            LstmGradients out{weights.input.gradient_target(), weights.recurrent.gradient_target(),
                              weights.input_bias.gradient_target(), weights.recurrent_bias.gradient_target(),
                              x.input_gradient()};
            kernels.backward(call, kept, y, dy, out);
            x.accumulate_grad(std::move(out.x.tensor));
          }};
}

}  // namespace topknot

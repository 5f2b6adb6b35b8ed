#include "nn/ops/lookahead.h"

#include <fmt/format.h>

#include "nn/core/pass_cost.h"
#include "nn/ops/layout.h"

namespace topknot {

Variable lookahead(const Variable& x, std::int64_t batch, const Variable& weight) {
  const Shape &in = x.shape(), &w = weight.shape();
  TOPKNOT_CHECK(
      in.rank() == 2 && w.rank() == 2 && in[1] == w[0] && w[1] > 0 && batch > 0 && in[0] % batch == 0,
      fmt::format("lookahead: input {} of {} sequences, weight {}", in.str(), batch, w.str()));
  if (needs_f32(x)) return cast(lookahead(cast(x, DType::f32), batch, weight), DType::bf16);
  const auto& kernels = kernels_for<LookaheadKernels>(x);
  Tensor y = Tensor::empty_like(x.value());
  const double flops = 2.0 * static_cast<double>(in.numel() * w[1]);
  PassCost::add_flops(flops);
  kernels.filter(x.value(), weight.value(), batch, y);
  return {"lookahead", y, {x, weight}, [=, &kernels](Tensor grad) {
            PassCost::add_flops(flops * (weight.requires_grad() + x.requires_grad()));
            if (weight.requires_grad()) {
              Tensor dw = Tensor::empty_like(weight.value());
              kernels.weight_gradient(x.value(), grad, batch, dw);
              write_gradient(weight.gradient_target(), dw);
            }
            if (!x.requires_grad()) return;
            Tensor dx = Tensor::empty_like(x.value());
            kernels.filter(grad, weight.value(), -batch, dx);
            x.accumulate_grad(std::move(dx));
          }};
}

}  // namespace topknot

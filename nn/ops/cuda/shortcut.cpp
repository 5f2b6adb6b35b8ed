// subsample_and_pad and flatten on a GPU.
#include "nn/core/base/check.h"
#include "nn/core/cuda/context.h"
#include "nn/ops/cuda/activation.h"
#include "nn/ops/cuda/activation_kernels.h"
#include "nn/ops/cuda_ops.h"

namespace topknot::cuda {

Variable subsample_and_pad(const Variable& x, std::int64_t channels) {
  const Shape& in = x.shape();
  const Shape out{in[0], channels, (in[2] + 1) / 2, (in[3] + 1) / 2};
  TOPKNOT_CHECK(x.value().layout() == Layout::nhwc, "subsample_and_pad on a GPU takes nhwc activations");
  TOPKNOT_CHECK(in.numel() < std::int64_t{1} << 32 && out.numel() < std::int64_t{1} << 32,
                "subsample_and_pad: fewer than 2^32 elements, not " + in.str());
  const auto word = [](std::int64_t value) { return static_cast<std::uint32_t>(value); };
  const ShortcutShape shape{word(in[0]), word(in[2]),    word(in[3]),
                            word(in[1]), word(channels), word((channels - in[1]) / 2)};
  Tensor y = Tensor::empty(out, Layout::nhwc, x.value().device(), x.value().dtype());
  subsample_forward(Context::current().stream(), x.value().data(), y.data(), shape, size_of(y.dtype()));
  return {"subsample_and_pad", y, {x}, [=](Tensor grad) {
            Tensor dx = Tensor::empty_like(x.value());
            subsample_backward(Context::current().stream(), grad.data(), dx.data(), shape,
                               size_of(dx.dtype()));
            x.accumulate_grad(std::move(dx));
          }};
}

Variable flatten(const Variable& x) {
  const Shape shape = x.shape(), flat{shape[0], shape.numel() / shape[0]};
  const Layout layout = x.value().layout();
  const DType type = x.value().dtype();
  return {"flatten", in_form(x.value(), Layout::plain, type).reshaped(flat), {x}, [=](Tensor grad) {
            x.accumulate_grad(in_form(grad.reshaped(shape), layout, type));
          }};
}

}  // namespace topknot::cuda

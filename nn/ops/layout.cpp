#include "nn/ops/kernels.h"

namespace topknot {

Tensor in_form(const Tensor& x, Layout layout, DType type) {
  if (x.layout() == layout && x.dtype() == type) return x;
  return kernels_for<LayoutKernels>(x).convert(x, layout, type);
}

Variable cast(const Variable& x, DType type) {
  const DType from = x.value().dtype();
  if (from == type) return x;
  return {"cast", in_form(x.value(), x.value().layout(), type), {x}, [=](Tensor grad) {
            x.accumulate_grad(in_form(grad, grad.layout(), from));
          }};
}

bool needs_f32(const Variable& x) {
  return x.value().device().kind == DeviceKind::cpu && x.value().dtype() == DType::bf16;
}

Variable flatten(const Variable& x) {
  const Shape shape = x.shape(), flat{shape[0], shape.numel() / shape[0]};
  const Layout layout = x.value().layout();
  return {"flatten", to_layout(x.value(), Layout::plain).reshaped(flat), {x}, [=](Tensor grad) {
            x.accumulate_grad(to_layout(grad.reshaped(shape), layout));
          }};
}

}  // namespace topknot

#include <algorithm>
#include <type_traits>

#include "nn/ops/cpu/channels.h"
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

namespace {

template <class From, class To>
void convert_type(const Tensor& x, Tensor& y) {
  const auto n = static_cast<std::size_t>(x.numel());
  constexpr std::int64_t kPart = 32768;
  parallel_ranges((x.numel() + kPart - 1) / kPart, [&](int, std::int64_t begin, std::int64_t end) {
    const std::size_t first = static_cast<std::size_t>(begin * kPart),
                      last = std::min(n, static_cast<std::size_t>(end * kPart));
    if constexpr (std::is_same_v<From, float>)
      to_bfloat16(x.as<From>() + first, last - first, y.as<To>() + first);
    else
      to_float(x.as<From>() + first, last - first, y.as<To>() + first);
  });
}

void convert_layout(const Tensor& x, Tensor& y) {
  const ChannelGeometry g(x);
  const auto convert = y.layout() == Layout::blocked ? to_blocks : from_blocks;
  parallel_ranges(g.images, [&](int, std::int64_t begin, std::int64_t end) {
    by_type(x.dtype(), [&]<class T>(T) {
      for (std::int64_t n = begin; n < end; ++n)
        convert(x.dtype(), g.channels, g.pixels, g.image<T>(x, n), g.image<T>(y, n));
    });
  });
}

Tensor convert(const Tensor& x, Layout layout, DType type) {
  Tensor y = x;
  if (layout != x.layout()) {
    y = Tensor::empty(x.shape(), layout, {}, x.dtype());
    convert_layout(x, y);
  }
  if (type == y.dtype()) return y;
  Tensor z = Tensor::empty(y.shape(), layout, {}, type);
  if (type == DType::bf16)
    convert_type<float, BFloat16>(y, z);
  else
    convert_type<BFloat16, float>(y, z);
  return z;
}

const bool layout_registered = add_cpu_kernels<LayoutKernels>({.convert = convert});

}  // namespace
}  // namespace topknot

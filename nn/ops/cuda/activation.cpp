#include "nn/ops/cuda/activation.h"

#include "nn/core/cuda/context.h"
#include "nn/ops/cuda/activation_kernels.h"

namespace topknot::cuda {
namespace {

Tensor on_this_gpu(const Tensor& x) {
  const Context& context = Context::current();
  if (x.device() == context.device()) return x;
  TOPKNOT_CHECK(x.device().kind == DeviceKind::cpu && x.layout() == Layout::plain && x.dtype() == DType::f32,
                "only plain f32 tensors go from the host to the GPU");
  Tensor y = Tensor::empty(x.shape(), Layout::plain, context.device());
  backend(y.device()).to_device(y.data(), x.data(), static_cast<std::size_t>(x.numel()));
  return y;
}

Tensor convert_form(const Tensor& x, Layout layout, DType type) {
  TOPKNOT_CHECK(x.layout() != Layout::blocked && layout != Layout::blocked, "no blocked tensors on a GPU");
  Tensor y = Tensor::empty(x.shape(), layout, x.device(), type);
  const cudaStream_t stream = Context::current().stream();
  const bool from = x.dtype() == DType::bf16, to = type == DType::bf16;
  const auto size = [&](int i) { return static_cast<std::size_t>(x.dim(i)); };
  if (x.layout() == layout)
    convert(stream, x.data(), from, y.data(), to, static_cast<std::size_t>(x.numel()));
  else if (layout == Layout::nhwc)
    transpose(stream, x.data(), from, y.data(), to, size(0), size(1), size(2) * size(3));
  else
    transpose(stream, x.data(), from, y.data(), to, size(0), size(2) * size(3), size(1));
  return y;
}

const RegisterKernels<LayoutKernels> activation_registered(DeviceKind::cuda, {.convert = convert_form});

}  // namespace

Tensor to_activation(const Tensor& images) {
  const Tensor x = on_this_gpu(images);
  return in_form(x, x.shape().rank() == 4 ? Layout::nhwc : Layout::plain,
                 Context::current().activation_type());
}

Tensor to_plain(const Tensor& x) {
  return in_form(on_this_gpu(x), Layout::plain, DType::f32);
}

}  // namespace topknot::cuda

// Convolution on a GPU. A 1x1 convolution of stride 1 and one group is a product of matrices, [N*H*W, in] by
// [in, out], for cuBLAS; others are cuDNN's. Under bf16 the weight is rounded to bfloat16 for the products of
// the step. Its gradient arrives in the arena in fp32, where cuDNN rounded it to bfloat16 before: its
// interface has dw in the type of x.
#include <algorithm>
#include <optional>

#include "nn/ops/cuda/conv_algorithms.h"
#include "nn/ops/cuda/products.h"
#include "nn/ops/kernels.h"

namespace topknot::cuda {
namespace {

// The three products of one op, and the weight in the form that they take.
class Products {
 public:
  virtual ~Products() = default;
  virtual void forward(const Tensor& x, Tensor& y) const = 0;
  virtual void input_gradient(const Tensor& grad, InputGradient& dx) const = 0;
  virtual void weight_gradient(const Tensor& x, const Tensor& grad, const GradientTarget& dw) const = 0;
};

class Pointwise final : public Products {
 public:
  Pointwise(const ConvGeometry& geometry, const Tensor& x, const Tensor& weight)
      : in_(geometry.in),
        out_(geometry.out),
        rows_(x.numel() / geometry.in),
        weight_(weight_as(x.dtype(), weight)) {}

  void forward(const Tensor& x, Tensor& y) const override {
    multiply(rows_, out_, in_, x.dtype(), {x.data(), false}, {weight_.data(), true}, false, y.data(),
             y.dtype());
  }
  void input_gradient(const Tensor& grad, InputGradient& dx) const override {
    multiply(rows_, in_, out_, grad.dtype(), {grad.data(), false}, {weight_.data(), false}, dx.accumulate,
             dx.tensor.data(), grad.dtype());
  }
  void weight_gradient(const Tensor& x, const Tensor& grad, const GradientTarget& dw) const override {
    multiply(out_, in_, rows_, x.dtype(), {grad.data(), true}, {x.data(), false}, dw.accumulate, dw.data,
             DType::f32);
  }

 private:
  std::int64_t in_, out_, rows_;
  Tensor weight_;
};

class Cudnn final : public Products {
 public:
  Cudnn(const ConvGeometry& geometry, const Tensor& x, const Tensor& weight)
      : shape_{geometry.out, geometry.in / geometry.groups, geometry.kernel.height * geometry.kernel.width},
        bf16_(x.dtype() == DType::bf16),
        convolution_(geometry, x.shape(), x.dtype()),
        filter_(Tensor::empty(weight.shape(), Layout::nhwc, x.device(), x.dtype())) {
    filter_from_weight(Context::current().stream(), weight.data(), filter_.data(), bf16_, shape_);
  }

  void forward(const Tensor& x, Tensor& y) const override {
    convolution_.run(ConvProduct::output, x.data(), filter_.data(), 0.0f, y.data());
  }
  void input_gradient(const Tensor& grad, InputGradient& dx) const override {
    convolution_.run(ConvProduct::input_gradient, filter_.data(), grad.data(), dx.accumulate ? 1.0f : 0.0f,
                     dx.tensor.data());
  }
  void weight_gradient(const Tensor& x, const Tensor& grad, const GradientTarget& dw) const override {
    Tensor filter = Tensor::empty_like(filter_);
    convolution_.run(ConvProduct::weight_gradient, x.data(), grad.data(), 0.0f, filter.data());
    weight_from_filter(Context::current().stream(), filter.data(), bf16_, dw.data, dw.accumulate, shape_);
  }

 private:
  FilterShape shape_;
  bool bf16_;
  Convolution convolution_;
  Tensor filter_;  // KRSC; kept for the backward pass
};

// The last resort if cuDNN has nothing for so many input channels, three for example: zeros beside them.
class Widened final : public Products {
 public:
  Widened(const ConvGeometry& geometry, const Tensor& x, const Tensor& weight)
      : geometry_(geometry),
        taps_(geometry.kernel.height * geometry.kernel.width),
        wide_(widened(geometry, x.dtype())) {
    Tensor w = Tensor::zeros(wide_.weight_shape(), Layout::plain, weight.device());
    copy(false, weight.data(), geometry.in * taps_, w.data(), wide_.in * taps_, geometry.out, false);
    products_.emplace(wide_, wide(x), w);
  }

  // The number of channels that cuDNN's kernels of this type ask for.
  static ConvGeometry widened(ConvGeometry geometry, DType type) {
    const std::int64_t unit = type == DType::bf16 ? 8 : 4;
    geometry.in = (geometry.in + unit - 1) / unit * unit;
    return geometry;
  }

  void forward(const Tensor& x, Tensor& y) const override { products_->forward(wide(x), y); }
  void input_gradient(const Tensor& grad, InputGradient& dx) const override {
    InputGradient all{Tensor::empty(wide_shape(dx.tensor), Layout::nhwc, grad.device(), grad.dtype()), false};
    products_->input_gradient(grad, all);
    copy(grad.dtype() == DType::bf16, all.tensor.data(), wide_.in, dx.tensor.data(), geometry_.in,
         dx.tensor.numel() / geometry_.in, dx.accumulate);
  }
  void weight_gradient(const Tensor& x, const Tensor& grad, const GradientTarget& dw) const override {
    const DeviceArray<float> all(static_cast<std::size_t>(wide_.weight_shape().numel()));
    products_->weight_gradient(wide(x), grad, {all.data(), false});
    copy(false, all.data(), wide_.in * taps_, dw.data, geometry_.in * taps_, geometry_.out, dw.accumulate);
  }

 private:
  // The numbers that both have of each row.
  static void copy(bool bf16, const void* from, std::int64_t from_width, void* to, std::int64_t to_width,
                   std::int64_t rows, bool accumulate) {
    const auto word = [](std::int64_t value) { return static_cast<std::uint32_t>(value); };
    copy_channels(
        Context::current().stream(), bf16, from, to,
        {word(rows), word(std::min(from_width, to_width)), word(from_width), 0, 1, word(to_width), 0, 1},
        accumulate);
  }
  Shape wide_shape(const Tensor& x) const { return {x.dim(0), wide_.in, x.dim(2), x.dim(3)}; }
  Tensor wide(const Tensor& x) const {
    Tensor all = Tensor::empty(wide_shape(x), Layout::nhwc, x.device(), x.dtype());
    const auto bytes = static_cast<std::size_t>(all.numel()) * size_of(all.dtype());
    TOPKNOT_CUDA(cudaMemsetAsync(all.data(), 0, bytes, Context::current().stream()));
    copy(x.dtype() == DType::bf16, x.data(), geometry_.in, all.data(), wide_.in, x.numel() / geometry_.in,
         false);
    return all;
  }

  ConvGeometry geometry_;
  std::int64_t taps_;
  ConvGeometry wide_;
  std::optional<Cudnn> products_;
};

std::shared_ptr<const Products> products(const ConvGeometry& geometry, const Tensor& x,
                                         const Tensor& weight) {
  if (geometry.kernel == 1 && geometry.stride == 1 && geometry.padding == 0 && geometry.groups == 1)
    return std::make_shared<const Pointwise>(geometry, x, weight);
  const auto supported = [&](const ConvGeometry& g) {
    return Convolution(g, {x.dim(0), g.in, x.dim(2), x.dim(3)}, x.dtype()).supported();
  };
  const ConvGeometry wide = Widened::widened(geometry, x.dtype());
  if (geometry.groups == 1 && wide != geometry && !supported(geometry) && supported(wide))
    return std::make_shared<const Widened>(geometry, x, weight);
  return std::make_shared<const Cudnn>(geometry, x, weight);
}

Layout output_layout(const ConvGeometry&) {
  return Layout::nhwc;
}

OpState forward(const ConvGeometry& geometry, const Tensor& x, const Tensor& weight, const Tensor& bias,
                Tensor& y) {
  TOPKNOT_CHECK(x.layout() == Layout::nhwc, "conv2d on a GPU takes activations in nhwc");
  const auto of = products(geometry, x, weight);
  of->forward(x, y);
  if (bias.defined()) add_bias(y, bias);
  return of;
}

void backward(const ConvGeometry&, const Tensor& x, const Tensor&, const Tensor& dy, const OpState& state,
              WeightedGradients& out) {
  const auto& of = state_as<Products>(state);
  bias_gradient(dy, out.bias);
  if (out.weight.data) of.weight_gradient(x, dy, out.weight);
  if (out.x.tensor.defined()) of.input_gradient(dy, out.x);
}

const RegisterKernels<ConvKernels> conv2d_registered(DeviceKind::cuda, {.output_layout = output_layout,
                                                                        .forward = forward,
                                                                        .backward = backward});

}  // namespace
}  // namespace topknot::cuda

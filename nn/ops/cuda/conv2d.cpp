// Convolution on a GPU. A 1x1 convolution of stride 1 and one group is a product of matrices, [N*H*W, in] by [in, out], for
// cuBLAS; others are cuDNN's. Under bf16 the weight is rounded to bfloat16 for the products of the step. Its gradient
// arrives in the arena in fp32, where cuDNN rounded it to bfloat16 before: its interface has dw in the type of x.
#include "nn/ops/conv2d.h"

#include "nn/ops/cuda/conv_algorithms.h"
#include "nn/ops/cuda/conv_layout.h"
#include "nn/ops/cuda/gemm.h"

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
    multiply(Context::current(), rows_, out_, in_, x.dtype(), {x.data(), false}, {weight_.data(), true}, 0.0f,
             y.data(), y.dtype());
  }
  void input_gradient(const Tensor& grad, InputGradient& dx) const override {
    multiply(Context::current(), rows_, in_, out_, grad.dtype(), {grad.data(), false},
             {weight_.data(), false}, dx.accumulate ? 1.0f : 0.0f, dx.tensor.data(), grad.dtype());
  }
  void weight_gradient(const Tensor& x, const Tensor& grad, const GradientTarget& dw) const override {
    multiply(Context::current(), out_, in_, rows_, x.dtype(), {grad.data(), true}, {x.data(), false},
             dw.accumulate ? 1.0f : 0.0f, dw.data, DType::f32);
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

std::shared_ptr<const Products> products(const ConvGeometry& geometry, const Tensor& x,
                                         const Tensor& weight) {
  if (geometry.kernel == 1 && geometry.stride == 1 && geometry.padding == 0 && geometry.groups == 1)
    return std::make_shared<const Pointwise>(geometry, x, weight);
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

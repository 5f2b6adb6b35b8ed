// Convolution on a GPU, each of its three products in the first way that there is for it:
//
//   1. 1x1, stride 1, one group: a product of matrices, [N*H*W, in] by [in, out], by cuBLAS;
//   2. cuDNN;
//   3. cuDNN with zeros added to the channels, if one group's numbers of channels are odd ones;
//   4. the definition (direct_conv.h), slow: a thread computes one number, by scalar loads and divisions.
//
// Under bf16 the weight is rounded to bfloat16 for the products of the step. Its gradient arrives in the
// arena in fp32; before, algorithms of cuDNN's older interface round it to bfloat16, and plans of its graph API
// do not (cudnn_graph.h).
#include <algorithm>
#include <memory>

#include "nn/base/log.h"
#include "nn/ops/cuda/conv_algorithms.h"
#include "nn/ops/cuda/direct_conv.h"
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
  // The weight may have fewer channels than the geometry says.
  Cudnn(const ConvGeometry& geometry, const Shape& x, DType type, const Tensor& weight)
      : convolution_(Convolution::of(geometry, x, type)),
        filter_(filter_of(weight, type,
                          {geometry.out, geometry.in / geometry.groups,
                           geometry.kernel.height * geometry.kernel.width, weight.dim(0), weight.dim(1)})) {}

  void forward(const Tensor& x, Tensor& y) const override {
    convolution_.run(ConvProduct::output, x.data(), filter_.data(), false, y.data());
  }
  void input_gradient(const Tensor& grad, InputGradient& dx) const override {
    convolution_.run(ConvProduct::input_gradient, filter_.data(), grad.data(), dx.accumulate,
                     dx.tensor.data());
  }
  void weight_gradient(const Tensor& x, const Tensor& grad, const GradientTarget& dw) const override {
    convolution_.run(ConvProduct::weight_gradient, x.data(), grad.data(), dw.accumulate, dw.data);
  }

 private:
  Convolution& convolution_;
  Tensor filter_;  // KRSC; kept for the backward pass
};

// cuDNN's kernels of a type ask for whole units of channels: zeros are added to those that there are.
ConvGeometry widened(ConvGeometry geometry, DType type) {
  const std::int64_t unit = type == DType::bf16 ? 8 : 4;
  geometry.in = (geometry.in + unit - 1) / unit * unit;
  geometry.out = (geometry.out + unit - 1) / unit * unit;
  return geometry;
}
Shape with_channels(const Shape& x, std::int64_t channels) {
  return {x[0], channels, x[2], x[3]};
}

class Widened final : public Products {
 public:
  Widened(const ConvGeometry& geometry, const Tensor& x, const Tensor& weight)
      : geometry_(geometry),
        wide_(widened(geometry, x.dtype())),
        taps_(geometry.kernel.height * geometry.kernel.width),
        products_(wide_, with_channels(x.shape(), wide_.in), x.dtype(), weight) {}

  void forward(const Tensor& x, Tensor& y) const override {
    Tensor all = wide_.out == geometry_.out ? y : empty(y, wide_.out);
    products_.forward(wide(x, wide_.in), all);
    if (wide_.out != geometry_.out) copy_pixels(all, y, false);
  }
  void input_gradient(const Tensor& grad, InputGradient& dx) const override {
    const Tensor dy = wide(grad, wide_.out);
    if (wide_.in == geometry_.in) return products_.input_gradient(dy, dx);
    InputGradient all{empty(dx.tensor, wide_.in), false};
    products_.input_gradient(dy, all);
    copy_pixels(all.tensor, dx.tensor, dx.accumulate);
  }
  void weight_gradient(const Tensor& x, const Tensor& grad, const GradientTarget& dw) const override {
    const DeviceArray<float> all(static_cast<std::size_t>(wide_.weight_shape().numel()));
    products_.weight_gradient(wide(x, wide_.in), wide(grad, wide_.out), {all.data(), false});
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
  static void copy_pixels(const Tensor& from, Tensor& to, bool accumulate) {
    copy(to.dtype() == DType::bf16, from.data(), from.dim(1), to.data(), to.dim(1), to.numel() / to.dim(1),
         accumulate);
  }
  static Tensor empty(const Tensor& like, std::int64_t channels) {
    return Tensor::empty(with_channels(like.shape(), channels), Layout::nhwc, like.device(), like.dtype());
  }
  static Tensor wide(const Tensor& x, std::int64_t channels) {
    if (x.dim(1) == channels) return x;
    Tensor all = empty(x, channels);
    const auto bytes = static_cast<std::size_t>(all.numel()) * size_of(all.dtype());
    TOPKNOT_CUDA(cudaMemsetAsync(all.data(), 0, bytes, Context::current().stream()));
    copy_pixels(x, all, false);
    return all;
  }

  ConvGeometry geometry_, wide_;
  std::int64_t taps_;
  Cudnn products_;
};

class Direct final : public Products {
 public:
  Direct(const ConvGeometry& geometry, const Tensor& x, const Tensor& weight)
      : geometry_(geometry), filter_(direct_conv_filter(geometry, weight, x.dtype())) {}
  void forward(const Tensor& x, Tensor& y) const override { direct_conv(geometry_, x, filter_, y); }
  void input_gradient(const Tensor& grad, InputGradient& dx) const override {
    direct_conv_input_gradient(geometry_, filter_, grad, dx);
  }
  void weight_gradient(const Tensor& x, const Tensor& grad, const GradientTarget& dw) const override {
    direct_conv_weight_gradient(geometry_, x, grad, dw);
  }

 private:
  ConvGeometry geometry_;
  Tensor filter_;
};

enum class Way { pointwise, cudnn, widened, direct };

Way way_of(ConvProduct product, const ConvGeometry& geometry, const Tensor& x) {
  if (geometry.kernel == 1 && geometry.stride == 1 && geometry.padding == 0 && geometry.groups == 1)
    return Way::pointwise;
  const auto supported = [&](const ConvGeometry& g) {
    return Convolution::of(g, with_channels(x.shape(), g.in), x.dtype()).supported(product);
  };
  if (supported(geometry)) return Way::cudnn;
  const ConvGeometry wide = widened(geometry, x.dtype());
  return geometry.groups == 1 && wide != geometry && supported(wide) ? Way::widened : Way::direct;
}

std::unique_ptr<const Products> products(Way way, const ConvGeometry& geometry, const Tensor& x,
                                         const Tensor& weight) {
  switch (way) {
    case Way::pointwise:
      return std::make_unique<const Pointwise>(geometry, x, weight);
    case Way::cudnn:
      return std::make_unique<const Cudnn>(geometry, x.shape(), x.dtype(), weight);
    case Way::widened:
      return std::make_unique<const Widened>(geometry, x, weight);
    default:
      return std::make_unique<const Direct>(geometry, x, weight);
  }
}

// The op's state: the weight in the form of the output's way, which the gradients mostly go too.
struct Kept {
  Way way;
  std::unique_ptr<const Products> products;
};

// run(products) in the product's way, by `kept` if that is its way; what was used.
template <class Run>
std::shared_ptr<const Kept> compute(ConvProduct product, const ConvGeometry& geometry, const Tensor& x,
                                    const Tensor& weight, std::shared_ptr<const Kept> kept, const Run& run) {
  for (;;) try {
      const Way way = way_of(product, geometry, x);
      if (!kept || kept->way != way)
        kept = std::make_shared<const Kept>(Kept{way, products(way, geometry, x, weight)});
      run(*kept->products);
      return kept;
    } catch (const ConvUnsupported& error) {  // which way_of() knows from now on
      log_warning(std::string(error.what()) + "; this shape may be slow from now on");
    }
}

Layout output_layout(const ConvGeometry&) {
  return Layout::nhwc;
}

OpState forward(const ConvGeometry& geometry, const Tensor& x, const Tensor& weight, const Tensor& bias,
                Tensor& y) {
  TOPKNOT_CHECK(x.layout() == Layout::nhwc, "conv2d on a GPU takes activations in nhwc");
  const auto kept = compute(ConvProduct::output, geometry, x, weight, nullptr,
                            [&](const Products& by) { by.forward(x, y); });
  if (bias.defined()) add_bias(y, bias);
  return kept;
}

void backward(const ConvGeometry& geometry, const Tensor& x, const Tensor& weight, const Tensor& dy,
              const OpState& state, WeightedGradients& out) {
  auto kept = std::static_pointer_cast<const Kept>(state);
  bias_gradient(dy, out.bias);
  if (out.weight.data)
    kept = compute(ConvProduct::weight_gradient, geometry, x, weight, kept,
                   [&](const Products& by) { by.weight_gradient(x, dy, out.weight); });
  if (out.x.tensor.defined())
    compute(ConvProduct::input_gradient, geometry, x, weight, kept,
            [&](const Products& by) { by.input_gradient(dy, out.x); });
}

const bool conv2d_registered =
    add_cuda_kernels<ConvKernels>({.output_layout = output_layout, .forward = forward, .backward = backward});

}  // namespace
}  // namespace topknot::cuda

// The output layer of a language model and its loss in one op.
//
// With N rows, V classes and width w a pass takes 2 N V w operations for the logits and as many for each of
// the two gradients, all in the forward pass: 6 N V w. The backward pass only scales. Bytes, in f32: each
// chunk reads the weight twice and reads and writes its gradient once (16 V w), and writes, reads and writes
// again its logits (12 V for each row). With GPT-2's V = 50,257 and w = 768 a chunk of N = 1,024 has 256
// rows: 59 G operations and 0.62 + 0.15 GB, so the products decide. The logits of all rows would be 206 MB;
// here they are at most 64 MB for any N, or 64 rows; on a GPU, where each chunk's pass over the weight's gradient
// costs more than its products, 256 MB. The weight in the order of the products takes as much as itself.

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <optional>
#include <vector>

#include "nn/core/pass_cost.h"
#include "nn/ops/cpu/gemm.h"
#include "nn/ops/cpu/softmax_row.h"
#include "nn/ops/kernels.h"

namespace topknot {
namespace {

// Rows of a chunk: a multiple of 64, so that products have whole tiles, and about as many in each chunk. By
// the problem and the kind of device: neither bits nor memory depend on the number of threads.
std::int64_t chunk_rows(std::int64_t rows, std::int64_t classes, Device device) {
  constexpr std::int64_t kTile = 64;
  const std::int64_t logits = std::int64_t{1} << (device.kind == DeviceKind::cpu ? 24 : 26),
                     most = std::max(kTile, logits / classes / kTile * kTile),
                     chunks = (rows + most - 1) / most;
  return ((rows + chunks - 1) / chunks + kTile - 1) / kTile * kTile;
}

}  // namespace

Variable linear_cross_entropy(const Variable& x, const Variable& weight, std::span<const std::int32_t> labels,
                              float smoothing, std::int64_t chunk) {
  const Shape &in = x.shape(), &w = weight.shape();
  TOPKNOT_CHECK(in.rank() == 2 && w.rank() == 2 && in[1] == w[1] && in.numel() > 0 && w.numel() > 0 &&
                    in[0] == static_cast<std::int64_t>(labels.size()),
                fmt::format("linear_cross_entropy: input {}, weight {} for {} labels", in.str(), w.str(),
                            labels.size()));
  TOPKNOT_CHECK(smoothing >= 0 && smoothing < 1, "linear_cross_entropy: smoothing in [0, 1)");
  TOPKNOT_CHECK(chunk >= 0, "linear_cross_entropy: a chunk of 1 row or more, or 0");
  const auto& kernels = kernels_for<LinearCrossEntropyKernels>(x);
  const Device device = x.value().device();
  Tensor loss = Tensor::empty({1}, Layout::plain, device), dx, dweight;
  if (x.requires_grad()) dx = Tensor::empty(in, Layout::plain, device);
  if (weight.requires_grad()) dweight = Tensor::empty(w, Layout::plain, device);
  const double flops = 2.0 * static_cast<double>(in[0] * w.numel());
  PassCost::add_flops(flops);
  kernels.forward({x.value(), weight.value(), labels, smoothing,
                   std::min(in[0], chunk > 0 ? chunk : chunk_rows(in[0], w[0], device))},
                  loss, dx, dweight);
  return {"linear_cross_entropy", loss, {x, weight}, [=, &kernels](Tensor grad) {
            // Computed above; counted here, as other ops' gradients are.
            PassCost::add_flops(flops * (dx.defined() + dweight.defined()));
            if (const GradientTarget target = weight.gradient_target(); target.data) {
              Tensor to = Tensor::view(target.data, weight.shape(), dweight.device());
              kernels.scale(dweight, grad, target.accumulate, to);
            }
            if (!dx.defined()) return;
            InputGradient to = x.input_gradient();
            kernels.scale(dx, grad, to.accumulate, to.tensor);
            x.accumulate_grad(std::move(to.tensor));
          }};
}

namespace {

// A row's target distribution: 1 - smoothing at the label, and smoothing / classes everywhere.
struct RowTarget {
  std::size_t label;
  float smoothing;
  float scale;  // of the gradient
};

// The loss of n logits; with dz, dz = (softmax(z) - t) scale. dz may be z.
template <class T>
TOPKNOT_INLINE double row_loss(const float* z, std::size_t n, RowTarget target, T* dz) {
  const float top = greatest_of(z, n), at_label = z[target.label] - top;
  const double sum = sum_of_exp(z, n, top);
  double loss = std::log(sum);
  if (target.smoothing == 0) {
    loss -= at_label;
  } else {
    double others = 0;
    for (std::size_t c = 0; c < n; ++c) others += z[c] - top;
    loss -= (1.0 - target.smoothing) * at_label + target.smoothing * (others / static_cast<double>(n));
  }
  if (!dz) return loss;
  const float factor = static_cast<float>(target.scale / sum),
              other = target.scale * (target.smoothing / static_cast<float>(n));
  for (std::size_t i = 0; i < n; i += kLanes) {
    const std::size_t count = std::min(kLanes, n - i);
    store_part(dz + i, exp_lanes(load_part(z + i, count) - top) * factor - other, count);
  }
  const Lanes hit = exp_lanes(splat(at_label)) * factor - other - (1.0f - target.smoothing) * target.scale;
  narrow(hit[0], dz[target.label]);
  return loss;
}
TOPKNOT_MULTIVERSION double loss_of_row(const float* z, std::size_t n, RowTarget target, float* dz) {
  return row_loss(z, n, target, dz);
}
TOPKNOT_MULTIVERSION double loss_of_row(const float* z, std::size_t n, RowTarget target, BFloat16* dz) {
  return row_loss(z, n, target, dz);
}

// The losses of the rows of z, and dz, if defined.
template <class T>
void losses_of_rows(const Tensor& z, std::span<const std::int32_t> labels, float smoothing, float scale,
                    double* losses, Tensor& dz) {
  const std::int64_t classes = z.dim(1);
  parallel_each(static_cast<std::int64_t>(labels.size()), [&](std::int64_t i) {
    const std::int32_t label = labels[static_cast<std::size_t>(i)];
    T* to = dz.defined() ? dz.as<T>() + i * classes : nullptr;
    losses[i] = 0;
    if (label != kNoLabel)
      losses[i] = loss_of_row(z.data() + i * classes, static_cast<std::size_t>(classes),
                              {static_cast<std::size_t>(label), smoothing, scale}, to);
    else if (to)
      std::fill_n(to, classes, T());
  });
}

const void* row(const Tensor& x, std::int64_t i) {
  return reinterpret_cast<const std::byte*>(x.data()) +
         static_cast<std::size_t>(i * x.dim(1)) * size_of(x.dtype());
}

// Products of chunks of rows and the weight, as matmul() has them. For several chunks the weight is rounded
// and put in oneDNN's order once, if matmul() would do it for each.
class WeightProduct {
 public:
  WeightProduct(const LinearCrossEntropyCall& call, bool transposed) : call_(call), transposed_(transposed) {
    const bool packs = call.x.dtype() != DType::f32 || transposed;
    constexpr std::int64_t kManyRows = 256;  // matmul()'s
    if (!packs || call.chunk == call.x.dim(0) || call.chunk < kManyRows) return;
    product_ = std::make_unique<Product>(form(call.chunk), Product::Order::packed);
    packed_ = product_->pack(call.weight.data());
  }
  void run(std::int64_t rows, const void* a, float* c) const {
    if (product_ && rows == call_.chunk)
      product_->run(a, packed_.data(), c);
    else
      matmul(form(rows), a, call_.weight.data(), c);
  }

 private:
  ProductForm form(std::int64_t rows) const {
    const std::int64_t classes = call_.weight.dim(0), width = call_.weight.dim(1);
    return {.m = rows,
            .n = transposed_ ? classes : width,
            .k = transposed_ ? width : classes,
            .type = call_.x.dtype(),
            .b_type = DType::f32,
            .b_transposed = transposed_};
  }
  const LinearCrossEntropyCall& call_;
  const bool transposed_;
  std::unique_ptr<Product> product_;
  Tensor packed_;
};

void forward(const LinearCrossEntropyCall& call, Tensor& loss, Tensor& dx, Tensor& dweight) {
  const Tensor& x = call.x;
  const std::int64_t n = x.dim(0), width = x.dim(1), classes = call.weight.dim(0);
  const DType type = x.dtype();
  std::int64_t unmasked = 0;
  for (const std::int32_t label : call.labels) {
    TOPKNOT_CHECK(label == kNoLabel || (label >= 0 && label < classes),
                  fmt::format("linear_cross_entropy: label {} of {} classes", label, classes));
    unmasked += label != kNoLabel;
  }
  const double counted = static_cast<double>(std::max<std::int64_t>(1, unmasked));
  Tensor z = Tensor::empty({call.chunk, classes}), dz;
  if (dx.defined() || dweight.defined())
    dz = type == DType::f32 ? z : Tensor::empty(z.shape(), Layout::plain, {}, type);
  std::vector<double> losses(call.labels.size());
  const WeightProduct logits(call, true);
  std::optional<WeightProduct> input_gradient;
  if (dx.defined()) input_gradient.emplace(call, false);
  for (std::int64_t begin = 0; begin < n; begin += call.chunk) {
    const std::int64_t rows = std::min(call.chunk, n - begin);
    const auto first = static_cast<std::size_t>(begin);
    logits.run(rows, row(x, begin), z.data());
    by_type(type, [&](auto element) {
      losses_of_rows<decltype(element)>(z, call.labels.subspan(first, static_cast<std::size_t>(rows)),
                                        call.smoothing, static_cast<float>(1.0 / counted),
                                        losses.data() + first, dz);
    });
    if (input_gradient) input_gradient->run(rows, dz.data(), dx.data() + begin * width);
    if (dweight.defined())
      matmul({.m = classes, .n = width, .k = rows, .type = type, .a_transposed = true, .add = begin > 0},
             dz.data(), row(x, begin), dweight.data());
  }
  double sum = 0;
  for (const double of_row : losses) sum += of_row;
  loss.data()[0] = static_cast<float>(sum / counted);
}

void scale(const Tensor& from, const Tensor& by, bool accumulate, Tensor& to) {
  const float factor = by.data()[0];
  by_type(to.dtype(), [&](auto element) {
    auto* out = to.as<decltype(element)>();
    parallel_each(from.numel(), [&](std::int64_t i) {
      const float value = factor * from.data()[i];
      narrow(accumulate ? widened(out[i]) + value : value, out[i]);
    });
  });
}

const bool linear_cross_entropy_registered =
    add_cpu_kernels<LinearCrossEntropyKernels>({.forward = forward, .scale = scale});

}  // namespace
}  // namespace topknot

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "nn/core/simd.h"
#include "nn/ops/cpu/channels.h"
#include "nn/ops/cpu/softmax_row.h"
#include "nn/ops/kernels.h"

namespace topknot {
namespace {

void check_logits(const char* op, const Tensor& logits, std::span<const std::int32_t> labels) {
  const Shape& shape = logits.shape();
  TOPKNOT_CHECK(
      shape.rank() == 2 && shape[0] == static_cast<std::int64_t>(labels.size()) && shape.numel() > 0,
      fmt::format("{}: logits {} for {} labels", op, shape.str(), labels.size()));
}

}  // namespace

Variable softmax_cross_entropy(const Variable& logits, std::span<const std::int32_t> labels,
                               float smoothing) {
  check_logits("softmax_cross_entropy", logits.value(), labels);
  TOPKNOT_CHECK(smoothing >= 0 && smoothing < 1, "softmax_cross_entropy: smoothing in [0, 1)");
  const auto& kernels = kernels_for<CrossEntropyKernels>(logits);
  Tensor loss = Tensor::empty({1}, Layout::plain, logits.value().device());
  const OpState state = kernels.forward(logits.value(), labels, smoothing, loss);
  return {"softmax_cross_entropy", loss, {logits}, [=, &kernels](Tensor grad) {
            Tensor dz = Tensor::empty_like(logits.value());
            kernels.backward(logits.value(), state, smoothing, grad, dz);
            logits.accumulate_grad(std::move(dz));
          }};
}

Variable mean_squared_error(const Variable& y, const Tensor& target) {
  const Tensor& out = y.value();
  TOPKNOT_CHECK(out.shape() == target.shape() && out.numel() > 0,
                fmt::format("mean_squared_error: {} against {}", out.shape().str(), target.shape().str()));
  TOPKNOT_CHECK(
      out.layout() == target.layout() && target.dtype() == DType::f32 && target.device() == out.device(),
      "mean_squared_error: a target in f32 on the same device and in the same layout");
  if (needs_f32(y)) return mean_squared_error(cast(y, DType::f32), target);
  const auto& kernels = kernels_for<SquaredErrorKernels>(y);
  Tensor loss = Tensor::empty({1}, Layout::plain, out.device());
  kernels.forward(out, target, loss);
  return {"mean_squared_error", loss, {y}, [=, &kernels](Tensor grad) {
            Tensor dy = Tensor::empty_like(y.value());
            kernels.backward(y.value(), target, grad, dy);
            y.accumulate_grad(std::move(dy));
          }};
}

void count_correct(const Tensor& logits, std::span<const std::int32_t> labels, int top, double* sum) {
  check_logits("count_correct", logits, labels);
  const bool cpu = logits.device().kind == DeviceKind::cpu;
  const Tensor z = cpu ? in_form(logits, logits.layout(), DType::f32) : logits;
  kernels_for<CrossEntropyKernels>(z).count_correct(z, labels, top, sum);
}

namespace {

// The softmax of a long row (a vocabulary's) is exp(z - top) / sum, by vector loops and made anew in the
// backward pass. Shorter rows, and smoothed labels, keep the plain loop and its bits.
constexpr std::int64_t kLongRow = 2048;
struct RowSum {
  double sum;
  float top;
};

struct Softmax {
  Tensor probabilities;      // of short rows
  std::vector<RowSum> rows;  // of long ones
  std::vector<std::int32_t> labels;
  double counted;  // rows that are not masked, at least 1
};

template <class T>
TOPKNOT_INLINE RowSum sum_row(const T* z, std::size_t n) {
  const float top = greatest_of(z, n);
  return {sum_of_exp(z, n, top), top};
}
TOPKNOT_MULTIVERSION RowSum sum_long_row(const float* z, std::size_t n) {
  return sum_row(z, n);
}
TOPKNOT_MULTIVERSION RowSum sum_long_row(const BFloat16* z, std::size_t n) {
  return sum_row(z, n);
}

// dz = exp(z - top) factor - (scale at the label)
template <class T>
TOPKNOT_INLINE void gradient_row(const T* z, std::size_t n, float top, float factor, std::size_t label,
                                 float scale, T* dz) {
  for (std::size_t i = 0; i < n; i += kLanes) {
    const std::size_t count = std::min(kLanes, n - i);
    store_part(dz + i, exp_lanes(load_part(z + i, count) - top) * factor, count);
  }
  const std::size_t first = label / kLanes * kLanes, count = std::min(kLanes, n - first);
  Lanes around = exp_lanes(load_part(z + first, count) - top) * factor;
  around[label - first] -= scale;
  store_part(dz + first, around, count);
}
TOPKNOT_MULTIVERSION void gradient_long_row(const float* z, std::size_t n, float top, float factor,
                                            std::size_t label, float scale, float* dz) {
  gradient_row(z, n, top, factor, label, scale, dz);
}
TOPKNOT_MULTIVERSION void gradient_long_row(const BFloat16* z, std::size_t n, float top, float factor,
                                            std::size_t label, float scale, BFloat16* dz) {
  gradient_row(z, n, top, factor, label, scale, dz);
}

template <class T>
float long_rows_forward(const Tensor& logits, std::span<const std::int32_t> labels, Softmax& softmax) {
  const std::int64_t n = logits.dim(0), classes = logits.dim(1);
  softmax.rows.resize(labels.size());
  parallel_each(n, [&](std::int64_t i) {
    if (labels[static_cast<std::size_t>(i)] != kNoLabel)
      softmax.rows[static_cast<std::size_t>(i)] =
          sum_long_row(logits.as<T>() + i * classes, static_cast<std::size_t>(classes));
  });
  double sum_of_losses = 0;
  for (std::size_t i = 0; i < labels.size(); ++i) {
    if (labels[i] == kNoLabel) continue;
    const RowSum& row = softmax.rows[i];
    const float z = widened(logits.as<T>()[static_cast<std::int64_t>(i) * classes + labels[i]]);
    sum_of_losses += std::log(row.sum) - (z - row.top);
  }
  return static_cast<float>(sum_of_losses / softmax.counted);
}

template <class T>
void long_rows_backward(const Tensor& logits, const Softmax& softmax, float scale, Tensor& dz) {
  const std::int64_t classes = logits.dim(1);
  parallel_each(logits.dim(0), [&](std::int64_t i) {
    const RowSum& row = softmax.rows[static_cast<std::size_t>(i)];
    const std::int32_t label = softmax.labels[static_cast<std::size_t>(i)];
    T* to = dz.as<T>() + i * classes;
    if (label == kNoLabel)
      std::fill_n(to, classes, T());
    else
      gradient_long_row(logits.as<T>() + i * classes, static_cast<std::size_t>(classes), row.top,
                        static_cast<float>(scale / row.sum), static_cast<std::size_t>(label), scale, to);
  });
}

void check_labels(const char* op, std::span<const std::int32_t> labels, std::int64_t classes) {
  for (const std::int32_t label : labels)
    TOPKNOT_CHECK(label == kNoLabel || (label >= 0 && label < classes),
                  fmt::format("{}: label {} of {} classes", op, label, classes));
}

OpState cross_entropy_forward(const Tensor& input, std::span<const std::int32_t> labels, float smoothing,
                              Tensor& loss) {
  const std::int64_t n = input.dim(0), classes = input.dim(1);
  check_labels("softmax_cross_entropy", labels, classes);
  const auto masked = std::count(labels.begin(), labels.end(), kNoLabel);
  const auto counted = static_cast<double>(std::max<std::int64_t>(1, n - masked));
  if (classes >= kLongRow && smoothing == 0) {
    auto softmax = std::make_shared<Softmax>(Softmax{{}, {}, {labels.begin(), labels.end()}, counted});
    loss.data()[0] = by_type(
        input.dtype(), [&](auto type) { return long_rows_forward<decltype(type)>(input, labels, *softmax); });
    return softmax;
  }
  const Tensor logits = in_form(input, Layout::plain, DType::f32);
  Tensor probabilities = Tensor::empty(logits.shape());
  double sum_of_losses = 0;
  for (std::int64_t i = 0; i < n; ++i) {
    const std::int32_t label = labels[static_cast<std::size_t>(i)];
    if (label == kNoLabel) continue;
    const float* z = logits.data() + i * classes;
    float* p = probabilities.data() + i * classes;
    // NaN must come through, so the maximum is not std::max_element's.
    float top = z[0];
    for (std::int64_t c = 1; c < classes; ++c) top = z[c] > top || std::isnan(z[c]) ? z[c] : top;
    double sum = 0;
    for (std::int64_t c = 0; c < classes; ++c) sum += p[c] = std::exp(z[c] - top);
    for (std::int64_t c = 0; c < classes; ++c) p[c] = static_cast<float>(p[c] / sum);
    if (smoothing == 0) {
      sum_of_losses += std::log(sum) - (z[label] - top);
      continue;
    }
    double others = 0;
    for (std::int64_t c = 0; c < classes; ++c) others += z[c] - top;
    sum_of_losses += std::log(sum) - (1.0 - smoothing) * (z[label] - top) -
                     smoothing * (others / static_cast<double>(classes));
  }
  loss.data()[0] = static_cast<float>(sum_of_losses / counted);
  return std::make_shared<Softmax>(Softmax{probabilities, {}, {labels.begin(), labels.end()}, counted});
}

void cross_entropy_backward(const Tensor& logits, const OpState& state, float smoothing, const Tensor& grad,
                            Tensor& dz) {
  const auto& softmax = state_as<Softmax>(state);
  const std::int64_t n = logits.dim(0), classes = logits.dim(1);
  const float scale = grad.data()[0] / static_cast<float>(softmax.counted);
  if (!softmax.rows.empty())
    return by_type(dz.dtype(),
                   [&](auto type) { long_rows_backward<decltype(type)>(logits, softmax, scale, dz); });
  Tensor wide = dz.dtype() == DType::f32 ? dz : Tensor::empty(dz.shape());
  const float other = smoothing / static_cast<float>(classes), hit = 1.0f - smoothing + other;
  for (std::int64_t i = 0; i < n; ++i) {
    const std::int32_t label = softmax.labels[static_cast<std::size_t>(i)];
    for (std::int64_t c = 0; c < classes; ++c) {
      const float target = c == label ? hit : other;
      wide.data()[i * classes + c] =
          label == kNoLabel ? 0.0f : (softmax.probabilities.data()[i * classes + c] - target) * scale;
    }
  }
  dz = in_form(wide, Layout::plain, dz.dtype());
}

void count_hits(const Tensor& logits, std::span<const std::int32_t> labels, int top, double* sum) {
  const std::int64_t classes = logits.dim(1);
  check_labels("count_correct", labels, classes);
  const float* z = logits.data();
  for (const std::int32_t label : labels) {
    if (label != kNoLabel) {
      std::int64_t before = 0;  // classes that come before the label
      for (std::int64_t c = 0; c < label; ++c) before += !(z[c] < z[label]);
      for (std::int64_t c = label + 1; c < classes; ++c) before += !(z[c] <= z[label]);
      *sum += before < top;
    }
    z += classes;
  }
}

void squared_error_forward(const Tensor& y, const Tensor& target, Tensor& loss) {
  const std::int64_t n = y.numel();
  double sum = 0;
  for (std::int64_t i = 0; i < n; ++i) {
    const double d = static_cast<double>(y.data()[i]) - target.data()[i];
    sum += d * d;
  }
  loss.data()[0] = static_cast<float>(sum / static_cast<double>(n));
}

void squared_error_backward(const Tensor& y, const Tensor& target, const Tensor& grad, Tensor& dy) {
  const std::int64_t n = y.numel();
  const float scale = 2.0f * grad.data()[0] / static_cast<float>(n);
  for (std::int64_t i = 0; i < n; ++i) dy.data()[i] = (y.data()[i] - target.data()[i]) * scale;
}

const bool cross_entropy = add_cpu_kernels<CrossEntropyKernels>(
    {.forward = cross_entropy_forward, .backward = cross_entropy_backward, .count_correct = count_hits});
const bool squared_error = add_cpu_kernels<SquaredErrorKernels>(
    {.forward = squared_error_forward, .backward = squared_error_backward});

}  // namespace
}  // namespace topknot

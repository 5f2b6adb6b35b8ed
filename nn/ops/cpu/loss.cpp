#include "nn/ops/loss.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <vector>

namespace topknot {
namespace {

struct Softmax {
  Tensor probabilities;
  std::vector<std::int32_t> labels;
};

OpState cross_entropy_forward(const Tensor& logits, std::span<const std::int32_t> labels, Tensor& loss) {
  const std::int64_t n = logits.dim(0), classes = logits.dim(1);
  Tensor probabilities = Tensor::empty(logits.shape());
  double sum_of_losses = 0;
  for (std::int64_t i = 0; i < n; ++i) {
    const std::int32_t label = labels[static_cast<std::size_t>(i)];
    TOPKNOT_CHECK(label >= 0 && label < classes,
                  fmt::format("softmax_cross_entropy: label {} of {} classes", label, classes));
    const float* z = logits.data() + i * classes;
    float* p = probabilities.data() + i * classes;
    // NaN must come through, so the maximum is not std::max_element's.
    float top = z[0];
    for (std::int64_t c = 1; c < classes; ++c) top = z[c] > top || std::isnan(z[c]) ? z[c] : top;
    double sum = 0;
    for (std::int64_t c = 0; c < classes; ++c) sum += p[c] = std::exp(z[c] - top);
    for (std::int64_t c = 0; c < classes; ++c) p[c] = static_cast<float>(p[c] / sum);
    sum_of_losses += std::log(sum) - (z[label] - top);
  }
  loss.data()[0] = static_cast<float>(sum_of_losses / static_cast<double>(n));
  return std::make_shared<Softmax>(Softmax{probabilities, {labels.begin(), labels.end()}});
}

void cross_entropy_backward(const Tensor& logits, const OpState& state, const Tensor& grad, Tensor& dz) {
  const auto& softmax = state_as<Softmax>(state);
  const std::int64_t n = logits.dim(0), classes = logits.dim(1);
  const float scale = grad.data()[0] / static_cast<float>(n);
  for (std::int64_t i = 0; i < n; ++i)
    for (std::int64_t c = 0; c < classes; ++c) {
      const float hit = c == softmax.labels[static_cast<std::size_t>(i)] ? 1.0f : 0.0f;
      dz.data()[i * classes + c] = (softmax.probabilities.data()[i * classes + c] - hit) * scale;
    }
}

void count_hits(const Tensor& logits, std::span<const std::int32_t> labels, double* sums) {
  const float* row = logits.data();
  for (const std::int32_t label : labels) {
    const float* end = row + logits.dim(1);
    sums[0] += std::max_element(row, end) - row == label;
    row = end;
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

const RegisterKernels<CrossEntropyKernels> cross_entropy(DeviceKind::cpu, {.forward = cross_entropy_forward,
                                                                           .backward = cross_entropy_backward,
                                                                           .count_correct = count_hits});
const RegisterKernels<SquaredErrorKernels> squared_error(DeviceKind::cpu,
                                                         {.forward = squared_error_forward,
                                                          .backward = squared_error_backward});

}  // namespace
}  // namespace topknot

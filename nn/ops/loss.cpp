#include "nn/ops/loss.h"

#include <cmath>

#include "nn/core/base/check.h"
#include "nn/ops/cuda_ops.h"

namespace topknot {

Variable softmax_cross_entropy(const Variable& logits, std::span<const std::int32_t> labels) {
  const Shape& shape = logits.shape();
  TOPKNOT_CHECK(
      shape.rank() == 2 && shape[0] == static_cast<std::int64_t>(labels.size()) && shape[0] > 0,
      "softmax_cross_entropy: logits " + shape.str() + " for " + std::to_string(labels.size()) + " labels");
  TOPKNOT_CHECK(!on_gpu(logits), "labels of logits on a GPU lie there too: cuda::softmax_cross_entropy");
  const std::int64_t n = shape[0], classes = shape[1];
  Tensor probabilities = Tensor::empty(shape);
  double loss = 0;
  for (std::int64_t i = 0; i < n; ++i) {
    const std::int32_t label = labels[static_cast<std::size_t>(i)];
    TOPKNOT_CHECK(label >= 0 && label < classes, "softmax_cross_entropy: label " + std::to_string(label) +
                                                     " of " + std::to_string(classes) + " classes");
    const float* z = logits.value().data() + i * classes;
    float* p = probabilities.data() + i * classes;
    // NaN must come through, so the maximum is not std::max_element's.
    float top = z[0];
    for (std::int64_t c = 1; c < classes; ++c) top = z[c] > top || std::isnan(z[c]) ? z[c] : top;
    double sum = 0;
    for (std::int64_t c = 0; c < classes; ++c) sum += p[c] = std::exp(z[c] - top);
    for (std::int64_t c = 0; c < classes; ++c) p[c] = static_cast<float>(p[c] / sum);
    loss += std::log(sum) - (z[label] - top);
  }
  const std::vector<std::int32_t> kept(labels.begin(), labels.end());
  return {"softmax_cross_entropy",
          Tensor::from({static_cast<float>(loss / static_cast<double>(n))}, {1}),
          {logits},
          [=](Tensor grad) {  // dz = (softmax(z) - onehot(label)) / N
            Tensor dz = Tensor::empty(probabilities.shape());
            const float scale = grad.data()[0] / static_cast<float>(n);
            for (std::int64_t i = 0; i < n; ++i)
              for (std::int64_t c = 0; c < classes; ++c) {
                const float hit = c == kept[static_cast<std::size_t>(i)] ? 1.0f : 0.0f;
                dz.data()[i * classes + c] = (probabilities.data()[i * classes + c] - hit) * scale;
              }
            logits.accumulate_grad(std::move(dz));
          }};
}

Variable mean_squared_error(const Variable& y, const Tensor& target) {
  TOPKNOT_CHECK(y.shape() == target.shape(),
                "mean_squared_error: " + y.shape().str() + " against " + target.shape().str());
  if (on_gpu(y)) return cuda::mean_squared_error(y, target);
  const std::int64_t n = y.value().numel();
  double sum = 0;
  for (std::int64_t i = 0; i < n; ++i) {
    const double d = static_cast<double>(y.value().data()[i]) - target.data()[i];
    sum += d * d;
  }
  return {"mean_squared_error",
          Tensor::from({static_cast<float>(sum / static_cast<double>(n))}, {1}),
          {y},
          [=](Tensor grad) {  // dy = 2 (y - target) / numel
            Tensor dy = Tensor::empty(y.shape());
            const float scale = 2.0f * grad.data()[0] / static_cast<float>(n);
            for (std::int64_t i = 0; i < n; ++i)
              dy.data()[i] = (y.value().data()[i] - target.data()[i]) * scale;
            y.accumulate_grad(std::move(dy));
          }};
}

}  // namespace topknot

#pragma once
// The ops' formulas as plain loops in double, in N, C, H, W order: what the tests of nn compare with. Slow
// and obvious on purpose. Called with absolute values, the linear ones give the sum of absolute terms, by
// which rounding errors are judged.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <sstream>
#include <string>
#include <vector>

#include "nn/ops/ops.h"

namespace topknot::reference {

using Array = std::vector<double>;

inline double logistic(double x) {
  return 1 / (1 + std::exp(-x));
}

inline Array absolute(Array a) {
  for (double& v : a) v = std::abs(v);
  return a;
}

inline Array plus(Array a, const Array& b) {
  for (std::size_t i = 0; i < a.size(); ++i) a[i] += b[i];
  return a;
}

struct Conv {
  std::int64_t n, in, height, width, out;
  Extent kernel, stride, padding;
  std::int64_t groups = 1;
  ConvGeometry geometry() const { return {in, out, kernel, stride, padding, groups}; }
  std::int64_t out_height() const {
    return (height + 2 * padding.height - kernel.height) / stride.height + 1;
  }
  std::int64_t out_width() const { return (width + 2 * padding.width - kernel.width) / stride.width + 1; }
  std::int64_t x_size() const { return n * in * height * width; }
  std::int64_t w_size() const { return out * (in / groups) * kernel.height * kernel.width; }
  std::int64_t y_size() const { return n * out * out_height() * out_width(); }
  std::string str() const {
    std::ostringstream text;
    text << "batch " << n << ", " << in << " -> " << out << " channels, " << height << "x" << width
         << ", kernel " << kernel.height << "x" << kernel.width << ", stride " << stride.height << "x"
         << stride.width << ", padding " << padding.height << "x" << padding.width << ", groups " << groups;
    return text.str();
  }

  // Calls fn(y index, x index, w index) for each product in the sum.
  template <class Fn>
  void for_each_product(Fn&& fn) const {
    const std::int64_t oh = out_height(), ow = out_width(), group_in = in / groups, group_out = out / groups;
    for (std::int64_t b = 0; b < n; ++b)
      for (std::int64_t o = 0; o < out; ++o)
        for (std::int64_t c = 0; c < group_in; ++c)
          for (std::int64_t i = 0; i < oh; ++i)
            for (std::int64_t p = 0; p < kernel.height; ++p) {
              const std::int64_t row = i * stride.height + p - padding.height;
              if (row < 0 || row >= height) continue;
              const std::int64_t channel = b * in + o / group_out * group_in + c;
              for (std::int64_t j = 0; j < ow; ++j)
                for (std::int64_t q = 0; q < kernel.width; ++q) {
                  const std::int64_t column = j * stride.width + q - padding.width;
                  if (column < 0 || column >= width) continue;
                  fn(((b * out + o) * oh + i) * ow + j, (channel * height + row) * width + column,
                     ((o * group_in + c) * kernel.height + p) * kernel.width + q);
                }
            }
  }
};

inline Array conv2d(const Conv& g, const Array& x, const Array& w) {
  Array y(static_cast<std::size_t>(g.y_size()), 0.0);
  g.for_each_product([&](auto at_y, auto at_x, auto at_w) { y[at_y] += x[at_x] * w[at_w]; });
  return y;
}
inline Array conv2d_input_gradient(const Conv& g, const Array& w, const Array& dy) {
  Array dx(static_cast<std::size_t>(g.x_size()), 0.0);
  g.for_each_product([&](auto at_y, auto at_x, auto at_w) { dx[at_x] += dy[at_y] * w[at_w]; });
  return dx;
}
inline Array conv2d_weight_gradient(const Conv& g, const Array& x, const Array& dy) {
  Array dw(static_cast<std::size_t>(g.w_size()), 0.0);
  g.for_each_product([&](auto at_y, auto at_x, auto at_w) { dw[at_w] += dy[at_y] * x[at_x]; });
  return dw;
}

// Images of channels of pixels.
struct Images {
  std::int64_t n, channels, pixels;
  double count() const { return static_cast<double>(n * pixels); }
  template <class Fn>
  void for_each(Fn&& fn) const {  // fn(index, channel)
    for (std::int64_t b = 0, i = 0; b < n; ++b)
      for (std::int64_t c = 0; c < channels; ++c)
        for (std::int64_t p = 0; p < pixels; ++p, ++i) fn(i, c);
  }
};

inline Array add_bias(const Images& g, Array y, const Array& bias) {
  g.for_each([&](auto i, auto c) { y[i] += bias[c]; });
  return y;
}
inline Array channel_sums(const Images& g, const Array& x) {
  Array sums(static_cast<std::size_t>(g.channels), 0.0);
  g.for_each([&](auto i, auto c) { sums[c] += x[i]; });
  return sums;
}

struct BatchNorm {
  Array mean, variance, y;  // variance: biased
  Array y_scale;            // magnitude of the terms of y
  Array dx, dresidual;      // gradients
  Array dgamma, dbeta;      //
  Array dx_scale, dgamma_scale, dbeta_scale;
};

// y = relu?(gamma (x - mean) / sqrt(variance + epsilon) + beta + residual) and its gradients for dy.
// `mean` and `variance` empty: the batch's. `x_scale`: magnitude of the terms that x is a sum of.
inline BatchNorm batch_norm(const Images& g, const Array& x, const Array& x_scale, const Array& gamma,
                            const Array& beta, const Array& residual, const Array& mean,
                            const Array& variance, double epsilon, bool relu, const Array& dy) {
  const bool training = mean.empty();
  BatchNorm r;
  r.mean = mean, r.variance = variance;
  if (training) {
    r.mean = channel_sums(g, x);
    for (double& m : r.mean) m /= g.count();
    r.variance.assign(r.mean.size(), 0.0);
    g.for_each([&](auto i, auto c) { r.variance[c] += (x[i] - r.mean[c]) * (x[i] - r.mean[c]) / g.count(); });
  }
  Array inverse_std(r.mean.size());
  for (std::size_t c = 0; c < inverse_std.size(); ++c)
    inverse_std[c] = 1 / std::sqrt(r.variance[c] + epsilon);
  Array xhat(x.size()), xhat_scale(x.size()), masked = dy;
  r.y = r.y_scale = r.dx = r.dx_scale = x;
  g.for_each([&](auto i, auto c) {
    xhat[i] = (x[i] - r.mean[c]) * inverse_std[c];
    xhat_scale[i] = (x_scale[i] + std::abs(r.mean[c])) * inverse_std[c];
    r.y[i] = gamma[c] * xhat[i] + beta[c];
    r.y_scale[i] = std::abs(gamma[c]) * xhat_scale[i] + std::abs(beta[c]);
    if (!residual.empty()) r.y[i] += residual[i], r.y_scale[i] += std::abs(residual[i]);
    if (relu && !(r.y[i] > 0)) r.y[i] = 0, masked[i] = 0;
  });
  const auto zero = Array(r.mean.size(), 0.0);
  r.dgamma = r.dgamma_scale = r.dbeta = r.dbeta_scale = zero;
  g.for_each([&](auto i, auto c) {
    r.dbeta[c] += masked[i], r.dbeta_scale[c] += std::abs(masked[i]);
    r.dgamma[c] += masked[i] * xhat[i], r.dgamma_scale[c] += std::abs(masked[i]) * xhat_scale[i];
  });
  g.for_each([&](auto i, auto c) {
    const double factor = gamma[c] * inverse_std[c];
    r.dx[i] = factor * masked[i], r.dx_scale[i] = std::abs(r.dx[i]);
    if (!training) return;
    r.dx[i] -= factor * (r.dbeta[c] + xhat[i] * r.dgamma[c]) / g.count();
    r.dx_scale[i] += std::abs(factor) * (r.dbeta_scale[c] + xhat_scale[i] * r.dgamma_scale[c]) / g.count();
  });
  r.dresidual = masked;
  return r;
}

// Max: the gradient goes to the window's first maximum. Average: padding is not counted.
struct Pool {
  std::int64_t images, height, width, window, stride, padding;  // images: N * C
  bool max;
  std::int64_t out(std::int64_t size) const { return (size + 2 * padding - window) / stride + 1; }

  void run(const Array& x, const Array& dy, Array& y, Array& dx) const {
    const std::int64_t oh = out(height), ow = out(width);
    y.assign(static_cast<std::size_t>(images * oh * ow), 0.0);
    dx.assign(x.size(), 0.0);
    for (std::int64_t b = 0, at = 0; b < images; ++b)
      for (std::int64_t i = 0; i < oh; ++i)
        for (std::int64_t j = 0; j < ow; ++j, ++at) {
          std::vector<std::int64_t> inside;
          for (std::int64_t p = i * stride - padding; p < i * stride - padding + window; ++p)
            for (std::int64_t q = j * stride - padding; q < j * stride - padding + window; ++q)
              if (p >= 0 && p < height && q >= 0 && q < width) inside.push_back((b * height + p) * width + q);
          std::int64_t best = inside.front();
          double sum = 0;
          for (std::int64_t k : inside) {
            if (x[k] > x[best]) best = k;
            sum += x[k];
          }
          const auto count = static_cast<double>(inside.size());
          y[at] = max ? x[best] : sum / count;
          if (max)
            dx[best] += dy[at];
          else
            for (std::int64_t k : inside) dx[k] += dy[at] / count;
        }
  }
};

// c (m x n) = a (m x k) b (k x n)
inline Array matmul(std::int64_t m, std::int64_t n, std::int64_t k, const Array& a, const Array& b) {
  Array c(static_cast<std::size_t>(m * n), 0.0);
  for (std::int64_t i = 0; i < m; ++i)
    for (std::int64_t j = 0; j < n; ++j)
      for (std::int64_t p = 0; p < k; ++p) c[i * n + j] += a[i * k + p] * b[p * n + j];
  return c;
}
inline Array transpose(std::int64_t rows, std::int64_t columns, const Array& a) {
  Array t(a.size());
  for (std::int64_t i = 0; i < rows; ++i)
    for (std::int64_t j = 0; j < columns; ++j) t[j * rows + i] = a[i * columns + j];
  return t;
}

// Mean over the rows with a label of -sum_c t_c log softmax(z)[c], t = (1 - smoothing) onehot(label) +
// smoothing / classes; the gradient in dz, the sum of its terms' magnitudes in dz_scale.
inline double softmax_cross_entropy(std::int64_t n, std::int64_t classes, const Array& z,
                                    const std::vector<std::int32_t>& labels, Array& dz, double smoothing = 0,
                                    Array* dz_scale = nullptr) {
  double loss = 0;
  dz.assign(z.size(), 0.0);
  if (dz_scale) *dz_scale = dz;
  const auto counted = static_cast<double>(std::max<std::ptrdiff_t>(
      1, std::count_if(labels.begin(), labels.end(), [](auto l) { return l >= 0; })));
  for (std::int64_t i = 0; i < n; ++i) {
    if (labels[i] < 0) continue;
    const double* row = z.data() + i * classes;
    const double top = *std::max_element(row, row + classes);
    double sum = 0;
    for (std::int64_t c = 0; c < classes; ++c) sum += std::exp(row[c] - top);
    const std::int32_t label = labels[i];
    for (std::int64_t c = 0; c < classes; ++c) {
      const double target = (1 - smoothing) * (c == label) + smoothing / static_cast<double>(classes);
      if (target > 0) loss += target * (std::log(sum) + top - row[c]) / counted;
      dz[i * classes + c] = (std::exp(row[c] - top) / sum - target) / counted;
      if (dz_scale) (*dz_scale)[i * classes + c] = (std::exp(row[c] - top) / sum + target) / counted;
    }
  }
  return loss;
}

}  // namespace topknot::reference

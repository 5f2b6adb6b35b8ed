#pragma once
// The lookahead convolution by its formula, in double, and its gradients.

#include "tests/support/reference.h"

namespace topknot::reference {

struct Lookahead {
  std::int64_t frames, batch, features, taps;

  // fn(row, f, j, row of x): one product of the formula.
  template <class Fn>
  void each(const Fn& fn) const {
    for (std::int64_t t = 0; t < frames; ++t)
      for (std::int64_t n = 0; n < batch; ++n)
        for (std::int64_t f = 0; f < features; ++f)
          for (std::int64_t j = 0; j < taps && t + j < frames; ++j)
            fn(static_cast<std::size_t>((t * batch + n) * features + f),
               static_cast<std::size_t>(f * taps + j),
               static_cast<std::size_t>(((t + j) * batch + n) * features + f));
  }
  Array y(const Array& x, const Array& w) const {
    Array y(x.size());
    each([&](std::size_t row, std::size_t tap, std::size_t from) { y[row] += w[tap] * x[from]; });
    return y;
  }
  Array dx(const Array& dy, const Array& w) const {
    Array dx(dy.size());
    each([&](std::size_t row, std::size_t tap, std::size_t from) { dx[from] += w[tap] * dy[row]; });
    return dx;
  }
  Array dw(const Array& dy, const Array& x) const {
    Array dw(static_cast<std::size_t>(features * taps));
    each([&](std::size_t row, std::size_t tap, std::size_t from) { dw[tap] += dy[row] * x[from]; });
    return dw;
  }
};

inline const std::vector<Lookahead>& lookaheads() {
  static const std::vector<Lookahead> shapes = {{1, 1, 1, 1}, {5, 1, 3, 2}, {4, 3, 17, 6}, {40, 2, 33, 21}};
  return shapes;
}

}  // namespace topknot::reference

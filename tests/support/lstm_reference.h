#pragma once
// The LSTM layer in float64, loop by loop from the formula of nn/ops/ops.h, and its gradient by back-propagation through
// the steps.

#include <cmath>
#include <vector>

#include "tests/support/reference.h"

namespace topknot::reference {

struct LstmCase {
  std::int64_t batch, steps, in, width;
  std::size_t at(std::int64_t s, std::int64_t b, std::int64_t j, std::int64_t columns) const {
    return static_cast<std::size_t>((s * batch + b) * columns + j);
  }
};

struct LstmValues {
  Array x, input, recurrent, input_bias, recurrent_bias, hidden,
      cell;  // hidden, cell: the state, [batch, width]
};

struct LstmResult {
  Array y, hidden, cell;                // the value, and the state after it
  Array dx, dinput, drecurrent, dbias;  // dbias: of both biases
};

inline double logistic(double x) {
  return 1 / (1 + std::exp(-x));
}

// `dy`: of the value.
inline LstmResult lstm(const LstmCase& c, const LstmValues& v, const Array& dy) {
  const std::int64_t H = c.width, G = 4 * H;
  LstmResult r;
  r.y.resize(dy.size());
  Array gates(static_cast<std::size_t>(c.steps * c.batch * G)), cells(dy.size()), before_h = v.hidden,
                                                                                  before_c = v.cell;
  const auto index = [](std::int64_t i) { return static_cast<std::size_t>(i); };
  for (std::int64_t s = 0; s < c.steps; ++s) {
    Array h(before_h.size()), cell(before_c.size());
    for (std::int64_t b = 0; b < c.batch; ++b) {
      for (std::int64_t g = 0; g < G; ++g) {
        double sum = v.input_bias[index(g)] + v.recurrent_bias[index(g)];
        for (std::int64_t k = 0; k < c.in; ++k)
          sum += v.x[c.at(s, b, k, c.in)] * v.input[index(g * c.in + k)];
        for (std::int64_t k = 0; k < H; ++k)
          sum += before_h[index(b * H + k)] * v.recurrent[index(g * H + k)];
        gates[c.at(s, b, g, G)] = g / H == 2 ? std::tanh(sum) : logistic(sum);
      }
      for (std::int64_t j = 0; j < H; ++j) {
        const auto gate = [&](std::int64_t k) { return gates[c.at(s, b, k * H + j, G)]; };
        const double value = gate(1) * before_c[index(b * H + j)] + gate(0) * gate(2);
        cells[c.at(s, b, j, H)] = cell[index(b * H + j)] = value;
        r.y[c.at(s, b, j, H)] = h[index(b * H + j)] = gate(3) * std::tanh(value);
      }
    }
    before_h = h, before_c = cell;
  }
  r.hidden = before_h, r.cell = before_c;

  r.dx.assign(v.x.size(), 0), r.dinput.assign(v.input.size(), 0), r.drecurrent.assign(v.recurrent.size(), 0);
  r.dbias.assign(v.input_bias.size(), 0);
  Array later_h(before_h.size(), 0), later_c(before_c.size(), 0);
  for (std::int64_t s = c.steps - 1; s >= 0; --s) {
    Array dh_before(later_h.size(), 0);
    for (std::int64_t b = 0; b < c.batch; ++b) {
      Array da(index(G));
      for (std::int64_t j = 0; j < H; ++j) {
        const auto gate = [&](std::int64_t k) { return gates[c.at(s, b, k * H + j, G)]; };
        const double i = gate(0), f = gate(1), g = gate(2), o = gate(3),
                     t = std::tanh(cells[c.at(s, b, j, H)]);
        const double c_before = s > 0 ? cells[c.at(s - 1, b, j, H)] : v.cell[index(b * H + j)];
        const double dh = dy[c.at(s, b, j, H)] + later_h[index(b * H + j)];
        const double dc = later_c[index(b * H + j)] + dh * o * (1 - t * t);
        da[index(j)] = dc * g * i * (1 - i), da[index(H + j)] = dc * c_before * f * (1 - f);
        da[index(2 * H + j)] = dc * i * (1 - g * g), da[index(3 * H + j)] = dh * t * o * (1 - o);
        later_c[index(b * H + j)] = dc * f;
      }
      for (std::int64_t g = 0; g < G; ++g) {
        const double d = da[index(g)];
        r.dbias[index(g)] += d;
        for (std::int64_t k = 0; k < c.in; ++k) {
          r.dinput[index(g * c.in + k)] += d * v.x[c.at(s, b, k, c.in)];
          r.dx[c.at(s, b, k, c.in)] += d * v.input[index(g * c.in + k)];
        }
        for (std::int64_t k = 0; k < H; ++k) {
          r.drecurrent[index(g * H + k)] +=
              d * (s > 0 ? r.y[c.at(s - 1, b, k, H)] : v.hidden[index(b * H + k)]);
          dh_before[index(b * H + k)] += d * v.recurrent[index(g * H + k)];
        }
      }
    }
    later_h = dh_before;
  }
  return r;
}

}  // namespace topknot::reference

#pragma once
// The forward and backward variables of connectionist temporal classification (Graves, Fernández, Gomez,
// Schmidhuber, ICML 2006, section 4.1), one state at a time, as logarithms.

#include <cmath>
#include <cstdint>

#include "nn/base/host_device.h"

namespace topknot {

// log(e^a + e^b)
TOPKNOT_HOST_DEVICE double log_add(double a, double b) {
  const double high = a > b ? a : b, low = a > b ? b : a;
  return high == -HUGE_VAL ? high : high + log1p(exp(low - high));
}

// The states of a label sequence: its labels, with a blank before, between and after them.
struct CtcStates {
  const std::int32_t* labels;
  std::int32_t count;  // of labels
  std::int32_t blank;

  TOPKNOT_HOST_DEVICE int size() const { return 2 * count + 1; }
  TOPKNOT_HOST_DEVICE std::int32_t label(int s) const { return s % 2 == 0 ? blank : labels[s / 2]; }
  // Whether an alignment may go from state s - 2 to s: past a blank between different labels.
  TOPKNOT_HOST_DEVICE bool skips(int s) const {
    return s % 2 == 1 && s >= 3 && s < size() && labels[s / 2] != labels[s / 2 - 1];
  }
};

// Equation 6: the log of the probability of all beginnings that are in state s at a frame, but for the
// label's own; `before`: the finished values of the frame before, null at the first frame.
TOPKNOT_HOST_DEVICE double ctc_forward(const CtcStates& states, int s, const double* before) {
  if (!before) return s <= 1 ? 0.0 : -HUGE_VAL;
  double sum = before[s];
  if (s >= 1) sum = log_add(sum, before[s - 1]);
  return states.skips(s) ? log_add(sum, before[s - 2]) : sum;
}

// Equation 10: of all endings after a frame in state s; `after`: the next frame's, with labels; null: none.
TOPKNOT_HOST_DEVICE double ctc_backward(const CtcStates& states, int s, const double* after) {
  if (!after) return s >= states.size() - 2 ? 0.0 : -HUGE_VAL;
  double sum = after[s];
  if (s + 1 < states.size()) sum = log_add(sum, after[s + 1]);
  return states.skips(s + 2) ? log_add(sum, after[s + 2]) : sum;
}

}  // namespace topknot

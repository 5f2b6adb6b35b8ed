#pragma once
// A message whose floats the collective sums, and what comes back of it.

#include <span>

#include "compress/compressor.h"
#include "nn/core/base/check.h"

namespace topknot {

// `values` stays the sender's memory and holds the sum afterwards.
inline Message sum_message(std::span<float> values) {
  Message message;
  message.kind = Message::Kind::sum;
  message.sum = values;
  return message;
}

inline void check_sum(const Round& round, std::span<const float> sent) {
  TOPKNOT_CHECK(round.sum.data() == sent.data() && round.sum.size() == sent.size(),
                "the sum is not in the memory that was sent");
}

}  // namespace topknot

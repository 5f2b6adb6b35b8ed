#pragma once
// The rotations of rotary position embedding, once for CPU and GPU, which so have the same bits.

#include <cstdint>
#include <cstring>

#include "nn/base/host_device.h"

namespace topknot {

struct Rotation {
  float cosine, sine;
};

// Cosine and sine of `quarters` quarter turns, from 0 to 2^31, within 1e-7. Whole quarters are taken off in
// double, so that an angle of 100,000 radians keeps its digits; the rest, of at most an eighth of a turn,
// goes through the polynomials of Moshier's Cephes library in single precision (sinf.c). Branch-free.
TOPKNOT_HOST_DEVICE Rotation rotation_of(double quarters) {
  constexpr double kRound = 6755399441055744.0;  // 1.5 * 2^52: a sum with it ends in the bits of the integer
  const double rounded = quarters + kRound;
  const auto angle = static_cast<float>((quarters - (rounded - kRound)) * 1.5707963267948966);
  const float square = angle * angle;
  float s = -1.9515295891e-4f;
  s = s * square + 8.3321608736e-3f;
  s = s * square - 1.6666654611e-1f;
  s = s * square * angle + angle;
  float c = 2.443315711809948e-5f;
  c = c * square - 1.388731625493765e-3f;
  c = c * square + 4.166664568298827e-2f;
  c = c * square * square - 0.5f * square + 1.0f;
  std::uint64_t bits;
  std::memcpy(&bits, &rounded, sizeof bits);
  const auto whole = static_cast<std::uint32_t>(bits);
  const float cosine = whole & 1 ? s : c, sine = whole & 1 ? c : s;
  return {(whole + 1) & 2 ? -cosine : cosine, whole & 2 ? -sine : sine};
}

}  // namespace topknot

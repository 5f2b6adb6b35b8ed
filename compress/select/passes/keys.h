#pragma once
// Magnitudes as integers. The bits of a float or double without the sign, read as an integer, order as the
// magnitudes do; infinities and NaNs come above every finite number, so one integer comparison finds large
// and broken values alike. For CPU loops and for kernels. C++17.

#include <cstdint>
#include <cstring>

#include "nn/core/host_device.h"

namespace topknot {

template <class T>
struct KeyOf;
template <>
struct KeyOf<float> {
  using type = std::int32_t;
  static constexpr type without_sign = 0x7fffffff, largest_finite = 0x7f7fffff;
};
template <>
struct KeyOf<double> {
  using type = std::int64_t;
  static constexpr type without_sign = 0x7fffffffffffffff, largest_finite = 0x7fefffffffffffff;
};
template <class T>
using Key = typename KeyOf<T>::type;

template <class T>
TOPKNOT_HOST_DEVICE Key<T> key_of(T x) {
  Key<T> bits;
  memcpy(&bits, &x, sizeof bits);
  return bits & KeyOf<T>::without_sign;
}
template <class T>
TOPKNOT_HOST_DEVICE T magnitude_of(Key<T> key) {
  T x;
  memcpy(&x, &key, sizeof x);
  return x;
}
template <class T>
TOPKNOT_HOST_DEVICE Key<T> largest_finite_key() {
  return KeyOf<T>::largest_finite;
}

// The key such that key_of(x) > key exactly where |x| > t, for every x; -1 where every magnitude exceeds t. t
// is no NaN.
template <class T>
TOPKNOT_HOST_DEVICE Key<T> key_below(double t) {
  if (t < 0) return -1;
  const T x = static_cast<T>(t);
  const Key<T> key = key_of(x) - (static_cast<double>(x) > t ? 1 : 0);
  return key < KeyOf<T>::largest_finite ? key : KeyOf<T>::largest_finite;
}

}  // namespace topknot

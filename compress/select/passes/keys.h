#pragma once
// Magnitudes as integers. The bits of a float or double without the sign, read as an integer, order as the
// magnitudes do; infinities and NaNs come above every finite number, so one integer comparison finds large
// and broken values alike.

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

namespace topknot {

template <class T>
struct KeyOf;
template <>
struct KeyOf<float> {
  using type = std::int32_t;
};
template <>
struct KeyOf<double> {
  using type = std::int64_t;
};
template <class T>
using Key = typename KeyOf<T>::type;

template <class T>
inline Key<T> key_of(T x) {
  return std::bit_cast<Key<T>>(x) & std::numeric_limits<Key<T>>::max();
}
template <class T>
inline T magnitude_of(Key<T> key) {
  return std::bit_cast<T>(key);
}
template <class T>
inline Key<T> largest_finite_key() {
  return std::bit_cast<Key<T>>(std::numeric_limits<T>::max());
}

// The key such that key_of(x) > key exactly where |x| > t, for every x; -1 where every magnitude exceeds t. t
// is no NaN.
template <class T>
inline Key<T> key_below(double t) {
  if (t < 0) return -1;
  T x = static_cast<T>(t);
  if (static_cast<double>(x) > t) x = std::nextafter(x, T{0});
  return std::min(std::bit_cast<Key<T>>(x), largest_finite_key<T>());
}

}  // namespace topknot

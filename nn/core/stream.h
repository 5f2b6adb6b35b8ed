#pragma once
// Stores past the caches, for what nobody reads soon: a plain store would first read the line that it writes to.

#include <cstring>

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

#include "nn/core/simd.h"

namespace topknot {

// Writes v to `to`, aligned to 64 bytes. V has 64 bytes. Other threads may not see it before finish_streaming().
template <class V>
TOPKNOT_INLINE void stream(void* to, V v) {
  static_assert(sizeof(V) == 64);
#if defined(__x86_64__)
  __m128i pieces[4];
  std::memcpy(pieces, &v, sizeof v);
  for (int i = 0; i < 4; ++i) _mm_stream_si128(static_cast<__m128i*>(to) + i, pieces[i]);
#else
  std::memcpy(to, &v, sizeof v);
#endif
}
TOPKNOT_INLINE void finish_streaming() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

}  // namespace topknot

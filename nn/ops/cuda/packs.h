#pragma once
// 16 bytes of activations at once, as floats. For .cu files, after topknot_kernel.h. Addresses of packs are 16-byte
// aligned. C++17.

#include "nn/core/cuda/kernel_tools.h"

namespace topknot::cuda {

template <class T>
inline constexpr int kPack = static_cast<int>(16 / sizeof(T));

// A type and a width, to choose a kernel by.
template <class Type, int Width>
struct Pack {
  using T = Type;
  static constexpr int V = Width;
};

__device__ inline void unpack(uint4 p, float (&out)[4]) {
  out[0] = __uint_as_float(p.x), out[1] = __uint_as_float(p.y);
  out[2] = __uint_as_float(p.z), out[3] = __uint_as_float(p.w);
}
__device__ inline void unpack(uint4 p, float (&out)[8]) {
  const unsigned words[4] = {p.x, p.y, p.z, p.w};
  for (int i = 0; i < 4; ++i) {
    out[2 * i] = __uint_as_float(words[i] << 16);
    out[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
  }
}

// V elements: one, or a pack.
template <int V, class T>
__device__ inline void load_pack(const T* at, float (&out)[V]) {
  if constexpr (V == 1)
    out[0] = as_float(*at);
  else
    unpack(*reinterpret_cast<const uint4*>(at), out);
}
template <int V, class T>
__device__ inline void store_pack(T* at, const float (&v)[V]) {
  if constexpr (V == 1) {
    *at = from_float<T>(v[0]);
  } else if constexpr (sizeof(T) == 4) {
    *reinterpret_cast<uint4*>(at) =
        uint4{__float_as_uint(v[0]), __float_as_uint(v[1]), __float_as_uint(v[2]), __float_as_uint(v[3])};
  } else {
    unsigned words[4];
    for (int i = 0; i < 4; ++i)
      words[i] = __bfloat16_as_ushort(from_float<T>(v[2 * i])) |
                 unsigned{__bfloat16_as_ushort(from_float<T>(v[2 * i + 1]))} << 16;
    *reinterpret_cast<uint4*>(at) = uint4{words[0], words[1], words[2], words[3]};
  }
}
// V floats, from an address of no more than a float's alignment.
template <int V>
__device__ inline void load_floats(const float* at, float (&out)[V]) {
  for (int i = 0; i < V; ++i) out[i] = at[i];
}

}  // namespace topknot::cuda

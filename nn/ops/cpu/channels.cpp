#include "nn/ops/cpu/channels.h"

#include <vector>

#include "nn/ops/cpu/blocks.h"
#include "nn/ops/kernels.h"

namespace topknot {

void add_channel_bias(Tensor& y, const float* bias, std::int64_t begin, std::int64_t end) {
  const ChannelGeometry g(y);
  by_type(y.dtype(), [&](auto type) {
    using T = decltype(type);
    T* p = y.as<T>() + begin * g.image_elements();
    for (std::int64_t n = begin; n < end; ++n)
      for (std::int64_t c = 0; c < g.channels; c += g.block)
        for (std::int64_t i = 0; i < g.pixels; ++i)
          for (int k = 0; k < g.block; ++k, ++p) narrow(widened(*p) + bias[c + k], *p);
  });
}

Tensor sum_over_channels(const Tensor& x) {
  const ChannelGeometry g(x);
  std::vector<float> sums(static_cast<std::size_t>(g.images * g.channels));
  by_type(x.dtype(), [&](auto type) {
    using T = decltype(type);
    parallel_ranges(g.images, [&](int, std::int64_t begin, std::int64_t end) {
      for (std::int64_t n = begin; n < end; ++n) {
        const T* p = x.as<T>() + n * g.image_elements();
        for (std::int64_t c = 0; c < g.channels; c += g.block)
          for (std::int64_t i = 0; i < g.pixels; ++i)
            for (int k = 0; k < g.block; ++k)
              sums[static_cast<std::size_t>(n * g.channels + c + k)] += widened(*p++);
      }
    });
  });
  Tensor total = Tensor::empty({g.channels});
  for (std::int64_t c = 0; c < g.channels; ++c) {
    double sum = 0;
    for (std::int64_t n = 0; n < g.images; ++n) sum += sums[static_cast<std::size_t>(n * g.channels + c)];
    total.data()[c] = static_cast<float>(sum);
  }
  return total;
}

namespace {

template <class From, class To>
void convert_type(const Tensor& x, Tensor& y) {
  const auto n = static_cast<std::size_t>(x.numel());
  constexpr std::int64_t kPart = 32768;
  parallel_ranges((x.numel() + kPart - 1) / kPart, [&](int, std::int64_t begin, std::int64_t end) {
    const std::size_t first = static_cast<std::size_t>(begin * kPart),
                      last = std::min(n, static_cast<std::size_t>(end * kPart));
    if constexpr (std::is_same_v<From, float>)
      to_bfloat16(x.as<From>() + first, last - first, y.as<To>() + first);
    else
      to_float(x.as<From>() + first, last - first, y.as<To>() + first);
  });
}

void convert_layout(const Tensor& x, Tensor& y) {
  const ChannelGeometry g(x);
  const auto convert = y.layout() == Layout::blocked ? to_blocks : from_blocks;
  parallel_ranges(g.images, [&](int, std::int64_t begin, std::int64_t end) {
    by_type(x.dtype(), [&](auto type) {
      using T = decltype(type);
      for (std::int64_t n = begin; n < end; ++n)
        convert(x.dtype(), g.channels, g.pixels, g.image<T>(x, n), g.image<T>(y, n));
    });
  });
}

Tensor convert(const Tensor& x, Layout layout, DType type) {
  Tensor y = x;
  if (layout != x.layout()) {
    y = Tensor::empty(x.shape(), layout, {}, x.dtype());
    convert_layout(x, y);
  }
  if (type == y.dtype()) return y;
  Tensor z = Tensor::empty(y.shape(), layout, {}, type);
  if (type == DType::bf16)
    convert_type<float, BFloat16>(y, z);
  else
    convert_type<BFloat16, float>(y, z);
  return z;
}

const RegisterKernels<LayoutKernels> channels_registered(DeviceKind::cpu, {.convert = convert});

}  // namespace

}  // namespace topknot

#include <fmt/format.h>

#include "nn/ops/cpu/channels.h"
#include "nn/ops/kernels.h"

namespace topknot {
namespace {

Shape with_channels(const Shape& x, std::int64_t channels) {
  return {x[0], channels, x[2], x[3]};
}

}  // namespace

Variable concat(const std::vector<Variable>& parts) {
  TOPKNOT_CHECK(!parts.empty(), "concat: nothing to concatenate");
  if (parts.size() == 1) return parts[0];
  const Shape& first = parts[0].shape();
  std::vector<ChannelRun> runs;
  std::int64_t channels = 0;
  for (const Variable& part : parts) {
    const Shape& shape = part.shape();
    TOPKNOT_CHECK(shape.rank() == 4 && shape == with_channels(first, shape[1]),
                  fmt::format("concat: {} beside {}", shape.str(), first.str()));
    runs.push_back({shape[1], 0, channels});
    channels += shape[1];
  }
  const auto& kernels = kernels_for<ChannelCopyKernels>(parts[0]);
  Layout layout = parts[0].value().layout();
  for (std::size_t i = 0; i < parts.size(); ++i)
    if (const Layout possible = kernels.layout(parts[i].value(), runs[i], channels); possible != layout)
      layout = Layout::plain;
  Tensor y = Tensor::empty(with_channels(first, channels), layout, parts[0].value().device(),
                           parts[0].value().dtype());
  for (std::size_t i = 0; i < parts.size(); ++i)
    kernels.copy(in_form(parts[i].value(), layout, y.dtype()), y, runs[i], false);
  return {"concat", y, parts, [=, &kernels](Tensor grad) {
            for (std::size_t i = 0; i < parts.size(); ++i) {
              if (!parts[i].requires_grad()) continue;
              const Tensor& x = parts[i].value();
              Tensor dx = Tensor::empty(x.shape(), layout, x.device(), grad.dtype());
              kernels.copy(grad, dx, runs[i].reversed(), false);
              parts[i].accumulate_grad(in_form(dx, x.layout(), x.dtype()));
            }
          }};
}

Variable slice_channels(const Variable& x, std::int64_t begin, std::int64_t count) {
  const Shape& shape = x.shape();
  TOPKNOT_CHECK(shape.rank() == 4 && begin >= 0 && count > 0 && begin + count <= shape[1],
                fmt::format("slice_channels: channels {} to {} of {}", begin, begin + count, shape.str()));
  const auto& kernels = kernels_for<ChannelCopyKernels>(x);
  const ChannelRun run{count, begin, 0};
  const Tensor from = to_layout(x.value(), kernels.layout(x.value(), run, count));
  Tensor y = Tensor::empty(with_channels(shape, count), from.layout(), from.device(), from.dtype());
  kernels.copy(from, y, run, false);
  return {"slice_channels", y, {x}, [=, &kernels](Tensor grad) {
            const Layout layout = x.value().layout();
            InputGradient dx = x.input_gradient();
            if (!dx.accumulate) {
              // Bytes of zeros, whatever the type.
              backend(dx.tensor.device()).fill_zero(dx.tensor.data(), (dx.tensor.bytes() + 3) / 4);
            }
            Tensor sum = to_layout(dx.tensor, grad.layout());
            kernels.copy(grad, sum, run.reversed(), dx.accumulate);
            x.accumulate_grad(to_layout(sum, layout));
          }};
}

Variable channel_shuffle(const Variable& x, std::int64_t groups) {
  const Shape& shape = x.shape();
  TOPKNOT_CHECK(shape.rank() == 4 && groups > 0 && shape[1] % groups == 0,
                fmt::format("channel_shuffle: {} in {} groups", shape.str(), groups));
  if (groups == 1 || groups == shape[1]) return x;
  const auto& kernels = kernels_for<ChannelCopyKernels>(x);
  std::vector<ChannelRun> runs;
  const std::int64_t n = shape[1] / groups;
  for (std::int64_t g = 0; g < groups; ++g) runs.push_back({n, g * n, g, 1, groups});
  const Tensor from = to_layout(x.value(), kernels.layout(x.value(), runs[0], shape[1]));
  Tensor y = Tensor::empty_like(from);
  for (const ChannelRun& run : runs) kernels.copy(from, y, run, false);
  return {"channel_shuffle", y, {x}, [=, &kernels](Tensor grad) {
            Tensor dx = Tensor::empty_like(grad);
            for (const ChannelRun& run : runs) kernels.copy(grad, dx, run.reversed(), false);
            x.accumulate_grad(to_layout(dx, x.value().layout()));
          }};
}

namespace {

Layout channel_copy_layout(const Tensor& x, const ChannelRun& run, std::int64_t other_channels) {
  const int block = channel_block();
  const bool whole_blocks = run.from_step == 1 && run.to_step == 1 && run.from % block == 0 &&
                            run.to % block == 0 && run.count % block == 0 && other_channels % block == 0;
  return whole_blocks ? x.layout() : Layout::plain;
}

// Channels that follow each other lie in one piece of an image, in either layout.
template <class T>
void copy_stored(const Tensor& x, Tensor& y, const ChannelRun& run, bool accumulate) {
  const ChannelGeometry from(x), to(y);
  const bool one_piece = run.from_step == 1 && run.to_step == 1;
  const std::int64_t pieces = one_piece ? 1 : run.count, elements = (one_piece ? run.count : 1) * from.pixels;
  parallel_each(from.images, [&](std::int64_t n) {
    for (std::int64_t i = 0; i < pieces; ++i) {
      const T* in = from.image<T>(x, n) + (run.from + i * run.from_step) * from.pixels;
      T* out = to.image<T>(y, n) + (run.to + i * run.to_step) * to.pixels;
      if (!accumulate)
        std::copy(in, in + elements, out);
      else
        for (std::int64_t k = 0; k < elements; ++k) narrow(widened(out[k]) + widened(in[k]), out[k]);
    }
  });
}

void copy_channels(const Tensor& x, Tensor& y, const ChannelRun& run, bool accumulate) {
  by_type(x.dtype(), [&](auto type) { copy_stored<decltype(type)>(x, y, run, accumulate); });
}

const bool concat_registered =
    add_cpu_kernels<ChannelCopyKernels>({.layout = channel_copy_layout, .copy = copy_channels});

}  // namespace
}  // namespace topknot

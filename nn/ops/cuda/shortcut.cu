#include "nn/ops/cuda/op_tools.h"

namespace topknot::cuda {
namespace {

// Shape of subsample_and_pad(): both images lie in N, H, W, C order.
struct ShortcutShape {
  std::uint32_t images, height,
      width;  // of the large images; the small ones have (height + 1) / 2, (width + 1) / 2
  std::uint32_t narrow, wide,
      shift;  // channels of the large and of the small images; the first that is not zero
};

ShortcutShape shape_of(const Tensor& large, const Tensor& small) {
  TOPKNOT_CHECK(large.layout() == Layout::nhwc, "subsample_and_pad on a GPU takes nhwc activations");
  TOPKNOT_CHECK(large.numel() < std::int64_t{1} << 32 && small.numel() < std::int64_t{1} << 32,
                "subsample_and_pad: fewer than 2^32 elements, not " + large.shape().str());
  return {word(large.dim(0)), word(large.dim(2)), word(large.dim(3)),
          word(large.dim(1)), word(small.dim(1)), word((small.dim(1) - large.dim(1)) / 2)};
}

// A word W is one element, or several channels side by side; channels are counted in words.
template <class W>
__global__ void __launch_bounds__(kThreads)
    subsample_kernel(const W* x, W* y, ShortcutShape s, std::uint32_t words) {
  const std::size_t at = awaited_index();
  if (at >= words) return;
  const std::uint32_t to = static_cast<std::uint32_t>(at), c = to % s.wide - s.shift, pixel = to / s.wide;
  W word{};
  if (c < s.narrow) {  // a negative c is a large one
    const std::uint32_t width = (s.width + 1) / 2, height = (s.height + 1) / 2;
    const std::uint32_t j = pixel % width, i = pixel / width % height, n = pixel / width / height;
    word = x[(std::size_t{n * s.height + 2 * i} * s.width + 2 * j) * s.narrow + c];
  }
  y[to] = word;
}

template <class W>
__global__ void __launch_bounds__(kThreads)
    subsample_backward_kernel(const W* dy, W* dx, ShortcutShape s, std::uint32_t words) {
  const std::size_t at = awaited_index();
  if (at >= words) return;
  const std::uint32_t to = static_cast<std::uint32_t>(at), c = to % s.narrow, pixel = to / s.narrow;
  const std::uint32_t j = pixel % s.width, i = pixel / s.width % s.height, n = pixel / s.width / s.height;
  W word{};
  if (i % 2 == 0 && j % 2 == 0) {
    const std::uint32_t width = (s.width + 1) / 2, height = (s.height + 1) / 2;
    word = dy[(std::size_t{n * height + i / 2} * width + j / 2) * s.wide + s.shift + c];
  }
  dx[to] = word;
}

template <class W>
void subsample_words(bool forward, const void* in, void* out, ShortcutShape s,
                     std::uint32_t elements_per_word) {
  s.narrow /= elements_per_word, s.wide /= elements_per_word, s.shift /= elements_per_word;
  const std::size_t small = std::size_t{s.images} * ((s.height + 1) / 2) * ((s.width + 1) / 2) * s.wide,
                    large = std::size_t{s.images} * s.height * s.width * s.narrow;
  const std::size_t words = forward ? small : large;
  if (words > 0)
    launch(forward ? subsample_kernel<W> : subsample_backward_kernel<W>, grid_for(words, kThreads), kThreads,
           compute_stream(), static_cast<const W*>(in), static_cast<W*>(out), s, words);
}

void subsample(bool forward, const Tensor& from, Tensor& to) {
  const ShortcutShape s = forward ? shape_of(from, to) : shape_of(to, from);
  const std::size_t element = size_of(to.dtype());
  const void* in = from.data();
  void* out = to.data();
  const std::uint32_t wide_word = static_cast<std::uint32_t>(16 / element);
  const bool aligned =
      (reinterpret_cast<std::uintptr_t>(in) | reinterpret_cast<std::uintptr_t>(out)) % 16 == 0;
  if (aligned && s.narrow % wide_word == 0 && s.wide % wide_word == 0 && s.shift % wide_word == 0)
    subsample_words<uint4>(forward, in, out, s, wide_word);
  else if (element == 4)
    subsample_words<std::uint32_t>(forward, in, out, s, 1);
  else
    subsample_words<std::uint16_t>(forward, in, out, s, 1);
}

void forward(const Tensor& x, Tensor& y) {
  subsample(true, x, y);
}
void backward(const Tensor& dy, Tensor& dx) {
  subsample(false, dy, dx);
}

const bool registered = add_cuda_kernels<ShortcutKernels>({.forward = forward, .backward = backward});

}  // namespace
}  // namespace topknot::cuda

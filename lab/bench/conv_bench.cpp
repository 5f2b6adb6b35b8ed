// Convolutions, one geometry after another, for a driver that alternates them with another library's: prints
// "ready 1", then answers each line "IN OUT HEIGHT WIDTH KERNEL STRIDE PADDING GROUPS BATCH K" on standard
// input with the seconds of K passes. A pass is forward and both gradients, of tensors in the layouts that
// the layers of a network leave them in. Up to three input channels are an image, which needs no gradient.
#include <omp.h>

#include <cstdio>
#include <iostream>
#include <sstream>
#include <string>

#include "lab/common/clock.h"
#include "lab/common/options.h"
#include "nn/base/program.h"
#include "nn/core/rng.h"
#include "nn/ops/kernels.h"

using namespace topknot;

namespace {

constexpr const char* kUsage =
    "usage: bench_conv [--threads T]\n"
    "  --threads  compute threads (2)\n";

Tensor random_tensor(const Shape& shape, Layout layout) {
  Tensor t = Tensor::empty(shape);
  const CounterRng rng(1, RngUse::test);
  for (std::int64_t i = 0; i < t.numel(); ++i)
    t.data()[i] = rng.uniform(static_cast<std::uint64_t>(i)) - 0.5f;
  return to_layout(t, layout);
}

class Convolution {
 public:
  Convolution(const ConvGeometry& geometry, const Shape& input)
      : g_(geometry),
        x_(random_tensor(input, g_.in % channel_block() == 0 ? Layout::blocked : Layout::plain)),
        weight_(random_tensor(g_.weight_shape(), Layout::plain)),
        dw_(Tensor::empty(g_.weight_shape())),
        dx_(Tensor::empty_like(x_)),
        kernels_(kernels_for<ConvKernels>(x_)),
        dy_(random_tensor(g_.output_shape(input), kernels_.output_layout(g_))) {}

  void pass() {
    Tensor y = Tensor::empty_like(dy_);
    const OpState state = kernels_.forward(g_, x_, weight_, {}, y);
    WeightedGradients gradients{Variable(x_), Variable(weight_), Variable()};
    if (g_.in > 3) gradients.x.tensor = dx_;
    gradients.weight.data = dw_.data();
    kernels_.backward(g_, x_, weight_, dy_, state, gradients);
  }

 private:
  ConvGeometry g_;
  Tensor x_, weight_, dw_, dx_;
  const ConvKernels& kernels_;
  Tensor dy_;
};

int run(int argc, char** argv) {
  int threads = 2;
  CLI::App app("bench_conv");
  app.add_option("--threads", threads)->check(CLI::PositiveNumber);
  if (!parse_options(app, kUsage, argc, argv)) return 0;
  omp_set_num_threads(threads);
  std::printf("ready 1\n");
  std::fflush(stdout);
  for (std::string line; std::getline(std::cin, line);) {
    ConvGeometry g;
    std::int64_t height, width, kernel, stride, padding, batch, passes;
    if (!(std::istringstream(line) >> g.in >> g.out >> height >> width >> kernel >> stride >> padding >>
          g.groups >> batch >> passes))
      throw UserError("bench_conv: ten numbers a line are expected, there is '" + line + "'");
    g.kernel = kernel, g.stride = stride, g.padding = padding;
    Convolution conv(g, {batch, g.in, height, width});
    for (int warm_up = 0; warm_up < 2; ++warm_up) conv.pass();
    for (std::int64_t i = 0; i < passes; ++i) std::printf("%.9f ", seconds_for([&] { conv.pass(); }));
    std::printf("\n");
    std::fflush(stdout);
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  return run_program("bench_conv", run, argc, argv);
}

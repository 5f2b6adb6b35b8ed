// Attention, one size after another, for a driver that alternates it with another library's: prints "ready
// 1", then answers each line "HEADS KV_HEADS BATCH STEPS WIDTH CAUSAL K" on standard input with the seconds of K
// forward passes, and then of K backward passes.
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
    "usage: bench_attention [--threads T] [--bf16]\n"
    "  --threads  compute threads (2)\n"
    "  --bf16     activations in bfloat16\n";

Tensor random_tensor(const Shape& shape, DType type) {
  Tensor t = Tensor::empty(shape);
  const CounterRng rng(1, RngUse::test);
  for (std::int64_t i = 0; i < t.numel(); ++i) t.data()[i] = rng.normal(static_cast<std::uint64_t>(i));
  return in_form(t, Layout::plain, type);
}

int run(int argc, char** argv) {
  int threads = 2;
  bool bf16 = false;
  CLI::App app("bench_attention");
  app.add_option("--threads", threads)->check(CLI::PositiveNumber);
  app.add_flag("--bf16", bf16);
  if (!parse_options(app, kUsage, argc, argv)) return 0;
  omp_set_num_threads(threads);
  std::printf("ready 1\n");
  std::fflush(stdout);
  for (std::string line; std::getline(std::cin, line);) {
    AttentionShape s{};
    std::int64_t passes;
    if (!(std::istringstream(line) >> s.heads >> s.kv_heads >> s.batch >> s.steps >> s.width >> s.causal >>
          passes))
      throw UserError("bench_attention: seven numbers a line are expected, there is '" + line + "'");
    const DType type = bf16 ? DType::bf16 : DType::f32;
    const std::int64_t rows = s.steps * s.batch;
    const Tensor qkv = random_tensor({rows, (s.heads + 2 * s.kv_heads) * s.width}, type),
                 dy = random_tensor({rows, s.heads * s.width}, type);
    Tensor y = Tensor::empty_like(dy), dqkv = Tensor::empty_like(qkv);
    const auto& kernels = kernels_for<AttentionKernels>(qkv);
    OpState state;
    const auto forward = [&] { state = kernels.forward(s, qkv, y); };
    const auto backward = [&] { kernels.backward(s, qkv, y, dy, state, dqkv); };
    forward();
    backward();
    for (std::int64_t i = 0; i < passes; ++i) std::printf("%.9f ", seconds_for(forward));
    for (std::int64_t i = 0; i < passes; ++i) std::printf("%.9f ", seconds_for(backward));
    std::printf("\n");
    std::fflush(stdout);
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  return run_program("bench_attention", run, argc, argv);
}

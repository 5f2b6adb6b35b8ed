// The ops between a transformer's matrix products, for a driver that alternates them with another library's:
// prints "ready 1", then answers each line "OP ROWS WIDTH K" on standard input with 2 K numbers, the seconds
// of K forward passes and those of K backward passes. A row of WIDTH elements is what the op reads; rope's is
// of heads of 64 elements (32 below a width of 256), a third of them queries, keys and values. "copy" copies
// the rows, what ops that are bound by memory are measured against; its backward pass is one more copy.
#include <omp.h>

#include <cstdio>
#include <iostream>
#include <map>
#include <sstream>
#include <string>

#include "lab/common/clock.h"
#include "lab/common/options.h"
#include "nn/base/program.h"
#include "nn/core/rng.h"
#include "nn/ops/cpu/channels.h"
#include "nn/ops/kernels.h"

using namespace topknot;

namespace {

constexpr const char* kUsage =
    "usage: bench_rows [--threads T] [--bf16]\n"
    "  --threads  compute threads (2)\n"
    "  --bf16     activations in bfloat16\n";

Tensor random_rows(std::int64_t rows, std::int64_t width, DType type) {
  Tensor t = Tensor::empty({rows, width});
  const CounterRng rng(1, RngUse::test);
  for (std::int64_t i = 0; i < t.numel(); ++i) t.data()[i] = rng.normal(static_cast<std::uint64_t>(i));
  return in_form(t, Layout::plain, type);
}

Tensor copy_of(const Tensor& x) {
  Tensor y = Tensor::empty_like(x);
  parallel_ranges(static_cast<std::int64_t>(x.bytes()), [&](int, std::int64_t begin, std::int64_t end) {
    std::memcpy(y.as<char>() + begin, x.as<char>() + begin, static_cast<std::size_t>(end - begin));
  });
  return y;
}

Variable copy(const Variable& x) {
  return {"copy", copy_of(x.value()), {x}, [x](const Tensor& grad) { x.accumulate_grad(copy_of(grad)); }};
}

class Pass {
 public:
  Pass(const std::string& op, std::int64_t rows, std::int64_t width, DType type)
      : op_(op), values_(random_rows(rows, width, type)), branch_(random_rows(rows, width, type)) {
    const auto random = [](std::span<float> out, const CounterRng& rng) {
      for (std::size_t i = 0; i < out.size(); ++i) out[i] = 1 + 0.1f * rng.normal(i);
    };
    const Parameter &weight = store_.add("weight", {width}, random),
                    &bias = store_.add("bias", {width}, random);
    store_.build([](const Parameter&) { return true; }, 1);
    weight_ = weight.variable(), bias_ = bias.variable();
    dy_ = copy_of(forward(input(values_)).value());
  }

  // Seconds forward and backward. The gradient that goes back is the op's own, as another op's result is.
  std::pair<double, double> run() {
    store_.arena().mark_gradients_unwritten();
    Variable x = input(op_ == "rope" ? copy_of(values_) : values_), y;
    const double seconds = seconds_for([&] { y = forward(std::move(x)); });
    auto dy = std::make_shared<Tensor>(copy_of(dy_));
    const Variable loss("given", Tensor::zeros({1}), {y},
                        [y, dy](const Tensor&) { y.accumulate_grad(std::move(*dy)); });
    return {seconds, seconds_for([&] { backward(loss); })};
  }

 private:
  // A result whose gradient is wanted.
  Variable input(Tensor values) const {
    return {"input", std::move(values), {weight_}, [](const Tensor&) {}};
  }
  Variable forward(Variable x) const {
    const std::int64_t width = x.shape()[1], heads = width / 3 / (width < 768 ? 32 : 64);
    if (op_ == "rope") return rope(std::move(x), heads, heads, 1);
    const std::map<std::string, std::function<Variable()>> ops{
        {"copy", [&] { return copy(x); }},
        {"layer_norm", [&] { return layer_norm(x, weight_, bias_); }},
        {"rms_norm", [&] { return rms_norm(x, weight_); }},
        {"add_layer_norm", [&] { return add_layer_norm(x, input(branch_), weight_, bias_).norm; }},
        {"gelu", [&] { return gelu(x); }},
        {"gelu_tanh", [&] { return gelu_tanh(x); }},
        {"swiglu", [&] { return swiglu(x); }}};
    const auto found = ops.find(op_);
    if (found == ops.end()) throw UserError("bench_rows: there is no op '" + op_ + "'");
    return found->second();
  }

  std::string op_;
  Tensor values_, branch_, dy_;
  ParameterStore store_;
  Variable weight_, bias_;
};

int run(int argc, char** argv) {
  int threads = 2;
  bool bf16 = false;
  CLI::App app("bench_rows");
  app.add_option("--threads", threads)->check(CLI::PositiveNumber);
  app.add_flag("--bf16", bf16);
  if (!parse_options(app, kUsage, argc, argv)) return 0;
  omp_set_num_threads(threads);
  std::printf("ready 1\n");
  std::fflush(stdout);
  for (std::string line; std::getline(std::cin, line);) {
    std::string op;
    std::int64_t rows, width, passes;
    if (!(std::istringstream(line) >> op >> rows >> width >> passes))
      throw UserError("bench_rows: an op and three numbers a line are expected, there is '" + line + "'");
    Pass pass(op, rows, width, bf16 ? DType::bf16 : DType::f32);
    for (int warm_up = 0; warm_up < 3; ++warm_up) pass.run();
    std::vector<double> backwards;
    for (std::int64_t i = 0; i < passes; ++i) {
      const auto [forward, backward] = pass.run();
      std::printf("%.9f ", forward);
      backwards.push_back(backward);
    }
    for (const double seconds : backwards) std::printf("%.9f ", seconds);
    std::printf("\n");
    std::fflush(stdout);
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  return run_program("bench_rows", run, argc, argv);
}

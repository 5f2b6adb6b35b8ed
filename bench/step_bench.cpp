// A persistent process that runs training steps on request, so that a driver can alternate it with another
// framework's: prints "ready BATCH", then for each line "K" on standard input runs K steps and prints the
// seconds of each.
//   bench_step MODEL [--batch N] [--threads T] [--loss]
// A step is forward, backward and SGD with momentum and weight decay on one fixed random batch of CIFAR's
// shape.
#include <omp.h>

#include <chrono>
#include <cstdio>
#include <cstring>
#include <iostream>
#include <string>

#include "nn/core/check.h"
#include "nn/models/model.h"
#include "nn/ops/loss.h"
#include "optim/optimizer.h"

using namespace topknot;

namespace {

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

int run(int argc, char** argv) {
  if (argc < 2) throw UserError("usage: bench_step MODEL [--batch N] [--threads T] [--loss]");
  int batch = 128, threads = 2;
  bool print_loss = false;
  for (int i = 2; i < argc; ++i) {
    if (!std::strcmp(argv[i], "--batch") && i + 1 < argc)
      batch = std::stoi(argv[++i]);
    else if (!std::strcmp(argv[i], "--threads") && i + 1 < argc)
      threads = std::stoi(argv[++i]);
    else if (!std::strcmp(argv[i], "--loss"))
      print_loss = true;
    else
      throw UserError(std::string("unknown argument '") + argv[i] + "'");
  }
  omp_set_num_threads(threads);
  ParameterStore store;
  const auto model = make_model(argv[1], store, {{3, 32, 32}, 10});
  ParameterArena& arena = store.build([](const Parameter& p) { return p.shape().rank() > 1; }, 1);
  OptimizerOptions options;
  options.lr = 0.1;
  options.momentum = 0.9;
  options.weight_decay = 1e-4;
  const auto optimizer = make_optimizer(options, arena);

  Tensor images = Tensor::empty({batch, 3, 32, 32});
  const CounterRng rng(1, RngUse::test);
  for (std::int64_t i = 0; i < images.numel(); ++i)
    images.data()[i] = rng.normal(static_cast<std::uint64_t>(i));
  std::vector<std::int32_t> labels(static_cast<std::size_t>(batch));
  for (std::size_t i = 0; i < labels.size(); ++i) labels[i] = static_cast<std::int32_t>(i * 7919 % 10);

  const auto step = [&] {
    arena.clear_gradients();
    const Variable loss = softmax_cross_entropy(model->forward(Variable(images), {}), labels);
    const float value = loss.value().data()[0];
    backward(loss);
    optimizer->update(0, arena.gradient(0, arena.size()), 0.1);
    return value;
  };
  for (int i = 0; i < 3; ++i) {
    const float loss = step();
    if (print_loss) std::printf("loss %.5f\n", loss);
  }
  std::printf("ready %d\n", batch);
  std::fflush(stdout);
  for (std::string line; std::getline(std::cin, line);) {
    for (int k = std::stoi(line); k > 0; --k) {
      const double start = now();
      step();
      std::printf("%.6f ", now() - start);
    }
    std::printf("\n");
    std::fflush(stdout);
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run(argc, argv);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "bench_step: %s\n", error.what());
    return 2;
  }
}

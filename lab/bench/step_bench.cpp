// A persistent process that runs training steps on request, so that a driver can alternate it with another
// framework's: prints "ready SAMPLES", then for each line "K" on standard input runs K steps and prints the
// seconds of each. A step is forward, backward, exchange (with several ranks) and SGD with momentum and
// weight decay, on one fixed random batch of images, or of tokens for lstm_lm, gpt and llama. The latter two clip
// the gradient's norm to 1 and take AdamW.
#include <omp.h>

#include <cstdio>
#include <iostream>
#include <string>
#include <utility>

#include "dist/comm/collective_queue.h"
#include "dist/exchange/exchange.h"
#include "dist/launch/launch.h"
#include "lab/common/clock.h"
#include "lab/common/options.h"
#include "nn/base/program.h"
#include "nn/core/threads.h"
#include "nn/models/model.h"
#include "nn/ops/kernels.h"
#include "optim/clip.h"
#include "optim/optimizer.h"

using namespace topknot;

namespace {

constexpr const char* kUsage =
    "usage: bench_step MODEL [--batch N] [--threads T] [--ranks P] [--bf16] [--loss]\n"
    "                        [--side S] [--classes C] [--width W] [--window T] [--tokens V] [--layers L] "
    "[--heads H]\n"
    "  --batch    images, or sequences, per rank and step (128)\n"
    "  --side     height and width of an image (32)\n"
    "  --classes  of images (10)\n"
    "  --width    lstm_lm, gpt, llama: units of a layer (200)\n"
    "  --window   tokens of a sequence (35)\n"
    "  --tokens   of the vocabulary (10000)\n"
    "  --layers   lstm_lm, gpt, llama (2)\n"
    "  --heads    gpt, llama (4)\n"
    "  --threads  compute threads per rank (2)\n"
    "  --ranks    gloo processes on this host, dense gradients (1)\n"
    "  --bf16     activations in bfloat16\n"
    "  --loss     print the loss of the first three steps\n";

struct Options {
  std::string model;
  int batch = 128, threads = 2, ranks = 1, side = 32, classes = 10, width = 200, window = 35;
  int tokens = 10000, layers = 2, heads = 4;
  bool loss = false, bf16 = false;
  bool transformer() const { return model == "gpt" || model == "llama"; }
  bool reads_tokens() const { return transformer() || model == "lstm_lm"; }
  int items() const { return batch * (reads_tokens() ? window : 1); }
  OptimizerOptions optimizer() const {
    OptimizerOptions of;
    of.momentum = 0.9, of.weight_decay = 1e-4;
    if (transformer()) of.name = "adamw", of.weight_decay = 0.1, of.set("beta2", 0.99);
    return of;
  }
};

ModelOptions model_options(const Options& options) {
  ModelOptions of;
  of.input = {3, options.side, options.side}, of.outputs = options.classes;
  if (options.reads_tokens()) of.input = {options.window, 1, 1}, of.outputs = options.tokens, of.dropout = 0;
  of.batch = options.batch;
  of.set("width", options.width), of.set("layers", options.layers), of.set("heads", options.heads);
  return of;
}

class Training {
 public:
  Training(const Options& options, Communicator& communicator)
      : model_(make_model(options.model, store_, model_options(options))),
        arena_(store_.build([](const Parameter& p) { return p.shape().rank() > 1; }, 1)),
        queue_(communicator),
        exchange_(arena_, queue_, {}),
        clips_(options.transformer()),
        clip_({}, arena_.size()),
        optimizer_(make_optimizer(options.optimizer(), arena_)),
        images_(Tensor::empty(options.reads_tokens() ? Shape{options.batch, options.window, 1, 1}
                                                     : Shape{options.batch, 3, options.side, options.side})),
        labels_(static_cast<std::size_t>(options.items())) {
    const auto classes = static_cast<std::size_t>(model_options(options).outputs);
    const CounterRng rng(1, RngUse::test, static_cast<std::uint32_t>(communicator.rank()));
    for (std::int64_t i = 0; i < images_.numel(); ++i)
      images_.data()[i] = options.reads_tokens() ? static_cast<float>((i * 7919 + 13) % options.tokens)
                                                 : rng.normal(static_cast<std::uint64_t>(i));
    const DType type = options.bf16 ? DType::bf16 : DType::f32;
    context_.cpu_activations = type;
    if (!options.reads_tokens()) images_ = in_form(images_, images_.layout(), type);
    for (std::size_t i = 0; i < labels_.size(); ++i)
      labels_[i] = static_cast<std::int32_t>(i * 7919 % classes);
  }

  float step() {
    spin_control_.poll();
    arena_.mark_gradients_unwritten();
    exchange_.begin_step({.step = step_++});
    const Variable loss = model_->reads_tokens()
                              ? model_->loss(Variable(images_), labels_, /*smoothing=*/0, context_)
                              : softmax_cross_entropy(model_->forward(Variable(images_), context_), labels_);
    const float value = loss.value().data()[0];
    backward(loss, [&](Parameter& parameter) { exchange_.ready(parameter); });
    exchange_.finish(true);
    StepParameters step{.step = step_, .lr = clips_ ? 1e-3 : 0.1};
    if (clips_) {
      std::vector<std::span<float>> averages;
      for (const Group& group : exchange_.groups()) averages.push_back(exchange_.averaged(group));
      clip_.sum_of_squares(averages);
      clip_.set_gradient_scale(1.0, &step);
    }
    for (const Group& group : exchange_.groups())
      optimizer_->update(group.begin, exchange_.averaged(group), step);
    return value;
  }
  // The number of steps that rank 0 was asked for; 0 ends.
  int agree(int steps) {
    queue_.run([&](Communicator& c) { c.broadcast(std::as_writable_bytes(std::span(&steps, 1)), 0); });
    return steps;
  }

 private:
  ParameterStore store_;
  ModulePtr model_;
  ParameterArena& arena_;
  CollectiveQueue queue_;
  Exchange exchange_;
  bool clips_;
  Clip clip_;
  std::unique_ptr<Optimizer> optimizer_;
  Tensor images_;
  ForwardContext context_;
  std::vector<std::int32_t> labels_;
  std::int64_t step_ = 0;
  SpinControl spin_control_;
};

void serve(const Options& options, Communicator& communicator) {
  omp_set_num_threads(options.threads);
  Training training(options, communicator);
  const bool root = communicator.rank() == 0;
  for (int i = 0; i < 3; ++i) {
    const float loss = training.step();
    if (root && options.loss) std::printf("loss %.5f\n", loss);
  }
  if (root) std::printf("ready %d\n", options.items() * options.ranks);
  std::fflush(stdout);
  for (std::string line;;) {
    int steps = root && std::getline(std::cin, line) ? std::stoi(line) : 0;
    if (!(steps = training.agree(steps))) return;
    for (; steps > 0; --steps) {
      const double seconds = seconds_for([&] { training.step(); });
      if (root) std::printf("%.6f ", seconds);
    }
    if (root) std::printf("\n");
    std::fflush(stdout);
  }
}

int run(int argc, char** argv) {
  Options options;
  CLI::App app("bench_step");
  app.add_option("--batch", options.batch);
  app.add_option("--threads", options.threads);
  app.add_option("--ranks", options.ranks);
  app.add_option("--side", options.side);
  app.add_option("--classes", options.classes);
  app.add_option("--width", options.width);
  app.add_option("--window", options.window);
  app.add_option("--tokens", options.tokens);
  app.add_option("--layers", options.layers);
  app.add_option("--heads", options.heads);
  app.add_flag("--bf16", options.bf16);
  app.add_flag("--loss", options.loss);
  app.add_option("model", options.model);
  if (!parse_options(app, kUsage, argc, argv)) return 0;
  if (options.model.empty()) misuse("bench_step", "no model given");
  if (options.bf16 && !cpu_has_bfloat16())
    misuse("bench_step",
           "--bf16 needs a CPU with products of bfloat16 (AVX-512 BF16), which this one is not");
  DistOptions dist;
  dist.backend = "gloo";
  dist.ranks = options.ranks;
  const LaunchPlan plan = plan_launch(dist, process_environment());
  if (plan.kind == LaunchPlan::Kind::spawn) return run_spawned(plan, dist, argv);
  run_process_rank(plan, dist, [&](Communicator& communicator) { serve(options, communicator); });
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  return run_program("bench_step", run, argc, argv);
}

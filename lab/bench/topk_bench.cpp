// Exact topk with error feedback against the plain pass r += g, both over 25.6 million floats, alternating in
// one run. For topk, the timed part is that of a training step without the collective: accumulate, select,
// write the block, take the sent entries out of the residual. The plain pass runs over two buffers of its
// own, of that size. `--help` shows the flags; --json adds one line per stream.

#include <cstdio>
#include <string>
#include <utility>
#include <vector>

#include "compress/codec/codec.h"
#include "compress/memory/memory.h"
#include "compress/select/selector.h"
#include "compress/sparse.h"
#include "lab/bench/common.h"
#include "nn/base/check.h"
#include "nn/base/program.h"

namespace topknot::bench {

struct Options : CommonOptions {
  std::size_t k = 25'600;
  int steps = 200, from = 100;
};

struct Figures {
  std::vector<double> plain, topk, ratio, decode, candidates;
  int fallbacks = 0;
};

Figures measure(const std::string& name, const Options& options) {
  const std::size_t d = options.size;
  Buffers buffers(d);
  std::span<float> gradient = buffers.gradient, residual = buffers.residual;
  const GradientStream stream(name, d);
  stream.fill(-1, buffers.plain_g);

  const auto selector = make_selector("topk");
  const auto feedback = make_memory("residual");
  CompressOptions compress;
  const auto* const index_codec = &index_codecs().find("raw");
  const auto* const value_codec = &value_codecs().find("fp32");
  Selection selected;
  SparseVector entries;
  SelectStep step;
  step.k = options.k;
  step.density = static_cast<double>(options.k) / static_cast<double>(d);

  Figures figures;
  std::vector<std::size_t> room = averaging_room(1, d);
  for (step.step = 0; step.step < options.steps; ++step.step) {
    stream.fill(step.step, gradient);
    const auto topk_pass = [&] {
      selector->select(gradient, feedback->input(gradient, residual), step, selected);
      entries.indices.assign(selected.indices.begin(), selected.indices.end());
      entries.values.assign(selected.values.begin(), selected.values.end());
      const std::vector<std::byte> block = write_block(entries, d, *index_codec, *value_codec);
      feedback->commit(gradient, residual, entries, {});
      TOPKNOT_CHECK(block.size() == kBlockHeaderBytes + 8 * options.k, "a block of another size");
    };
    double plain = 0;
    const auto pass = [&] { plain = milliseconds_of([&] { plain_pass(buffers.plain_r, buffers.plain_g); }); };
    if (step.step % 2) pass();
    const double topk = milliseconds_of(topk_pass);
    if (step.step % 2 == 0) pass();
    selector->commit({});
    const SparseView own = entries;
    const double decode = milliseconds_of([&] { average_sparse(std::span(&own, 1), residual, room); });
    std::swap(gradient, residual);
    if (step.step < options.from) continue;
    figures.plain.push_back(plain);
    figures.topk.push_back(topk);
    figures.ratio.push_back(topk / plain);
    figures.decode.push_back(decode);
    figures.candidates.push_back(static_cast<double>(selector->diagnostics().candidates) /
                                 static_cast<double>(options.k));
    figures.fallbacks += selector->diagnostics().exact;
  }
  return figures;
}

constexpr const char* kUsage =
    "bench_topk [--threads N] [--size D] [--k K] [--steps S] [--from F] [--stream NAME] [--json]\n"
    "\n"
    "Exact topk with error feedback against the plain pass r += g: D elements, the K largest are sent.\n"
    "Steps 0 to F-1 warm the error feedback up, steps F to S-1 are measured. --json adds one line per "
    "stream.\n";

int run(int argc, char** argv) {
  Options options;
  CLI::App app("bench_topk");
  app.add_option("--k", options.k)->check(CLI::PositiveNumber);
  app.add_option("--steps", options.steps)->check(CLI::PositiveNumber);
  app.add_option("--from", options.from)->check(CLI::NonNegativeNumber);
  if (!parse_common(app, options, kUsage, argc, argv)) return 0;
  if (options.k > options.size || options.from >= options.steps)
    misuse("bench_topk", "needed: k <= size, from < steps");
  if (options.streams.empty()) options.streams = GradientStream::names();
  std::printf("%zu elements, k = %zu, %d threads, steps %d to %d, medians\n", options.size, options.k,
              options.threads, options.from, options.steps - 1);
  std::printf("%-8s %10s %10s %7s %10s %13s %9s\n", "stream", "r+=g ms", "topk ms", "ratio", "decode ms",
              "candidates/k", "fallbacks");
  for (const std::string& name : options.streams) {
    const Figures f = measure(name, options);
    double candidates = 0;
    for (const double c : f.candidates) candidates += c / static_cast<double>(f.candidates.size());
    std::printf("%-8s %10.2f %10.2f %7.3f %10.2f %13.2f %9d\n", name.c_str(), median(f.plain), median(f.topk),
                median(f.ratio), median(f.decode), candidates, f.fallbacks);
    if (options.json)
      std::printf(
          "{\"bench\":\"topk\",\"stream\":\"%s\",\"size\":%zu,\"k\":%zu,\"threads\":%d,\"plain_ms\":%.4f,"
          "\"topk_ms\":%.4f,\"ratio\":%.4f,\"decode_ms\":%.4f,\"candidates_per_k\":%.3f,\"fallbacks\":%d}\n",
          name.c_str(), options.size, options.k, options.threads, median(f.plain), median(f.topk),
          median(f.ratio), median(f.decode), candidates, f.fallbacks);
    std::fflush(stdout);
  }
  return 0;
}

}  // namespace topknot::bench

int main(int argc, char** argv) {
  return topknot::run_program("bench_topk", topknot::bench::run, argc, argv);
}

// Exact topk with error feedback against the plain pass r += g, both over 25.6 million floats, alternating in
// one run. Timed of topk: what a training step pays beside the collective: accumulate, select, write the
// block, take what was sent out of the residual. The plain pass runs over two buffers of its own, of that size.
// `--help` shows the flags; --json adds one line a stream.

#include <omp.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <string>
#include <utility>
#include <vector>

#include "bench/plain_pass.h"
#include "bench/streams.h"
#include "compress/average.h"
#include "compress/codec/codec.h"
#include "compress/memory/residual.h"
#include "compress/select/topk.h"
#include "nn/core/base/check.h"
#include "nn/core/device.h"

namespace topknot::bench {

struct Options {
  int threads = 2;
  std::size_t size = 25'600'000, k = 25'600;
  int steps = 200, from = 100;
  std::vector<std::string> streams = GradientStream::names();
  bool json = false;
};

struct Figures {
  std::vector<double> plain, topk, ratio, decode, candidates;
  int fallbacks = 0;
};

Figures measure(const std::string& name, const Options& options) {
  const std::size_t d = options.size;
  DeviceBackend& memory = cpu_backend();
  const auto buffer = [&] {
    float* data = memory.allocate(d);
    memory.fill_zero(data, d);
    return std::span<float>(data, d);
  };
  std::span<float> gradient = buffer(), spare = buffer(), plain_r = buffer(), plain_g = buffer();
  const GradientStream stream(name, d);
  stream.fill(-1, plain_g);

  TopKSelector<float> selector;
  ResidualMemory<float> feedback;
  CompressOptions compress;
  const auto index_codec = index_codecs().find("raw")(compress);
  const auto value_codec = value_codecs().find("fp32")(compress);
  Selected<float> selected;
  Entries<float> entries;
  SelectStep step;
  step.k = options.k;
  step.density = static_cast<double>(options.k) / static_cast<double>(d);

  Figures figures;
  for (step.step = 0; step.step < options.steps; ++step.step) {
    stream.fill(step.step, gradient);
    const auto topk_pass = [&] {
      selector.select(gradient, feedback.addend(gradient, spare), step, selected);
      entries.indices.assign(selected.indices.begin(), selected.indices.end());
      entries.values.assign(selected.values.begin(), selected.values.end());
      const std::vector<std::byte> block = write_block(entries, d, *index_codec, *value_codec);
      feedback.commit(gradient, spare, entries.indices, entries.values, {});
      TOPKNOT_CHECK(block.size() == kBlockHeaderBytes + 8 * options.k, "a block of another size");
    };
    double plain = 0, topk = 0;
    if (step.step % 2) {
      plain = milliseconds([&] { plain_pass(plain_r, plain_g); });
      topk = milliseconds(topk_pass);
    } else {
      topk = milliseconds(topk_pass);
      plain = milliseconds([&] { plain_pass(plain_r, plain_g); });
    }
    selector.commit({});
    const Contribution<float> own{entries.indices, entries.values, 1.0f};
    const double decode = milliseconds([&] { average_sparse<float>(std::span(&own, 1), spare); });
    std::swap(gradient, spare);
    if (step.step < options.from) continue;
    figures.plain.push_back(plain);
    figures.topk.push_back(topk);
    figures.ratio.push_back(topk / plain);
    figures.decode.push_back(decode);
    figures.candidates.push_back(static_cast<double>(selector.candidates()) / static_cast<double>(options.k));
    figures.fallbacks += selector.fell_back();
  }
  for (const auto& span : {gradient, spare, plain_r, plain_g}) memory.release(span.data(), d);
  return figures;
}

constexpr const char* kUsage =
    "bench_topk [--threads N] [--size D] [--k K] [--steps S] [--from F] [--stream NAME] [--json]\n"
    "\n"
    "Exact topk with error feedback against the plain pass r += g: D elements, the K largest travel.\n"
    "Steps 0 to F-1 warm the error feedback up, steps F to S-1 are measured. --json adds one line a "
    "stream.\n";

Options parse(int argc, char** argv) {
  Options options;
  for (int i = 1; i < argc; ++i) {
    const std::string flag = argv[i];
    if (flag == "--json") {
      options.json = true;
      continue;
    }
    if (i + 1 == argc) throw UserError(flag + " needs a value, or is unknown");
    const std::string value = argv[++i];
    if (flag == "--stream") {
      const auto names = GradientStream::names();
      if (std::find(names.begin(), names.end(), value) == names.end())
        throw UserError(unknown_name_message("stream", value, names));
      options.streams = {value};
      continue;
    }
    char* end = nullptr;
    const long long number = std::strtoll(value.c_str(), &end, 10);
    if (*end || number < 0) throw UserError(flag + ": '" + value + "' is no count");
    if (flag == "--threads")
      options.threads = static_cast<int>(number);
    else if (flag == "--size")
      options.size = static_cast<std::size_t>(number);
    else if (flag == "--k")
      options.k = static_cast<std::size_t>(number);
    else if (flag == "--steps")
      options.steps = static_cast<int>(number);
    else if (flag == "--from")
      options.from = static_cast<int>(number);
    else
      throw UserError("unknown flag " + flag);
  }
  if (options.threads < 1 || options.k < 1 || options.k > options.size || options.from >= options.steps)
    throw UserError("needed: threads >= 1, 1 <= k <= size, from < steps");
  return options;
}

int run(int argc, char** argv) {
  const Options options = parse(argc, argv);
  omp_set_num_threads(options.threads);
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
  if (argc == 2 && std::string(argv[1]) == "--help") {
    std::fputs(topknot::bench::kUsage, stdout);
    return 0;
  }
  try {
    return topknot::bench::run(argc, argv);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "topk_bench: %s\n", error.what());
    return 1;
  }
}

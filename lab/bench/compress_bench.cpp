// Every registered selector and every registered codec on 25.6 million elements, against the plain pass r +=
// g that alternates with it in the same run. Medians.
//
// A selector's time is the share of a training step that it and its memory take without codec and collective:
// accumulate, select, take what was sent out of the memory. Before it is measured the residual settles over
// some steps. A codec's time is that of one block, written and read, of the entries that topk selects at the
// end of such a run. `--help` shows the flags.

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <exception>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "compress/codec/codec.h"
#include "compress/codec/exponents.h"
#include "compress/memory/memory.h"
#include "compress/select/selector.h"
#include "compress/sparse.h"
#include "lab/bench/common.h"
#include "nn/base/check.h"
#include "nn/base/program.h"

namespace topknot::bench {

struct Options : CommonOptions {
  int rounds = 41, warmup = 60;
  double density = 0.001;
  std::vector<std::string> only;

  const std::string& stream() const { return streams.front(); }
  bool wants(const std::string& name) const {
    return only.empty() || std::find(only.begin(), only.end(), name) != only.end();
  }
};

// One selector with one memory, step after step.
class Run {
 public:
  Run(const Options& options, const GradientStream& stream, Buffers& buffers, const CompressOptions& compress,
      const std::string& selector, const std::string& memory)
      : options_(options),
        stream_(stream),
        buffers_(buffers),
        memory_(memories().find(memory).make(compress)) {
    use(selector, compress);
  }
  // Another selector goes on with the memory as it is.
  void use(const std::string& selector, const CompressOptions& compress) {
    const SelectorFactory& type = selectors().find(selector);
    selector_ = type.make(compress);
    k_ = type.traits.target(options_.density, buffers_.gradient.size(), {});
  }

  struct Times {
    double plain = 0, step = 0;
  };
  Times step() {
    stream_.fill(step_, buffers_.gradient);
    SelectStep info;
    info.density = options_.density;
    info.k = k();
    info.step = step_;
    Times times;
    const auto plain = [&] {
      times.plain = milliseconds_of([&] { plain_pass(buffers_.plain_r, buffers_.plain_g); });
    };
    if (step_ % 2) plain();
    times.step = milliseconds_of([&] {
      selector_->select(buffers_.gradient, memory_->input(buffers_.gradient, buffers_.residual), info,
                        selected_);
      TOPKNOT_CHECK(selected_.finite, "a finite gradient was taken for another");
      memory_->commit(buffers_.gradient, buffers_.residual, selected_, {});
    });
    if (step_ % 2 == 0) plain();
    const std::span<float> average = memory_->has_residual() ? buffers_.residual : buffers_.gradient;
    const SparseView own = selected_;
    average_sparse(std::span(&own, 1), average, room_);
    times.step += milliseconds_of([&] { selector_->commit({selected_, average, 1.0}); });
    memory_->finish(average);
    if (memory_->has_residual()) std::swap(buffers_.gradient, buffers_.residual);
    ++step_;
    return times;
  }
  void settle() {
    for (int i = 0; i < options_.warmup; ++i) step();
  }
  std::size_t k() const { return k_; }
  const Selection& selected() const { return selected_; }

 private:
  const Options& options_;
  const GradientStream& stream_;
  Buffers& buffers_;
  std::unique_ptr<Memory> memory_;
  std::unique_ptr<Selector> selector_;
  std::vector<std::size_t> room_ = averaging_room(1, buffers_.gradient.size());
  std::size_t k_ = 1;
  Selection selected_;
  std::int64_t step_ = 0;
};

double lowest(const std::vector<double>& values) {
  return *std::min_element(values.begin(), values.end());
}

CompressOptions method_options() {
  CompressOptions compress;
  compress.seed = 1;
  compress.momentum = 0.9;
  return compress;
}

void print_selector(const std::string& selector, const std::string& memory, const Options& options,
                    Run& run) {
  std::vector<double> plain, step, ratio, count;
  for (int i = 0; i < options.rounds; ++i) {
    const auto times = run.step();
    plain.push_back(times.plain);
    step.push_back(times.step);
    ratio.push_back(times.step / times.plain);
    count.push_back(static_cast<double>(run.selected().indices.size()) / static_cast<double>(run.k()));
  }
  const auto [least, greatest] = std::minmax_element(count.begin(), count.end());
  const double best = lowest(step) / lowest(plain);
  std::printf("%-22s %-9s %9.2f %9.2f %8.2f %8.2f %9.3f %9.3f %9.3f\n", selector.c_str(), memory.c_str(),
              median(plain), median(step), median(ratio), best, median(count), *least, *greatest);
  if (options.json)
    std::printf(
        "{\"bench\":\"select\",\"select\":\"%s\",\"memory\":\"%s\",\"size\":%zu,\"density\":%g,"
        "\"stream\":\"%s\",\"threads\":%d,\"plain_ms\":%.4f,\"ms\":%.4f,\"ratio\":%.4f,"
        "\"lowest_ratio\":%.4f,\"count_per_k\":%.4f,\"count_least\":%.4f,\"count_greatest\":%.4f}\n",
        selector.c_str(), memory.c_str(), options.size, options.density, options.stream().c_str(),
        options.threads, median(plain), median(step), median(ratio), best, median(count), *least, *greatest);
  std::fflush(stdout);
}

void measure_selector(const std::string& selector, const std::string& memory, const Options& options,
                      const GradientStream& stream, Buffers& buffers) {
  buffers.clear();
  CompressOptions compress = method_options();
  if (selector != "threshold") {
    Run run(options, stream, buffers, compress, selector, memory);
    run.settle();
    print_selector(selector, memory, options, run);
    return;
  }
  // The fixed threshold is the k-th magnitude that topk arrives at, over topk's residual.
  Run run(options, stream, buffers, compress, "topk", memory);
  run.settle();
  compress.set("threshold", run.selected().threshold);
  run.use(selector, compress);
  print_selector(selector, memory, options, run);
}

void measure_codec(const std::string& index, const std::string& value, const SparseVector& entries,
                   const Options& options, Buffers& buffers) {
  const CompressOptions compress = method_options();
  const auto* const index_codec = &index_codecs().find(index);
  const auto* const value_codec = &value_codecs().find(value);
  std::vector<double> plain, encode, decode, ratio;
  std::vector<std::byte> block;
  SparseVector read;
  for (int i = 0; i < options.rounds; ++i) {
    plain.push_back(milliseconds_of([&] { plain_pass(buffers.plain_r, buffers.plain_g); }));
    encode.push_back(
        milliseconds_of([&] { block = write_block(entries, options.size, *index_codec, *value_codec); }));
    decode.push_back(
        milliseconds_of([&] { read_block(block, options.size, *index_codec, *value_codec, read); }));
    ratio.push_back((encode.back() + decode.back()) / plain.back());
    TOPKNOT_CHECK(read.indices == entries.indices, "a codec that changed the positions: " + index);
  }
  const auto count = static_cast<double>(entries.indices.size()), bytes = static_cast<double>(block.size());
  const double dense = 4.0 * static_cast<double>(options.size);
  std::printf("%-12s %-6s %9.2f %9.3f %9.3f %8.3f %13.3f %12.0f\n", index.c_str(), value.c_str(),
              median(plain), median(encode), median(decode), median(ratio), bytes / count, dense / bytes);
  if (options.json)
    std::printf(
        "{\"bench\":\"code\",\"code\":\"%s\",\"values\":\"%s\",\"size\":%zu,\"count\":%zu,\"threads\":%d,"
        "\"plain_ms\":%.4f,\"encode_ms\":%.4f,\"decode_ms\":%.4f,\"ratio\":%.4f,\"bytes\":%zu,"
        "\"bytes_per_entry\":%.4f,\"times_smaller\":%.1f}\n",
        index.c_str(), value.c_str(), options.size, entries.indices.size(), options.threads, median(plain),
        median(encode), median(decode), median(ratio), block.size(), bytes / count, dense / bytes);
  std::fflush(stdout);
}

// A whole gradient, as exchange.collective=coded_sum sends it.
template <class T>
void measure_exponents(const char* values_are, std::span<const T> values, const Options& options) {
  std::vector<double> encode, decode;
  std::vector<std::byte> coded;
  std::vector<T> read(values.size());
  for (int i = 0; i < options.rounds; ++i) {
    encode.push_back(milliseconds_of([&] { encode_exponents(values, coded); }));
    decode.push_back(milliseconds_of([&] { decode_exponents(coded, std::span<T>(read)); }));
  }
  TOPKNOT_CHECK(std::memcmp(read.data(), values.data(), values.size_bytes()) == 0, "coded exponents changed");
  const auto bytes = static_cast<double>(values.size_bytes());
  std::printf("%-12s %-6s %9.3f %9.3f %13.2f %13.2f %12.3f\n", "exponents", values_are, median(encode),
              median(decode), 1e-6 * bytes / median(encode), 1e-6 * bytes / median(decode),
              bytes / static_cast<double>(coded.size()));
  if (options.json)
    std::printf(
        "{\"bench\":\"exponents\",\"values\":\"%s\",\"size\":%zu,\"threads\":%d,\"encode_ms\":%.4f,"
        "\"decode_ms\":%.4f,\"bytes\":%zu}\n",
        values_are, values.size(), options.threads, median(encode), median(decode), coded.size());
  std::fflush(stdout);
}

void measure_exponents(const Options& options, const GradientStream& stream, Buffers& buffers) {
  stream.fill(0, buffers.gradient);
  std::vector<BFloat16> narrow(buffers.gradient.size());
  to_bfloat16(buffers.gradient.data(), narrow.size(), narrow.data());
  std::printf("%-12s %-6s %9s %9s %13s %13s %12s\n", "all values", "as", "encode ms", "decode ms",
              "encode GB/s", "decode GB/s", "times less");
  measure_exponents<float>("fp32", buffers.gradient, options);
  measure_exponents<BFloat16>("bf16", narrow, options);
}

constexpr const char* kUsage =
    "bench_compress [--size D] [--density R] [--only NAME]... [--threads N] [--rounds N] [--warmup N]\n"
    "               [--stream normal|layers|laplace] [--json]\n"
    "\n"
    "Selectors with their memory, and codecs, against the plain pass r += g over D elements; medians of N "
    "rounds.\n"
    "--warmup steps go before, so that the residual settles. `lowest` is the quickest step over the "
    "quickest\n"
    "pass, the ratio without interruptions on a busy machine. --only, once or more, names a selector, `dgc` "
    "(DGC's\n"
    "memory with sampled selection), an index codec, `codecs` or `exponents` (whole gradients with coded "
    "exponents).\n"
    "--json adds one line per row.\n";

int run(int argc, char** argv) {
  Options options;
  options.streams = {"laplace"};
  CLI::App app("bench_compress");
  app.add_option("--density", options.density);
  app.add_option("--rounds", options.rounds)->check(CLI::PositiveNumber);
  app.add_option("--warmup", options.warmup)->check(CLI::PositiveNumber);
  std::vector<std::string> names = selectors().names();
  for (const std::string& codec : index_codecs().names()) names.push_back(codec);
  names.insert(names.end(), {"dgc", "codecs", "exponents"});
  app.add_option("--only", options.only)->check(CLI::IsMember(names))->expected(1)->take_all();
  if (!parse_common(app, options, kUsage, argc, argv)) return 0;
  if (!(options.density > 0 && options.density <= 1)) misuse("bench_compress", "needed: a density in (0, 1]");
  Buffers buffers(options.size);
  const GradientStream stream(options.stream(), options.size);
  stream.fill(-1, buffers.plain_g);
  int failures = 0;
  const auto attempt = [&](const std::string& what, auto&& measure) {
    try {
      measure();
    } catch (const std::exception& error) {
      std::fprintf(stderr, "bench_compress: %s: %s\n", what.c_str(), error.what());
      ++failures;
    }
  };

  std::printf("%zu elements, density %g, stream %s, %d threads, medians of %d rounds\n", options.size,
              options.density, options.stream().c_str(), options.threads, options.rounds);
  std::printf("%-22s %-9s %9s %9s %8s %8s %9s %9s %9s\n", "selector", "memory", "r+=g ms", "ms", "ratio",
              "lowest", "count/k", "least", "greatest");
  for (const std::string& name : selectors().names())
    if (options.wants(name))
      attempt(name, [&] { measure_selector(name, "residual", options, stream, buffers); });
  if (options.wants("dgc") && memories().contains("dgc") && selectors().contains("dgc_sampled"))
    attempt("dgc", [&] { measure_selector("dgc_sampled", "dgc", options, stream, buffers); });

  if (options.wants("exponents")) attempt("exponents", [&] { measure_exponents(options, stream, buffers); });

  std::vector<std::string> codecs;
  for (const std::string& name : index_codecs().names())
    if (options.wants(name) || options.wants("codecs")) codecs.push_back(name);
  if (codecs.empty()) return failures > 0;
  SparseVector entries;
  {
    buffers.clear();
    Run topk(options, stream, buffers, method_options(), "topk", "residual");
    topk.settle();
    entries.indices = topk.selected().indices;
    entries.values = topk.selected().values;
  }
  std::printf("%-12s %-6s %9s %9s %9s %8s %13s %12s\n", "codec", "values", "r+=g ms", "encode ms",
              "decode ms", "ratio", "bytes/entry", "times less");
  for (const std::string& index : codecs)
    for (const std::string& value : value_codecs().names())
      attempt(index + " and " + value, [&] { measure_codec(index, value, entries, options, buffers); });
  return failures > 0;
}

}  // namespace topknot::bench

int main(int argc, char** argv) {
  return topknot::run_program("bench_compress", topknot::bench::run, argc, argv);
}

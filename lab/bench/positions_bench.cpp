// Index codecs on positions drawn uniformly: bits per position, and log2 of the number of such sets of
// positions, and the quickest of many rounds of writing and of reading.
#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>
#include <string>
#include <vector>

#include "compress/codec/codec.h"
#include "lab/common/clock.h"
#include "lab/common/options.h"
#include "nn/base/check.h"
#include "nn/base/program.h"
#include "nn/core/rng.h"

namespace topknot::bench {
namespace {

constexpr const char* kUsage =
    "bench_positions [--size D] [--rounds N] [--threads N] [--only CODEC]...\n"
    "\n"
    "Index codecs (compress.codec) on positions among D elements: 64 of each chunk of 4096, then any, at "
    "densities\n"
    "1/64, 0.01, 0.001 and 0.0001. Bits per position, log2 of the number of such sets per position, and MB "
    "of\n"
    "positions, 4 bytes each, written and read in a second, the quickest of N rounds.\n";

struct Drawn {
  std::string name;
  std::vector<std::uint32_t> positions;
  double least_bits = 0;  // log2 of the number of sets that are as likely, per position
};

double log2_binomial(double n, double k) {
  return (std::lgamma(n + 1) - std::lgamma(k + 1) - std::lgamma(n - k + 1)) / std::log(2.0);
}

// `count` of each chunk of `length` elements, every set alike likely.
Drawn draw(std::string name, std::size_t size, std::size_t length, std::size_t count) {
  const CounterRng rng(1, RngUse::test);
  Drawn drawn{std::move(name), {}, log2_binomial(static_cast<double>(length), static_cast<double>(count))};
  drawn.least_bits /= static_cast<double>(count);
  for (std::size_t begin = 0; begin + length <= size; begin += length) {
    std::size_t wanted = count;
    for (std::size_t i = 0; i < length && wanted > 0; ++i) {
      if (rng.below(begin + i, static_cast<std::uint32_t>(length - i)) >= wanted) continue;
      drawn.positions.push_back(static_cast<std::uint32_t>(begin + i));
      --wanted;
    }
  }
  return drawn;
}

void measure(const std::string& codec, const Drawn& drawn, std::size_t size, int rounds) {
  const IndexLayout& layout = *index_codecs().find(codec).layouts.front();
  const auto count = static_cast<double>(drawn.positions.size());
  std::vector<std::byte> bytes;
  std::vector<std::uint32_t> fillers, back(drawn.positions.size());
  double writing = std::numeric_limits<double>::infinity(), reading = writing;
  for (int i = 0; i < rounds; ++i) {
    bytes.clear();
    fillers.clear();
    writing = std::min(writing, seconds_for([&] { layout.encode(drawn.positions, size, bytes, fillers); }));
    fillers.clear();
    reading = std::min(reading, seconds_for([&] { layout.decode(bytes, size, back, fillers); }));
    TOPKNOT_CHECK(back == drawn.positions, "a codec that changed the positions: " + codec);
  }
  const double bits = 8 * static_cast<double>(bytes.size()) / count;
  std::printf("%-12s %10.0f  %-8s %12.3f %10.3f %8.2f %12.0f %12.0f\n", drawn.name.c_str(), count,
              codec.c_str(), bits, drawn.least_bits, 100 * (bits / drawn.least_bits - 1),
              4 * count / writing / 1e6, 4 * count / reading / 1e6);
  std::fflush(stdout);
}

int run(int argc, char** argv) {
  std::size_t size = std::size_t{1} << 24;
  int rounds = 101, threads = 1;
  std::vector<std::string> only;
  CLI::App app("bench_positions");
  app.add_option("--size", size)->check(CLI::Range(std::size_t{1} << 14, (std::size_t{1} << 31) - 1));
  app.add_option("--rounds", rounds)->check(CLI::PositiveNumber);
  app.add_option("--threads", threads)->check(CLI::PositiveNumber);
  app.add_option("--only", only)->check(CLI::IsMember(index_codecs().names()))->expected(1)->take_all();
  if (!parse_options(app, kUsage, argc, argv, false)) return 0;
  omp_set_num_threads(threads);
  // auto is one of the others.
  if (only.empty())
    for (const std::string& codec : index_codecs().names())
      if (codec != "auto") only.push_back(codec);

  std::printf("%zu elements, %d threads, quickest of %d rounds\n", size, threads, rounds);
  std::printf("%-12s %10s  %-8s %12s %10s %8s %12s %12s\n", "density", "positions", "codec", "bits/position",
              "binomial", "over %", "write MB/s", "read MB/s");
  std::vector<Drawn> all;
  all.push_back(draw("64 of 4096", size, 4096, 64));
  for (const auto& [name, density] :
       {std::pair<const char*, double>{"1/64", 1.0 / 64}, {"0.01", 0.01}, {"0.001", 0.001}, {"0.0001", 1e-4}})
    all.push_back(draw(name, size, size, static_cast<std::size_t>(density * static_cast<double>(size))));
  for (const Drawn& drawn : all)
    for (const std::string& codec : only) measure(codec, drawn, size, rounds);
  return 0;
}

}  // namespace
}  // namespace topknot::bench

int main(int argc, char** argv) {
  return topknot::run_program("bench_positions", topknot::bench::run, argc, argv);
}

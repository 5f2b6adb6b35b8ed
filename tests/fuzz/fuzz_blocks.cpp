// Random and mutated blocks through every decoder:
//   fuzz_blocks [--blocks N] [--seed S] [--only TARGET]
// Every decoder must take what its own writer made, must not crash or throw anything but Error, and must not
// take what it should not (FuzzTarget::accept). The same N and S try the same blocks. Exit code 1 and the
// block in hexadecimal on the first failure. Meant to run under the address and undefined-behaviour
// sanitizers: `make fuzz`.
#include <omp.h>

#include <charconv>
#include <cstdio>
#include <cstring>
#include <string>
#include <string_view>

#include "nn/base/check.h"
#include "tests/fuzz/fuzz_target.h"

namespace {

using namespace topknot;
using namespace topknot::fuzz;

struct Options {
  std::uint64_t blocks = 200000, seed = 1;
  std::string only;
};

std::uint64_t number(std::string_view text) {
  std::uint64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size())
    throw UserError("'" + std::string(text) + "' is not a number");
  return value;
}

Options parse(int argc, char** argv) {
  Options options;
  for (int i = 1; i < argc; i += 2) {
    const std::string_view key = argv[i];
    if (i + 1 == argc) throw UserError(std::string(key) + " needs a value");
    if (key == "--blocks")
      options.blocks = number(argv[i + 1]);
    else if (key == "--seed")
      options.seed = number(argv[i + 1]);
    else if (key == "--only")
      options.only = argv[i + 1];
    else
      throw UserError("unknown option " + std::string(key) + "; there are --blocks, --seed and --only");
  }
  return options;
}

struct Tally {
  std::uint64_t tried = 0, accepted = 0, changed = 0;  // changed: accepted, and not as written
};

constexpr std::size_t kHeader = 16;
constexpr int kMutants = 7;  // of each sample, after the sample itself

void report(const std::string& target, const Block& block, std::size_t numel, const char* what) {
  std::printf("FAILED: %s, numel %zu: %s\n", target.c_str(), numel, what);
  for (const std::byte byte : block) std::printf("%02x", std::to_integer<unsigned>(byte));
  std::printf("\n");
}

// Returns false after the first failure.
bool try_target(const std::string& name, std::uint64_t blocks, std::uint64_t seed, Tally& tally) {
  const FuzzTarget& target = fuzz_targets().find(name);
  Random random(seed);
  Block other, block;
  std::size_t numel = 0;
  try {
    while (tally.tried < blocks) {
      const Sample sample = target.make(random);
      numel = sample.numel;
      block = sample.block;
      ++tally.tried;
      if (!target.accept(block, numel)) throw Accepted("its own writer's block is refused");
      ++tally.accepted;
      for (int i = 0; i < kMutants && tally.tried < blocks; ++i) {
        block = mutated(sample.block, other, random, kHeader);
        numel = sample.numel;
        if (random.one_in(32)) numel = random.below(200);
        ++tally.tried;
        if (!target.accept(block, numel)) continue;
        ++tally.accepted;
        tally.changed += block != sample.block;
      }
      other = sample.block;
    }
  } catch (const std::exception& error) {
    report(name, block, numel, error.what());
    return false;
  }
  return true;
}

int run(const Options& options) {
  const std::vector<std::string> names =
      options.only.empty() ? fuzz_targets().names() : std::vector<std::string>{options.only};
  std::uint64_t tried = 0;
  for (std::size_t i = 0; i < names.size(); ++i) {
    const std::uint64_t share = options.blocks * (i + 1) / names.size() - options.blocks * i / names.size();
    Tally tally;
    if (!try_target(names[i], share, options.seed * 1000003 + i, tally)) return 1;
    std::printf("%-14s %10llu blocks, %9llu accepted, of them %8llu changed on the way\n", names[i].c_str(),
                static_cast<unsigned long long>(tally.tried), static_cast<unsigned long long>(tally.accepted),
                static_cast<unsigned long long>(tally.changed));
    tried += tally.tried;
  }
  std::printf("%llu blocks through %zu decoders, seed %llu: none accepted that should not be\n",
              static_cast<unsigned long long>(tried), names.size(),
              static_cast<unsigned long long>(options.seed));
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  // The blocks are small, and `make fuzz` runs a process per core: threads would only wait for each other.
  omp_set_num_threads(1);
  try {
    return run(parse(argc, argv));
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 2;
  }
}

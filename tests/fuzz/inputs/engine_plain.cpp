// Without libFuzzer: inputs are made of the corpus by random edits, without a look at which code they reach.
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <vector>

#include "tests/fuzz/fuzz_target.h"
#include "tests/fuzz/inputs/input_target.h"

#if defined(__SANITIZE_ADDRESS__)
extern "C" void __sanitizer_set_death_callback(void (*callback)(void));
#endif

namespace topknot::fuzz {
namespace {

using Clock = std::chrono::steady_clock;

// The input that runs, where a crash finds it.
Block current_input;
std::string finding_path;

void keep_current_input() {
  std::FILE* file = std::fopen(finding_path.c_str(), "wb");
  if (!file) return;
  std::fwrite(current_input.data(), 1, current_input.size(), file);
  std::fclose(file);
  std::fprintf(stderr, "the input is in %s\n", finding_path.c_str());
}

void on_signal(int number) {
  std::fprintf(stderr, "%s\n", number == SIGALRM ? "an input without an end" : "a crash");
  keep_current_input();
  _exit(1);
}

std::vector<Block> read_corpus(const std::string& folder) {
  std::vector<std::filesystem::path> paths;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) paths.push_back(entry.path());
  std::sort(paths.begin(), paths.end());
  std::vector<Block> corpus;
  for (const auto& path : paths) {
    std::ifstream stream(path, std::ios::binary);
    const std::vector<char> content{std::istreambuf_iterator<char>(stream), {}};
    const Bytes bytes = std::as_bytes(std::span(content));
    corpus.emplace_back(bytes.begin(), bytes.end());
  }
  if (corpus.empty()) corpus.emplace_back();
  return corpus;
}

// A part of `from` put into `input` somewhere.
void insert_part(Block& input, const Block& from, Random& random) {
  const std::size_t begin = random.below(from.size() + 1), length = random.below(from.size() - begin + 1);
  const auto first = from.begin() + std::ptrdiff_t(begin);
  input.insert(input.begin() + random.below(input.size() + 1), first,
               first + std::ptrdiff_t(std::min<std::size_t>(length, 64)));
}

}  // namespace

int run_campaign(const Campaign& campaign, InputTarget target) {
  const std::vector<Block> corpus = read_corpus(campaign.corpus);
  finding_path = (std::filesystem::path(campaign.out) / ("finding-" + campaign.target)).string();
  for (const int number : {SIGALRM, SIGSEGV, SIGABRT, SIGFPE, SIGBUS}) std::signal(number, on_signal);
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_set_death_callback(keep_current_input);
#endif
  Random random(campaign.seed);
  const auto begin = Clock::now();
  const std::chrono::duration<double> limit(campaign.seconds);
  std::uint64_t tried = 0;
  // The corpus as it is comes first, whatever the limit.
  for (; tried < corpus.size() || Clock::now() - begin < limit; ++tried) {
    if (tried < corpus.size()) {
      current_input = corpus[tried];
    } else {
      const Block& other = corpus[random.below(corpus.size())];
      current_input = mutated(corpus[random.below(corpus.size())], other, random, 16);
      if (random.one_in(4)) insert_part(current_input, other, random);
    }
    alarm(unsigned(kHang.count()));
    try {
      run_input(target, current_input);
    } catch (const std::exception& error) {
      std::fprintf(stderr, "FAILED: %s: %s\n", campaign.target.c_str(), error.what());
      keep_current_input();
      return 1;
    }
  }
  alarm(0);
  std::printf("%-14s %10llu inputs, %zu of them as the corpus has them\n", campaign.target.c_str(),
              static_cast<unsigned long long>(tried), corpus.size());
  std::fflush(stdout);
  return 0;
}

}  // namespace topknot::fuzz

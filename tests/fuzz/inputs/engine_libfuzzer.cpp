// libFuzzer (https://llvm.org/docs/LibFuzzer.html): inputs that reach new code are kept and edited further.
#include <fmt/format.h>

#include <cstdio>
#include <cstdlib>
#include <vector>

#include "tests/fuzz/inputs/input_target.h"

extern "C" int LLVMFuzzerRunDriver(int* argc, char*** argv,
                                   int (*callback)(const std::uint8_t*, std::size_t));

namespace {
topknot::fuzz::InputTarget current_target = nullptr;
}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  try {
    topknot::fuzz::run_input(current_target, std::as_bytes(std::span(data, size)));
  } catch (const std::exception& error) {
    std::fprintf(stderr, "FAILED: %s\n", error.what());
    std::abort();
  }
  return 0;
}

namespace topknot::fuzz {

int run_campaign(const Campaign& campaign, InputTarget target) {
  current_target = target;
  static const Scratch grown;  // libFuzzer adds to the first folder
  std::vector<std::string> words = {
      "fuzz_inputs",
      grown.write(campaign.target + "/empty", {}),
      campaign.corpus,
      fmt::format("-max_total_time={:.0f}", std::max(1.0, campaign.seconds)),
      fmt::format("-seed={}", campaign.seed),
      fmt::format("-timeout={}", kHang.count()),
      fmt::format("-artifact_prefix={}/finding-{}-", campaign.out, campaign.target),
      "-rss_limit_mb=4096",
      "-max_len=16384",
      "-print_final_stats=1",
      "-verbosity=0",
  };
  words[1] = grown.path(campaign.target);
  std::vector<char*> pointers;
  for (std::string& word : words) pointers.push_back(word.data());
  int argc = int(pointers.size());
  pointers.push_back(nullptr);
  char** argv = pointers.data();
  return LLVMFuzzerRunDriver(&argc, &argv, LLVMFuzzerTestOneInput);
}

}  // namespace topknot::fuzz

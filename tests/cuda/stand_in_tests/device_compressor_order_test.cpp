// Blocks of threads and their threads in the other order: the same bits.
#include "tests/cuda/compressor_ranks.h"
#include "tests/cuda/fixture.h"
#include "tests/cuda/stand_in_tests/machine_settings.h"

namespace topknot {
namespace {

TEST_CASE("compressors on a GPU do not depend on the order of threads") {
  const stand_in::Reversed reversed;
  const OnGpu gpu;
  const std::size_t n = 1300;
  for (const char* name : testing::kMethods) {
    INFO(name);
    CompressOptions options = testing::options_of(name);
    options.codec = "rice";
    options.values = "fp16";
    testing::BothRanks both(options, {n, {{0, 600}, {600, n}}, 3});
    testing::ten_steps(both, n, {0.75f, 1.25f, 1.0f});
  }
}

}  // namespace
}  // namespace topknot

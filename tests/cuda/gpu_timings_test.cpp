// What gpu_timings measures: every method at every size, whatever the figures are.
#include "lab/gpu_timings/gpu_timings.h"
#include "tests/support/test.h"

using namespace topknot;
using namespace topknot::gpu_timings;

TEST_CASE("gpu_timings measures each method at each size, beside a copy") {
  std::map<std::pair<std::string, std::size_t>, Timing> timings;
  measure({.seconds = 600, .smallest = 10, .largest = 13},  // 2^10 and 2^12
          [&](const Timing& timing) {
            timings[{timing.what, timing.elements}] = timing;
          });
  CHECK(timings.size() == 10);
  for (const std::size_t n : {1024, 4096}) {
    CHECK(timings[{"device copy", n}].figures.size() == 1);
    for (const std::string method : {"topk", "gaussiank", "dgc", "regtopk"}) {
      const Timing& timing = timings[{method, n}];
      INFO(method << ", " << n << ": " << timing.skipped);
      CHECK(timing.skipped.empty());
      REQUIRE(timing.figures.size() == 3);
      CHECK(timing.figures[0].first == "ms");
    }
  }
}

TEST_CASE("what gpu_timings has no time to measure is skipped by name") {
  int skipped = 0;
  measure({.seconds = 0, .smallest = 10, .largest = 10},
          [&](const Timing& timing) { skipped += timing.skipped == kUsedUp; });
  CHECK(skipped == 4);
}

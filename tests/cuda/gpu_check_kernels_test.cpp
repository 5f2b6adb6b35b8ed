// What gpu-check measures of the kernels: every method at every size, whatever the figures are.
#include <map>

#include "tests/support/catch.h"
#include "tools/gpu_check/stages.h"

using namespace topknot;
using namespace topknot::gpu_check;

TEST_CASE("gpu-check measures each method at each size, beside a copy") {
  Options options;
  options.smallest = 10, options.largest = 13;  // 2^10 and 2^12
  options.seconds = 600;
  std::map<std::string, Result> results;
  measure_kernels(options, [&](const Result& result) { results[result.name] = result; });
  CHECK(results.size() == 10);
  for (const std::string size : {"2^10", "2^12"}) {
    CHECK(results["device copy, " + size].figures.size() == 1);
    for (const std::string method : {"topk", "gaussiank", "dgc", "regtopk"}) {
      const Result& result = results[method + ", " + size];
      INFO(method << ", " << size << ": " << result.note);
      CHECK(result.status == Status::passed);
      REQUIRE(result.figures.size() == 3);
      CHECK(result.figures[0].first == "ms");
    }
  }
}

TEST_CASE("what gpu-check has no time to measure is skipped by name") {
  Options options;
  options.smallest = options.largest = 10;
  options.seconds = 0;
  int skipped = 0;
  measure_kernels(options, [&](const Result& result) { skipped += result.note == kUsedUp; });
  CHECK(skipped == 4);
}

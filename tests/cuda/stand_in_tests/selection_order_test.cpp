// Selections do not depend on the order in which blocks and threads run.
#include "tests/cuda/selectors.h"
#include "tests/cuda/stand_in_tests/machine_settings.h"

namespace topknot::testing {
namespace {

TEST_CASE("selections are the same where blocks and threads run backwards") {
  const stand_in::Reversed reversed;
  const OnGpu gpu;
  for (const char* name : {"topk", "threshold", "gaussiank"})
    for (const double capacity : {0.0, 1.5})
      for (const std::size_t n : {33u, 4097u, 20000u}) {
        CompressOptions options;
        options.set("threshold", 0.8);
        options.capacity = capacity;
        SelectPair pair(name, options, n, capacity > 0);
        pair.set_density(0.02);
        for (std::uint32_t t = 0; t < 10; ++t) {
          INFO(name << ", " << n << " elements, capacity " << capacity << ", step " << t);
          pair.step(gradient_of(t % 3 == 2 ? static_cast<int>(t) % kGradients : 0, n, t), 0.02, t != 4);
        }
      }
}

}  // namespace
}  // namespace topknot::testing

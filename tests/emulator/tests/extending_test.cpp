// The CUDA counterpart of docs/extending.md's example compressor selects what the CPU's selects.
#include "compress/compressor.h"
#include "tests/cuda/selectors.h"

namespace topknot::testing {
namespace {

TEST_CASE("the example's CUDA counterpart selects what the example selects, also replayed as a graph") {
  const OnGpu gpu;
  for (const std::size_t n : {1u, 33u, 4097u, 20000u})
    for (const bool graph : {false, true}) {
      CompressOptions options;
      options.set("phase", 3);
      SelectPair pair("cyclic", options, n, graph);
      pair.set_density(0.1);
      for (std::uint32_t t = 0; t < 12; ++t) {
        INFO(n << " elements, step " << t);
        pair.step(gradient_of_kind(t % 3 == 2 ? int(t) % kGradients : 0, n, t), 0.1, t != 4);
      }
    }
}

TEST_CASE("every CUDA counterpart belongs to a registered selection") {
  CHECK(cuda::device_selectors().names().size() >= 6);
  for (const std::string& name : cuda::device_selectors().names()) CHECK(selectors().contains(name));
}

}  // namespace
}  // namespace topknot::testing

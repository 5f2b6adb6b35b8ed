// Clipping on a GPU: the CPU's sums and factors, bit for bit.
#include "optim/clip.h"

#include <cmath>
#include <limits>

#include "nn/core/rng.h"
#include "tests/compress/select/select_once.h"
#include "tests/cuda/device_vector.h"
#include "tests/cuda/fixture.h"
#include "tests/support/catch.h"

namespace topknot {
namespace {

using namespace testing;

TEST_CASE("a sum of squares on a GPU has the CPU's bits, whatever the length") {
  const OnGpu gpu;
  Clip clip(gpu.device(), 300000);
  const auto sum = [&] { return to_host(clip.sum(), 1); };
  for (const std::size_t n : {0, 1, 15, 17, 255, 4099, 8191, 8192, 8193, 131072 + 5, 300000}) {
    INFO(n);
    const auto values = noise(n, 1);
    const DeviceVector<float> there(values);
    clip.sum_of_squares({there.data(), n}, false);
    CHECK(same_bits(sum(), {sum_of_squares(values)}));
    clip.sum_of_squares({there.data(), n}, true);
    CHECK(same_bits(sum(), {sum_of_squares(values) + sum_of_squares(values)}));
  }
  CHECK_THROWS_AS(clip.sum_of_squares({static_cast<const float*>(nullptr), 300001}, false), Error);
}

TEST_CASE("clipping on a GPU scales what the CPU scales, and nothing that is not finite") {
  const OnGpu gpu;
  const std::size_t n = 5000;
  Clip clip(gpu.device(), n);
  DeviceVector<StepParameters> parameters(std::vector<StepParameters>(1));
  for (const float odd :
       {0.5f, std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()})
    for (const double max_norm : {0.25, 70.0, 1e6}) {
      auto values = noise(n, 1);
      values[77] = odd;
      DeviceVector<float> there(values);
      clip.sum_of_squares({there.data(), n}, false);
      clip.scale({there.data(), n}, max_norm);
      clip.set_gradient_scale(max_norm, parameters.data());
      const double factor = clip_factor(l2_norm(values), max_norm);
      scale(values, factor);
      CHECK(same_bits(there.host(), values));
      CHECK(parameters.host()[0].gradient_scale == factor);
      CHECK(parameters.host()[0].lr == 1.0);
    }
  CHECK_THROWS_AS(clip.set_gradient_scale(0, parameters.data()), UserError);
}

}  // namespace
}  // namespace topknot

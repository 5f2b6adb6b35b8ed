// libtopknot on a GPU: calls that fail change nothing, and memory of a warm-up is given back.
#include <string>
#include <vector>

#include "tests/cuda/device_vector.h"
#include "tests/cuda/fixture.h"
#include "tests/emulator/machine.h"
#include "tests/emulator/tests/machine_settings.h"
#include "tests/library/library_fixture.h"
#include "tests/support/catch.h"
#include "tests/support/error_text.h"

namespace topknot {
namespace {

using namespace topknot::testing;

constexpr std::size_t kNumel = 64 * 1024;

Handle make() {
  return testing::make("topk", {"device=cuda"}, 0, 1, {{"weight", {64, 1024}}});
}

// One rank's step up to its commit; null where a call fails.
topknot_round* decoded(const Handle& compressor, double density, const DeviceVector<float>& gradient) {
  const topknot_step context{0, density, 0};
  const std::int32_t which = 0;
  const void* from = gradient.data();
  topknot_round* round = nullptr;
  if (topknot_encode(compressor.get(), &context, &which, 1, &from, TOPKNOT_FLOAT32, 1, &round) != TOPKNOT_OK)
    return nullptr;
  topknot_message message;
  REQUIRE(topknot_message_of(round, &message) == TOPKNOT_OK);
  REQUIRE(topknot_decode(round, &message.block, &message.block_bytes) == TOPKNOT_DONE);
  return round;
}
topknot_result commit(topknot_round* round, const DeviceVector<float>& average) {
  void* to = average.data();
  return topknot_commit(round, &to, TOPKNOT_FLOAT32, 1);
}
bool step(const Handle& compressor, double density, const DeviceVector<float>& gradient,
          const DeviceVector<float>& average) {
  topknot_round* const round = decoded(compressor, density, gradient);
  return round && commit(round, average) == TOPKNOT_OK;
}

TEST_CASE("libtopknot on a GPU: a step without memory for its density can be made again") {
  const OnGpu program;
  const DeviceVector<float> gradient(gradient_of(0, 0, kNumel)), average(kNumel), expected(kNumel);
  const Handle compressor = make(), other = make();
  for (const Handle* each : {&compressor, &other})
    REQUIRE(step(*each, 0.01, gradient, each == &other ? expected : average));
  for (int call = 0; call < 4; ++call) {
    const emulator::Settings settings;
    emulator::fail("cudaMalloc", cudaErrorMemoryAllocation, call);
    if (step(compressor, 0.2, gradient, average)) break;
    CHECK(says(topknot_error(), {"GPU 0 is out of memory"}));
  }
  for (const double density : {0.01, 0.2, 0.01}) {
    REQUIRE(step(compressor, density, gradient, average));
    REQUIRE(step(other, density, gradient, expected));
    CHECK((average.host() == expected.host()));
  }
}

TEST_CASE("libtopknot on a GPU: a commit that fails ends its round, and says that the library failed") {
  const OnGpu program;
  const DeviceVector<float> gradient(gradient_of(0, 0, kNumel)), average(kNumel);
  const Handle compressor = make();
  topknot_round* const round = decoded(compressor, 0.01, gradient);
  REQUIRE(round);
  {
    const emulator::Settings settings;
    emulator::fail("cudaMemcpyAsync", cudaErrorInvalidValue);
    CHECK(commit(round, average) == TOPKNOT_FAILED);
  }
  CHECK(step(compressor, 0.01, gradient, average));
}

TEST_CASE("libtopknot on a GPU: the memory of a higher density is given back") {
  const OnGpu program;
  const DeviceVector<float> gradient(gradient_of(0, 0, kNumel)), average(kNumel);
  const Handle compressor = make();
  REQUIRE(step(compressor, 0.01, gradient, average));
  const std::size_t before = emulator::bytes_in_use();
  REQUIRE(step(compressor, 0.25, gradient, average));
  REQUIRE(emulator::bytes_in_use() > before);
  REQUIRE(step(compressor, 0.01, gradient, average));
  CHECK(emulator::bytes_in_use() <= before + before / 10);
}

TEST_CASE("libtopknot on a GPU: the thread's own GPU stays its current one") {
  const emulator::Gpus two(2);
  const OnGpu program;
  REQUIRE(cudaSetDevice(1) == cudaSuccess);
  int current = 0;
  {
    const Handle compressor = make();
    REQUIRE(cudaGetDevice(&current) == cudaSuccess);
    CHECK(current == 1);
  }
  REQUIRE(cudaGetDevice(&current) == cudaSuccess);
  CHECK(current == 1);
  cudaSetDevice(0);
}

}  // namespace
}  // namespace topknot

// libtopknot on a GPU: calls that fail change nothing, and memory of a warm-up is given back.
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "include/topknot.h"
#include "tests/compress/every_method.h"
#include "tests/cuda/device_vector.h"
#include "tests/cuda/fixture.h"
#include "tests/emulator/machine.h"
#include "tests/emulator/tests/machine_settings.h"
#include "tests/support/catch.h"
#include "tests/support/error_text.h"

namespace topknot {
namespace {

using namespace topknot::testing;

constexpr std::size_t kNumel = 64 * 1024;

struct Destroy {
  void operator()(topknot_compressor* compressor) const { topknot_destroy(compressor); }
};
using Handle = std::unique_ptr<topknot_compressor, Destroy>;

Handle make() {
  const char* keys[] = {"device=cuda"};
  const std::int64_t shape[] = {64, 1024};
  const topknot_tensor tensor{"weight", shape, 2};
  topknot_compressor* made = nullptr;
  REQUIRE(topknot_create("topk", keys, 1, &tensor, 1, 0, 1, &made) == TOPKNOT_OK);
  return Handle(made);
}

// One rank's step. The result of the call that failed, or TOPKNOT_OK.
topknot_result step(const Handle& compressor, double density, const DeviceVector<float>& gradient,
                    const DeviceVector<float>& average) {
  const topknot_step context{0, density, 0};
  const std::int32_t which = 0;
  const void* from = gradient.data();
  topknot_round* round = nullptr;
  if (const auto result =
          topknot_encode(compressor.get(), &context, &which, 1, &from, TOPKNOT_FLOAT32, 1, &round);
      result != TOPKNOT_OK)
    return result;
  topknot_message message;
  REQUIRE(topknot_message_of(round, &message) == TOPKNOT_OK);
  REQUIRE(topknot_decode(round, &message.block, &message.block_bytes) == TOPKNOT_DONE);
  void* to = average.data();
  return topknot_commit(round, &to, TOPKNOT_FLOAT32, 1);
}

TEST_CASE("libtopknot on a GPU: a step without memory for its density can be made again") {
  const OnGpu program;
  const DeviceVector<float> gradient(gradient_of(0, 0, kNumel)), average(kNumel), expected(kNumel);
  const Handle compressor = make(), other = make();
  for (const Handle* each : {&compressor, &other})
    REQUIRE(step(*each, 0.01, gradient, each == &other ? expected : average) == TOPKNOT_OK);
  for (int call = 0; call < 4; ++call) {
    const emulator::Settings settings;
    emulator::fail("cudaMalloc", cudaErrorMemoryAllocation, call);
    if (step(compressor, 0.2, gradient, average) == TOPKNOT_OK) break;
    CHECK(says(topknot_error(), {"GPU 0 is out of memory"}));
  }
  for (const double density : {0.01, 0.2, 0.01}) {
    REQUIRE(step(compressor, density, gradient, average) == TOPKNOT_OK);
    REQUIRE(step(other, density, gradient, expected) == TOPKNOT_OK);
    CHECK((average.host() == expected.host()));
  }
}

TEST_CASE("libtopknot on a GPU: a commit that fails ends its round, and says that the library failed") {
  const OnGpu program;
  const DeviceVector<float> gradient(gradient_of(0, 0, kNumel)), average(kNumel);
  const Handle compressor = make();
  const topknot_step context{0, 0.01, 0};
  const std::int32_t which = 0;
  const void* from = gradient.data();
  topknot_round* round = nullptr;
  REQUIRE(topknot_encode(compressor.get(), &context, &which, 1, &from, TOPKNOT_FLOAT32, 1, &round) ==
          TOPKNOT_OK);
  topknot_message message;
  REQUIRE(topknot_message_of(round, &message) == TOPKNOT_OK);
  REQUIRE(topknot_decode(round, &message.block, &message.block_bytes) == TOPKNOT_DONE);
  void* to = average.data();
  {
    const emulator::Settings settings;
    emulator::fail("cudaMemcpyAsync", cudaErrorInvalidValue);
    CHECK(topknot_commit(round, &to, TOPKNOT_FLOAT32, 1) == TOPKNOT_FAILED);
  }
  CHECK(step(compressor, 0.01, gradient, average) == TOPKNOT_OK);
}

TEST_CASE("libtopknot on a GPU: the memory of a higher density is given back") {
  const OnGpu program;
  const DeviceVector<float> gradient(gradient_of(0, 0, kNumel)), average(kNumel);
  const Handle compressor = make();
  REQUIRE(step(compressor, 0.01, gradient, average) == TOPKNOT_OK);
  const std::size_t before = emulator::bytes_in_use();
  REQUIRE(step(compressor, 0.25, gradient, average) == TOPKNOT_OK);
  REQUIRE(emulator::bytes_in_use() > before);
  REQUIRE(step(compressor, 0.01, gradient, average) == TOPKNOT_OK);
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

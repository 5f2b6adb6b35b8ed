// Blocks and threads that run backwards change nothing: DGC's and RegTop-k's selections, and the memories.
#include "compress/memory/cuda/device_memory.h"
#include "tests/cuda/selectors.h"
#include "tests/cuda/stand_in_tests/machine_settings.h"

namespace topknot {
namespace {

using namespace testing;

}  // namespace

TEST_CASE("sampled selection is the CPU's when blocks and threads run backwards") {
  const stand_in::Reversed reversed;
  const OnGpu gpu;
  CompressOptions options;
  options.set("resample", GENERATE(true, false));
  const std::size_t n = 20011;
  BothSelectors both("dgc_sampled", options, n, 0, 0.05);
  for (std::uint32_t draw = 0; draw < 6; ++draw) {
    Asked asked;
    asked.density = draw < 4 ? 0.01 : 0.00001;
    asked.step = draw;
    both.select(gpu.stream(), noise(n, draw, draw % 2 ? 9 : 1), noise(n, 50), asked);
  }
}

TEST_CASE("RegTop-k is the CPU's when blocks and threads run backwards") {
  const stand_in::Reversed reversed;
  const OnGpu gpu;
  CompressOptions options;
  options.set("mu", 1);
  const std::size_t n = 20011;
  BothSelectors both("regtopk", options, n, 0, 0.05);
  for (std::uint32_t step = 0; step < 6; ++step) {
    Asked asked;
    asked.density = 0.05;
    std::vector<float> u = noise(n, 1, 2);
    for (float& x : u) x += 0.01f * static_cast<float>(step);
    both.select(gpu.stream(), u, noise(n, 60), asked);
    both.commit(gpu.stream(), step == 2, 1, 2, step);
  }
}

TEST_CASE("memories take what was sent, or the old residual back, in any order of threads") {
  const stand_in::Reversed reversed;
  const OnGpu gpu;
  const std::size_t n = 3000;
  CompressOptions options;
  options.momentum = 0.9;
  const auto memory = cuda::make_device_memory("dgc", options, n);
  DeviceVector<float> u(noise(n, 1)), spare(noise(n, 2));
  const Slice slice{{u.data(), n}, {spare.data(), n}};
  const cuda::Accumulate made = memory->accumulate(slice, nullptr);
  to_device(made.next_velocity, noise(n, 3));
  DeviceVector<std::uint32_t> positions(std::vector<std::uint32_t>{0, 1700, 2999}),
      count(std::vector<std::uint32_t>{3});
  const std::vector<float> before = u.host();
  DeviceVector<float> values(std::vector<float>{before[0], before[1700], 1});
  const bool bad = GENERATE(false, true);
  StepStatus word;
  word.bad = bad;
  DeviceVector<StepStatus> status(std::vector<StepStatus>{word});
  memory->commit(gpu.stream(), status.data(), slice, {positions.data(), values.data(), count.data(), 3});
  std::vector<float> kept = bad ? noise(n, 2) : before;
  std::vector<float> velocity = bad ? std::vector<float>(n) : noise(n, 3);
  if (!bad) {
    kept[0] = kept[1700] = 0;
    kept[2999] -= 1;
    velocity[0] = velocity[1700] = velocity[2999] = 0;
  }
  CHECK(same_bits(u.host(), kept));
  CHECK(same_bits(to_host(static_cast<const float*>(made.next_velocity), n), velocity));
}

}  // namespace topknot

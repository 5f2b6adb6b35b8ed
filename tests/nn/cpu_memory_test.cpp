#include "nn/core/cpu_memory.h"

#include <optional>

#include "nn/base/check.h"
#include "nn/core/pass_cost.h"
#include "nn/core/tensor.h"
#include "tests/support/test.h"

using namespace topknot;

TEST_CASE("memory of the same sizes is used again, also after a step of other sizes") {
  CpuMemory memory;
  float *first = memory.allocate(1000), *second = memory.allocate(2000);
  memory.release(first, 1000);
  memory.release(second, 2000);
  float* other = memory.allocate(2500);
  memory.release(other, 2500);
  CHECK(memory.allocate(1000) == first);
  CHECK(memory.allocate(2000) == second);
  memory.release(first, 1000);
  memory.release(second, 2000);
}

TEST_CASE("memory of ever other sizes is given back: no more than twice what was in use is held") {
  CpuMemory memory;
  std::size_t most = 0;
  for (std::size_t floats = 1000; floats < 5000; floats += 100) {
    float *first = memory.allocate(floats), *second = memory.allocate(floats + 50);
    first[floats - 1] = second[floats + 49] = 1;
    most =
        std::max(most, 4 * (2 * floats + 50) + 256);  // each block has 64 bytes more, and is a multiple of 64
    memory.release(first, floats);
    memory.release(second, floats + 50);
    CHECK(memory.held() <= 2 * most);
  }
  memory.release_cached();
  CHECK(memory.held() == 0);
}

TEST_CASE("memory that is not there is an error, and counts as nothing") {
  CpuMemory memory;
#ifndef __SANITIZE_ADDRESS__  // which ends the process
  CHECK_THROWS_AS(memory.allocate(std::size_t{1} << 60), UserError);
#endif
  CHECK(memory.held() == 0);
  float* data = memory.allocate(10);
  CHECK(memory.held() == 128);
  memory.release(data, 10);
}

#ifdef TOPKNOT_POISON
TEST_CASE("a build with TOPKNOT_POISON hands out NaNs: fresh memory, memory used again, and glibc's") {
  CpuMemory memory;
  for (int use = 0; use < 2; ++use) {
    float* data = memory.allocate(1000);
    CHECK(std::all_of(data, data + 1000, [](float v) { return std::isnan(v); }));
    std::fill_n(data, 1000, 1.0f);
    memory.release(data, 1000);
  }
  const std::unique_ptr<float[]> others(new float[100000]);
#ifndef __SANITIZE_ADDRESS__  // ASAN_OPTIONS says what that fills memory with
  CHECK(std::all_of(others.get(), others.get() + 100000, [](float v) { return std::isnan(v); }));
#endif
}
#endif

TEST_CASE("the memory of a pass is that of its thread's own tensors") {
  std::optional<PassCost> cost(std::in_place);
  Tensor before = Tensor::empty({1000}), elsewhere;
  std::thread([&] { elsewhere = Tensor::empty({1000}); }).join();
  CHECK(cost->peak_bytes() == 4000);
  cost.reset();
  cost.emplace();  // in the same place
  before = Tensor();
  elsewhere = Tensor();
  CHECK(Tensor::empty({1000}).defined());
  CHECK(Tensor::empty({500}).defined());
  CHECK(cost->peak_bytes() == 4000);
}

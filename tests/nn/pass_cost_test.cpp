#include "nn/core/pass_cost.h"

#include <optional>
#include <thread>

#include "nn/core/tensor.h"
#include "tests/support/catch.h"

using namespace topknot;

TEST_CASE(
    "the memory of a pass is that of its thread's tensors, without what goes from before and from other "
    "threads") {
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

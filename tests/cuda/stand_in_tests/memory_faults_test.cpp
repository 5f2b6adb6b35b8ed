// What fails on a GPU ends in one message.
#include "nn/core/tensor.h"
#include "tests/cuda/fixture.h"
#include "tests/cuda/stand_in/machine.h"
#include "tests/support/catch.h"
#include "tests/support/error_text.h"

namespace topknot {
namespace {

struct Machine {
  ~Machine() { stand_in::reset(); }
};

TEST_CASE("a GPU out of memory says what was asked for and what to lower") {
  const Machine machine;
  stand_in::machine().memory = stand_in::bytes_in_use() + (1 << 20);
  const OnGpu gpu;
  const auto allocate = [&] { Tensor::empty({1 << 20}, Layout::plain, gpu.device()); };
  CHECK_THROWS_AS(allocate(), cuda::OutOfMemory);
  CHECK(says(error_text(allocate), {"rank 0", "4.0 MiB asked for", "data.batch_size"}));
}

TEST_CASE("cached blocks are given back before memory is called short") {
  const Machine machine;
  stand_in::machine().memory = stand_in::bytes_in_use() + (3 << 20);
  const OnGpu gpu;
  for (const std::int64_t floats : {1 << 19, 1 << 18, 3 << 17})
    CHECK(Tensor::zeros({floats}, Layout::plain, gpu.device()).to_vector()[0] == 0);
}

TEST_CASE("a lost GPU is called lost, with the rank") {
  const Machine machine;
  const OnGpu gpu;
  const Tensor x = Tensor::zeros({4}, Layout::plain, gpu.device());
  stand_in::lose_device();
  CHECK(says(error_text([&] { x.to_vector(); }), {"the GPU is lost", "rank 0"}));
}

TEST_CASE("no GPU and too old a driver are told apart") {
  const Machine machine;
  stand_in::machine().devices = 0;
  CHECK(says(error_text([] { parse_device("cuda"); }), {"no GPU was found", "train.device=cpu"}));
  CHECK(parse_device("auto") == Device{});
  stand_in::machine().devices = 1;
  stand_in::machine().driver_too_old = true;
  CHECK(says(error_text([] { parse_device("cuda"); }), {"driver is too old", "train.device=cpu"}));
  stand_in::machine() = {};
  CHECK(parse_device("auto").kind == DeviceKind::cuda);
}

}  // namespace
}  // namespace topknot

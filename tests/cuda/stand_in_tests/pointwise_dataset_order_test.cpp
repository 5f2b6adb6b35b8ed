// A batch does not lean on the order of blocks and threads.
#include "data/cuda/device_dataset.h"
#include "tests/cuda/device_vector.h"
#include "tests/cuda/fixture.h"
#include "tests/cuda/stand_in/machine.h"
#include "tests/data/small_dataset.h"
#include "tests/support/catch.h"

namespace topknot {
namespace {

using namespace test;

TEST_CASE("a batch is the same whatever the order of blocks and threads") {
  std::vector<std::vector<float>> made;
  std::vector<std::vector<std::int32_t>> made_labels;
  for (const bool reverse : {false, true}) {
    stand_in::reset();
    stand_in::machine().reverse = reverse;
    const OnGpu gpu;
    const cuda::DeviceDataset dataset(SmallDataset(9, true, {3, 40, 41}), true, 5);
    const DeviceVector<std::int32_t> indices(std::vector<std::int32_t>{8, 0, 3}), labels(3);
    Tensor images = Tensor::empty({3, 3, 40, 41}, Layout::nhwc, gpu.device()), none;
    dataset.make_batch(gpu.stream(), indices.data(), 3, nullptr, images, labels.data(), none);
    made.push_back(images.to_vector());
    made_labels.push_back(labels.host());
  }
  stand_in::reset();
  CHECK(same_bits(made[0], made[1]));
  CHECK(made_labels[0] == made_labels[1]);
  CHECK(made_labels[0] == std::vector<std::int32_t>{3, 0, 3});
}

}  // namespace
}  // namespace topknot

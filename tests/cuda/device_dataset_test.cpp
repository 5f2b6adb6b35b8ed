// Batches made on a GPU are the loader's, bit for bit.
#include "data/cuda/device_dataset.h"

#include "data/loader.h"
#include "nn/core/bfloat16.h"
#include "tests/cuda/device_vector.h"
#include "tests/cuda/fixture.h"
#include "tests/data/small_dataset.h"

namespace topknot {
namespace {

using namespace testing;

constexpr std::uint64_t kSeed = 77;

LoaderOptions loader_options(bool augment) {
  LoaderOptions options;
  options.batch_size = 5;
  options.seed = kSeed;
  options.augment = augment;
  return options;
}

// All batches of two epochs, with images in each order and type.
void check_same_batches(const Dataset& dataset, bool augment) {
  const auto order = GENERATE(from_range(orders()))();
  const OnGpu gpu;
  const cuda::DeviceDataset there(dataset, augment, kSeed);
  Loader loader(dataset, loader_options(augment));
  const DeviceVector<std::uint32_t> epoch_word(1);
  const Shape sample = dataset.sample_shape();
  for (const std::uint32_t epoch : {0u, 3u}) {
    to_device(epoch_word.data(), std::vector<std::uint32_t>{epoch});
    loader.start_epoch(epoch);
    Batch batch;
    while (loader.next(batch)) {
      const std::int64_t n = batch.size();
      const DeviceVector<std::int32_t> indices(
          std::vector<std::int32_t>(batch.indices.begin(), batch.indices.end()));
      const DeviceVector<std::int32_t> labels(static_cast<std::size_t>(n));
      Tensor targets;
      if (dataset.classes() == 0)
        targets = Tensor::empty({n, dataset.targets()}, Layout::plain, gpu.device());
      const auto made = [&](Tensor images) {
        there.make_batch(gpu.stream(), indices.data(), n, epoch_word.data(), images, labels.data(), targets);
        return images.to_vector();
      };
      const Shape shape{n, sample[0], sample[1], sample[2]};
      const auto expected = batch.images.to_vector();
      std::vector<float> nhwc, nhwc_bf16;
      for (std::int64_t i = 0; i < n; ++i)
        for (std::int64_t pixel = 0; pixel < sample[1] * sample[2]; ++pixel)
          for (std::int64_t c = 0; c < sample[0]; ++c) {
            nhwc.push_back(expected[std::size_t((i * sample[0] + c) * sample[1] * sample[2] + pixel)]);
            nhwc_bf16.push_back(to_float(to_bfloat16(nhwc.back())));
          }
      CHECK(same_bits(made(Tensor::empty(shape, Layout::nhwc, gpu.device())), nhwc));
      CHECK(same_bits(made(Tensor::empty(shape, Layout::nhwc, gpu.device(), DType::bf16)), nhwc_bf16));
      CHECK(same_bits(made(Tensor::empty({n, sample.numel()}, Layout::plain, gpu.device())), expected));
      if (dataset.classes() > 0)
        CHECK(labels.host() == batch.labels);
      else
        CHECK(same_bits(targets.to_vector(), batch.targets.to_vector()));
    }
  }
}

TEST_CASE("batches on a GPU are the loader's: synthetic pictures, plain and augmented") {
  DatasetOptions options;
  options.train_size = 10;
  const auto dataset = make_dataset("synthetic_images", options, Split::train);
  for (const bool augment : {false, true}) check_same_batches(*dataset, augment);
}

TEST_CASE("batches on a GPU are the loader's: bytes or floats, odd sides, smaller than the padding") {
  for (const bool as_bytes : {false, true})
    for (const bool augment : {false, true})
      for (const Shape& shape : {Shape{2, 6, 7}, Shape{1, 3, 2}, Shape{3, 9, 31}})
        check_same_batches(SmallDataset(23, as_bytes, shape), augment);
}

TEST_CASE("batches on a GPU are the loader's: vectors with targets") {
  DatasetOptions options;
  options.train_size = 12;
  options.features = 19;
  options.targets = 3;
  check_same_batches(*make_dataset("synthetic_regression", options, Split::train), false);
}

TEST_CASE("a captured batch follows the indices and the epoch of each step") {
  const OnGpu gpu;
  const SmallDataset dataset(23, true);
  const Transform transform(dataset, true, kSeed);
  const cuda::DeviceDataset there(dataset, true, kSeed);
  DeviceVector<std::int32_t> indices(2);
  DeviceVector<std::uint32_t> epoch(1);
  const DeviceVector<std::int32_t> labels(2);
  Tensor images = Tensor::empty({2, 2 * 6 * 7}, Layout::plain, gpu.device()), none;
  CapturedGraph graph(gpu.stream(), [&] {
    there.make_batch(gpu.stream(), indices.data(), 2, epoch.data(), images, labels.data(), none);
  });
  for (const std::int32_t step : {0, 1, 2}) {
    indices.set({step, 22 - step});
    epoch.set({std::uint32_t(7 * step)});
    graph.launch(gpu.stream());
    std::vector<float> expected(2 * 84);
    transform.apply(step, 7 * step, expected.data());
    transform.apply(22 - step, 7 * step, expected.data() + 84);
    CHECK(same_bits(images.to_vector(), expected));
    CHECK(labels.host() == std::vector<std::int32_t>{step % 5, (22 - step) % 5});
  }
}

TEST_CASE("a batch on a GPU refuses images of another shape") {
  const OnGpu gpu;
  const SmallDataset dataset(6, true);
  const cuda::DeviceDataset there(dataset, false, kSeed);
  CHECK(there.bytes() == 6 * 84 + 4 * 4 + 6 * 4);
  const DeviceVector<std::int32_t> indices(std::vector<std::int32_t>{0, 1}), labels(2);
  Tensor none;
  for (const Shape& shape : {Shape{2, 2, 7, 6}, Shape{3, 84}, Shape{2, 83}}) {
    Tensor images = Tensor::empty(shape, Layout::plain, gpu.device());
    CHECK_THROWS_AS(there.make_batch(gpu.stream(), indices.data(), 2, nullptr, images, labels.data(), none),
                    Error);
  }
}

}  // namespace
}  // namespace topknot

#include "data/cuda/device_dataset.h"

#include <topknot_kernel.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "data/transforms.h"
#include "nn/base/check.h"
#include "nn/core/cuda/kernel_tools.h"

namespace topknot::cuda {
namespace {

constexpr std::uint32_t kPerThread = 8;

__device__ float value_of(std::uint8_t x) {
  return value_of_byte(x);
}
__device__ float value_of(float x) {
  return x;
}

// `chunks` blocks per sample. In: the stored type, Out: the images'.
template <class In, class Out>
__global__ void __launch_bounds__(kThreads)
    batch_kernel(StoredSamples stored, BatchMemory batch, bool augment, PhiloxStream rng,
                 const std::uint32_t* epoch, std::uint32_t chunks) {
  await_previous();
  const std::uint32_t sample = blockIdx.x / chunks, chunk = blockIdx.x % chunks;
  const std::int32_t index = batch.indices ? batch.indices[sample] : static_cast<std::int32_t>(sample);
  CropDraw draw{kCropPadding, kCropPadding, false};
  if (augment) {  // every thread draws: cheaper than waiting for one that does
    rng.a = epoch ? *epoch : 0;
    rng.b = static_cast<std::uint32_t>(index);
    draw = crop_draw(rng.block(0));
  }
  const std::uint32_t channels = stored.channels, area = stored.height * stored.width,
                      numel = area * channels;
  const In* from =
      static_cast<const In*>(stored.samples) + std::size_t{numel} * static_cast<std::uint32_t>(index);
  Out* to = static_cast<Out*>(batch.images) + std::size_t{numel} * sample;
  std::uint32_t i = chunk * kThreads * kPerThread + threadIdx.x;
  for (std::uint32_t j = 0; j < kPerThread && i < numel; ++j, i += kThreads) {
    const std::uint32_t c = batch.nhwc ? i % channels : i / area,
                        pixel = batch.nhwc ? i / channels : i % area;
    const int x = static_cast<int>(pixel % stored.width), y = static_cast<int>(pixel / stored.width);
    const int width = static_cast<int>(stored.width), height = static_cast<int>(stored.height);
    const int source_x = (draw.flip ? width - 1 - x : x) + draw.left - kCropPadding;
    const int source_y = y + draw.top - kCropPadding;
    float value = 0;  // black
    if (source_x >= 0 && source_x < width && source_y >= 0 && source_y < height) {
      const std::uint32_t source = static_cast<std::uint32_t>(source_y * width + source_x);
      value = value_of(from[stored.channels_first ? c * area + source : source * channels + c]);
    }
    to[i] = from_float<Out>(normalised(value, stored.statistics[c], stored.statistics[channels + c]));
  }
  if (chunk != 0) return;
  if (stored.labels && threadIdx.x == 0) batch.labels[sample] = stored.labels[index];
  if (stored.targets)
    for (std::uint32_t t = threadIdx.x; t < stored.target_count; t += kThreads)
      batch.targets[std::size_t{sample} * stored.target_count + t] =
          stored.targets[std::size_t{stored.target_count} * static_cast<std::uint32_t>(index) + t];
}

template <class In, class Out>
void make(cudaStream_t stream, const StoredSamples& stored, const BatchMemory& batch, bool augment,
          const PhiloxStream& rng, const std::uint32_t* epoch) {
  const std::size_t numel = std::size_t{stored.channels} * stored.height * stored.width;
  const std::size_t chunks = grid_for(numel, kThreads * kPerThread).x;
  launch(batch_kernel<In, Out>, grid_for(chunks * batch.n, 1), kThreads, stream, stored, batch, augment, rng,
         epoch, chunks);
}

constexpr std::size_t kPiece = std::size_t{64} << 20;  // bytes that go to the GPU at a time

std::size_t unsigned_of(std::int64_t n) {
  return static_cast<std::size_t>(n);
}

// All samples in H, W, C order, by pieces of whole samples. read(i, sample) gives sample i in C, H, W order.
template <class T, class Read>
DeviceArray<std::uint8_t> uploaded_samples(std::int64_t size, const Shape& shape, Read&& read) {
  const std::size_t numel = unsigned_of(shape.numel()), channels = unsigned_of(shape[0]),
                    area = numel / std::max<std::size_t>(channels, 1);
  DeviceArray<std::uint8_t> array(unsigned_of(size) * numel * sizeof(T));
  const std::size_t per_piece =
      std::max<std::size_t>(1, kPiece / std::max<std::size_t>(1, numel * sizeof(T)));
  std::vector<T> sample(numel), piece;
  const cudaStream_t stream = Context::current().stream();
  for (std::size_t begin = 0; begin < unsigned_of(size); begin += per_piece) {
    const std::size_t count = std::min(per_piece, unsigned_of(size) - begin);
    piece.resize(count * numel);
    for (std::size_t n = 0; n < count; ++n) {
      read(static_cast<std::int64_t>(begin + n), sample.data());
      for (std::size_t c = 0; c < channels; ++c)
        for (std::size_t i = 0; i < area; ++i) piece[n * numel + i * channels + c] = sample[c * area + i];
    }
    TOPKNOT_CUDA(cudaMemcpyAsync(array.data() + begin * numel * sizeof(T), piece.data(),
                                 piece.size() * sizeof(T), cudaMemcpyHostToDevice, stream));
    TOPKNOT_CUDA(cudaStreamSynchronize(stream));
  }
  return array;
}

// The same statistics as Transform's: 0 and 1 if the data set gives none.
std::vector<float> statistics_of(const Dataset& dataset) {
  const std::size_t channels = unsigned_of(dataset.sample_shape()[0]);
  std::vector<float> mean = dataset.channel_mean(), std = dataset.channel_std();
  if (mean.empty()) mean.assign(channels, 0.0f);
  if (std.empty()) std.assign(channels, 1.0f);
  TOPKNOT_CHECK(mean.size() == channels && std.size() == channels,
                "one mean and one standard deviation per channel");
  mean.insert(mean.end(), std.begin(), std.end());
  return mean;
}

}  // namespace

void make_batch_images(cudaStream_t stream, const StoredSamples& stored, const BatchMemory& batch,
                       bool augment, const PhiloxStream& rng, const std::uint32_t* epoch) {
  if (batch.n == 0) return;
  if (stored.as_bytes)
    (batch.bf16 ? make<std::uint8_t, __nv_bfloat16> : make<std::uint8_t, float>)(stream, stored, batch,
                                                                                 augment, rng, epoch);
  else
    (batch.bf16 ? make<float, __nv_bfloat16> : make<float, float>)(stream, stored, batch, augment, rng,
                                                                   epoch);
}

DeviceArray<float> device_statistics(const Dataset& dataset) {
  return on_device(statistics_of(dataset));
}

DeviceDataset::DeviceDataset(const Dataset& dataset, bool augment, std::uint64_t seed)
    : size_(dataset.size()),
      targets_count_(dataset.classes() == 0 ? dataset.targets() : 0),
      shape_(dataset.sample_shape()),
      as_bytes_(size_ > 0 && dataset.bytes(0)),
      augment_(augment),
      seed_(seed),
      statistics_(device_statistics(dataset)) {
  if (size_ > std::numeric_limits<std::int32_t>::max())
    throw UserError("data.on_device: data set '" + dataset.name() +
                    "' has more than 2^31 - 1 samples; set data.on_device=false");
  TOPKNOT_CHECK(shape_.numel() < std::int64_t{1} << 31, "samples of fewer than 2^31 elements");
  const std::size_t numel = unsigned_of(shape_.numel());
  if (as_bytes_)
    samples_ = uploaded_samples<std::uint8_t>(size_, shape_, [&](std::int64_t i, std::uint8_t* sample) {
      std::memcpy(sample, dataset.bytes(i), numel);
    });
  else
    samples_ = uploaded_samples<float>(size_, shape_,
                                       [&](std::int64_t i, float* sample) { dataset.get(i, sample); });
  if (dataset.classes() > 0) {
    std::vector<std::int32_t> labels;
    for (std::int64_t i = 0; i < size_; ++i) labels.push_back(dataset.label(i));
    labels_ = on_device(labels);
  } else {
    std::vector<float> targets(unsigned_of(size_ * targets_count_));
    for (std::int64_t i = 0; i < size_; ++i) dataset.target(i, targets.data() + i * targets_count_);
    targets_ = on_device(targets);
  }
}

void DeviceDataset::make_batch(cudaStream_t stream, const std::int32_t* indices, std::int64_t n,
                               const std::uint32_t* epoch, Tensor& images, std::int32_t* labels,
                               Tensor& targets) const {
  const Shape& given = images.shape();
  TOPKNOT_CHECK(images.layout() != Layout::blocked && given.rank() > 0 && given[0] == n &&
                    given.numel() == n * shape_.numel() &&
                    (given.rank() == 2 || given == Shape({n, shape_[0], shape_[1], shape_[2]})),
                "images of " + std::to_string(n) + " samples " + shape_.str() + ", not " + given.str());
  TOPKNOT_CHECK(n == 0 || (targets_count_ == 0) == (labels_.size() > 0), "a batch of an empty data set");
  TOPKNOT_CHECK(targets_count_ == 0 || targets.shape() == Shape({n, targets_count_}), "targets of the batch");
  const auto word = [](std::int64_t value) { return static_cast<std::uint32_t>(value); };
  const StoredSamples stored{samples_.data(), as_bytes_,       word(shape_[0]),
                             word(shape_[1]), word(shape_[2]), statistics_.data(),
                             labels_.data(),  targets_.data(), word(targets_count_)};
  const BatchMemory batch{indices,
                          word(n),
                          images.data(),
                          images.dtype() == DType::bf16,
                          images.layout() == Layout::nhwc,
                          labels,
                          targets_count_ > 0 ? targets.data() : nullptr};
  make_batch_images(stream, stored, batch, augment_, CounterRng(seed_, RngUse::augment).stream(), epoch);
}

}  // namespace topknot::cuda

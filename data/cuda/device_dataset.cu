#include <topknot_kernel.h>

#include "data/cuda/device_dataset_kernels.h"
#include "data/pixel_rule.h"
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

}  // namespace topknot::cuda

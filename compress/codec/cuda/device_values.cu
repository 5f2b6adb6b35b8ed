// The value codecs.
#include <topknot_kernel.h>

#include "compress/codec/cuda/device_codec.h"
#include "nn/core/cuda/kernel_tools.h"

namespace topknot::cuda {
namespace {

static_assert(int8::kBlock == kThreads, "a block of threads codes the values of one scale");

// `at` is any byte of a block.
__device__ void store_u16(std::byte* block, std::uint64_t at, std::uint16_t word) {
  if ((at & 1) == 0) {
    reinterpret_cast<std::uint16_t*>(block)[at / 2] = word;
    return;
  }
  block[at] = static_cast<std::byte>(word);
  block[at + 1] = static_cast<std::byte>(word >> 8);
}
__device__ std::uint16_t load_u16(const std::byte* block, std::uint64_t at) {
  if ((at & 1) == 0) return reinterpret_cast<const std::uint16_t*>(block)[at / 2];
  return static_cast<std::uint16_t>(static_cast<unsigned>(block[at]) | static_cast<unsigned>(block[at + 1])
                                                                           << 8);
}

__device__ std::uint32_t magnitude_bits(float x) {
  return bits_of(x) & 0x7FFFFFFF;
}

// Values that are scaled, or not, one by one. `at`: of the first value in the block.
struct Fp32 {
  static constexpr std::uint64_t kBytes = 4;
  __device__ static void store(std::byte* block, std::uint64_t at, float value, float) {
    store_u32(block, at, bits_of(value));
  }
  __device__ static float load(const std::byte* block, std::uint64_t at, float) {
    return float_of(load_u32(block, at));
  }
};
struct Bf16 {
  static constexpr std::uint64_t kBytes = 2;
  __device__ static void store(std::byte* block, std::uint64_t at, float value, float) {
    store_u16(block, at, bf16::encode(value));
  }
  __device__ static float load(const std::byte* block, std::uint64_t at, float) {
    return bf16::decode(load_u16(block, at));
  }
};
struct Fp16 {
  static constexpr std::uint64_t kBytes = 2;
  __device__ static void store(std::byte* block, std::uint64_t at, float value, float scale) {
    store_u16(block, at, fp16::encode(value, scale));
  }
  // Halves above kLargestHalf, which fp16::encode never writes, decode to Inf.
  __device__ static float load(const std::byte* block, std::uint64_t at, float scale) {
    const std::uint16_t half = load_u16(block, at);
    return (half & 0x7FFFu) > fp16::kLargestHalf ? float_of(0x7F800000) : fp16::decode(half, scale);
  }
};

__global__ void __launch_bounds__(kThreads) largest_kernel(BlockWork work, DeviceEntries entries) {
  const std::size_t i = awaited_index(), count = *entries.count;
  if (std::size_t{blockIdx.x} * kThreads >= count) return;
  const std::uint32_t most = block_max(i < count ? magnitude_bits(entries.values[i]) : 0);
  if (threadIdx.x == 0) atomicMax(&work.place->largest, most);
}

template <class Code>
__global__ void __launch_bounds__(kThreads)
    write_values_kernel(BlockWork work, DeviceEntries entries, std::byte* block) {
  const std::size_t i = awaited_index();
  if (i >= *entries.count) return;
  std::uint64_t at = work.place->values_at;
  float scale = 1;
  if (work.values == Values::fp16) {
    const int e = fp16::exponent_of(static_cast<std::int32_t>(work.place->largest));
    if (i == 0) block[at] = static_cast<std::byte>(e);
    scale = fp16::power_of_two(-e);
    ++at;
  }
  Code::store(block, at + Code::kBytes * i, entries.values[i], scale);
}

__global__ void __launch_bounds__(kThreads)
    write_int8_kernel(BlockWork work, DeviceEntries entries, std::byte* block) {
  const std::size_t i = awaited_index(), count = *entries.count;
  if (std::size_t{blockIdx.x} * kThreads >= count) return;
  const float value = i < count ? entries.values[i] : 0.0f;
  const float scale = int8::scale_of(float_of(block_max(magnitude_bits(value))));
  const std::uint64_t at = work.place->values_at;
  if (threadIdx.x == 0) store_u32(block, at + 4 * std::uint64_t{blockIdx.x}, bits_of(scale));
  if (i < count)
    block[at + 4 * ((count + kThreads - 1) / kThreads) + i] =
        static_cast<std::byte>(int8::encode(value, int8::factor_of(scale)));
}

// Keeps a thread's value, its finiteness and the greatest magnitude. Every thread of the block calls.
__device__ void take_value(const BlockWork& work, const DecodedEntries& out, std::size_t i, float value) {
  DecodedStats& stats = out.stats[blockIdx.y];
  const bool mine = i < stats.count;
  const std::uint32_t magnitude = mine ? magnitude_bits(value) : 0;
  if (mine) out.values[blockIdx.y * std::size_t{work.capacity} + i] = value;
  if (magnitude > kLargestFiniteBits) atomicOr(&stats.damaged, 1u);
  const std::uint32_t most = block_max(magnitude);
  if (threadIdx.x == 0) atomicMax(&stats.largest, most);
}

template <class Code>
__global__ void __launch_bounds__(kThreads)
    read_values_kernel(BlockWork work, const std::byte* blocks, DecodedEntries out) {
  const std::size_t rank = blockIdx.y, i = awaited_index();
  const std::uint32_t count = out.stats[rank].count;
  if (std::size_t{blockIdx.x} * kThreads >= count) return;
  const std::byte* const block = blocks + rank * work.block_bytes;
  std::uint64_t at = work.place[rank].values_at;
  float scale = 1;
  if (work.values == Values::fp16) {
    const int e = static_cast<std::int8_t>(block[at]);
    const bool good = e >= fp16::kLeast && e <= fp16::kMost;
    if (!good) atomicOr(&out.stats[rank].damaged, 1u);
    scale = fp16::power_of_two(good ? e : 0);
    ++at;
  }
  take_value(work, out, i, i < count ? Code::load(block, at + Code::kBytes * i, scale) : 0.0f);
}

// The exponent must be that of the largest magnitude.
__global__ void check_fp16_kernel(BlockWork work, const std::byte* blocks, DecodedEntries out) {
  await_previous();
  const int rank = static_cast<int>(blockIdx.x * kThreads + threadIdx.x);
  if (rank >= work.ranks || out.stats[rank].count == 0) return;
  const int e =
      static_cast<std::int8_t>(blocks[std::size_t(rank) * work.block_bytes + work.place[rank].values_at]);
  if (e > fp16::kLeast && e <= fp16::kMost && out.stats[rank].largest < bits_of(fp16::power_of_two(e + 14)))
    out.stats[rank].damaged = 1;
}

__global__ void __launch_bounds__(kThreads)
    read_int8_kernel(BlockWork work, const std::byte* blocks, DecodedEntries out) {
  const std::size_t rank = blockIdx.y, i = awaited_index();
  const std::size_t count = out.stats[rank].count;
  if (std::size_t{blockIdx.x} * kThreads >= count) return;
  const std::byte* const block = blocks + rank * work.block_bytes;
  const std::uint64_t at = work.place[rank].values_at;
  const std::uint32_t bits = load_u32(block, at + 4 * std::uint64_t{blockIdx.x});
  const float scale = float_of(bits);
  const int code =
      i < count ? static_cast<std::int8_t>(block[at + 4 * ((count + kThreads - 1) / kThreads) + i]) : 0;
  const std::uint32_t largest = block_max(static_cast<std::uint32_t>(code < 0 ? -code : code));
  const bool zero = bits == 0, usable = scale >= int8::kLeastScale && bits <= kLargestFiniteBits;
  if (threadIdx.x == 0 && ((!zero && !usable) || largest != (zero ? 0u : 127u)))
    atomicOr(&out.stats[rank].damaged, 1u);
  take_value(work, out, i, int8::decode(static_cast<std::int8_t>(code), static_cast<double>(scale)));
}

}  // namespace

void write_values(cudaStream_t stream, const BlockWork& work, const DeviceEntries& entries,
                  std::byte* block) {
  const dim3 grid = grid_for(work.capacity, kThreads);
  switch (work.values) {
    case Values::fp32:
      return launch(write_values_kernel<Fp32>, grid, kThreads, stream, work, entries, block);
    case Values::bf16:
      return launch(write_values_kernel<Bf16>, grid, kThreads, stream, work, entries, block);
    case Values::fp16:
      launch(largest_kernel, grid, kThreads, stream, work, entries);
      return launch(write_values_kernel<Fp16>, grid, kThreads, stream, work, entries, block);
    case Values::int8:
      return launch(write_int8_kernel, grid, kThreads, stream, work, entries, block);
  }
}

void read_values(cudaStream_t stream, const BlockWork& work, const std::byte* blocks,
                 const DecodedEntries& out) {
  dim3 grid = grid_for(work.capacity, kThreads);
  grid.y = static_cast<unsigned>(work.ranks);
  switch (work.values) {
    case Values::fp32:
      return launch(read_values_kernel<Fp32>, grid, kThreads, stream, work, blocks, out);
    case Values::bf16:
      return launch(read_values_kernel<Bf16>, grid, kThreads, stream, work, blocks, out);
    case Values::fp16:
      launch(read_values_kernel<Fp16>, grid, kThreads, stream, work, blocks, out);
      return launch(check_fp16_kernel, grid_for(static_cast<std::size_t>(work.ranks), kThreads), kThreads,
                    stream, work, blocks, out);
    case Values::int8:
      return launch(read_int8_kernel, grid, kThreads, stream, work, blocks, out);
  }
}

}  // namespace topknot::cuda

#pragma once
// Entries and their blocks in GPU memory, as the kernels of compress/code see them; others call
// compress/codec/cuda/device_codec.h.

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "compress/codec/code_bits.h"
#include "nn/base/host_device.h"

namespace topknot::cuda {

// One rank's entries; the count and the flag are on the GPU as well. A list that is not finite has count 0.
struct DeviceEntries {
  const std::uint32_t* indices = nullptr;  // strictly ascending, below numel
  const float* values = nullptr;
  const std::uint32_t* count = nullptr;   // at most the code's capacity
  const std::uint32_t* finite = nullptr;  // 0: the rank saw a NaN or Inf
};

// What a rank's block held.
struct DecodedStats {
  std::uint32_t count = 0;    // at most the capacity, whatever the block says
  std::uint32_t finite = 0;   // the sender's flag
  std::uint32_t damaged = 0;  // not 0: indices and values are of no use
  std::uint32_t largest = 0;  // the bits of the largest magnitude of the values
};

// The lists of all ranks, rank r's from r * capacity on.
struct DecodedEntries {
  std::uint32_t* indices = nullptr;
  float* values = nullptr;
  DecodedStats* stats = nullptr;  // one per rank
};

// By the numbers of the wire.
enum class Layout : std::uint8_t { raw = 0, rice = 2, bitmap = 3 };
enum class Values : std::uint8_t { fp32 = 0, bf16 = 1, fp16 = 2, int8 = 3 };

// Bytes of a section of values.
TOPKNOT_HOST_DEVICE std::uint64_t value_bytes(Values values, std::uint64_t count) {
  if (values == Values::fp32) return 4 * count;
  if (values == Values::bf16) return 2 * count;
  if (values == Values::fp16) return count == 0 ? 0 : 1 + 2 * count;
  return (count + int8::kBlock - 1) / int8::kBlock * 4 + count;
}

// Scratch of one block: where its values begin, in bytes, and the largest magnitude seen.
struct BlockPlace {
  std::uint64_t values_at = 0;
  std::uint32_t largest = 0;
  std::uint32_t unused = 0;
};

// A block under way. `sizes` and `starts` have an item for each of Rice's parts, or of the chunks in which a
// bitmap is read; when reading, a row of `parts` items per rank.
struct BlockWork {
  Layout layout = Layout::raw;
  Values values = Values::fp32;
  std::uint32_t numel = 0, capacity = 0;
  std::uint64_t block_bytes = 0;
  int ranks = 1;
  BlockPlace* place = nullptr;  // one, or one per rank
  std::uint32_t parts = 1;      // room of a row
  std::uint32_t* sizes = nullptr;
  std::uint32_t* starts = nullptr;
};

inline constexpr std::uint32_t kBitmapChunk = 32 * 1024;  // bits that a block of threads reads

// Writing, in this order, over zeros: header and positions, then values.
void write_raw(cudaStream_t stream, const BlockWork& work, const DeviceEntries& entries, std::byte* block);
void write_rice(cudaStream_t stream, const BlockWork& work, const DeviceEntries& entries, std::byte* block);
void write_bitmap(cudaStream_t stream, const BlockWork& work, const DeviceEntries& entries, std::byte* block);
void write_values(cudaStream_t stream, const BlockWork& work, const DeviceEntries& entries, std::byte* block);

// Reading, of all ranks at once: headers, then positions, then values.
void read_headers(cudaStream_t stream, const BlockWork& work, const std::byte* blocks,
                  const DecodedEntries& out);
void read_raw(cudaStream_t stream, const BlockWork& work, const std::byte* blocks, const DecodedEntries& out);
void read_rice(cudaStream_t stream, const BlockWork& work, const std::byte* blocks,
               const DecodedEntries& out);
void read_bitmap(cudaStream_t stream, const BlockWork& work, const std::byte* blocks,
                 const DecodedEntries& out);
void read_values(cudaStream_t stream, const BlockWork& work, const std::byte* blocks,
                 const DecodedEntries& out);

}  // namespace topknot::cuda

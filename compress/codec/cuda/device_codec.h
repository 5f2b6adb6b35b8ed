#pragma once
// Coding on a GPU: blocks of compress/codec/codec.h, byte for byte what write_block() makes, written from and
// read into GPU memory. All blocks of a group have one length, the greatest that the capacity allows; zeros
// follow what was written. The layouts raw, rice and bitmap with the value codec fp32, bf16, fp16 and int8
// have kernels. One per group and rank; works in the current context's memory.
//
// A damaged block: read() finds a count above the capacity, and all that read_block() throws Error for except
// bytes after the values, which it does not look at. The CPU throws; here the statistics of the rank say so,
// nothing is written out of bounds, and whoever reads the stats must refuse the step, as all ranks then do.

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "compress/codec/code_bits.h"
#include "nn/base/host_device.h"
#include "nn/core/cuda/context.h"
#include "nn/core/step.h"

namespace topknot::cuda {

// One rank's entries; the count and the flag are on the GPU as well. A list that is not finite has count 0.
struct DeviceEntries {
  const std::uint32_t* indices = nullptr;  // strictly ascending, below numel
  const float* values = nullptr;
  const std::uint32_t* count = nullptr;   // at most the code's capacity
  const std::uint32_t* finite = nullptr;  // 0: the rank saw a NaN or Inf
};

// The contents of a rank's block.
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

// Inputs and outputs of judge(), in GPU memory.
struct Judging {
  const float* weights = nullptr;  // by rank
  const StepParameters* step = nullptr;
  float* kept_weights = nullptr;  // becomes the weights, and after them this rank's own
  StepStatus* status = nullptr;
};
// Whether blocks can be averaged: all finite and undamaged, and no sum can overflow; else the status is bad.
void judge(cudaStream_t stream, const DecodedStats* stats, int ranks, const Judging& judging);

// The numbers are those of the wire format.
enum class Layout : std::uint8_t { raw = 0, rice = 2, bitmap = 3 };
enum class Values : std::uint8_t { fp32 = 0, bf16 = 1, fp16 = 2, int8 = 3 };

TOPKNOT_HOST_DEVICE std::uint64_t value_bytes(Values values, std::uint64_t count) {
  if (values == Values::fp32) return 4 * count;
  if (values == Values::bf16) return 2 * count;
  if (values == Values::fp16) return count == 0 ? 0 : 1 + 2 * count;
  return (count + int8::kBlock - 1) / int8::kBlock * 4 + count;
}

// At the end of each block, zeros when it is written: room for what else a rank tells the others.
inline constexpr std::size_t kTrailerBytes = 16;

// Scratch of one block: where its values begin, in bytes, and the largest magnitude seen.
struct BlockPlace {
  std::uint64_t values_at = 0;
  std::uint32_t largest = 0;
  std::uint32_t unused = 0;
};

// A block under way. `sizes` and `starts` have an item for each of Rice's parts, of the chunks in which a
// bitmap is read, or of the blocks of threads that read a plain list; when reading, `parts` items per rank.
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
  std::uint32_t* calls = nullptr;  // of is_last_block(): one per rank, then the ranks'
};

class DeviceCodec {
 public:
  // For groups of `numel` elements, below 2^31.
  DeviceCodec(Layout layout, Values values, std::size_t numel, int ranks);

  // Whether what read() makes of a value is the value.
  bool exact() const { return work_.values == Values::fp32; }
  // Whether a block is header, indices and values, then zeros.
  bool plain() const { return work_.layout == Layout::raw && exact(); }

  // Sizes scratch memory for `capacity` entries per rank, at most numel; before the first write() or read().
  void set_capacity(std::size_t capacity);
  std::size_t capacity() const { return work_.capacity; }
  // Bytes of one rank's block, a multiple of 16, with kTrailerBytes after the longest block.
  std::size_t block_bytes() const { return work_.block_bytes; }
  std::size_t block_bytes(std::size_t capacity) const;  // of another capacity

  // `block`: block_bytes() aligned to 16, overwritten whole.
  void write(cudaStream_t stream, const DeviceEntries& entries, std::byte* block);
  // `blocks`: by rank. `out`: capacity() indices and values per rank. Judges them if `judging` has a status.
  void read(cudaStream_t stream, const std::byte* blocks, const DecodedEntries& out,
            const Judging& judging = {});

 private:
  BlockWork writing() const;
  BlockWork reading() const;

  BlockWork work_;
  std::uint32_t write_parts_ = 1, read_parts_ = 1;
  DeviceArray<BlockPlace> places_;      // this rank's, then one per rank
  DeviceArray<std::uint32_t> scratch_;  // sizes and starts
  DeviceArray<std::uint32_t> calls_;
};

// The length of the longest block of up to `capacity` entries at any positions, a multiple of 16.
std::size_t longest_block(Layout layout, Values values, std::size_t capacity, std::size_t numel);

// Makes the codec of compress.codec and compress.values; null if there are no kernels for it.
std::unique_ptr<DeviceCodec> make_device_codec(const std::string& code, const std::string& values,
                                               std::size_t numel, int ranks);

// The following is shared by the layouts and value codecs of this folder.

inline constexpr std::uint64_t kHeaderBytes = sizeof(BlockHeader);
inline constexpr std::uint32_t kLargestFiniteBits = 0x7F7FFFFF;  // of a float
inline constexpr std::uint32_t kBitmapChunk = 32 * 1024;         // bits that a block of threads reads

// Writing, in this order, over zeros: header and positions, then values.
void write_rice(cudaStream_t stream, const BlockWork& work, const DeviceEntries& entries, std::byte* block);
void write_bitmap(cudaStream_t stream, const BlockWork& work, const DeviceEntries& entries, std::byte* block);
void write_values(cudaStream_t stream, const BlockWork& work, const DeviceEntries& entries, std::byte* block);

// Reading, of all ranks at once: headers, then positions, then values.
void read_rice(cudaStream_t stream, const BlockWork& work, const std::byte* blocks,
               const DecodedEntries& out);
void read_bitmap(cudaStream_t stream, const BlockWork& work, const std::byte* blocks,
                 const DecodedEntries& out);
void read_values(cudaStream_t stream, const BlockWork& work, const std::byte* blocks,
                 const DecodedEntries& out);

// `at` is any byte of a block, which begins at a multiple of 16.
TOPKNOT_HOST_DEVICE void store_u32(std::byte* block, std::uint64_t at, std::uint32_t word) {
  if ((at & 3) == 0) {
    reinterpret_cast<std::uint32_t*>(block)[at / 4] = word;
    return;
  }
  for (int i = 0; i < 4; ++i) block[at + i] = static_cast<std::byte>(word >> (8 * i));
}
TOPKNOT_HOST_DEVICE std::uint32_t load_u32(const std::byte* block, std::uint64_t at) {
  const auto* words = reinterpret_cast<const std::uint32_t*>(block) + at / 4;
  const unsigned shift = static_cast<unsigned>(at & 3) * 8;
  const std::uint32_t low = words[0];
  return shift == 0 ? low : low >> shift | words[1] << (32 - shift);
}

TOPKNOT_HOST_DEVICE std::uint64_t map_bytes(std::uint64_t numel) {
  return (numel + 7) / 8;
}
TOPKNOT_HOST_DEVICE std::uint32_t rice_parts(std::uint64_t count) {
  return static_cast<std::uint32_t>((count + kRicePart - 1) / kRicePart);
}
// The offset of Rice's bits, after b and the parts' ends.
TOPKNOT_HOST_DEVICE std::uint64_t rice_body(std::uint32_t parts) {
  return kHeaderBytes + 1 + 4 * std::uint64_t{parts};
}

// One thread calls it.
TOPKNOT_HOST_DEVICE void store_header(const BlockWork& work, const DeviceEntries& entries, std::byte* block) {
  auto* const words = reinterpret_cast<std::uint32_t*>(block);
  words[0] = BlockHeader::kMagic;
  words[1] = BlockHeader::kVersion | (*entries.finite != 0 ? BlockHeader::kFiniteFlag : 0u) << 8 |
             static_cast<std::uint32_t>(work.layout) << 16 | static_cast<std::uint32_t>(work.values) << 24;
  words[2] = work.numel;
  words[3] = *entries.count;
}

}  // namespace topknot::cuda

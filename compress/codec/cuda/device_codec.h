#pragma once
// Coding on a GPU: blocks of compress/codec/codec.h, byte for byte what write_block() makes, written from and
// read into GPU memory. All blocks of a group have one length, the greatest that the capacity allows; zeros
// follow what was written. The layouts raw, rice and bitmap with the value codec fp32, bf16, fp16 and int8
// have kernels. One per group and rank; works in the current context's memory.
//
// A damaged block: read() finds a count above the capacity, and all that read_block() throws Error for except
// bytes behind the values, which it does not look at. The CPU throws; here the statistics of the rank say so,
// nothing is written out of bounds, and whoever reads the stats must refuse the step, as all ranks then do.

#include <cuda_runtime_api.h>

#include <cstddef>
#include <memory>
#include <string>

#include "compress/codec/cuda/device_block.h"
#include "nn/core/cuda/context.h"

namespace topknot::cuda {

// At the end of each block, zeros when it is written: room for what a rank tells the others beside its entries, which so
// needs no collective of its own.
inline constexpr std::size_t kTrailerBytes = 16;

class DeviceCodec {
 public:
  // For groups of `numel` elements, below 2^31.
  DeviceCodec(Layout layout, Values values, std::size_t numel, int ranks);

  // Whether what read() makes of a value is the value.
  bool exact() const { return work_.values == Values::fp32; }

  // For `capacity` entries per rank or less, at most numel; before the first write() or read(). Sizes scratch
  // memory.
  void set_capacity(std::size_t capacity);
  std::size_t capacity() const { return work_.capacity; }
  // Of one rank, a multiple of 16; kTrailerBytes of them behind the longest block.
  std::size_t block_bytes() const { return work_.block_bytes; }
  std::size_t block_bytes(std::size_t capacity) const;  // of another capacity

  // `block`: block_bytes() aligned to 16, overwritten whole.
  void write(cudaStream_t stream, const DeviceEntries& entries, std::byte* block);
  // `blocks`: one per rank, in rank order. `out`: capacity() indices and values per rank.
  void read(cudaStream_t stream, const std::byte* blocks, const DecodedEntries& out);

 private:
  BlockWork writing() const;
  BlockWork reading() const;

  BlockWork work_;
  std::uint32_t write_parts_ = 1, read_parts_ = 1;
  DeviceArray<BlockPlace> places_;      // this rank's, then one per rank
  DeviceArray<std::uint32_t> scratch_;  // sizes and starts
};

// The length of the longest block of `capacity` entries or less, whatever their positions, rounded up to a
// multiple of 16.
std::size_t longest_block(Layout layout, Values values, std::size_t capacity, std::size_t numel);

// By compress.codec and compress.values; null for what has no kernels.
std::unique_ptr<DeviceCodec> make_device_codec(const std::string& code, const std::string& values,
                                               std::size_t numel, int ranks);

}  // namespace topknot::cuda

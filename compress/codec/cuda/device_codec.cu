// Headers, the layout raw, plain blocks (raw with fp32) in one launch, the judgement, and the codec.
#include "compress/codec/cuda/device_codec.h"

#include <topknot_kernel.h>

#include <algorithm>
#include <limits>
#include <optional>

#include "nn/base/check.h"
#include "nn/core/cuda/kernel_tools.h"

namespace topknot::cuda {
namespace {

__global__ void __launch_bounds__(kThreads)
    write_raw_kernel(BlockWork work, DeviceEntries entries, std::byte* block) {
  await_previous();
  const std::uint32_t count = *entries.count;
  const std::size_t i = std::size_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i == 0) {
    store_header(work, entries, block);
    *work.place = BlockPlace{kHeaderBytes + 4 * std::uint64_t{count}, 0, 0};
  }
  if (i < count) reinterpret_cast<std::uint32_t*>(block + kHeaderBytes)[i] = entries.indices[i];
}

// A word a thread: header, indices, values, zeros.
__global__ void __launch_bounds__(kThreads)
    write_plain_kernel(BlockWork work, DeviceEntries entries, std::byte* block) {
  await_previous();
  constexpr std::size_t header = kHeaderBytes / 4;
  const std::size_t word = std::size_t{blockIdx.x} * kThreads + threadIdx.x, i = word - header;
  if (word == 0) store_header(work, entries, block);
  if (word < header || word >= work.block_bytes / 4) return;
  const std::size_t count = *entries.count;
  reinterpret_cast<std::uint32_t*>(block)[word] = i < count       ? entries.indices[i]
                                                  : i < 2 * count ? bits_of(entries.values[i - count])
                                                                  : 0;
}

struct Header {
  bool good;
  std::uint32_t count, finite;  // as the block says
};
__device__ Header header_of(const BlockWork& work, const std::byte* block) {
  const auto* const words = reinterpret_cast<const std::uint32_t*>(block);
  const std::uint32_t head = words[1], flags = head >> 8 & 0xFF, count = words[3];
  const std::uint32_t coded = BlockHeader::kVersion | static_cast<std::uint32_t>(work.layout) << 16 |
                              static_cast<std::uint32_t>(work.values) << 24;
  const bool good = words[0] == BlockHeader::kMagic && (head & 0xFFFF00FFu) == coded &&
                    (flags & ~std::uint32_t{BlockHeader::kFiniteFlag}) == 0 && words[2] == work.numel &&
                    count <= work.capacity && count <= work.numel && (flags != 0 || count == 0);
  return {good, count, flags & 1};
}

// One block of threads per rank. What it accepts bounds every later access.
__global__ void __launch_bounds__(kThreads)
    read_headers_kernel(BlockWork work, const std::byte* blocks, DecodedEntries out) {
  await_previous();
  const std::size_t rank = blockIdx.x;
  const std::byte* const block = blocks + rank * work.block_bytes;
  const auto [sound, count, finite] = header_of(work, block);
  bool good = sound;
  std::uint64_t values_at = kHeaderBytes;
  if (good && count > 0 && work.layout == Layout::raw) values_at += 4 * std::uint64_t{count};
  if (good && count > 0 && work.layout == Layout::bitmap) values_at += map_bytes(work.numel);
  if (good && count > 0 && work.layout == Layout::rice) {
    const std::uint32_t parts = rice_parts(count);
    const std::uint64_t body = rice_body(parts);
    good = body <= work.block_bytes &&
           static_cast<unsigned>(block[kHeaderBytes]) == rice_parameter(count, work.numel);
    int wrong = 0;
    std::uint64_t last = 0;
    for (std::uint32_t part = threadIdx.x; good && part < parts; part += kThreads) {
      const std::uint64_t before = part == 0 ? 0 : load_u32(block, rice_body(part - 1));
      const std::uint64_t end = load_u32(block, rice_body(part)), begin = (before + 7) / 8;
      if (end < 8 * begin || body + (end + 7) / 8 > work.block_bytes) wrong = 1;
    }
    good = good && __syncthreads_or(wrong) == 0;
    if (good) last = load_u32(block, rice_body(parts - 1));
    values_at = body + (last + 7) / 8;
  }
  good = good && values_at + value_bytes(work.values, count) <= work.block_bytes;
  if (threadIdx.x != 0) return;
  out.stats[rank] = DecodedStats{good ? count : 0, finite, good ? 0u : 1u, 0};
  work.place[rank] = BlockPlace{values_at, 0, 0};
}

__global__ void __launch_bounds__(kThreads)
    read_raw_kernel(BlockWork work, const std::byte* blocks, DecodedEntries out) {
  await_previous();
  const std::size_t rank = blockIdx.y;
  const auto* const indices =
      reinterpret_cast<const std::uint32_t*>(blocks + rank * work.block_bytes + kHeaderBytes);
  const std::size_t i = std::size_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= out.stats[rank].count) return;
  const std::uint32_t index = indices[i];
  if (index >= work.numel || (i > 0 && indices[i - 1] >= index)) atomicOr(&out.stats[rank].damaged, 1u);
  out.indices[rank * work.capacity + i] = index;
}

// One block of threads calls it; thread 0 adds in rank order, as the CPU does.
__device__ void judge_ranks(const DecodedStats* stats, int ranks, const Judging& judging) {
  __shared__ double terms[kThreads];  // negative: not finite, or damaged
  double bound = 0;
  int bad_rank = -1;
  for (int first = 0; first < ranks; first += kThreads) {
    const int mine = first + static_cast<int>(threadIdx.x);
    if (mine < ranks) {
      const DecodedStats found = stats[mine];
      const float weight = judging.weights[mine];
      judging.kept_weights[mine] = weight;
      terms[threadIdx.x] = found.finite == 0 || found.damaged != 0
                               ? -1.0
                               : static_cast<double>(weight) * static_cast<double>(float_of(found.largest));
    }
    __syncthreads();
    for (int i = 0; threadIdx.x == 0 && i < kThreads && first + i < ranks; ++i) {
      if (terms[i] < 0 && bad_rank < 0) bad_rank = first + i;
      bound += terms[i];
    }
    __syncthreads();
  }
  if (threadIdx.x != 0) return;
  StepStatus* const status = judging.status;
  judging.kept_weights[ranks] = judging.weights[judging.step->rank];
  if (bad_rank >= 0 && (status->bad_rank < 0 || bad_rank < status->bad_rank)) status->bad_rank = bad_rank;
  if (bad_rank >= 0 || !(bound <= static_cast<double>(float_of(kLargestFiniteBits)))) status->bad = 1;
}

__global__ void __launch_bounds__(kThreads)
    judge_kernel(const DecodedStats* stats, int ranks, Judging judging) {
  await_previous();
  judge_ranks(stats, ranks, judging);
}

// An entry a thread, a row of blocks a rank. A rank's last block gathers its results, the last rank's judges.
__global__ void __launch_bounds__(kThreads)
    read_plain_kernel(BlockWork work, const std::byte* blocks, DecodedEntries out, Judging judging) {
  await_previous();
  constexpr std::uint32_t kDamaged = 0x80000000;
  const std::size_t rank = blockIdx.y, i = std::size_t{blockIdx.x} * kThreads + threadIdx.x;
  const std::byte* const block = blocks + rank * work.block_bytes;
  const Header header = header_of(work, block);
  const std::uint32_t count = header.good ? header.count : 0;
  const std::uint32_t parts =
      count > kThreads ? (count + kThreads - 1) / kThreads : 1;  // that there is work for
  if (blockIdx.x >= parts) return;
  const auto* const indices = reinterpret_cast<const std::uint32_t*>(block + kHeaderBytes);
  std::uint32_t* const found = work.sizes + rank * work.parts;
  std::uint32_t magnitude = 0;
  bool damaged = false;
  if (i < count) {
    const std::uint32_t index = indices[i], bits = indices[count + i];
    magnitude = bits & 0x7FFFFFFF;
    damaged = index >= work.numel || (i > 0 && indices[i - 1] >= index) || magnitude > kLargestFiniteBits;
    out.indices[rank * work.capacity + i] = index;
    out.values[rank * work.capacity + i] = float_of(bits);
  }
  magnitude = block_max(magnitude);
  damaged = __syncthreads_or(damaged);
  if (threadIdx.x == 0) found[blockIdx.x] = magnitude | (damaged ? kDamaged : 0);
  if (!is_last_block(work.calls + rank, parts)) return;
  damaged = !header.good, magnitude = 0;
  for (std::uint32_t part = threadIdx.x; part < parts; part += kThreads) {
    const std::uint32_t other = found[part];
    damaged |= (other & kDamaged) != 0;
    if ((other & ~kDamaged) > magnitude) magnitude = other & ~kDamaged;
  }
  magnitude = block_max(magnitude);
  damaged = __syncthreads_or(damaged);
  if (threadIdx.x == 0) out.stats[rank] = {count, header.finite, damaged ? 1u : 0u, magnitude};
  if (judging.status && is_last_block(work.calls + work.ranks, gridDim.y))
    judge_ranks(out.stats, work.ranks, judging);
}

std::size_t parts_of(std::size_t n, std::size_t each) {
  return (n + each - 1) / each;
}

// The most that `count` positions take under their b: runs of numel - count at most, 7 bits lost for a part.
std::size_t rice_section(std::size_t count, std::size_t numel) {
  const unsigned b = rice_parameter(count, numel);
  const std::size_t parts = parts_of(count, kRicePart);
  return 1 + 4 * parts + (count * (1 + b) + ((numel - count) >> b) + 7 * parts) / 8;
}

std::size_t longest_rice(Values values, std::size_t capacity, std::size_t numel) {
  // b falls as the count grows, and with one b the length grows: the longest block has a b's greatest count.
  std::size_t longest = 0, count = capacity;
  while (count > 0) {
    longest = std::max(longest, rice_section(count, numel) + value_bytes(values, count));
    const unsigned b = rice_parameter(count, numel);
    std::size_t below = 0, above = count;  // b is greater at `below` (or that is 0), the same at `above`
    while (above - below > 1) {
      const std::size_t middle = (below + above) / 2;
      (rice_parameter(middle, numel) > b ? below : above) = middle;
    }
    count = below;
  }
  return longest;
}

template <class Code>
std::optional<Code> by_name(const std::string& name,
                            std::initializer_list<std::pair<const char*, Code>> known) {
  for (const auto& [its, code] : known)
    if (name == its) return code;
  return std::nullopt;
}

}  // namespace

void judge(cudaStream_t stream, const DecodedStats* stats, int ranks, const Judging& judging) {
  launch(judge_kernel, dim3(1), kThreads, stream, stats, ranks, judging);
}

std::size_t longest_block(Layout layout, Values values, std::size_t capacity, std::size_t numel) {
  std::size_t body = 0;
  if (capacity > 0 && layout == Layout::rice) body = longest_rice(values, capacity, numel);
  if (capacity > 0 && layout == Layout::raw) body = 4 * capacity + value_bytes(values, capacity);
  if (capacity > 0 && layout == Layout::bitmap) body = map_bytes(numel) + value_bytes(values, capacity);
  return (kHeaderBytes + body + 15) / 16 * 16;
}

DeviceCodec::DeviceCodec(Layout layout, Values values, std::size_t numel, int ranks) {
  TOPKNOT_CHECK(numel <= std::numeric_limits<std::int32_t>::max() && ranks >= 1 && ranks <= 65535,
                "a group of this size has no blocks");
  work_.layout = layout;
  work_.values = values;
  work_.numel = static_cast<std::uint32_t>(numel);
  work_.ranks = ranks;
  places_ = DeviceArray<BlockPlace>(1 + static_cast<std::size_t>(ranks));
  calls_ = DeviceArray<std::uint32_t>(1 + static_cast<std::size_t>(ranks));
  TOPKNOT_CUDA(cudaMemsetAsync(calls_.data(), 0, calls_.bytes(), Context::current().stream()));
}

std::size_t DeviceCodec::block_bytes(std::size_t capacity) const {
  return longest_block(work_.layout, work_.values, capacity, work_.numel) + kTrailerBytes;
}

void DeviceCodec::set_capacity(std::size_t capacity) {
  TOPKNOT_CHECK(capacity <= work_.numel, "a capacity above the group's length");
  work_.capacity = static_cast<std::uint32_t>(capacity);
  work_.block_bytes = block_bytes(capacity);
  const auto at_least_one = [](std::size_t n) {
    return static_cast<std::uint32_t>(std::max<std::size_t>(n, 1));
  };
  write_parts_ = at_least_one(parts_of(capacity, kRicePart));
  read_parts_ = work_.layout == Layout::bitmap ? at_least_one(parts_of(work_.numel, kBitmapChunk))
                : plain()                      ? at_least_one(parts_of(capacity, kThreads))
                                               : write_parts_;
  const std::size_t words = 2 * (write_parts_ + read_parts_ * static_cast<std::size_t>(work_.ranks));
  if (words > scratch_.size()) scratch_ = DeviceArray<std::uint32_t>(words);
}

BlockWork DeviceCodec::writing() const {
  BlockWork work = work_;
  work.ranks = 1;
  work.place = places_.data();
  work.parts = write_parts_;
  work.sizes = scratch_.data();
  work.starts = work.sizes + write_parts_;
  return work;
}

BlockWork DeviceCodec::reading() const {
  BlockWork work = work_;
  work.place = places_.data() + 1;
  work.parts = read_parts_;
  work.sizes = scratch_.data() + 2 * std::size_t{write_parts_};
  work.starts = work.sizes + read_parts_ * static_cast<std::size_t>(work_.ranks);
  work.calls = calls_.data();
  return work;
}

void DeviceCodec::write(cudaStream_t stream, const DeviceEntries& entries, std::byte* block) {
  TOPKNOT_CHECK(work_.block_bytes > 0, "set_capacity() comes first");
  const BlockWork work = writing();
  if (plain())
    return launch(write_plain_kernel, grid_for(work.block_bytes / 4, kThreads), kThreads, stream, work,
                  entries, block);
  TOPKNOT_CUDA(cudaMemsetAsync(block, 0, work.block_bytes, stream));
  if (work.layout == Layout::raw)
    launch(write_raw_kernel, grid_for(work.capacity, kThreads), kThreads, stream, work, entries, block);
  if (work.layout == Layout::rice) write_rice(stream, work, entries, block);
  if (work.layout == Layout::bitmap) write_bitmap(stream, work, entries, block);
  write_values(stream, work, entries, block);
}

void DeviceCodec::read(cudaStream_t stream, const std::byte* blocks, const DecodedEntries& out,
                       const Judging& judging) {
  TOPKNOT_CHECK(work_.block_bytes > 0, "set_capacity() comes first");
  const BlockWork work = reading();
  const auto ranks = static_cast<unsigned>(work.ranks);
  if (plain()) {
    const dim3 grid(work.parts, ranks);
    return launch(read_plain_kernel, grid, kThreads, stream, work, blocks, out, judging);
  }
  launch(read_headers_kernel, dim3(ranks), kThreads, stream, work, blocks, out);
  if (work.layout == Layout::raw) {
    dim3 grid = grid_for(work.capacity, kThreads);
    grid.y = ranks;
    launch(read_raw_kernel, grid, kThreads, stream, work, blocks, out);
  }
  if (work.layout == Layout::rice) read_rice(stream, work, blocks, out);
  if (work.layout == Layout::bitmap) read_bitmap(stream, work, blocks, out);
  read_values(stream, work, blocks, out);
  if (judging.status) judge(stream, out.stats, work.ranks, judging);
}

std::unique_ptr<DeviceCodec> make_device_codec(const std::string& code, const std::string& values,
                                               std::size_t numel, int ranks) {
  const auto layout =
      by_name<Layout>(code, {{"raw", Layout::raw}, {"rice", Layout::rice}, {"bitmap", Layout::bitmap}});
  const auto value_codec = by_name<Values>(
      values,
      {{"fp32", Values::fp32}, {"bf16", Values::bf16}, {"fp16", Values::fp16}, {"int8", Values::int8}});
  if (!layout || !value_codec) return nullptr;
  return std::make_unique<DeviceCodec>(*layout, *value_codec, numel, ranks);
}

}  // namespace topknot::cuda

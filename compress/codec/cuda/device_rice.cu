// The layout rice: a block of threads writes a part, or reads one.
#include <topknot_kernel.h>

#include "compress/codec/cuda/device_codec.h"
#include "nn/core/cuda/kernel_tools.h"

namespace topknot::cuda {
namespace {

constexpr std::uint32_t kEach = kRicePart / kThreads;  // entries of a part that a thread takes

// A thread's entries of a part and the bits they take.
struct Mine {
  std::uint32_t begin, end, next;  // entries; the first position that the first of them may have
};
__device__ Mine my_entries(const std::uint32_t* indices, std::uint32_t count) {
  const std::uint32_t begin = blockIdx.x * kRicePart + threadIdx.x * kEach;
  Mine mine{begin < count ? begin : count, begin + kEach < count ? begin + kEach : count, 0};
  if (mine.begin > 0 && mine.begin < mine.end) mine.next = indices[mine.begin - 1] + 1;
  return mine;
}
__device__ std::uint32_t bits_of_entries(const std::uint32_t* indices, const Mine& mine, unsigned b) {
  std::uint32_t bits = (mine.end - mine.begin) * (1 + b), next = mine.next;
  for (std::uint32_t i = mine.begin; i < mine.end; ++i) {
    const std::uint32_t index = indices[i];
    bits += (index - next) >> b;
    next = index + 1;
  }
  return bits;
}

__global__ void __launch_bounds__(kThreads) part_bits_kernel(BlockWork work, DeviceEntries entries) {
  await_previous();
  const std::uint32_t count = *entries.count;
  if (blockIdx.x >= rice_parts(count)) return;
  const unsigned b = rice_parameter(count, work.numel);
  std::uint32_t total = 0;
  block_exclusive_sum(bits_of_entries(entries.indices, my_entries(entries.indices, count), b), total);
  if (threadIdx.x == 0) work.sizes[blockIdx.x] = total;
}

// One block of threads: the header, b, where each part's bits end, and where (in bytes) they begin.
__global__ void __launch_bounds__(kThreads)
    part_ends_kernel(BlockWork work, DeviceEntries entries, std::byte* block) {
  await_previous();
  const std::uint32_t count = *entries.count, parts = rice_parts(count);
  std::uint64_t base = 0;  // bytes
  for (std::uint32_t first = 0; first < parts; first += kThreads) {
    const std::uint32_t part = first + threadIdx.x, bits = part < parts ? work.sizes[part] : 0;
    std::uint64_t total = 0;
    const std::uint64_t begin = base + block_exclusive_sum((std::uint64_t{bits} + 7) / 8, total);
    base += total;
    if (part >= parts) continue;
    work.starts[part] = static_cast<std::uint32_t>(begin);
    store_u32(block, rice_body(part), static_cast<std::uint32_t>(8 * begin + bits));
  }
  if (threadIdx.x != 0) return;
  store_header(work, entries, block);
  if (count > 0) block[kHeaderBytes] = static_cast<std::byte>(rice_parameter(count, work.numel));
  *work.place = BlockPlace{count == 0 ? kHeaderBytes : rice_body(parts) + base, 0, 0};
}

// Bits go into words that are zero, or hold what others wrote; a run's zeros are there already.
__global__ void __launch_bounds__(kThreads)
    write_parts_kernel(BlockWork work, DeviceEntries entries, std::byte* block) {
  await_previous();
  const std::uint32_t count = *entries.count, parts = rice_parts(count);
  if (blockIdx.x >= parts) return;
  const unsigned b = rice_parameter(count, work.numel);
  const Mine mine = my_entries(entries.indices, count);
  std::uint32_t total = 0;
  const std::uint32_t before = block_exclusive_sum(bits_of_entries(entries.indices, mine, b), total);
  std::uint64_t at = 8 * (rice_body(parts) + work.starts[blockIdx.x]) + before;
  auto* const words = reinterpret_cast<std::uint32_t*>(block);
  std::uint32_t next = mine.next;
  for (std::uint32_t i = mine.begin; i < mine.end; ++i) {
    const std::uint32_t index = entries.indices[i], run = index - next;
    next = index + 1;
    at += run >> b;
    // The one that ends the unary part, and the remainder above it: b + 1 bits, at most 31.
    const std::uint64_t bits = (1 | std::uint64_t{run & ((1u << b) - 1)} << 1) << (at & 31);
    atomicOr(words + at / 32, static_cast<std::uint32_t>(bits));
    if (bits >> 32 != 0) atomicOr(words + at / 32 + 1, static_cast<std::uint32_t>(bits >> 32));
    at += b + 1;
  }
}

// A part's bits, from its first byte on. Beyond them there are zeros.
struct PartBits {
  const std::uint32_t* words;  // of the block
  std::uint64_t begin, end;    // bits of the block

  // 64 bits from a bit of the part on.
  __device__ std::uint64_t from(std::uint64_t bit) const {
    const std::uint64_t at = begin + bit;
    if (at >= end) return 0;
    const unsigned shift = static_cast<unsigned>(at & 31);
    std::uint64_t window = word(at / 32) | std::uint64_t{word(at / 32 + 1)} << 32;
    window >>= shift;
    if (shift != 0) window |= std::uint64_t{word(at / 32 + 2)} << (64 - shift);
    return end - at >= 64 ? window : window & ((std::uint64_t{1} << (end - at)) - 1);
  }
  // Zeros from a bit on, to the next one; more than `most` if there are that many.
  __device__ std::uint64_t zeros(std::uint64_t bit, std::uint64_t most) const {
    for (std::uint64_t count = 0;; count += 64) {
      const std::uint64_t window = from(bit + count);
      if (window != 0) return count + static_cast<std::uint64_t>(__ffsll(static_cast<long long>(window)) - 1);
      if (count > most) return count;
    }
  }

 private:
  __device__ std::uint32_t word(std::uint64_t at) const { return 32 * at < end ? words[at] : 0; }
};

// A code word ends where its own bits say, so they can only be read one after the other. But where one that
// began at a bit would end can be found for all bits at once; following these jumps twice, four times and so
// on, the threads find all the beginnings in ten rounds. Bits are looked at in windows.
constexpr std::uint32_t kWindow = 8192;    // bits
constexpr std::uint16_t kBeyond = 0xFFFF;  // a jump out of the window

// A part is read by a block of threads: positions from the part's first possible one on. `sizes` gets how
// many positions it spans, or 0 if it is damaged.
__global__ void __launch_bounds__(kThreads)
    read_parts_kernel(BlockWork work, const std::byte* blocks, DecodedEntries out) {
  await_previous();
  __shared__ std::uint16_t jumps[2][kWindow];
  __shared__ std::uint16_t begins[kRicePart];
  __shared__ std::uint64_t next_window;
  __shared__ std::uint32_t found;  // entries that begin in the window
  const std::size_t rank = blockIdx.y;
  const std::byte* const block = blocks + rank * work.block_bytes;
  const std::uint32_t part = blockIdx.x, count = out.stats[rank].count, parts = rice_parts(count);
  if (part >= parts) return;
  const unsigned b = rice_parameter(count, work.numel);
  const std::uint64_t before = part == 0 ? 0 : load_u32(block, rice_body(part - 1));
  const std::uint64_t first = (before + 7) / 8, bits = load_u32(block, rice_body(part)) - 8 * first;
  const std::uint64_t begin = 8 * (rice_body(parts) + first);
  const PartBits source{reinterpret_cast<const std::uint32_t*>(block), begin, begin + bits};
  const std::uint32_t entries = count - part * kRicePart < kRicePart ? count - part * kRicePart : kRicePart;
  std::uint32_t* const to = out.indices + rank * work.capacity + std::size_t{part} * kRicePart;

  std::uint32_t done = 0;                 // entries
  std::uint64_t window = 0, spanned = 0;  // bits and positions before this window
  int wrong = 0;
  while (done < entries && wrong == 0) {
    const std::uint32_t size = bits - window < kWindow ? static_cast<std::uint32_t>(bits - window) : kWindow;
    for (std::uint32_t p = threadIdx.x; p < size; p += kThreads) {
      const std::uint64_t end = p + source.zeros(window + p, size) + 1 + b;
      jumps[0][p] = end < size ? static_cast<std::uint16_t>(end) : kBeyond;
    }
    for (std::uint32_t i = threadIdx.x; i < kRicePart; i += kThreads)
      begins[i] = i == 0 && size > 0 ? 0 : kBeyond;
    __syncthreads();
    std::uint32_t known = 1;
    const std::uint32_t wanted = entries - done;
    for (int from = 0; known < wanted; from = 1 - from, known *= 2) {
      for (std::uint32_t i = threadIdx.x; i < known && i + known < wanted; i += kThreads)
        if (begins[i] != kBeyond) begins[i + known] = jumps[from][begins[i]];
      for (std::uint32_t p = threadIdx.x; p < size; p += kThreads) {
        const std::uint16_t at = jumps[from][p];
        jumps[1 - from][p] = at == kBeyond ? kBeyond : jumps[from][at];
      }
      __syncthreads();
    }
    // Each thread reads the code words of a few entries.
    std::uint64_t runs[kEach], mine = 0, total = 0;
    for (std::uint32_t j = 0; j < kEach; ++j) {
      const std::uint32_t i = threadIdx.x * kEach + j;
      runs[j] = 0;
      if (i >= wanted || begins[i] == kBeyond) continue;
      const std::uint64_t at = window + begins[i], quotient = source.zeros(at, bits - at);
      const std::uint64_t end = at + quotient + 1 + b;
      const std::uint64_t remainder = source.from(at + quotient + 1) & ((std::uint64_t{1} << b) - 1);
      runs[j] = (quotient << b) + remainder + 1;
      if (end > bits || runs[j] > work.numel) wrong = 1;
      mine += runs[j];
      if (i + 1 == wanted || begins[i + 1] == kBeyond) {  // the last one that begins in this window
        next_window = end;
        found = i + 1;
      }
    }
    std::uint64_t position = spanned + block_exclusive_sum(mine, total);
    for (std::uint32_t j = 0; j < kEach; ++j) {
      if (runs[j] == 0) continue;
      position += runs[j];
      if (position > work.numel) wrong = 1;
      to[done + threadIdx.x * kEach + j] = static_cast<std::uint32_t>(position - 1);
    }
    if (size == 0) wrong = 1;
    wrong = __syncthreads_or(wrong);
    if (wrong == 0) {
      done += found;
      window = next_window;
      spanned += total;
    }
    __syncthreads();
  }
  if (threadIdx.x != 0) return;
  // The rest of the last byte is zero.
  const PartBits rest{source.words, begin + bits, (begin + bits + 7) / 8 * 8};
  const bool good = wrong == 0 && window == bits && rest.from(0) == 0;
  work.sizes[rank * work.parts + part] = good ? static_cast<std::uint32_t>(spanned) : 0;
}

// One block of threads per rank: where each part begins.
__global__ void __launch_bounds__(kThreads) part_starts_kernel(BlockWork work, DecodedEntries out) {
  await_previous();
  const std::size_t rank = blockIdx.x;
  const std::uint32_t parts = rice_parts(out.stats[rank].count);
  const std::uint32_t* const spans = work.sizes + rank * work.parts;
  std::uint32_t* const starts = work.starts + rank * work.parts;
  std::uint64_t base = 0;
  int wrong = 0;
  for (std::uint32_t first = 0; first < parts; first += kThreads) {
    const std::uint32_t part = first + threadIdx.x, span = part < parts ? spans[part] : 0;
    if (part < parts && span == 0) wrong = 1;
    std::uint64_t total = 0;
    const std::uint64_t before = base + block_exclusive_sum(std::uint64_t{span}, total);
    if (part < parts) starts[part] = static_cast<std::uint32_t>(before);
    base += total;
  }
  wrong = __syncthreads_or(wrong);
  if (threadIdx.x == 0 && (wrong != 0 || base > work.numel)) out.stats[rank].damaged = 1;
}

__global__ void __launch_bounds__(kThreads) add_starts_kernel(BlockWork work, DecodedEntries out) {
  const std::size_t rank = blockIdx.y, i = awaited_index();
  const DecodedStats& stats = out.stats[rank];
  if (i < stats.count && stats.damaged == 0)
    out.indices[rank * work.capacity + i] += work.starts[rank * work.parts + i / kRicePart];
}

}  // namespace

void write_rice(cudaStream_t stream, const BlockWork& work, const DeviceEntries& entries, std::byte* block) {
  const dim3 parts = grid_for(work.capacity, kRicePart);
  launch(part_bits_kernel, parts, kThreads, stream, work, entries);
  launch(part_ends_kernel, dim3(1), kThreads, stream, work, entries, block);
  launch(write_parts_kernel, parts, kThreads, stream, work, entries, block);
}

void read_rice(cudaStream_t stream, const BlockWork& work, const std::byte* blocks,
               const DecodedEntries& out) {
  const auto ranks = static_cast<unsigned>(work.ranks);
  dim3 parts = grid_for(work.capacity, kRicePart), all = grid_for(work.capacity, kThreads);
  parts.y = all.y = ranks;
  launch(read_parts_kernel, parts, kThreads, stream, work, blocks, out);
  launch(part_starts_kernel, dim3(ranks), kThreads, stream, work, out);
  launch(add_starts_kernel, all, kThreads, stream, work, out);
}

}  // namespace topknot::cuda

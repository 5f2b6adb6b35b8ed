// The layout rice: a block of threads writes a part, a warp reads one.
#include "compress/code/device_block_tools.h"

namespace topknot::cuda {
namespace {

constexpr std::uint32_t kEach = kRicePart / kThreads;  // entries of a part that a thread writes
constexpr int kWarps = kThreads / 32;

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

// Bits of a block from a byte on, a word ahead. Beyond the block there are zeros.
class BitReader {
 public:
  __device__ BitReader(const std::uint32_t* words, std::uint64_t limit, std::uint64_t byte)
      : words_(words), limit_(limit), word_(byte / 4) {
    const unsigned skip = static_cast<unsigned>(byte & 3) * 8;
    buffer_ = word() >> skip;
    left_ = 32 - skip;
    ahead_ = word();
  }
  // Zeros up to the next one, which is taken as well; more than `most` where there are that many.
  __device__ std::uint64_t unary(std::uint64_t most) {
    std::uint64_t zeros = 0;
    for (refill(); buffer_ == 0; refill()) {
      zeros += left_;
      left_ = 0;
      if (zeros > most) return zeros;
    }
    const auto run = static_cast<unsigned>(__ffsll(static_cast<long long>(buffer_)) - 1);
    buffer_ = buffer_ >> run >> 1;
    left_ -= run + 1;
    return zeros + run;
  }
  __device__ std::uint32_t get(unsigned bits) {  // at most 31
    refill();
    const auto value = static_cast<std::uint32_t>(buffer_ & ((std::uint64_t{1} << bits) - 1));
    buffer_ >>= bits;
    left_ -= bits;
    return value;
  }

 private:
  __device__ std::uint32_t word() { return word_ < limit_ ? words_[word_++] : 0; }
  __device__ void refill() {
    if (left_ > 32) return;
    buffer_ |= std::uint64_t{ahead_} << left_;
    left_ += 32;
    ahead_ = word();
  }
  const std::uint32_t* words_;
  std::uint64_t limit_, word_, buffer_;
  std::uint32_t ahead_;
  unsigned left_;  // valid bits of buffer_; the others are 0
};

// Positions of one part, from the part's first possible one on. Returns how many positions it spans, or 0 where
// it is damaged.
__device__ std::uint32_t read_part(BitReader reader, std::uint64_t bits, unsigned b, std::uint32_t numel,
                                   std::uint32_t entries, std::uint32_t* out) {
  std::uint64_t next = 0, used = 0;
  for (std::uint32_t i = 0; i < entries; ++i) {
    const std::uint64_t quotient = reader.unary(bits - used);
    used += quotient + 1 + b;
    if (used > bits) return 0;
    next += (quotient << b) + reader.get(b);
    if (next >= numel) return 0;
    out[i] = static_cast<std::uint32_t>(next++);
  }
  if (used != bits || reader.get(static_cast<unsigned>(-bits & 7)) != 0) return 0;
  return static_cast<std::uint32_t>(next);
}

__global__ void __launch_bounds__(kThreads)
    read_parts_kernel(BlockWork work, const std::byte* blocks, DecodedEntries out) {
  if ((threadIdx.x & 31) != 0) return;  // one code word begins where the last one ends
  const std::size_t rank = blockIdx.y;
  const std::byte* const block = blocks + rank * work.block_bytes;
  const std::uint32_t part = blockIdx.x * kWarps + threadIdx.x / 32, count = out.facts[rank].count;
  const std::uint32_t parts = rice_parts(count);
  if (part >= parts) return;
  const std::uint64_t before = part == 0 ? 0 : load_u32(block, rice_body(part - 1));
  const std::uint64_t begin = (before + 7) / 8, bits = load_u32(block, rice_body(part)) - 8 * begin;
  const BitReader reader(reinterpret_cast<const std::uint32_t*>(block), work.block_bytes / 4,
                         rice_body(parts) + begin);
  const std::uint32_t first = part * kRicePart;
  work.sizes[rank * work.parts + part] = read_part(
      reader, bits, rice_parameter(count, work.numel), work.numel,
      count - first < kRicePart ? count - first : kRicePart, out.indices + rank * work.capacity + first);
}

// One block of threads a rank: where each part begins.
__global__ void __launch_bounds__(kThreads) part_starts_kernel(BlockWork work, DecodedEntries out) {
  const std::size_t rank = blockIdx.x;
  const std::uint32_t parts = rice_parts(out.facts[rank].count);
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
  if (threadIdx.x == 0 && (wrong != 0 || base > work.numel)) out.facts[rank].damaged = 1;
}

__global__ void __launch_bounds__(kThreads) add_starts_kernel(BlockWork work, DecodedEntries out) {
  const std::size_t rank = blockIdx.y, i = std::size_t{blockIdx.x} * kThreads + threadIdx.x;
  const DecodedFacts& facts = out.facts[rank];
  if (i < facts.count && facts.damaged == 0)
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
  dim3 parts = grid_for(work.capacity, std::size_t{kRicePart} * kWarps),
       all = grid_for(work.capacity, kThreads);
  parts.y = all.y = ranks;
  launch(read_parts_kernel, parts, kThreads, stream, work, blocks, out);
  launch(part_starts_kernel, dim3(ranks), kThreads, stream, work, out);
  launch(add_starts_kernel, all, kThreads, stream, work, out);
}

}  // namespace topknot::cuda

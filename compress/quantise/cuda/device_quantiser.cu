// signsgd and qsgd on a GPU, with the bits of compress/quantise/compressor.h.
#include <topknot_kernel.h>

#include <algorithm>
#include <vector>

#include "compress/codec/cuda/device_codec.h"
#include "compress/cuda/device_compressor.h"
#include "compress/quantise/compressor.h"
#include "compress/state.h"
#include "nn/base/check.h"
#include "nn/core/cuda/kernel_tools.h"
#include "nn/core/rng.h"

namespace topknot::cuda {
namespace {

using quantise::BlockHeader, quantise::Kind;

constexpr std::uint32_t kTile = 4096;  // floats; 16 KiB

// A format of compress/quantise/block.h with the cells' ends in GPU memory.
struct QuantisedFormat {
  quantise::Kind kind = quantise::Kind::sign;
  std::uint32_t bits = 1, levels = 1, numel = 0, cells = 0;
  const std::uint32_t* ends = nullptr;
  std::uint64_t block_bytes = 0;  // of a rank, a multiple of 16

  TOPKNOT_HOST_DEVICE std::uint64_t codes_at() const {
    return sizeof(quantise::BlockHeader) + 4 * std::uint64_t{cells};
  }
};

// A piece of a cell over which magnitudes are summed in order: a chunk for signs, the whole cell for levels.
struct QuantisedPiece {
  std::uint32_t cell, begin, end;
};

__device__ bool finite(float x) {
  return (__float_as_uint(x) & 0x7FFFFFFFu) <= kLargestFiniteBits;
}

// u = gradient + residual over the gradient, or the gradient as it is (null). sums: of each piece, of
// magnitudes (kLanes = kSignLanes) or of squares. *broken: 1 if u is not finite. A block has the pieces from spans[b]
// to spans[b + 1]: its threads fetch a tile of them at a time, as memory likes it, and kLanes neighbouring threads
// add up a piece, as on the CPU.
template <int kLanes>
__global__ void __launch_bounds__(kThreads)
    sums_kernel(float* u, const float* residual, const QuantisedPiece* pieces, const std::uint32_t* spans,
                double* sums, std::uint32_t* broken) {
  await_previous();
  __shared__ float tile[kTile];
  const std::uint32_t first = spans[blockIdx.x], past = spans[blockIdx.x + 1];
  const std::uint32_t begin = pieces[first].begin, end = pieces[past - 1].end;
  const std::uint32_t index = first + threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
  const QuantisedPiece mine = index < past ? pieces[index] : QuantisedPiece{0, 0, 0};
  std::uint32_t next = mine.begin + lane;
  double sum = 0;
  bool bad = false;
  for (std::uint32_t base = begin; base < end; base += kTile) {
    const std::uint32_t there = end - base < kTile ? end - base : kTile;
#pragma unroll 8
    for (std::uint32_t i = threadIdx.x; i < there; i += kThreads) {
      float x = u[base + i];
      if (residual) {
        x += residual[base + i];
        u[base + i] = x;
      }
      bad |= !finite(x);
      tile[i] = x;
    }
    __syncthreads();
    const std::uint32_t stop = mine.end < base + there ? mine.end : base + there;
#pragma unroll 8
    for (; next < stop; next += kLanes) {
      const double term = static_cast<double>(tile[next - base]);
      sum += kLanes == quantise::kSignLanes ? (term < 0 ? -term : term) : term * term;
    }
    __syncthreads();
  }
  // Lanes are added in order.
  double total = 0;
  for (int l = 0; l < kLanes; ++l)
    total += __shfl_sync(kAllLanes, sum, static_cast<int>(threadIdx.x & 31u) / kLanes * kLanes + l);
  if (index < past && lane == 0) sums[index] = total;
  if (bad) atomicOr(broken, 1u);
}

// The cells' scales. `first`: of each cell, and after the last: where its pieces begin. *broken: 1 if one is
// not finite. Signs: a block a cell, whose pieces are added in order by one thread.
__global__ void __launch_bounds__(kThreads)
    mean_kernel(QuantisedFormat format, const double* sums, const std::uint32_t* first, float* scales,
                std::uint32_t* broken) {
  await_previous();
  __shared__ double staged[kThreads];
  const std::uint32_t cell = blockIdx.x, end = first[cell + 1];
  double total = 0;
  for (std::uint32_t begin = first[cell]; begin < end; begin += kThreads) {
    if (begin + threadIdx.x < end) staged[threadIdx.x] = sums[begin + threadIdx.x];
    __syncthreads();
    for (std::uint32_t i = 0; threadIdx.x == 0 && i < kThreads && begin + i < end; ++i) total += staged[i];
    __syncthreads();
  }
  if (threadIdx.x != 0) return;
  const std::uint32_t n = format.ends[cell] - (cell == 0 ? 0 : format.ends[cell - 1]);
  scales[cell] = static_cast<float>(total / static_cast<double>(n));
  if (!finite(scales[cell])) atomicOr(broken, 1u);
}

// Levels: the norm, rounded up to float.
__global__ void __launch_bounds__(kThreads)
    norm_kernel(QuantisedFormat format, const double* sums, float* scales, std::uint32_t* broken) {
  await_previous();
  const std::uint32_t cell = blockIdx.x * kThreads + threadIdx.x;
  if (cell >= format.cells) return;
  const double norm = sqrt(sums[cell]);
  float rounded = static_cast<float>(norm);
  if (static_cast<double>(rounded) < norm) rounded = __uint_as_float(__float_as_uint(rounded) + 1);
  scales[cell] = rounded;
  if (!finite(rounded)) atomicOr(broken, 1u);
}

// The cell of entry i, from one that is not after it.
__device__ std::uint32_t cell_from(const QuantisedFormat& format, std::uint32_t cell, std::uint32_t i) {
  while (format.ends[cell] <= i) ++cell;
  return cell;
}
__device__ std::uint32_t cell_of(const QuantisedFormat& format, std::uint32_t i) {
  std::uint32_t begin = 0, count = format.cells;
  while (count > 0) {
    const std::uint32_t half = count / 2;
    if (format.ends[begin + half] <= i)
      begin += half + 1, count -= half + 1;
    else
      count = half;
  }
  return begin;
}

__device__ std::uint32_t code_of(const QuantisedFormat& format, float x, float scale, PhiloxStream rng,
                                 std::uint64_t position) {
  if (format.kind == Kind::sign) return x < 0 ? 1 : 0;
  if (scale == 0) return 0;
  const float uniform = uniform_of(rng.block(position / 4).words[position % 4]);
  const int level = quantise::level_of(x < 0 ? -x : x, uniform, scale, static_cast<float>(format.levels));
  return static_cast<std::uint32_t>(level) | (x < 0 && level > 0 ? 1u << (format.bits - 1) : 0u);
}

// This rank's block. `rng`: of the method's seed; `offset`: of the group in the model. A block of threads
// makes the codes of as many entries, and then the words that hold them.
__global__ void __launch_bounds__(kThreads)
    write_kernel(QuantisedFormat format, const float* u, const float* scales, const std::uint32_t* broken,
                 const StepParameters* step, PhiloxStream rng, std::uint64_t offset, std::byte* block,
                 StepStatus* status) {
  await_previous();
  __shared__ std::uint32_t codes[kThreads], first_cell;
  const std::uint32_t i = blockIdx.x * kThreads + threadIdx.x;
  if (i == 0) {
    BlockHeader header;
    header.flags = *broken ? 0 : BlockHeader::kFiniteFlag;
    header.kind = static_cast<std::uint8_t>(format.kind);
    header.numel = format.numel, header.cells = format.cells, header.levels = format.levels;
    *reinterpret_cast<BlockHeader*>(block) = header;
    status->selected += format.numel;
    status->threshold = 0;
  }
  // After the header of a vector that is not finite there are zeros.
  const bool whole = *broken == 0;
  for (std::uint32_t cell = i; cell < format.cells; cell += gridDim.x * kThreads)
    reinterpret_cast<float*>(block + sizeof(BlockHeader))[cell] = whole ? scales[cell] : 0.0f;
  if (threadIdx.x == 0) first_cell = i < format.numel ? cell_of(format, i) : 0;
  __syncthreads();
  codes[threadIdx.x] = 0;
  if (whole && i < format.numel) {
    rng.a = static_cast<std::uint32_t>(step->step), rng.b = static_cast<std::uint32_t>(step->rank);
    codes[threadIdx.x] = code_of(format, u[i], scales[cell_from(format, first_cell, i)], rng, offset + i);
  }
  __syncthreads();
  // 32 codes are as many words as a code has bits.
  auto* const words = reinterpret_cast<std::uint32_t*>(block + format.codes_at()) +
                      blockIdx.x * (kThreads / 32) * format.bits;
  const std::uint64_t all_words = (std::uint64_t{format.numel} * format.bits + 31) / 32;
  for (std::uint32_t w = threadIdx.x; w < kThreads / 32 * format.bits; w += kThreads) {
    const std::uint32_t from = 32 * w / format.bits;  // the first code that reaches into the word
    std::uint64_t word = codes[from] >> (32 * w - from * format.bits);
    std::uint32_t have = (from + 1) * format.bits - 32 * w;
    for (std::uint32_t c = from + 1; have < 32; ++c, have += format.bits)
      word |= static_cast<std::uint64_t>(codes[c]) << have;
    if (std::uint64_t{blockIdx.x} * (kThreads / 32) * format.bits + w < all_words)
      words[w] = static_cast<std::uint32_t>(word);
  }
}

__device__ std::uint32_t code_at(const QuantisedFormat& format, const std::byte* block, std::uint32_t i) {
  const std::uint64_t at = std::uint64_t{i} * format.bits;
  const auto* words = reinterpret_cast<const std::uint32_t*>(block + format.codes_at()) + at / 32;
  const unsigned shift = static_cast<unsigned>(at % 32);
  std::uint32_t code = words[0] >> shift;
  if (shift + format.bits > 32) code |= words[1] << (32 - shift);
  return code & ((1u << format.bits) - 1);
}

__device__ float value_of(const QuantisedFormat& format, std::uint32_t code, float scale) {
  float factor = 1.0f;
  if (format.kind == Kind::sign) {
    if (code != 0) factor = -1.0f;
  } else {
    const std::uint32_t sign = 1u << (format.bits - 1);
    factor = static_cast<float>(code & (sign - 1)) / static_cast<float>(format.levels);
    if (code & sign) factor = -factor;
  }
  return factor * scale + 0.0f;
}

// Checks the blocks, one block of threads per rank; `stats`: one per rank, count is not used.
__global__ void __launch_bounds__(kThreads)
    check_kernel(QuantisedFormat format, const std::byte* blocks, DecodedStats* stats) {
  await_previous();
  __shared__ std::uint32_t largest;
  const std::byte* const block = blocks + blockIdx.x * format.block_bytes;
  const BlockHeader header = *reinterpret_cast<const BlockHeader*>(block);
  if (threadIdx.x == 0) largest = 0;
  __syncthreads();
  const bool finite = (header.flags & BlockHeader::kFiniteFlag) != 0;
  bool damaged = header.magic != BlockHeader::kMagic || header.version != BlockHeader::kVersion ||
                 header.zero != 0 || (header.flags & ~BlockHeader::kFiniteFlag) != 0 ||
                 header.kind != static_cast<std::uint8_t>(format.kind) || header.cells != format.cells ||
                 header.levels != format.levels || header.numel != format.numel;
  const auto* const scales = reinterpret_cast<const std::uint32_t*>(block + sizeof(BlockHeader));
  for (std::uint32_t cell = threadIdx.x; finite && cell < format.cells; cell += kThreads) {
    const std::uint32_t scale = scales[cell];
    damaged |= scale > kLargestFiniteBits;  // or below zero
    atomicMax(&largest, scale);
  }
  const std::uint64_t bits = std::uint64_t{format.numel} * format.bits;
  if (finite && threadIdx.x == 0 && bits % 32 != 0)
    damaged |=
        reinterpret_cast<const std::uint32_t*>(block + format.codes_at())[bits / 32] >> (bits % 32) != 0;
  damaged = __syncthreads_or(damaged);
  if (threadIdx.x == 0) stats[blockIdx.x] = {0, finite ? 1u : 0u, damaged ? 1u : 0u, largest};
}

// A row of blocks a rank.
__global__ void __launch_bounds__(kThreads)
    check_levels_kernel(QuantisedFormat format, const std::byte* blocks, DecodedStats* stats) {
  await_previous();
  DecodedStats& of_rank = stats[blockIdx.y];
  if (of_rank.finite == 0) return;
  const std::byte* const block = blocks + blockIdx.y * format.block_bytes;
  const std::uint32_t sign = 1u << (format.bits - 1);
  for (std::uint32_t i = blockIdx.x * kThreads + threadIdx.x; i < format.numel; i += gridDim.x * kThreads) {
    const std::uint32_t code = code_at(format, block, i);
    if ((code & (sign - 1)) > format.levels || code == sign) atomicOr(&of_rank.damaged, 1u);
  }
}

// If the status is good: the average of the ranks' values over the residual's memory, or u's where there is
// no residual (null), and u -= this rank's values where there is one. Else the residual over u.
__global__ void __launch_bounds__(kThreads)
    commit_kernel(QuantisedFormat format, const std::byte* blocks, int ranks, const float* weights,
                  float factor, const StepParameters* step, const StepStatus* status, float* u,
                  float* residual) {
  await_previous();
  __shared__ std::uint32_t first_cell;
  const std::uint32_t i = blockIdx.x * kThreads + threadIdx.x;
  if (status->bad) {
    if (residual && i < format.numel) u[i] = residual[i];
    return;
  }
  if (threadIdx.x == 0) first_cell = cell_of(format, i);
  __syncthreads();
  if (i >= format.numel) return;
  const std::uint32_t cell = cell_from(format, first_cell, i);
  float sum = 0, own = 0;
  for (int rank = 0; rank < ranks; ++rank) {
    const std::byte* const block = blocks + static_cast<std::size_t>(rank) * format.block_bytes;
    const float scale = reinterpret_cast<const float*>(block + sizeof(BlockHeader))[cell];
    const float value = value_of(format, code_at(format, block, i), scale);
    sum += weights[rank] * value;
    if (rank == step->rank) own = value;
  }
  if (ranks > 1) sum *= factor;
  if (residual) u[i] -= own;
  (residual ? residual : u)[i] = sum;
}

class DeviceQuantiser final : public Compressor {
 public:
  DeviceQuantiser(const quantise::Format& format, bool keeps, std::uint64_t seed, const GroupSpec& group)
      : keeps_(keeps),
        ranks_(group.ranks),
        offset_(group.offset),
        rng_(CounterRng(seed, RngUse::compress).stream()),
        ends_(on_device(format.cells)),
        scales_(format.cells.size()),
        broken_(1),
        received_(static_cast<std::size_t>(group.ranks)),
        weights_(static_cast<std::size_t>(group.ranks) + 1) {
    format_.kind = format.kind;
    format_.bits = static_cast<std::uint32_t>(format.bits());
    format_.levels = format.levels;
    format_.numel = static_cast<std::uint32_t>(format.numel);
    format_.cells = static_cast<std::uint32_t>(format.cells.size());
    format_.ends = ends_.data();
    format_.block_bytes = (format.bytes() + 15) / 16 * 16 + kTrailerBytes;
    std::vector<QuantisedPiece> pieces;
    std::vector<std::uint32_t> first;
    std::uint32_t begin = 0;
    for (std::uint32_t cell = 0; cell < format_.cells; ++cell) {
      const std::uint32_t end = format.cells[cell];
      const std::uint32_t length = format.kind == Kind::sign ? quantise::kSumChunk : end - begin;
      first.push_back(static_cast<std::uint32_t>(pieces.size()));
      for (; begin < end; begin = std::min(end, begin + length))
        pieces.push_back({cell, begin, std::min(end, begin + length)});
    }
    first.push_back(static_cast<std::uint32_t>(pieces.size()));
    const int lanes = format.kind == Kind::sign ? quantise::kSignLanes : quantise::kLevelLanes;
    std::vector<std::uint32_t> spans;
    for (std::uint32_t piece = 0; piece < pieces.size(); ++piece)
      if (spans.empty() || piece - spans.back() == static_cast<std::uint32_t>(kThreads / lanes) ||
          pieces[piece].end - pieces[spans.back()].begin > kTile)
        spans.push_back(piece);
    spans.push_back(static_cast<std::uint32_t>(pieces.size()));
    pieces_ = on_device(pieces);
    spans_ = on_device(spans);
    first_ = on_device(first);
    sums_ = DeviceArray<double>(pieces.size());
    block_ = DeviceArray<std::byte>(format_.block_bytes);
  }

  std::size_t reserve(double) override { return block_.size(); }

  Message encode(Slice slice, const StepContext& context) override {
    TOPKNOT_CHECK(slice.gradient.size() == format_.numel, "a slice of another length than the group's");
    slice_ = slice;
    step_ = context;
    const cudaStream_t stream = Context::current().stream();
    float* const u = slice.gradient.data();
    TOPKNOT_CUDA(cudaMemsetAsync(broken_.data(), 0, broken_.bytes(), stream));
    const auto sums =
        format_.kind == Kind::sign ? sums_kernel<quantise::kSignLanes> : sums_kernel<quantise::kLevelLanes>;
    if (pieces_.size() > 0)
      launch(sums, static_cast<unsigned>(spans_.size() - 1), kThreads, stream, u,
             keeps_ ? slice.residual.data() : nullptr, pieces_.data(), spans_.data(), sums_.data(),
             broken_.data());
    if (format_.cells > 0 && format_.kind == Kind::sign)
      launch(mean_kernel, grid_for(format_.cells, 1), kThreads, stream, format_, sums_.data(), first_.data(),
             scales_.data(), broken_.data());
    else if (format_.cells > 0)
      launch(norm_kernel, grid_for(format_.cells, kThreads), kThreads, stream, format_, sums_.data(),
             scales_.data(), broken_.data());
    // Zeros after the codes.
    const std::uint64_t end =
        format_.codes_at() + (std::uint64_t{format_.numel} * format_.bits + 31) / 32 * 4;
    TOPKNOT_CUDA(cudaMemsetAsync(block_.data() + end, 0, format_.block_bytes - end, stream));
    launch(write_kernel, grid_for(format_.numel, kThreads), kThreads, stream, format_, u, scales_.data(),
           broken_.data(), step_.parameters, rng_, offset_, block_.data(), step_.status);
    return gpu_block_message({block_.data(), block_.size()});
  }

  std::optional<Message> decode(const Round& round) override {
    TOPKNOT_CHECK(step_.parameters != nullptr, "decode without encode");
    const cudaStream_t stream = Context::current().stream();
    blocks_ = round.gpu_blocks.data();
    const auto ranks = static_cast<unsigned>(ranks_);
    launch(check_kernel, dim3(ranks), kThreads, stream, format_, blocks_, received_.data());
    if (format_.kind != Kind::sign && format_.numel > 0) {
      dim3 grid = grid_for(format_.numel, 4 * kThreads, 4096);
      grid.y = ranks;
      launch(check_levels_kernel, grid, kThreads, stream, format_, blocks_, received_.data());
    }
    judge(stream, received_.data(), ranks_,
          {step_.weights.data(), step_.parameters, weights_.data(), step_.status});
    return std::nullopt;
  }

  std::span<float> commit(std::span<const std::uint32_t>) override {
    TOPKNOT_CHECK(step_.parameters != nullptr, "commit without encode");
    if (format_.numel > 0)
      launch(commit_kernel, grid_for(format_.numel, kThreads), kThreads, Context::current().stream(), format_,
             blocks_, ranks_, weights_.data(), 1.0f / static_cast<float>(ranks_), step_.parameters,
             step_.status, slice_.gradient.data(), keeps_ ? slice_.residual.data() : nullptr);
    step_.parameters = nullptr;
    return keeps_ ? slice_.residual : slice_.gradient;
  }

  void load(StateReader& reader) override {
    if (!reader.at_end()) StateReader::fail("has bytes for a method that carries nothing");
  }

 private:
  const bool keeps_;
  const int ranks_;
  const std::uint64_t offset_;
  const PhiloxStream rng_;
  QuantisedFormat format_;
  DeviceArray<std::uint32_t> ends_, first_;  // of the cells; of each, its first piece
  DeviceArray<std::uint32_t> spans_;         // of each block that sums: its first piece
  DeviceArray<QuantisedPiece> pieces_;
  DeviceArray<double> sums_;  // by piece
  DeviceArray<float> scales_;
  DeviceArray<std::uint32_t> broken_;
  DeviceArray<DecodedStats> received_;  // by rank
  DeviceArray<float> weights_;          // by rank, then this rank's
  DeviceArray<std::byte> block_;        // this rank's

  // State of the current step; its parameters are null between steps.
  Slice slice_;
  StepContext step_;
  const std::byte* blocks_ = nullptr;
};

template <quantise::Format (*format)(const CompressOptions&, const GroupSpec&),
          bool (*keeps)(const CompressOptions&)>
std::unique_ptr<Compressor> make(const CompressOptions& options, const GroupSpec& group) {
  return std::make_unique<DeviceQuantiser>(format(options, group), keeps(options), options.seed, group);
}

const bool registered[] = {
    device_methods().add("signsgd", "", {make<quantise::signsgd_format, quantise::signsgd_has_residual>}),
    device_methods().add("qsgd", "", {make<quantise::qsgd_format, quantise::qsgd_has_residual>})};

}  // namespace
}  // namespace topknot::cuda

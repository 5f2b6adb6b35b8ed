#include "compress/quantise/compressor.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "compress/parallel.h"
#include "compress/select/passes/keys.h"
#include "compress/select/passes/passes.h"
#include "nn/base/check.h"
#include "nn/core/rng.h"
#include "nn/core/simd.h"

namespace topknot::quantise {
namespace {

// Entries worked on while they are in the first-level cache. A multiple of every code_step().
constexpr std::size_t kTile = 5 * 8 * 64;

constexpr std::size_t kPiece = 512;  // entries whose random numbers are drawn at a time
constexpr std::size_t kBlocks = 16;  // of four numbers each

// Philox4x32-10 as in nn/core/rng.h, for kBlocks counters from `block` on.
TOPKNOT_MULTIVERSION void make_blocks(std::uint32_t key0, std::uint32_t key1, std::uint32_t a,
                                      std::uint32_t b, std::uint64_t block, float* out) {
  std::uint32_t c0[kBlocks], c1[kBlocks], c2[kBlocks], c3[kBlocks];
  for (std::size_t i = 0; i < kBlocks; ++i) {
    c0[i] = static_cast<std::uint32_t>(block + i);
    c1[i] = static_cast<std::uint32_t>((block + i) >> 32);
    c2[i] = a;
    c3[i] = b;
  }
  for (int round = 0; round < 10; ++round) {
    for (std::size_t i = 0; i < kBlocks; ++i) {
      const std::uint64_t x = std::uint64_t{0xD2511F53u} * c0[i], y = std::uint64_t{0xCD9E8D57u} * c2[i];
      c0[i] = static_cast<std::uint32_t>(y >> 32) ^ c1[i] ^ key0;
      c2[i] = static_cast<std::uint32_t>(x >> 32) ^ c3[i] ^ key1;
      c1[i] = static_cast<std::uint32_t>(y);
      c3[i] = static_cast<std::uint32_t>(x);
    }
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  const std::uint32_t* words[4] = {c0, c1, c2, c3};
  // 24 bits fit a signed integer, whose conversion is the cheaper one.
  for (std::size_t w = 0; w < 4; ++w)
    for (std::size_t i = 0; i < kBlocks; ++i)
      out[4 * i + w] = static_cast<float>(static_cast<std::int32_t>(words[w][i] >> 8)) * 0x1p-24f;
}

// Calls body(begin, end) for tiles that cover [0, n).
void for_tiles(std::size_t n, auto&& body) {
  const std::size_t tiles = (n + kTile - 1) / kTile, threads = part_count(n);
#pragma omp parallel for num_threads(static_cast <int>(threads)) schedule(static) if (threads > 1)
  for (std::size_t tile = 0; tile < tiles; ++tile) body(tile * kTile, std::min(n, (tile + 1) * kTile));
}

}  // namespace

QuantisingCompressor::QuantisingCompressor(Quantiser quantiser, std::uint64_t seed, Format format,
                                           bool residual, const GroupSpec& group)
    : HostCompressor(group, residual),
      quantiser_(std::move(quantiser)),
      seed_(seed),
      format_(std::move(format)),
      offset_(group.offset) {}

Message QuantisingCompressor::encode(Slice slice, const StepContext& context) {
  check_encode(slice, context);
  std::vector<float> scales(format_.cells.size());
  const std::span<const float> u = slice.gradient;
  const bool finite = accumulate(slice.gradient, residual()) && quantiser_.scales(u, format_, scales);
  Message message;
  message.kind = Message::Kind::block;
  message.block = start_block(format_, finite);
  if (finite) {
    write_scales(format_, scales, message.block);
    for_tiles(u.size(), [&](std::size_t begin, std::size_t end) {
      std::int16_t codes[kTile];
      std::size_t cell = cell_of(format_, begin);
      for (std::size_t i = begin, stop; i < end; i = stop) {
        stop = std::min<std::size_t>({end, format_.cells[cell], i + kPiece});
        set_codes(u, i, stop, scales[cell], context, codes + (i - begin));
        if (stop == format_.cells[cell]) ++cell;
      }
      write_codes(format_, {codes, end - begin}, begin, end, message.block);
    });
  }
  phase_ = Phase::encoded;
  return message;
}

// Of entries [begin, end), kPiece at most, all in one cell.
void QuantisingCompressor::set_codes(std::span<const float> u, std::size_t begin, std::size_t end,
                                     float scale, const StepContext& context, std::int16_t* codes) const {
  if (quantiser_.random && scale == 0) {
    std::fill_n(codes, end - begin, std::int16_t{0});
    return;
  }
  float uniform[kPiece];
  if (quantiser_.random) uniforms(seed_, context.step, context.rank, offset_ + begin, end - begin, uniform);
  quantiser_.codes(u.data() + begin, quantiser_.random ? uniform : nullptr, end - begin, scale, codes);
}

std::optional<Message> QuantisingCompressor::decode(const Round& round) {
  check_decode();
  check_blocks(round);
  finite_ = true;
  for (const auto& block : round.blocks) finite_ &= check_block(format_, block);
  blocks_.resize(ranks_);
  for (std::size_t r = 0; r < ranks_ && finite_; ++r)
    blocks_[r].assign(round.blocks[r].begin(), round.blocks[r].end());
  double bound = 0;  // of the sum over the ranks, which must not overflow either
  for (std::size_t r = 0; r < ranks_ && finite_; ++r)
    bound += weights_[r] * static_cast<double>(largest_scale(format_, blocks_[r]));
  finite_ &= bound <= std::numeric_limits<float>::max();
  phase_ = Phase::decoded;
  return std::nullopt;
}

std::span<float> QuantisingCompressor::commit(std::span<const std::uint32_t>) {
  check_commit();
  const std::span<float> average = this->average();
  const float factor = 1.0f / static_cast<float>(ranks_);
  for_tiles(format_.numel, [&](std::size_t begin, std::size_t end) {
    float values[kTile];
    const std::size_t count = end - begin, first_cell = cell_of(format_, begin);
    std::fill_n(average.data() + begin, count, 0.0f);
    for (std::size_t r = 0; r < ranks_; ++r) {
      std::size_t cell = first_cell;
      read_values(format_, blocks_[r], begin, end, cell, values);
      add_weighted(average.data() + begin, values, count, weights_[r]);
      if (r == rank_ && has_residual_) subtract(slice_.gradient.data() + begin, values, count);
    }
    if (ranks_ > 1) multiply(average.data() + begin, count, factor);
  });
  phase_ = Phase::idle;
  return average;
}

std::optional<SparseView> QuantisingCompressor::contributed() const {
  TOPKNOT_CHECK(phase_ == Phase::decoded && finite_, "a contribution is known after a decoded, finite step");
  contributed_.resize(format_.numel);
  for_tiles(format_.numel, [&](std::size_t begin, std::size_t end) {
    std::size_t cell = cell_of(format_, begin);
    read_values(format_, blocks_[rank_], begin, end, cell, contributed_.data() + begin);
  });
  return SparseView{{}, contributed_};
}

std::vector<std::uint32_t> cells_of(const GroupSpec& group, std::size_t bucket) {
  std::vector<std::uint32_t> cells;
  for (const auto& [begin, end] : group.segments) {
    if (bucket > 0)
      for (std::size_t stop = begin + bucket; stop < end; stop += bucket)
        cells.push_back(static_cast<std::uint32_t>(stop));
    cells.push_back(static_cast<std::uint32_t>(end));
  }
  return cells;
}

void uniforms(std::uint64_t seed, std::int64_t step, int rank, std::uint64_t first, std::size_t count,
              float* out) {
  const auto key0 = static_cast<std::uint32_t>(seed);
  const auto key1 =
      static_cast<std::uint32_t>(seed >> 32) ^ (static_cast<std::uint32_t>(RngUse::compress) << 24);
  const auto a = static_cast<std::uint32_t>(step), b = static_cast<std::uint32_t>(rank);
  float numbers[4 * kBlocks];
  for (std::size_t i = 0; i < count;) {
    const std::uint64_t block = (first + i) / 4;
    const std::size_t skip = (first + i) % 4, take = std::min(count - i, 4 * kBlocks - skip);
    make_blocks(key0, key1, a, b, block, numbers);
    std::copy_n(numbers + skip, take, out + i);
    i += take;
  }
}

}  // namespace topknot::quantise

// The uncompressed baseline: gradients are summed by the collective and divided in place. With
// compress.values: bf16 they are rounded to bfloat16 for the way, without error feedback, as PyTorch's
// bf16_compress_hook does.
//
// Other value codecs make dense sums in few bits: every gradient entry is sent, coded, to
// the one rank that sums it, and the sum is coded once more on its way back. Per rank that is 2 (P - 1) / P messages of
// the whole vector, as for a ring's sums, where gathering rounded vectors takes P - 1 of them.
//
// Both roundings have error feedback, as DoubleSqueeze (Tang et al., arXiv 1905.05957). There the summing rank has a
// memory of its own for the second error; here it adds that error, divided by its own share of the average, to its
// residual, from which the next sum gets it back. encode() leaves in the slice's gradient what its message leaves of u.
//
// A message consists of one piece for each rank, all of one length: piece r has the elements from r * n on, n being the
// P-th part of them in multiples of 16, zeros behind the last. A piece is a header (compress/codec/codec.h, with the
// layout `all`) and n values, coded in chunks of kChunk. The second message is the rank's own piece of the average.
// Without the header's flag the rest of a piece is zeros.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <exception>
#include <utility>
#include <vector>

#include "compress/codec/code_bits.h"
#include "compress/codec/codec.h"
#include "compress/compressor.h"
#include "compress/parallel.h"
#include "compress/select/passes/keys.h"
#include "compress/select/passes/passes.h"
#include "compress/sparse.h"
#include "nn/core/simd.h"

namespace topknot {
namespace {

// x = (x + 0) * factor; returns the largest key of x. Adding 0 turns -0 into +0 as the sparse average does,
// which starts from zeros: so topk of density 1 equals dense bit for bit.
TOPKNOT_MULTIVERSION MagnitudeKey finish(float* x, std::size_t n, float factor) {
  MagnitudeKey largest = 0;
  for (std::size_t i = 0; i < n; ++i) {
    largest = std::max(largest, key_of(x[i]));
    x[i] = (x[i] + 0.0f) * factor;
  }
  return largest;
}

class DenseCompressor final : public HostCompressor {
 public:
  DenseCompressor(const GroupSpec& group, bool narrow)
      : HostCompressor(group, false), narrow_(narrow ? group.numel : 0) {}

  Message encode(Slice slice, const StepContext& context) override {
    check_encode(slice, context);
    multiply_all(slice.gradient, weights_[rank_]);
    phase_ = Phase::encoded;
    if (narrow_.empty()) return sum_message(slice.gradient);
    for_parts(numel_, part_count(numel_), [&](std::size_t, std::size_t begin, std::size_t end) {
      to_bfloat16(slice.gradient.data() + begin, end - begin, narrow_.data() + begin);
    });
    Message message;
    message.kind = Message::Kind::sum_bfloat16;
    message.sum_bfloat16 = narrow_;
    return message;
  }

  std::optional<Message> decode(const Round& round) override {
    check_decode();
    float* const gradient = slice_.gradient.data();
    if (narrow_.empty())
      check_sum(round, slice_.gradient);
    else
      TOPKNOT_CHECK(round.sum_bfloat16.data() == narrow_.data(),
                    "the sum is not in the memory that was sent");
    const std::size_t parts = part_count(numel_);
    std::vector<MagnitudeKey> largest(parts);
    for_parts(numel_, parts, [&](std::size_t part, std::size_t begin, std::size_t end) {
      if (!narrow_.empty()) to_float(narrow_.data() + begin, end - begin, gradient + begin);
      largest[part] = finish(gradient + begin, end - begin, 1.0f / static_cast<float>(ranks_));
    });
    finite_ = *std::max_element(largest.begin(), largest.end()) <= kLargestFinite;
    phase_ = Phase::decoded;
    return std::nullopt;
  }

  std::span<float> commit(std::span<const std::uint32_t>) override {
    check_commit();
    phase_ = Phase::idle;
    return average();
  }

  Diagnostics diagnostics() const override { return {.selected = numel_}; }

 private:
  std::vector<BFloat16> narrow_;  // what is sent, if it is not the gradient itself
};

// Validates the options; whether values are sent as bfloat16.
bool is_narrow(const CompressOptions& options) {
  if (!options.memory.empty() && options.memory != "none")
    refuse_key(options, "memory", options.memory,
               "which leaves nothing unsent to remember; remove the key or choose another compressor");
  if (options.lr_inside)
    refuse_key(options, "lr_inside", "true", "which accumulates nothing; remove the key");
  const bool narrow = options.values == "bf16";
  CompressOptions others = options;
  if (narrow) others.values.clear();
  reject_sparse_options(others, "every entry, as sums of fp32 or bf16", true);
  return narrow;
}

// Calls body(chunk) on threads; the first exception that it throws is thrown here.
void for_chunks(std::size_t chunks, const auto& body) {
  std::exception_ptr error;
  for_each_block(chunks, 4, [&](std::size_t chunk) {
    try {
      body(chunk);
    } catch (...) {
#pragma omp critical(topknot_dense_coded)
      if (!error) error = std::current_exception();
    }
  });
  if (error) std::rethrow_exception(error);
}

// How a vector is cut into pieces, and these into chunks.
class Pieces {
 public:
  Pieces(const ValueCodec& codec, const GroupSpec& group)
      : codec_(codec),
        numel_(group.numel),
        ranks_(static_cast<std::size_t>(group.ranks)),
        length_(((numel_ + ranks_ - 1) / ranks_ + 15) / 16 * 16),
        chunks_((length_ + kChunk - 1) / kChunk),
        bytes_(kBlockHeaderBytes +
               (chunks_ > 0 ? (chunks_ - 1) * codec.bytes(kChunk) + codec.bytes(chunk_length(chunks_ - 1))
                            : 0)) {}

  std::size_t ranks() const { return ranks_; }
  std::size_t length() const { return length_; }
  std::size_t chunks() const { return chunks_; }  // of a piece
  std::size_t bytes() const { return bytes_; }    // of a piece
  std::size_t chunk_length(std::size_t chunk) const { return std::min(kChunk, length_ - chunk * kChunk); }
  // The chunk's elements in the vector; fewer than its length where they lie behind the last.
  std::pair<std::size_t, std::size_t> elements(std::size_t piece, std::size_t chunk) const {
    const std::size_t begin = std::min(numel_, piece * length_ + chunk * kChunk);
    return {begin, std::min({numel_, (piece + 1) * length_, begin + kChunk})};
  }

  // Piece r of all.
  auto piece(auto& all, std::size_t r) const { return std::span(all).subspan(r * bytes_, bytes_); }
  void write_header(std::span<std::byte> piece, bool finite) const {
    const BlockHeader header = header_of(finite);
    std::memcpy(piece.data(), &header, sizeof header);
  }
  // Codes a whole chunk.
  void write(std::span<const float> values, std::size_t chunk, std::span<std::byte> piece) const {
    thread_local std::vector<std::byte> coded;
    coded.clear();
    codec_.encode(values, coded);
    TOPKNOT_CHECK(coded.size() == codec_.bytes(values.size()),
                  "a value codec whose length depends on the values");
    std::copy(coded.begin(), coded.end(), piece.begin() + place(chunk));
  }
  // Whether the sender's values were finite. Throws Error for what is no such piece.
  bool check(std::span<const std::byte> piece) const {
    if (piece.size() != bytes_)
      damaged_block(std::to_string(piece.size()) + " bytes where there must be " + std::to_string(bytes_));
    BlockHeader header;
    std::memcpy(&header, piece.data(), sizeof header);
    const bool finite = header.flags & BlockHeader::kFiniteFlag;
    const BlockHeader expected = header_of(finite);
    if (std::memcmp(&header, &expected, sizeof header) != 0)
      damaged_block(
          "not a piece of this version, of another vector, or coded otherwise than here; do all ranks run "
          "with the same compress.values?");
    return finite;
  }
  // Decodes a chunk's first values. Throws Error if it is damaged.
  void read(std::span<const std::byte> piece, std::size_t chunk, std::span<float> values) const {
    float room[kChunk];
    const std::size_t n = chunk_length(chunk);
    float* const all = values.size() == n ? values.data() : room;
    codec_.decode(piece.subspan(place(chunk), codec_.bytes(n)), {all, n});
    if (largest_key(all, n) > kLargestFinite) damaged_block("a value that is not finite");
    if (all == room) std::copy_n(room, values.size(), values.data());
  }

 private:
  BlockHeader header_of(bool finite) const {
    BlockHeader header;
    header.flags = finite ? BlockHeader::kFiniteFlag : 0;
    header.index_codec = kAllLayout.id, header.value_codec = codec_.id;
    header.numel = static_cast<std::uint32_t>(numel_), header.count = static_cast<std::uint32_t>(length_);
    return header;
  }
  std::size_t place(std::size_t chunk) const { return kBlockHeaderBytes + chunk * codec_.bytes(kChunk); }

  const ValueCodec& codec_;
  std::size_t numel_, ranks_, length_, chunks_, bytes_;
};

class CodedDense final : public HostCompressor {
 public:
  CodedDense(const ValueCodec& codec, bool residual, const GroupSpec& group)
      : HostCompressor(group, residual),
        pieces_(codec, group),
        second_error_(pieces_.length()),
        averages_(pieces_.ranks() * pieces_.bytes()) {}

  Message encode(Slice slice, const StepContext& context) override {
    check_encode(slice, context);
    Message message;
    message.block.resize(pieces_.ranks() * pieces_.bytes());
    message.pieces = static_cast<int>(pieces_.ranks());
    // One pass over memory: a chunk stays in the cache while it is accumulated, coded and read back.
    std::atomic<bool> finite = true;
    for_all([&](std::size_t r, std::size_t chunk, std::span<float> u) {
      float values[kChunk];
      const std::span<std::byte> piece = pieces_.piece(message.block, r);
      const std::size_t length = pieces_.chunk_length(chunk);
      if (has_residual_) add_weighted(u.data(), slice_.residual.data() + offset_of(u), u.size(), 1);
      if (largest_key(u.data(), u.size()) > kLargestFinite) return finite.store(false);
      std::span<const float> whole = u;
      if (u.size() < length) {
        std::fill(std::copy(u.begin(), u.end(), values), values + length, 0.0f);
        whole = {values, length};
      }
      pieces_.write(whole, chunk, piece);
      if (!has_residual_) return;
      pieces_.read(piece, chunk, {values, u.size()});
      subtract(u.data(), values, u.size());
    });
    if (!finite) std::fill(message.block.begin(), message.block.end(), std::byte{0});
    for (std::size_t r = 0; r < pieces_.ranks(); ++r)
      pieces_.write_header(pieces_.piece(message.block, r), finite);
    phase_ = Phase::encoded, summed_ = false;
    return message;
  }

  std::optional<Message> decode(const Round& round) override {
    check_decode();
    check_blocks(round);
    if (!summed_) return sum_of(round);
    finite_ = true;
    for (const auto& block : round.blocks) finite_ &= pieces_.check(block);
    for (std::size_t r = 0; r < pieces_.ranks(); ++r)
      std::copy(round.blocks[r].begin(), round.blocks[r].end(), pieces_.piece(averages_, r).begin());
    // commit() throws nothing.
    if (finite_)
      for_chunks(pieces_.ranks() * pieces_.chunks(), [&](std::size_t i) {
        pieces_.read(pieces_.piece(averages_, i / pieces_.chunks()), i % pieces_.chunks(), {});
      });
    phase_ = Phase::decoded;
    return std::nullopt;
  }

  std::span<float> commit(std::span<const std::uint32_t>) override {
    check_commit();
    const std::span<float> average = this->average();
    const float weight = weights_[rank_];
    const float share = weight > 0 ? static_cast<float>(pieces_.ranks()) / weight : 0;
    for_all([&](std::size_t r, std::size_t chunk, std::span<float> left) {
      if (has_residual_ && r == rank_)
        add_weighted(left.data(), second_error_.data() + chunk * kChunk, left.size(), share);
      pieces_.read(pieces_.piece(averages_, r), chunk, average.subspan(offset_of(left), left.size()));
    });
    phase_ = Phase::idle;
    return average;
  }

  Diagnostics diagnostics() const override { return {.selected = numel_}; }

 private:
  std::size_t offset_of(std::span<const float> elements) const {
    return static_cast<std::size_t>(elements.data() - slice_.gradient.data());
  }

  // body(piece, chunk, elements) for all chunks, the elements in the slice's gradient.
  void for_all(const auto& body) {
    for_chunks(pieces_.ranks() * pieces_.chunks(), [&](std::size_t i) {
      const std::size_t r = i / pieces_.chunks(), chunk = i % pieces_.chunks();
      const auto [begin, end] = pieces_.elements(r, chunk);
      body(r, chunk, slice_.gradient.subspan(begin, end - begin));
    });
  }

  // A rank's piece for this one. The whole block may have been gathered.
  std::span<const std::byte> own_piece(std::span<const std::byte> block) const {
    return block.size() == averages_.size() ? pieces_.piece(block, rank_) : block;
  }

  // The average of the ranks' pieces for this one, coded; its error goes to second_error_.
  Message sum_of(const Round& round) {
    std::vector<std::span<const std::byte>> pieces;
    bool finite = true;
    for (std::size_t r = 0; r < pieces_.ranks(); ++r) {
      pieces.push_back(own_piece(round.blocks[r]));
      finite &= pieces_.check(pieces.back());
    }
    Message message;
    message.block.resize(pieces_.bytes());
    std::vector<char> overflows(pieces_.chunks());
    if (finite)
      for_chunks(pieces_.chunks(), [&](std::size_t chunk) {
        float values[kChunk];
        const std::span<float> average =
            std::span(second_error_).subspan(chunk * kChunk, pieces_.chunk_length(chunk));
        std::fill(average.begin(), average.end(), 0.0f);
        for (std::size_t r = 0; r < pieces_.ranks(); ++r) {
          pieces_.read(pieces[r], chunk, {values, average.size()});
          add_weighted(average.data(), values, average.size(), weights_[r]);
        }
        multiply(average.data(), average.size(), 1.0f / static_cast<float>(pieces_.ranks()));
        overflows[chunk] = largest_key(average.data(), average.size()) > kLargestFinite;
        if (overflows[chunk]) return;
        pieces_.write(average, chunk, message.block);
        pieces_.read(message.block, chunk, {values, average.size()});
        subtract(average.data(), values, average.size());
      });
    finite &= std::none_of(overflows.begin(), overflows.end(), [](char one) { return one != 0; });
    if (!finite) std::fill(message.block.begin(), message.block.end(), std::byte{0});
    pieces_.write_header(message.block, finite);
    summed_ = true;
    return message;
  }

  const Pieces pieces_;
  bool summed_ = false;              // the first of two sums has been decoded
  std::vector<float> second_error_;  // what coding took away from this rank's piece of the average
  std::vector<std::byte> averages_;  // the ranks', between the last decode and commit
};

const ValueCodec& codec_of(const CompressOptions& options) {
  CompressOptions others = options;
  others.values.clear();
  reject_sparse_options(others, "every entry", true);
  const ValueCodec& codec = value_codecs().find(options.values);
  if (codec.least)
    refuse_key(
        options, "values", options.values,
        "whose length depends on the values, where pieces of a dense sum have one length; use int8 or fp8");
  return codec;
}

std::unique_ptr<Compressor> make_dense(const CompressOptions& options, const GroupSpec& group) {
  if (!sums_plainly(options.name, options.values))
    return std::make_unique<CodedDense>(codec_of(options), options.memory != "none", group);
  return std::make_unique<DenseCompressor>(group, is_narrow(options));
}

std::size_t dense_bytes(const CompressOptions& options, const GroupSpec& group, double) {
  if (!sums_plainly(options.name, options.values)) {
    const Pieces pieces(codec_of(options), group);
    return pieces.ranks() * pieces.bytes();  // of both messages
  }
  return group.numel * (is_narrow(options) ? sizeof(BFloat16) : sizeof(float));
}

const bool dense_registered[] = {
    compressors().add("dense", "no compression: gradients are summed as they are",
                      {make_dense, dense_bytes, true}),
    // Douillard et al., arXiv 2311.08105.
    recipes().add("diloco", "DiLoCo: dense, Nesterov's momentum outside; for exchange.every",
                  {"dense",
                   {{"exchange.outer.name", "nesterov"},
                    {"exchange.outer.lr", "0.7"},
                    {"exchange.outer.momentum", "0.9"}}}),
    // Thérien et al., arXiv 2505.23725, with 8 workers.
    recipes().add("muloco", "MuLoCo: dense, Muon inside, Nesterov's momentum outside; for exchange.every",
                  {"dense",
                   {{"optimizer.name", "muon"},
                    {"optimizer.variant", "muloco"},
                    {"exchange.outer.name", "nesterov"},
                    {"exchange.outer.lr", "0.9"},
                    {"exchange.outer.momentum", "0.8"}}})};

}  // namespace
}  // namespace topknot

#pragma once
// exchange.collective=coded_sum: the sum of dense floats whose exponents are coded on their way
// (compress/codec/exponents.h), without loss. After ZipCCL (arXiv 2604.27844).
//
// Each rank sends piece r of its floats, coded, to rank r, which adds the pieces in rank order and sends the coded sum
// to all. Pieces take turns, block by block, so that all take about as many bytes. The result is that of
// Communicator::all_reduce() with SumOrder::ranks, bit for bit. It pays where a link is slower than the coder
// (docs/exchange.md has rates).

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "dist/comm/communicator.h"

namespace topknot {

// Bytes on the wire per byte of normally distributed values, for models.
inline constexpr double kCodedFloat = 0.855, kCodedBFloat16 = 0.71;
// Seconds that the coder takes per byte of data on about one core, if it was not measured.
inline constexpr double kCoderSeconds = 1e-9;

class CodedSum {
 public:
  // Counted as SparseSum's; nothing is sent where there is one rank.
  struct Bytes {
    std::uint64_t sent = 0, received = 0;
  };
  // Collective. Sums in place, of one length on all ranks. CollectiveError; Error for damaged pieces.
  Bytes sum(Communicator& communicator, std::span<float> data) { return sum(communicator, data, floats_); }
  Bytes sum(Communicator& communicator, std::span<BFloat16> data) { return sum(communicator, data, halves_); }

 private:
  template <class T>
  Bytes sum(Communicator& communicator, std::span<T> data, std::vector<T>& pieces);

  // Memory that stays from sum to sum.
  std::vector<float> floats_;
  std::vector<BFloat16> halves_;
  std::vector<std::vector<std::byte>> mine_, theirs_;
  std::vector<std::byte> coded_;
};

}  // namespace topknot

#pragma once
// Asymmetric numeral systems, range variant (rANS; Duda, arXiv 1311.2540): symbols of a small alphabet, in
// little more than log2(kSlots / slots of the symbol) bits each. A number x in [2^16, 2^32) holds what has
// been written. Symbol s, whose f slots begin at slot c, makes it
//
//   (x / f) kSlots + c + x % f
//
// x first gives up its lower 16 bits, as a word, if that would be 2^32 or more. Reading undoes it, the last
// symbol first; so symbols are written from the last to the first. A stream is x, the upper word first, then
// the words, those given up last first: 2 to 4 bytes more than its symbols.
//
// The writer begins with x = 2^16 + start, a number of 16 bits that is the caller's: the reader has it after
// the last symbol. A step of reading has one inverse, so a reader that ends with x - 2^16 below 2^16 has read
// the one stream that a writer makes of these symbols and this start.

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

#include "nn/base/check.h"

namespace topknot {

// How the slots are shared out: symbol s has those of [ends[s - 1], ends[s]).
class AnsTable {
 public:
  static constexpr unsigned kSlotBits = 12;
  static constexpr std::uint32_t kSlots = 1u << kSlotBits;

  struct Share {
    std::uint16_t begin = 0, slots = 0;
  };

  // At most 256 symbols, of a slot or more each; the last end is kSlots.
  explicit AnsTable(std::span<const std::uint16_t> ends) {
    std::uint32_t begin = 0;
    for (std::size_t symbol = 0; symbol < ends.size(); ++symbol) {
      TOPKNOT_CHECK(symbol < shares_.size() && ends[symbol] > begin && ends[symbol] <= kSlots,
                    "slots out of order");
      shares_[symbol] = {static_cast<std::uint16_t>(begin), static_cast<std::uint16_t>(ends[symbol] - begin)};
      std::memset(symbols_.data() + begin, static_cast<int>(symbol), ends[symbol] - begin);
      begin = ends[symbol];
    }
    TOPKNOT_CHECK(begin == kSlots, "slots without a symbol");
  }
  Share share(std::uint8_t symbol) const { return shares_[symbol]; }
  std::uint8_t symbol_at(std::uint32_t slot) const { return symbols_[slot]; }

 private:
  std::array<Share, 256> shares_{};
  std::array<std::uint8_t, kSlots> symbols_;  // by slot
};

inline constexpr std::uint32_t kAnsLeast = 1u << 16;  // of x
inline constexpr std::size_t kAnsStateWords = 2;

// Writes towards lower addresses, at most a word per symbol and kAnsStateWords.
class AnsWriter {
 public:
  AnsWriter(const AnsTable& table, std::uint16_t* end, std::uint16_t start = 0)
      : table_(table), at_(end), x_(kAnsLeast + start) {}

  void put(std::uint8_t symbol) {
    const auto [begin, slots] = table_.share(symbol);
    if (x_ >> (32 - AnsTable::kSlotBits) >= slots) {
      *--at_ = static_cast<std::uint16_t>(x_);
      x_ >>= 16;
    }
    x_ = (x_ / slots << AnsTable::kSlotBits) + begin + x_ % slots;
  }
  // Writes the final state and returns the begin of the stream.
  std::uint16_t* finish() {
    *--at_ = static_cast<std::uint16_t>(x_);
    *--at_ = static_cast<std::uint16_t>(x_ >> 16);
    return at_;
  }

 private:
  const AnsTable& table_;
  std::uint16_t* at_;
  std::uint32_t x_;
};

// After the end of `in` it reads any symbols, and done() is false.
class AnsReader {
 public:
  AnsReader(const AnsTable& table, std::span<const std::byte> in)
      : table_(table), at_(in.data()), end_(in.data() + in.size()) {
    const std::uint32_t upper = word();
    x_ = upper << 16 | word();
    if (x_ < kAnsLeast) fail();
  }

  std::uint8_t get() {
    const std::uint32_t slot = x_ & (AnsTable::kSlots - 1);
    const std::uint8_t symbol = table_.symbol_at(slot);
    const auto [begin, slots] = table_.share(symbol);
    x_ = slots * (x_ >> AnsTable::kSlotBits) + slot - begin;
    if (x_ < kAnsLeast) x_ = x_ << 16 | word();
    return symbol;
  }
  // Whether what was read is all that was written; with which start.
  bool done() const { return x_ >> 16 == 1 && !failed_; }
  std::uint16_t start() const { return static_cast<std::uint16_t>(x_); }
  const std::byte* at() const { return at_; }  // the first byte that was not read

 private:
  std::uint32_t word() {
    if (end_ - at_ < static_cast<std::ptrdiff_t>(sizeof(std::uint16_t))) return fail();
    std::uint16_t word = 0;
    std::memcpy(&word, at_, sizeof word);
    at_ += sizeof word;
    return word;
  }
  std::uint32_t fail() {
    failed_ = true;
    return 0;
  }

  const AnsTable& table_;
  const std::byte *at_, *end_;
  std::uint32_t x_ = 0;
  bool failed_ = false;
};

}  // namespace topknot

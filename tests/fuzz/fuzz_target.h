#pragma once
// What the fuzzer tries: a format's writer and its reader. A format is one file that adds its targets:
//
//   const bool added = [] {
//     fuzz_targets().add("name", "what it is", {make, accept});
//     return true;
//   }();

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <stdexcept>
#include <vector>

#include "nn/base/registry.h"

namespace topknot::fuzz {

using Block = std::vector<std::byte>;

// SplitMix64 (Steele, Lea, Flood, OOPSLA 2014).
class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed) {}
  std::uint64_t bits() {
    std::uint64_t z = state_ += 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
  }
  // In [0, n), n > 0.
  std::uint32_t below(std::size_t n) { return std::uint32_t(((bits() >> 32) * std::uint64_t(n)) >> 32); }
  bool one_in(std::uint32_t n) { return below(n) == 0; }

 private:
  std::uint64_t state_;
};

// A block as the format's writer makes it, and the length of the group that it is for.
struct Sample {
  std::size_t numel = 0;
  Block block;
};

// A block was accepted that should not have been. The text says why.
class Accepted : public std::logic_error {
 public:
  using std::logic_error::logic_error;
};

inline void require(bool holds, const char* what) {
  if (!holds) throw Accepted(what);
}

struct FuzzTarget {
  std::function<Sample(Random&)> make;
  // Reads a block of any bytes for a group of that length. True where the reader takes it and everything that
  // must then hold does; false where it throws Error. Throws Accepted where something does not hold.
  std::function<bool(std::span<const std::byte> block, std::size_t numel)> accept;
};

Registry<FuzzTarget>& fuzz_targets();

// A block with one to four random faults: bits, bytes and numbers changed, bytes cut, added, taken out or
// doubled, a part of another block put in, the body or all of it replaced by noise. `header`: how many bytes
// at the front are the likeliest to be edited.
Block mutated(const Block& block, const Block& other, Random& random, std::size_t header);

}  // namespace topknot::fuzz

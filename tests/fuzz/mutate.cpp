#include <algorithm>
#include <cstring>

#include "tests/fuzz/fuzz_target.h"

namespace topknot::fuzz {
namespace {

std::ptrdiff_t offset(std::size_t n) {
  return std::ptrdiff_t(n);
}

// Numbers at which checks turn.
std::uint32_t telling_number(Random& random) {
  constexpr std::uint32_t numbers[] = {0,          1,          2,          0x7F,       0x80,       0xFF,
                                       0x7FFF,     0x8000,     0xFFFE,     0xFFFF,     0x7F800000, 0x7FC00000,
                                       0xFF800000, 0x7F7FFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 512};
  return numbers[random.below(std::size(numbers))];
}

template <class T>
void change_number(Block& block, std::size_t at, Random& random) {
  if (at + sizeof(T) > block.size()) return;
  T number = 0;
  std::memcpy(&number, block.data() + at, sizeof number);
  switch (random.below(4)) {
    case 0:
      number = static_cast<T>(telling_number(random));
      break;
    case 1:
      number = static_cast<T>(number + 1);
      break;
    case 2:
      number = static_cast<T>(number - 1);
      break;
    default:
      number = static_cast<T>(random.bits());
      break;
  }
  std::memcpy(block.data() + at, &number, sizeof number);
}

void make_noise(Block& block, std::size_t from, Random& random) {
  for (std::size_t i = from; i < block.size(); ++i) block[i] = std::byte(random.bits());
}

void fault(Block& block, const Block& other, Random& random, std::size_t header) {
  const std::size_t size = block.size();
  const std::size_t anywhere = random.below(size + 1);
  const std::size_t at = random.one_in(2) ? random.below(std::min(size, header + 8) + 1) : anywhere;
  const std::size_t length = 1 + random.below(random.one_in(4) ? 64 : 8);
  switch (random.below(12)) {
    case 0:
    case 1:
    case 2:
      if (anywhere < size) block[anywhere] ^= std::byte(1u << random.below(8));
      break;
    case 3:
      change_number<std::uint8_t>(block, at, random);
      break;
    case 4:
      change_number<std::uint16_t>(block, at, random);
      break;
    case 5:
    case 6:
      change_number<std::uint32_t>(block, at / 4 * 4, random);
      break;
    case 7:
      block.resize(random.one_in(2) ? anywhere : size - std::min(size, length));
      break;
    case 8:
      block.resize(size + length);
      if (random.one_in(2)) make_noise(block, size, random);
      break;
    case 9:
      block.erase(block.begin() + offset(anywhere),
                  block.begin() + offset(std::min(size, anywhere + length)));
      break;
    case 10: {
      const Block part(block.begin() + offset(anywhere),
                       block.begin() + offset(std::min(size, anywhere + length)));
      block.insert(block.begin() + offset(anywhere), part.begin(), part.end());
      break;
    }
    default: {
      const std::size_t cut = std::min(anywhere, other.size());
      block.resize(cut);
      block.insert(block.end(), other.begin() + offset(cut), other.end());
    }
  }
}

}  // namespace

Block mutated(const Block& block, const Block& other, Random& random, std::size_t header) {
  Block result = block;
  const std::uint32_t kind = random.below(32);
  if (kind == 0) {
    result.resize(random.below(128));
    make_noise(result, 0, random);
  } else if (kind <= 2) {
    make_noise(result, std::min(header, result.size()), random);
  } else {
    for (std::uint32_t faults = 1 + random.below(kind < 20 ? 1 : 4); faults > 0; --faults)
      fault(result, other, random, header);
  }
  return result;
}

Registry<FuzzTarget>& fuzz_targets() {
  static Registry<FuzzTarget> registry("block format (--only)");
  return registry;
}

}  // namespace topknot::fuzz

// The index codec ans: its length beside the binomial, its bytes, and what its reader refuses.
#include "compress/codec/ans_coder.h"
#include "compress/codec/codec.h"
#include "nn/core/rng.h"
#include "tests/compress/codec/through.h"
#include "tests/support/positions.h"
#include "tests/support/test.h"

using namespace topknot;
using namespace topknot::testing;

namespace {

using Positions = std::vector<std::uint32_t>;
using Bytes = std::vector<std::byte>;

Bytes encoded(const Positions& positions, std::size_t numel) {
  Bytes out;
  Positions fillers;
  kAnsLayout.encode(positions, numel, out, fillers);
  CHECK(fillers.empty());
  return out;
}

// Of bytes that hold `count` positions and no more.
Positions decoded(std::span<const std::byte> bytes, std::size_t count, std::size_t numel) {
  Positions positions(count), fillers;
  if (kAnsLayout.decode(bytes, numel, positions, fillers) != bytes.size()) throw Error("bytes left over");
  return positions;
}

void check_comes_back(const Positions& positions, std::size_t numel) {
  INFO(positions.size() << " of " << numel);
  const Bytes bytes = encoded(positions, numel);
  REQUIRE(kAnsLayout.size(positions, numel).bytes == bytes.size());
  REQUIRE(decoded(bytes, positions.size(), numel) == positions);
}

Positions every_position(std::size_t numel) {
  Positions positions(numel);
  std::iota(positions.begin(), positions.end(), 0u);
  return positions;
}

double log2_binomial(std::size_t n, std::size_t k) {
  const auto log_factorial = [](std::size_t of) { return std::lgamma(double(of) + 1); };
  return (log_factorial(n) - log_factorial(k) - log_factorial(n - k)) / std::log(2.0);
}

double bits_of(const Positions& positions, std::size_t numel) {
  return 8.0 * double(kAnsLayout.size(positions, numel).bytes);
}

// 10000 positions with gaps up to 199: three parts.
Positions of_three_parts() {
  Positions positions;
  std::uint32_t state = 1, next = 0;
  for (int i = 0; i < 10000; ++i) {
    state = (state * 1103515245u + 12345u) & 0x7FFFFFFF;
    positions.push_back(next + (state >> 16) % 199);
    next = positions.back() + 1;
  }
  return positions;
}

// Why a block of `count` positions in these bytes is refused; "" if it is read.
std::string refusal(std::span<const std::byte> bytes, std::size_t count, std::size_t numel) {
  return error_text<Error>([&] { decoded(bytes, count, numel); });
}

}  // namespace

TEST_CASE("ans takes positions drawn uniformly within 2 % of the binomial at any density") {
  constexpr std::size_t kNumel = 1 << 20;
  for (const double density : {1e-4, 1e-3, 0.003, 0.01, 1.0 / 64, 0.03, 0.0625, 0.1, 0.124, 0.126,
                               0.2,  0.3,  0.4,   0.45, 0.5,      0.55, 0.7,    0.9, 0.99,  0.999}) {
    const auto count = std::size_t(density * kNumel);
    for (const std::uint64_t seed : {1, 2, 3}) {
      const double bits = bits_of(uniform_positions(kNumel, count, seed), kNumel);
      INFO(density << ": " << bits << " bits, binomial " << log2_binomial(kNumel, count));
      CHECK(bits < 1.02 * log2_binomial(kNumel, count));
      CHECK(8 * kAnsLayout.expected_bytes(count, kNumel) == Approx(bits).epsilon(0.01));
    }
  }
}

TEST_CASE("ans takes clusters in the bits of uniform positions") {
  constexpr std::size_t kNumel = 4000000, kCount = 40000;
  Positions first = every_position(kCount), last, blocks;
  for (const std::uint32_t position : first) {
    last.push_back(std::uint32_t(kNumel - kCount) + position);
    blocks.push_back(position / 1000 * 100000 + position % 1000);
  }
  for (const Positions& positions : {first, last, blocks}) {
    CHECK(bits_of(positions, kNumel) < 1.05 * log2_binomial(kNumel, kCount));
    check_comes_back(positions, kNumel);
  }
}

TEST_CASE("every set of positions in up to ten elements comes back from ans") {
  for (std::size_t numel = 1; numel <= 10; ++numel)
    for (unsigned set = 1; set < 1u << numel; ++set) {
      Positions positions;
      for (std::uint32_t i = 0; i < numel; ++i)
        if (set >> i & 1) positions.push_back(i);
      check_comes_back(positions, numel);
    }
}

TEST_CASE("ans takes groups of 2^31 - 1 elements, few of them or one, wherever they lie") {
  constexpr std::uint32_t kNumel = 0x7FFFFFFF;
  for (const std::uint32_t position : {0u, 1u, 65535u, 65536u, 0x10000000u, kNumel - 1}) {
    check_comes_back({position}, kNumel);
    CHECK(encoded({position}, kNumel).size() <= 10);
  }
  check_comes_back({0, kNumel - 1}, kNumel);
  check_comes_back({0, 1, 2, 3, kNumel - 2, kNumel - 1}, kNumel);
  Positions spread;
  for (std::uint32_t i = 0; i < 5000; ++i) spread.push_back(i * 429000 + i % 7);
  check_comes_back(spread, kNumel);
  CHECK(bits_of(spread, kNumel) < 1.02 * log2_binomial(kNumel, spread.size()));
}

TEST_CASE("parts that are full, or of one position, come back from ans") {
  for (const std::size_t count : {4095u, 4096u, 4097u, 8191u, 8192u, 8193u}) {
    for (const std::size_t numel : {2 * count, 3 * count, 9 * count + 5, 1000 * count})
      check_comes_back(uniform_positions(numel, count, 3), numel);
    check_comes_back(every_position(count), 2 * count);
  }
}

// The numbers are those of a model of the format in another language.
TEST_CASE("the bytes of ans are what compress/codec/ans.cpp says") {
  const auto bytes = [](const Positions& positions, std::size_t numel) {
    std::vector<unsigned> numbers;
    for (const std::byte byte : encoded(positions, numel)) numbers.push_back(std::to_integer<unsigned>(byte));
    return numbers;
  };
  using Numbers = std::vector<unsigned>;
  CHECK(bytes({5, 9, 70}, 100) == Numbers{0x1D, 0x20, 0x02, 0xAB, 0xA2});
  CHECK(bytes({70}, 100) == Numbers{0x0C, 0x00, 0x9D, 0xC8});
  CHECK(bytes({0, 1, 2, 4}, 6) == Numbers{0x2D, 0x00, 0x1F, 0x3C});
  CHECK(bytes({3, 1000000}, 3000000) == Numbers{0x03, 0x00, 0x0C, 0x52, 0x00, 0xB3, 0xC0});
  CHECK(bytes({0x7FFFFFFE}, 0x7FFFFFFF) == Numbers{0xFF, 0x0F, 0x28, 0x00, 0x9B, 0xF9});
  CHECK(bytes({0}, 1).empty());

  const Positions positions = of_three_parts();
  const Bytes long_block = encoded(positions, positions.back() + 1);
  CHECK(long_block.size() == 10118);
  std::uint64_t hash = 0xCBF29CE484222325;  // FNV-1a
  for (const std::byte byte : long_block)
    hash = (hash ^ std::to_integer<std::uint64_t>(byte)) * 0x100000001B3;
  CHECK(hash == 0x314762750936E850);
}

TEST_CASE("ans refuses parts that end elsewhere, padding, a stream out of range and a start too large") {
  const Positions positions = of_three_parts();
  const std::size_t numel = positions.back() + 1, count = positions.size();
  const Bytes block = encoded(positions, numel);
  std::uint32_t ends[2];
  std::memcpy(ends, block.data(), sizeof ends);
  for (const std::uint32_t end :
       {0u, ends[0] - 1, ends[0] + 1, ends[1], ends[1] + 1, 0x7FFFFFFFu, 0xFFFFFFFFu})
    CHECK(says(refusal(with(block, 0, end), count, numel), {"part"}));
  for (const std::uint32_t end : {0u, ends[0] - 1, ends[1] - 1, ends[1] + 1, 0xFFFFFFFFu})
    CHECK(says(refusal(with(block, 4, end), count, numel), {"part"}));

  // A word more at the end of the first part, after remainders of 4 bits.
  const std::size_t words = 8 + 2 * 2048 + 904;
  Bytes longer = with(with(block, 0, ends[0] + 1), 4, ends[1] + 1);
  longer.insert(longer.begin() + std::ptrdiff_t(words + 2 * ends[0]), 2, std::byte{0});
  CHECK(says(refusal(longer, count, numel), {"a part's runs"}));

  // Three positions of 100: a byte for the remainders of the first two, 3 bits each.
  const Bytes three = encoded({5, 9, 70}, 100);
  CHECK(refusal(three, 3, 100).empty());
  for (const unsigned bit : {6u, 7u})
    CHECK(says(refusal(with(three, 0, three[0] | std::byte(1u << bit)), 3, 100), {"a part's runs"}));
  CHECK(says(refusal(std::span(three).first(0), 3, 100), {"cut off"}));
}

TEST_CASE("ans reads no stream but the one that a writer makes, whatever its first words are") {
  std::size_t read = 0;
  const auto check = [&](const Bytes& bytes) {
    if (!refusal(bytes, 1, 100).empty()) return;
    ++read;
    REQUIRE(encoded(decoded(bytes, 1, 100), 100) == bytes);
  };
  // One position of 100 is a state of 32 bits, which starts with 4 of the position's.
  const Bytes one = encoded({70}, 100);
  REQUIRE(one.size() == 4);
  Bytes longer = one;
  longer.resize(6);
  for (std::uint32_t low = 0; low < 65536; ++low) {
    check(with(one, 2, std::uint16_t(low)));
    // A state below its range, which a word fills.
    for (const std::uint16_t upper : {0, 1})
      for (const std::uint16_t word : {5, 700}) {
        const Bytes start = with(longer, 0, upper);
        check(with(with(start, 2, std::uint16_t(low)), 4, word));
      }
  }
  CHECK(read > 0);
}

TEST_CASE("symbols of any table come back from their stream in little more than their entropy") {
  const std::vector<std::uint16_t> tables[] = {{1000, 2000, 3000, 4096},
                                               {3000, 3600, 4000, 4096},
                                               {4095, 4096},
                                               {1, 4096},
                                               {1, 2, 3, 4096},
                                               {2048, 4096}};
  const CounterRng rng(3, RngUse::test);
  for (const auto& ends : tables) {
    const AnsTable table(ends);
    std::vector<std::uint8_t> symbols(50000);
    double bits = 0;
    for (std::size_t i = 0; i < symbols.size(); ++i) {
      symbols[i] = table.symbol_at(rng.below(i, AnsTable::kSlots));
      bits += AnsTable::kSlotBits - std::log2(table.share(symbols[i]).slots);
    }
    std::vector<std::uint16_t> room(symbols.size() + kAnsStateWords);
    AnsWriter writer(table, room.data() + room.size(), 0xBEEF);
    for (std::size_t i = symbols.size(); i-- > 0;) writer.put(symbols[i]);
    const std::span<const std::uint16_t> words(writer.finish(), room.data() + room.size());
    CHECK(8.0 * double(words.size_bytes()) < 1.001 * bits + 32);

    AnsReader reader(table, std::as_bytes(words));
    std::size_t same = 0;
    for (const std::uint8_t symbol : symbols) same += reader.get() == symbol;
    CHECK(same == symbols.size());
    CHECK(reader.done());
    CHECK(reader.start() == 0xBEEF);
    CHECK(reader.at() == std::as_bytes(words).data() + words.size_bytes());
  }
}

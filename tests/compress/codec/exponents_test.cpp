// Floats with coded exponents: whatever bits come back, in no more bytes than the format says, and nothing damaged is
// read beyond its end.
#include "compress/codec/exponents.h"

#include <bit>

#include "tests/compress/fixtures.h"
#include "tests/support/any_threads.h"

using namespace topknot;

namespace {

using Bytes = std::vector<std::byte>;

template <class T>
Bytes coded(const std::vector<T>& values) {
  Bytes bytes(3, std::byte{7});  // is replaced
  encode_exponents(std::span<const T>(values), bytes);
  return bytes;
}

// Also that no block takes more than its header above its values.
template <class T>
void check_round_trip(const std::vector<T>& values) {
  const Bytes bytes = coded(values);
  const std::size_t blocks = (values.size() + kExponentBlock - 1) / kExponentBlock;
  CHECK(bytes.size() <= values.size() * sizeof(T) + 4 * blocks);
  std::vector<T> back(values.size());
  decode_exponents(bytes, std::span<T>(back));
  CHECK(same_bits(back, values));
}

std::vector<BFloat16> narrow(const std::vector<float>& values) {
  std::vector<BFloat16> half(values.size());
  to_bfloat16(values.data(), values.size(), half.data());
  return half;
}

std::vector<float> normal(std::size_t n) {
  return testing::normal_values(n, 0.01, 3);
}

// Of bits that `draw` makes of 64 random ones.
template <class Draw>
void check_bits(std::size_t n, const Draw& draw) {
  const CounterRng rng(4, RngUse::test);
  std::vector<float> values(n);
  std::vector<BFloat16> half(n);
  for (std::size_t i = 0; i < n; ++i) {
    const std::uint64_t random = std::uint64_t{std::bit_cast<std::uint32_t>(rng.normal(2 * i))} << 32 |
                                 std::bit_cast<std::uint32_t>(rng.normal(2 * i + 1));
    const std::uint32_t bits = draw(random * 0x9E3779B97F4A7C15u);
    values[i] = std::bit_cast<float>(bits);
    half[i] = {std::uint16_t(bits >> 16)};
  }
  check_round_trip(values);
  check_round_trip(half);
}

}  // namespace

TEST_CASE("coded exponents: values of any bits come back") {
  for (const std::size_t n : {0u, 1u, 2u, 15u, 16u, 17u, 500u, 4095u, 4096u, 4097u, 4113u, 20000u}) {
    INFO(n << " values");
    check_bits(n, [](std::uint64_t r) { return std::uint32_t(r >> 32); });  // any
    check_bits(n, [](std::uint64_t) { return 0u; });
    check_bits(n, [](std::uint64_t) { return 0x80000000u; });
    check_bits(n, [](std::uint64_t r) { return 0x7F800000u | std::uint32_t(r >> 32); });  // NaN, Inf
    check_bits(n, [](std::uint64_t r) { return std::uint32_t(r >> 32) & 0x807FFFFFu; });  // denormals
    // Zeros among others, in any share; of them -0, which is none.
    for (const unsigned share : {1u, 10u, 50u, 99u})
      check_bits(n, [=](std::uint64_t r) {
        const auto bits = std::uint32_t(r >> 32);
        return r % 100 < share ? (r % 1000 < 5 ? 0x80000000u : 0u) : bits | 1u << 16;
      });
    check_round_trip(normal(n));
    check_round_trip(narrow(normal(n)));
  }
}

TEST_CASE("coded exponents: windows of every width, at both ends of the range, with and without escapes") {
  for (unsigned width = 0; width <= 8; ++width)
    for (const unsigned first : {0u, 1u, 120u, 200u, 255u})
      for (const unsigned escapes : {0u, 1u, 40u}) {
        INFO("width " << width << " from " << first << ", " << escapes << " escapes of 1000");
        check_bits(5000, [=](std::uint64_t r) {
          const unsigned size = width == 0 ? 1 : (1u << width) - 1;
          const unsigned inside = std::min(255u, first + unsigned(r >> 40) % size);
          const unsigned exponent = r % 1000 < escapes ? unsigned(r >> 50) % 256 : inside;
          return exponent << 23 | (std::uint32_t(r >> 20) & 0x807FFFFFu);
        });
      }
}

TEST_CASE("coded exponents: the bytes are those of the format") {
  // 18 values: a strip of one code, and a tail of two.
  std::vector<BFloat16> values(18, {0x3F80});  // 1: sign and mantissa 0
  values[1] = {0xBFC0};                        // -1.5
  values[5] = {0x4000};                        // 2
  values[17] = {0x7F80};                       // infinity, in the tail
  const Bytes bytes = coded(values);
  // A word of 16 bits for width 1, whose only code is exponent 127; value 5 has an escape.
  Bytes expected{std::byte{127}, std::byte{1}, std::byte{1}, std::byte{0}};
  for (std::size_t i = 0; i < 18; ++i) expected.push_back(i == 1 ? std::byte{0xC0} : std::byte{0});
  expected.insert(expected.end(),
                  {std::byte{1 << 5}, std::byte{0}, std::byte{127}, std::byte{255}, std::byte{128}});
  CHECK(bytes == expected);
  expected[4 + 18] = std::byte{3 << 5};  // a second escape, of which there is no exponent
  CHECK_THROWS_AS(decode_exponents(expected, std::span<BFloat16>(values)), Error);
  // The highest exponent alone needs no codes.
  CHECK(coded(std::vector<BFloat16>(4096, {0x7F80})).size() == 4 + 4096);
  // Zeros left out: a bit each, and nothing else.
  const Bytes zeros = coded(std::vector<float>(4096));
  CHECK(zeros.size() == 4 + 512);
  CHECK(std::to_integer<unsigned>(zeros[1]) == 0x80);
}

TEST_CASE("coded exponents: normal values take 1.15 times less room, in bfloat16 1.38 times") {
  const std::vector<float> values = normal(100000);
  CHECK(4.0 * 100000 / double(coded(values).size()) > 1.15);
  CHECK(2.0 * 100000 / double(coded(narrow(values)).size()) > 1.38);
  std::vector<float> sparse = values;
  for (std::size_t i = 0; i < sparse.size(); i += 2) sparse[i] = 0;
  CHECK(4.0 * 100000 / double(coded(sparse).size()) > 2);
}

TEST_CASE("coded exponents: threads write and read the same bytes") {
  std::vector<float> values = normal(1000000);
  for (std::size_t i = 300000; i < 400000; i += 3) values[i] = 0;
  testing::check_any_threads([&] { return coded(values); });
  const testing::Threads four(4);
  check_round_trip(values);
}

TEST_CASE("coded exponents: damaged bytes are refused, or read as other values") {
  const auto try_all = [](const auto& values) {
    using T = typename std::decay_t<decltype(values)>::value_type;
    const Bytes whole = coded(values);
    std::vector<T> back(values.size());
    // In memory of its own length, so that a sanitizer sees a read behind it.
    const auto accepted = [&](const Bytes& bytes) {
      try {
        decode_exponents(bytes, std::span<T>(back));
        return true;
      } catch (const Error&) {
        return false;
      }
    };
    REQUIRE(accepted(whole));
    for (std::size_t size = 0; size < whole.size(); ++size)
      CHECK_FALSE(accepted(Bytes(whole.begin(), whole.begin() + std::ptrdiff_t(size))));
    Bytes longer = whole;
    longer.push_back(std::byte{0});
    CHECK_FALSE(accepted(longer));
    for (std::size_t at = 0; at < whole.size(); ++at)
      for (unsigned bit = 0; bit < 8; ++bit) {
        Bytes flipped = whole;
        flipped[at] ^= std::byte(1u << bit);
        if (accepted(flipped)) CHECK_FALSE(same_bits(back, values));
      }
    // Another number of values.
    back.resize(values.size() + 16);
    CHECK_FALSE(accepted(whole));
  };
  std::vector<float> values = normal(150);
  values[3] = std::numeric_limits<float>::infinity();
  try_all(values);
  try_all(narrow(values));
  for (std::size_t i = 0; i < values.size(); i += 2) values[i] = 0;
  try_all(values);
  try_all(narrow(values));
}

// Damaged blocks in every code are refused, and nothing is allocated on their word.
#include <cstring>
#include <functional>

#include "compress/codec/codec.h"
#include "nn/base/check.h"
#include "tests/support/catch.h"
#include "tests/support/positions.h"

using namespace topknot;
using namespace topknot::testing;

namespace {

using Block = std::vector<std::byte>;

struct Codes {
  const IndexCodec* index;
  const ValueCodec* value;
  Codes(const std::string& index_name, const std::string& value_name)
      : index(&index_codecs().find(index_name)), value(&value_codecs().find(value_name)) {}
  Block write(const std::vector<std::uint32_t>& positions, std::size_t numel) const {
    SparseVector entries{true, positions, {}};
    for (std::size_t i = 0; i < positions.size(); ++i)
      entries.values.push_back(static_cast<float>(i % 13) * 0.37f - 2.0f);
    return write_block(entries, numel, *index, *value);
  }
  // "accepted", or why not.
  std::string read(std::span<const std::byte> block, std::size_t numel) const {
    SparseVector entries;
    try {
      read_block(block, numel, *index, *value, entries);
    } catch (const Error& error) {
      return error.what();
    }
    return "accepted";
  }
};

template <class T>
Block with(Block block, std::size_t at, T value) {
  REQUIRE(at + sizeof value <= block.size());
  std::memcpy(block.data() + at, &value, sizeof value);
  return block;
}

void says(const std::string& text, const std::string& part) {
  INFO(text);
  CHECK(text.find(part) != std::string::npos);
}

}  // namespace

TEST_CASE("a block in any codes that is cut anywhere, or longer, is refused") {
  for (const std::string& index : index_codecs().names())
    for (const std::string& value : value_codecs().names()) {
      INFO(index << ", " << value);
      const Codes codes(index, value);
      for (const auto& positions : {uniform_positions(500, 20, 1), uniform_positions(70000, 2, 1),
                                    uniform_positions(300, 299, 1), uniform_positions(40, 40, 1)}) {
        const std::size_t numel = positions.back() + 1;
        const Block block = codes.write(positions, numel);
        REQUIRE(codes.read(block, numel) == "accepted");
        for (std::size_t length = 0; length < block.size(); ++length)
          REQUIRE(codes.read(std::span(block).first(length), numel) != "accepted");
        Block longer = block;
        longer.push_back(std::byte{0});
        CHECK(codes.read(longer, numel) != "accepted");
      }
      Block empty = codes.write({}, 100);
      CHECK(empty.size() == 16);
      empty.push_back(std::byte{0});
      CHECK(codes.read(empty, 100) != "accepted");
    }
}

TEST_CASE("a reader takes the layouts that its own compress.codec may write, and no other") {
  const std::vector<std::uint32_t> positions = {1, 5, 9};
  for (const std::string writer : {"raw", "run16", "rice", "bitmap"})
    for (const std::string reader : {"raw", "run16", "rice", "bitmap", "auto"}) {
      const std::string answer = Codes(reader, "fp32").read(Codes(writer, "fp32").write(positions, 60), 60);
      if (reader == writer || reader == "auto")
        CHECK(answer == "accepted");
      else
        says(answer, "compress.codec");
    }
  says(Codes("raw", "bf16").read(Codes("raw", "fp32").write(positions, 60), 60), "compress.values");
  says(Codes("auto", "fp32").read(with(Codes("raw", "fp32").write(positions, 60), 6, std::uint8_t{200}), 60),
       "compress.codec");
}

TEST_CASE("a short block that claims two thousand million entries is refused at once") {
  const std::size_t numel = 0x7FFFFFFF;
  for (const std::string& index : index_codecs().names())
    for (const std::string& value : value_codecs().names()) {
      const Codes codes(index, value);
      for (const std::uint8_t layout : {0, 1, 2, 3, 4}) {
        Block block = codes.write({5}, numel >> 12);
        block = with(with(block, 6, layout), 8, std::uint32_t{0x7FFFFFFF});
        const std::string answer = codes.read(with(block, 12, std::uint32_t{0x7FFFFFFF}), numel);
        CHECK((answer.find("shorter") != std::string::npos ||
               answer.find("compress.codec") != std::string::npos));
      }
    }
}

TEST_CASE("run16: a filler with a value, a run beyond the group and a filler too many are refused") {
  const Codes codes("run16", "fp32");
  const Block block = codes.write({0, 70000}, 70001);  // words 0, 65535, 4464
  REQUIRE(block.size() == 16 + 18);
  says(codes.read(with(block, 16 + 6 + 4, 1.0f), 70001), "filler");
  says(codes.read(with(block, 16 + 6 + 4, -0.0f), 70001), "filler");
  says(codes.read(with(block, 16 + 4, std::uint16_t{4465}), 70001), "70001");
  says(codes.read(with(block, 16 + 4, std::uint16_t{65535}), 70001), "runs lead to");
  CHECK(codes.read(with(block, 16 + 2, std::uint16_t{65534}), 70001) != "accepted");
}

TEST_CASE("rice: another parameter, part ends out of order, bits left over are refused") {
  const Codes codes("rice", "fp32");
  const std::size_t numel = 100000;
  const Block block = codes.write(uniform_positions(numel, 3000, 4), numel);  // three parts
  REQUIRE(block[16] == std::byte{5});
  for (const int b : {0, 4, 6, 31, 64, 255})
    says(codes.read(with(block, 16, static_cast<std::uint8_t>(b)), numel), "Rice parameter");
  std::uint32_t ends[3];
  std::memcpy(ends, block.data() + 17, sizeof ends);
  for (std::size_t part = 0; part < 3; ++part)
    for (const std::uint32_t end : {ends[part] - 1, ends[part] + 1, ends[part] + 8, ends[part] - 8, 0u,
                                    0xFFFFFFFFu, ends[(part + 1) % 3]})
      says(codes.read(with(block, 17 + 4 * part, end), numel), "Rice part");
  // A bit of padding after the first part.
  REQUIRE(ends[0] % 8 != 0);
  const std::size_t padded = 17 + 12 + ends[0] / 8;
  says(codes.read(with(block, padded, block[padded] | std::byte{0x80}), numel), "Rice part");
}

TEST_CASE("bitmap: a bit too many, one too few, one beyond the group are refused") {
  const Codes codes("bitmap", "fp32");
  const Block block = codes.write({3, 9}, 12);
  REQUIRE(block.size() == 16 + 2 + 8);
  says(codes.read(with(block, 16, std::uint8_t{0x18}), 12), "3 bits for 2");
  says(codes.read(with(block, 16, std::uint8_t{0}), 12), "1 bits for 2");
  says(codes.read(with(block, 17, std::uint8_t{0x12}), 12), "beyond the group");
  CHECK(codes.read(with(block, 16, std::uint8_t{1}), 12) == "accepted");  // another position
}

TEST_CASE("fp16 and int8: values that their scale cannot have are refused") {
  const Codes half("raw", "fp16"), byte("raw", "int8");
  const std::vector<std::uint32_t> positions = {1, 2};
  const std::size_t at = 16 + 8;                  // of the value section
  const Block halves = half.write(positions, 9);  // -2, -1.63: e = 1 - 14
  REQUIRE(std::to_integer<std::int8_t>(halves[at]) == -13);
  says(half.read(with(halves, at, std::int8_t{114}), 9), "fp16 exponent");
  says(half.read(with(halves, at, std::int8_t{-126}), 9), "fp16 exponent");
  says(half.read(with(halves, at + 1, std::uint16_t{0x7C00}), 9), "fp16 value");  // infinity
  says(half.read(with(halves, at + 1, std::uint16_t{0x7E01}), 9), "fp16 value");  // NaN
  says(half.read(with(with(halves, at + 1, std::uint16_t{0}), at + 3, std::uint16_t{0x1000}), 9),
       "fp16 value");  // this e has a larger m

  const Block bytes = byte.write(positions, 9);
  REQUIRE(bytes.size() == at + 4 + 2);
  CHECK(std::to_integer<std::int8_t>(bytes[at + 4]) == -127);
  says(byte.read(with(bytes, at + 4, std::int8_t{-128}), 9), "int8 values");
  says(byte.read(with(bytes, at + 4, std::int8_t{5}), 9), "int8 values");
  for (const float scale : {-2.0f, -0.0f, 1e-40f, std::numeric_limits<float>::infinity(),
                            std::numeric_limits<float>::quiet_NaN()})
    says(byte.read(with(bytes, at, scale), 9), "int8 scale");
  says(byte.read(with(bytes, at, 0.0f), 9), "int8 values");
}

TEST_CASE("a Rice part that would end before it begins is refused by its length") {
  const Codes codes("rice", "fp32");
  std::vector<std::uint32_t> positions;
  for (std::uint32_t i = 0; i < 2000; ++i) positions.push_back(9 * i);  // two parts
  const Block block = codes.write(positions, 18000);
  says(codes.read(with(block, 16 + 1 + 4, std::uint32_t{8}), 18000), "a Rice part's length");
}

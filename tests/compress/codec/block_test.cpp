// Blocks on the wire: what is written is read, and nothing else is.
#include "compress/codec/codec.h"
#include "tests/compress/codec/through.h"
#include "tests/support/positions.h"

using namespace topknot;
using namespace topknot::testing;

namespace {

using Block = std::vector<std::byte>;

struct Codes {
  const IndexCodec* index;
  const ValueCodec* value;
  explicit Codes(const std::string& index_name = "raw", const std::string& value_name = "fp32")
      : index(&index_codecs().find(index_name)), value(&value_codecs().find(value_name)) {}
  Block write(const SparseVector& entries, std::size_t numel) const {
    return write_block(entries, numel, *index, *value);
  }
  Block write_at(const std::vector<std::uint32_t>& positions, std::size_t numel) const {
    SparseVector entries{true, positions, {}};
    for (std::size_t i = 0; i < positions.size(); ++i) entries.values.push_back(float(i % 13) * 0.37f - 2.0f);
    return write(entries, numel);
  }
  SparseVector read(std::span<const std::byte> block, std::size_t numel) const {
    SparseVector entries;
    read_block(block, numel, *index, *value, entries);
    return entries;
  }
  // "accepted", or why not.
  std::string answer(std::span<const std::byte> block, std::size_t numel) const {
    const std::string text = error_text<Error>([&] { read(block, numel); });
    return text.empty() ? "accepted" : text;
  }
};

SparseVector some_entries() {
  return {true, {0, 3, 4, 99}, {1.5f, -0.0f, 1e-42f, -std::numeric_limits<float>::max()}};
}

void check_says(const std::string& text, const std::string& part) {
  CHECK(says(text, {part}));
}

}  // namespace

TEST_CASE("a block reads back as it was written, 16 bytes of header and 8 an entry") {
  const Codes codes;
  const SparseVector entries = some_entries();
  const Block block = codes.write(entries, 100);
  CHECK(block.size() == 16 + 4 * 8);
  const SparseVector back = codes.read(block, 100);
  CHECK(back.finite);
  CHECK(back.indices == entries.indices);
  CHECK(same_bits(back.values, entries.values));

  const SparseVector none = codes.read(codes.write(SparseVector{}, 100), 100);
  CHECK((none.finite && none.indices.empty()));
  SparseVector broken;
  broken.finite = false;
  CHECK_FALSE(codes.read(codes.write(broken, 100), 100).finite);
}

TEST_CASE("the header is what docs/compress.md says") {
  const Block block = Codes().write(SparseVector{true, {5}, {1.0f}}, 258);
  const std::vector<unsigned> expected = {0x54, 0x4E, 0x4B, 0x54, 1, 1, 0, 0, 2, 1, 0,    0,
                                          1,    0,    0,    0,    5, 0, 0, 0, 0, 0, 0x80, 0x3F};
  REQUIRE(block.size() == expected.size());
  for (std::size_t i = 0; i < block.size(); ++i) CHECK(std::to_integer<unsigned>(block[i]) == expected[i]);
}

TEST_CASE("a block that says something wrong is refused, and the message says what") {
  const Codes codes;
  const Block good = codes.write(some_entries(), 100);
  check_says(codes.answer(with(good, 0, std::uint32_t{1}), 100), "version");
  check_says(codes.answer(with(good, 4, std::uint8_t{2}), 100), "version");
  check_says(codes.answer(with(good, 5, std::uint8_t{3}), 100), "flags");
  check_says(codes.answer(with(good, 6, std::uint8_t{1}), 100), "compress.codec");
  check_says(codes.answer(with(good, 7, std::uint8_t{1}), 100), "compress.values");
  check_says(codes.answer(good, 101), "100 elements where the group has 101");
  check_says(codes.answer(with(good, 12, std::uint32_t{3}), 100), "bytes of values");
  check_says(codes.answer(with(good, 12, std::uint32_t{5}), 100), "position");  // the first value read as one
  check_says(codes.answer(with(good, 12, std::uint32_t{100}), 100), "shorter");
  check_says(codes.answer(with(good, 12, std::uint32_t{0xFFFFFFFF}), 100), "count");
  check_says(codes.answer(with(good, 5, std::uint8_t{0}), 100), "count");     // entries, yet not finite
  check_says(codes.answer(with(good, 20, std::uint32_t{4}), 100), "ascend");  // 0, 4, 4, 99
  check_says(codes.answer(with(good, 16, std::uint32_t{3}), 100), "ascend");  // 3, 3, 4, 99
  check_says(codes.answer(with(good, 28, std::uint32_t{100}), 100), "100 of 100");
  check_says(codes.answer(with(good, 28, std::uint32_t{0xFFFFFFFF}), 100), "position");
  check_says(codes.answer(with(good, 32, std::uint32_t{0x7F800000}), 100), "not finite");
  check_says(codes.answer(with(good, 32, std::uint32_t{0xFFC00000}), 100), "not finite");
}

TEST_CASE("a compressor refuses damaged blocks, a missing one, and its own come back changed") {
  const auto make = [] { return make_compressor(named("topk"), whole_group(4, 2)); };
  std::vector<float> gradient = {1, 2, 3, 4}, residual(4);
  StepContext info;
  info.density = 0.5;
  const auto round = [&](auto&& change) {
    auto compressor = make();
    std::vector<Block> blocks(2, compressor->encode({gradient, residual}, info).block);
    change(blocks);
    compressor->decode({.blocks = views_of(blocks)});
  };
  CHECK_NOTHROW(round([](auto&) {}));
  CHECK_THROWS_AS(round([](auto& blocks) { blocks[1].pop_back(); }), Error);
  CHECK_THROWS_AS(round([](auto& blocks) { blocks.pop_back(); }), Error);
  CHECK_THROWS_AS(round([](auto& blocks) { blocks[0][16] = std::byte{0}; }), Error);
}

TEST_CASE("a block in any codes that is cut anywhere, or longer, is refused") {
  for (const std::string& index : index_codecs().names())
    for (const std::string& value : value_codecs().names()) {
      INFO(index << ", " << value);
      const Codes codes(index, value);
      for (const auto& positions : {uniform_positions(500, 20, 1), uniform_positions(70000, 2, 1),
                                    uniform_positions(300, 299, 1), uniform_positions(40, 40, 1)}) {
        const std::size_t numel = positions.back() + 1;
        const Block block = codes.write_at(positions, numel);
        REQUIRE(codes.answer(block, numel) == "accepted");
        for (std::size_t length = 0; length < block.size(); ++length)
          REQUIRE(codes.answer(std::span(block).first(length), numel) != "accepted");
        Block longer = block;
        longer.push_back(std::byte{0});
        CHECK(codes.answer(longer, numel) != "accepted");
      }
      Block empty = codes.write(SparseVector{}, 100);
      CHECK(empty.size() == 16);
      empty.push_back(std::byte{0});
      CHECK(codes.answer(empty, 100) != "accepted");
    }
}

TEST_CASE("a reader takes the layouts that its own compress.codec may write, and no other") {
  const std::vector<std::uint32_t> positions = {1, 5, 9};
  for (const std::string writer : {"raw", "run16", "rice", "bitmap", "ans"})
    for (const std::string reader : {"raw", "run16", "rice", "bitmap", "ans", "auto"}) {
      const std::string answer =
          Codes(reader, "fp32").answer(Codes(writer, "fp32").write_at(positions, 60), 60);
      if (reader == writer || (reader == "auto" && writer != "ans"))
        CHECK(answer == "accepted");
      else
        check_says(answer, "compress.codec");
    }
  check_says(Codes("raw", "bf16").answer(Codes("raw", "fp32").write_at(positions, 60), 60),
             "compress.values");
  check_says(Codes("auto", "fp32")
                 .answer(with(Codes("raw", "fp32").write_at(positions, 60), 6, std::uint8_t{200}), 60),
             "compress.codec");
}

// In a long block, all bytes near its ends, and every 97th between them.
TEST_CASE(
    "a block in any codes with any byte changed is refused, or is what a writer makes of other entries") {
  std::vector<std::pair<std::string, std::string>> all;
  for (const std::string& index : index_codecs().names()) all.emplace_back(index, "fp32");
  for (const std::string& value : value_codecs().names()) all.emplace_back("raw", value);
  std::map<std::string, std::vector<std::string>> reasons = {
      {"run16", {"a filler with a value", "runs lead to position"}},
      {"rice", {"Rice parameter", "Rice part's length", "Rice part's bits", "beyond the group"}},
      {"bitmap", {"bits beyond the group", "bits for"}},
      {"ans", {"a part's length", "a part's runs", "runs lead beyond the group"}},
      {"fp16", {"fp16 exponent", "an fp16 value that does not belong to its exponent"}},
      {"int8", {"an int8 scale", "int8 values that do not belong to their scale"}},
      {"fp8", {"an fp8 scale", "fp8 values that do not belong to their scale"}},
      {"e3m0", {"an e3m0 scale", "an e3m0 code", "e3m0 values that do not belong to their scale"}},
      {"centroid2", {"centroids that do not ascend, or are not used", "bits behind the last code"}},
      {"centroid2_ans", {"counts of centroids", "codes that are not those of their counts"}}};
  const std::vector<float> values = {1, -1.5f, 0.25f, 0, -0.75f, 1.5f, 1.25f, -1, 0.5f};
  for (const auto& [index, value] : all) {
    std::string answers;
    for (const auto& positions : {std::vector<std::uint32_t>{0},
                                  {3, 9, 11},
                                  {0, 1, 2, 4, 5},
                                  uniform_positions(300, 20, 1),
                                  uniform_positions(60, 55, 9),
                                  {5, 70000, 200000},
                                  uniform_positions(100000, 9000, 4)}) {
      INFO(index << ", " << value << ", " << positions.size() << " positions");
      const Codes codes(index, value);
      const std::size_t numel = positions.back() + 5;
      SparseVector entries{true, positions, {}};
      for (std::size_t i = 0; i < positions.size(); ++i)
        entries.values.push_back(values[i % values.size()] * (i < 9 ? 1.0f : 1.0f / 3));
      const Block block = codes.write(entries, numel);
      std::size_t refused = 0;
      const bool is_long = block.size() > 400;
      for (std::size_t at = 4; at < block.size(); at += is_long && at > 40 && at + 40 < block.size() ? 97 : 1)
        for (unsigned change = 1; change < 256; change += is_long ? 127 : 1) {
          const Block changed = with(block, at, block[at] ^ std::byte(change));
          const std::string answer = codes.answer(changed, numel);
          refused += answer != "accepted";
          answers += answer + "\n";
          if (answer != "accepted") continue;
          const IndexCodec layout{{codes.index->find(std::to_integer<std::uint8_t>(changed[6]))}};
          REQUIRE(write_block(codes.read(changed, numel), numel, layout, *codes.value) == changed);
        }
      CHECK(refused > 8);
    }
    for (const std::string& reason : reasons[index == "raw" ? value : index]) {
      INFO(index << ", " << value << ": " << reason);
      CHECK(answers.find(reason) != std::string::npos);
    }
  }
}

TEST_CASE("a short block that claims two thousand million entries is refused at once") {
  const std::size_t numel = 0x7FFFFFFF;
  for (const std::string& index : index_codecs().names())
    for (const std::string& value : value_codecs().names()) {
      const Codes codes(index, value);
      for (const std::uint8_t layout : {0, 1, 2, 3, 4, 5}) {
        Block block = codes.write_at({5}, numel >> 12);
        block = with(with(block, 6, layout), 8, std::uint32_t{0x7FFFFFFF});
        const std::string answer = codes.answer(with(block, 12, std::uint32_t{0x7FFFFFFF}), numel);
        CHECK((answer.find("shorter") != std::string::npos ||
               answer.find("compress.codec") != std::string::npos));
      }
    }
}

TEST_CASE("a Rice part that would end before it begins is refused by its length") {
  const Codes codes("rice", "fp32");
  std::vector<std::uint32_t> positions;
  for (std::uint32_t i = 0; i < 2000; ++i) positions.push_back(9 * i);  // two parts
  const Block block = codes.write_at(positions, 18000);
  check_says(codes.answer(with(block, 16 + 1 + 4, std::uint32_t{8}), 18000), "a Rice part's length");
}

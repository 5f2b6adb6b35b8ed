// Blocks written and read by a GPU against write_block() and read_block().
#include "compress/codec/cuda/device_codec.h"

#include "compress/codec/codec.h"
#include "tests/cuda/device_vector.h"
#include "tests/cuda/fixture.h"
#include "tests/support/positions.h"

namespace topknot {
namespace {

using cuda::DecodedStats;
using namespace testing;

using Block = std::vector<std::byte>;

struct Codes {
  explicit Codes(const std::string& index, const std::string& value)
      : index(&index_codecs().find(index)), value(&value_codecs().find(value)) {}
  const IndexCodec* index;
  const ValueCodec* value;
};

// Values of widely different magnitudes; some of them 0.
float value_at(std::size_t i, std::uint32_t stream) {
  const CounterRng rng(5, RngUse::test, stream);
  const float x = rng.normal(i);
  return i % 37 == 5 ? 0.0f : x * x * x * (i % 11 == 3 ? 1e-6f : 1.0f);
}

SparseVector entries_at(std::vector<std::uint32_t> indices, std::uint32_t stream) {
  SparseVector entries;
  entries.indices = std::move(indices);
  for (std::size_t i = 0; i < entries.indices.size(); ++i) entries.values.push_back(value_at(i, stream));
  return entries;
}

// `count` of numel, as even as integers allow.
SparseVector spread(std::size_t count, std::size_t numel, std::uint32_t stream = 0) {
  std::vector<std::uint32_t> indices(count);
  for (std::size_t i = 0; i < count; ++i) indices[i] = std::uint32_t(i * numel / count);
  return entries_at(std::move(indices), stream);
}

// Neighbours, with one gap that leaves the last one at the end.
SparseVector crowded(std::size_t count, std::size_t numel, std::size_t before_gap) {
  std::vector<std::uint32_t> indices(count);
  for (std::size_t i = 0; i < count; ++i) indices[i] = std::uint32_t(i < before_gap ? i : numel - count + i);
  return entries_at(std::move(indices), 1);
}

SparseVector scattered(std::size_t count, std::size_t numel, std::uint32_t stream) {
  return entries_at(uniform_positions(numel, count, stream), stream);
}

Block written(cuda::DeviceCodec& code, const SparseVector& entries, cudaStream_t stream) {
  const DeviceVector<std::uint32_t> indices(entries.indices),
      stats(std::vector<std::uint32_t>{std::uint32_t(entries.indices.size()), entries.finite ? 1u : 0u});
  const DeviceVector<float> values(entries.values);
  DeviceVector<std::byte> block(Block(code.block_bytes(), std::byte{0xAB}));
  code.write(stream, {indices.data(), values.data(), stats.data(), stats.data() + 1}, block.data());
  return block.host();
}

struct Read {
  std::vector<DecodedStats> stats;
  std::vector<SparseVector> entries;
};

Read read(cuda::DeviceCodec& code, const std::vector<Block>& blocks, cudaStream_t stream) {
  Block all;
  for (const Block& block : blocks) all.insert(all.end(), block.begin(), block.end());
  const std::size_t capacity = code.capacity(), ranks = blocks.size();
  const DeviceVector<std::byte> on_gpu(all);
  DeviceVector<std::uint32_t> indices(capacity * ranks);
  DeviceVector<float> values(capacity * ranks);
  DeviceVector<DecodedStats> stats(ranks);
  code.read(stream, on_gpu.data(), {indices.data(), values.data(), stats.data()});
  Read result;
  result.stats = stats.host();
  const auto every_index = indices.host();
  const auto every_value = values.host();
  for (std::size_t r = 0; r < ranks; ++r) {
    const auto first = std::ptrdiff_t(r * capacity), n = std::ptrdiff_t(result.stats[r].count);
    REQUIRE(result.stats[r].count <= capacity);
    SparseVector entries;
    entries.finite = result.stats[r].finite != 0;
    entries.indices.assign(every_index.begin() + first, every_index.begin() + first + n);
    entries.values.assign(every_value.begin() + first, every_value.begin() + first + n);
    result.entries.push_back(std::move(entries));
  }
  return result;
}

Block padded(Block block, std::size_t length) {
  REQUIRE(block.size() <= length);
  block.resize(length);
  return block;
}

bool same(const SparseVector& a, const SparseVector& b) {
  return a.finite == b.finite && a.indices == b.indices && same_bits(a.values, b.values);
}

std::uint32_t largest_of(const SparseVector& entries) {
  float largest = 0;
  for (const float value : entries.values) largest = std::max(largest, std::abs(value));
  std::uint32_t bits = 0;
  std::memcpy(&bits, &largest, sizeof bits);
  return bits;
}

const char* const kLayouts[] = {"raw", "rice", "bitmap"};
const char* const kValues[] = {"fp32", "bf16", "fp16", "int8"};

// The lists as the ranks of a group, through every layout and value codec.
void check_all(const std::vector<SparseVector>& lists, std::size_t capacity, std::size_t numel,
               bool all_values) {
  const OnGpu gpu;
  for (const char* layout : kLayouts)
    for (const char* value : kValues) {
      if (!all_values && value != kValues[0]) continue;
      INFO(layout << " " << value << " of " << numel);
      const Codes codes(layout, value);
      const auto code = cuda::make_device_codec(layout, value, numel, int(lists.size()));
      REQUIRE(code);
      code->set_capacity(capacity);
      REQUIRE(code->block_bytes() % 16 == 0);
      std::vector<Block> blocks;
      std::vector<SparseVector> expected;
      for (const SparseVector& entries : lists) {
        const Block block = write_block(entries, numel, *codes.index, *codes.value);
        CHECK(written(*code, entries, gpu.stream()) == padded(block, code->block_bytes()));
        blocks.push_back(padded(block, code->block_bytes()));
        read_block(block, numel, *codes.index, *codes.value, expected.emplace_back());
      }
      const Read result = read(*code, blocks, gpu.stream());
      for (std::size_t r = 0; r < lists.size(); ++r) {
        INFO("rank " << r);
        CHECK(result.stats[r].damaged == 0);
        CHECK(same(result.entries[r], expected[r]));
        CHECK(result.stats[r].largest == largest_of(expected[r]));
      }
    }
}

TEST_CASE("a GPU's blocks are write_block()'s, and read alike, about a Rice part's length, in any order") {
  const auto order = GENERATE(from_range(orders()))();
  const std::size_t numel = 40009;
  std::vector<SparseVector> lists;
  for (const std::size_t count : {0, 1, 255, 256, 1023, 1024, 1025, 5000})
    lists.push_back(spread(count, numel, 2));
  check_all(lists, 5000, numel, true);
}

TEST_CASE("positions anywhere: crowded, scattered, at both ends, every one") {
  const std::size_t numel = 2503;
  check_all(
      {crowded(700, numel, 699), crowded(700, numel, 1), crowded(1100, numel, 1024), scattered(900, numel, 1),
       scattered(1, numel, 2), spread(numel, numel), entries_at({0}, 0), entries_at({2502}, 0)},
      numel, numel, true);
}

TEST_CASE("runs of many thousand zeros") {
  const std::size_t numel = std::size_t{3} << 20;
  check_all({crowded(2, numel, 1), entries_at({3145727}, 0), crowded(1030, numel, 1024),
             crowded(1500, numel, 3), crowded(9000, numel, 8500), spread(1500, numel)},
            9000, numel, false);
}

TEST_CASE("a rank that is not finite sends a header") {
  SparseVector broken;
  broken.finite = false;
  check_all({spread(5, 100), broken, {}}, 10, 100, true);
}

TEST_CASE("groups of one element, and values at the edges of floats") {
  constexpr float most = std::numeric_limits<float>::max(), least = std::numeric_limits<float>::denorm_min();
  std::vector<SparseVector> lists;
  for (const float value : {0.0f, -0.0f, most, -most, least, -1.0f}) {
    lists.push_back(entries_at({0}, 0));
    lists.back().values[0] = value;
  }
  check_all(lists, 1, 1, true);
  SparseVector wide = spread(600, 700);
  for (std::size_t i = 0; i < 600; ++i) wide.values[i] = std::ldexp(i % 2 ? -1.3f : 1.7f, int(i % 277) - 149);
  check_all({wide}, 700, 700, true);
}

TEST_CASE("the fixed length holds the longest block of a capacity") {
  // The worst positions for Rice: one run of all that is left, in each count.
  for (const std::size_t numel : {37, 300, 1303}) {
    const Codes codes("rice", "fp32");
    for (std::size_t capacity = 1; capacity <= numel; capacity += 1 + capacity) {
      const std::size_t length = cuda::longest_block(cuda::Layout::rice, cuda::Values::fp32, capacity, numel);
      for (std::size_t count = 1; count <= capacity; ++count)
        for (const std::size_t before : {std::size_t{0}, count / 2, count - 1})
          if (write_block(crowded(count, numel, before), numel, *codes.index, *codes.value).size() > length)
            FAIL("capacity " << capacity << ", count " << count << ", numel " << numel);
    }
  }
  CHECK(cuda::longest_block(cuda::Layout::raw, cuda::Values::fp16, 10, 1000) == 80);  // 16 + 40 + 21, rounded
  CHECK(cuda::longest_block(cuda::Layout::bitmap, cuda::Values::int8, 300, 1001) ==
        464);  // 16 + 126 + 8 + 300
}

// A damaged block between two good ones: its rank is found, and nothing else is touched (on the emulator,
// memory beside a list is watched).
void check_damaged(const std::string& layout, const std::string& value,
                   const std::function<void(Block&)>& damage) {
  const OnGpu gpu;
  INFO(layout << " " << value);
  const std::size_t numel = 5000, capacity = 1300;
  const Codes codes(layout, value);
  const auto code = cuda::make_device_codec(layout, value, numel, 3);
  code->set_capacity(capacity);
  std::vector<Block> blocks;
  const SparseVector entries = scattered(1200, numel, 3);
  for (int r = 0; r < 3; ++r)
    blocks.push_back(padded(write_block(entries, numel, *codes.index, *codes.value), code->block_bytes()));
  damage(blocks[1]);
  const Read result = read(*code, blocks, gpu.stream());
  CHECK(result.stats[0].damaged == 0);
  CHECK(result.stats[1].damaged != 0);
  CHECK(result.stats[2].damaged == 0);
  CHECK(result.entries[0].indices == entries.indices);
  CHECK(result.entries[2].indices == entries.indices);
}

void put(Block& block, std::size_t at, std::uint32_t word) {
  std::memcpy(block.data() + at, &word, sizeof word);
}

TEST_CASE("damaged headers are found") {
  for (const char* layout : kLayouts)
    for (const std::size_t at : {0, 4, 5, 6, 7, 8, 11, 15})
      check_damaged(layout, "fp32", [=](Block& block) { block[at] ^= std::byte{0x82}; });
  for (const char* layout : kLayouts)
    for (const std::uint32_t count : {1301u, 5001u, 0xFFFFFFFFu})
      check_damaged(layout, "fp32", [=](Block& block) { put(block, 12, count); });
  // Not finite, and yet entries.
  check_damaged("raw", "fp32", [](Block& block) { block[5] = std::byte{0}; });
}

TEST_CASE("positions out of order or range are found") {
  check_damaged("raw", "fp32", [](Block& block) { put(block, 16 + 4 * 500, 5000); });
  check_damaged("raw", "fp32", [](Block& block) { put(block, 16 + 4 * 1199, 0xFFFFFFFF); });
  check_damaged("raw", "fp32",
                [](Block& block) { std::memcpy(&block[16 + 4 * 70], &block[16 + 4 * 71], 4); });
  check_damaged("bitmap", "fp32", [](Block& block) { block[16 + 300] ^= std::byte{1}; });
  check_damaged("rice", "fp32", [](Block& block) { block[16] ^= std::byte{1}; });   // b
  check_damaged("rice", "fp32", [](Block& block) { put(block, 17, 0xFFFFFFFF); });  // an end
  check_damaged("rice", "fp32", [](Block& block) { block[17] ^= std::byte{8}; });   // of the first part
  check_damaged("rice", "fp32", [](Block& block) { put(block, 21, 3); });           // of the last part
  check_damaged("rice", "fp32",
                [](Block& block) { std::memset(&block[25 + 100], 0, 40); });  // a run too long
  check_damaged("rice", "fp32", [](Block& block) { std::memset(&block[25 + 100], 0xFF, 40); });
}

TEST_CASE("values that no code writes are found") {
  // The last value is at the block's written end.
  const auto end_of = [](const char* layout, const char* value) {
    const Codes codes(layout, value);
    return write_block(scattered(1200, 5000, 3), 5000, *codes.index, *codes.value).size();
  };
  for (const char* layout : kLayouts) {
    const std::size_t fp32 = end_of(layout, "fp32"), bf16 = end_of(layout, "bf16"),
                      fp16 = end_of(layout, "fp16"), int8 = end_of(layout, "int8");
    check_damaged(layout, "fp32", [=](Block& block) { put(block, fp32 - 4, 0x7F800000); });
    check_damaged(layout, "fp32", [=](Block& block) { put(block, fp32 - 4 * 700, 0xFFC00000); });
    check_damaged(layout, "bf16", [=](Block& block) {
      block[bf16 - 2] = std::byte{0x80}, block[bf16 - 1] = std::byte{0x7F};
    });
    check_damaged(layout, "fp16", [=](Block& block) { block[fp16 - 1] = std::byte{0x7C}; });
    check_damaged(layout, "fp16", [=](Block& block) { block[fp16 - 2401] = std::byte{114}; });  // an exponent
    check_damaged(layout, "fp16", [=](Block& block) { std::memset(&block[fp16 - 2400], 0, 2400); });
    check_damaged(layout, "int8",
                  [=](Block& block) { put(block, int8 - 1200 - 20, 0xBF800000); });  // a scale
    check_damaged(layout, "int8", [=](Block& block) { put(block, int8 - 1200 - 20, 0); });
    check_damaged(layout, "int8", [=](Block& block) { std::memset(&block[int8 - 1200], 1, 256); });
  }
}

TEST_CASE("a block with any byte changed is refused where the CPU refuses it") {
  const OnGpu gpu;
  const CounterRng rng(21, RngUse::test);
  const std::size_t numel = 3000, ranks = 24;
  std::uint64_t draw = 0;
  for (const char* layout : kLayouts)
    for (const char* value : kValues) {
      INFO(layout << " " << value);
      const Codes codes(layout, value);
      const auto code = cuda::make_device_codec(layout, value, numel, int(ranks));
      code->set_capacity(1200);
      const Block good = write_block(scattered(1100, numel, 4), numel, *codes.index, *codes.value);
      std::vector<Block> blocks, padded_blocks;
      for (std::size_t r = 0; r < ranks; ++r) {
        Block& block = blocks.emplace_back(good);
        for (std::size_t i = 0; i <= r % 3; ++i) {
          // The first bytes of the body, where Rice's parts end, more often than by chance.
          const std::size_t body = r % 2 ? 12 : block.size() - 16;
          const auto at = 16 + std::size_t(rng.uniform(draw++) * float(body - 1));
          block[at] ^= std::byte(1u << (draw % 8));
        }
        padded_blocks.push_back(padded(block, code->block_bytes()));
      }
      const Read result = read(*code, padded_blocks, gpu.stream());
      for (std::size_t r = 0; r < ranks; ++r) {
        SparseVector expected;
        const std::string error =
            error_text([&] { read_block(blocks[r], numel, *codes.index, *codes.value, expected); });
        INFO("rank " << r << ": " << error);
        if (error.empty()) CHECK((result.stats[r].damaged == 0 && same(result.entries[r], expected)));
        // A length that the fixed one hides.
        else if (error.find("bytes of values") == std::string::npos)
          CHECK(result.stats[r].damaged != 0);
      }
    }
}

TEST_CASE("codes without kernels are none") {
  const OnGpu gpu;
  CHECK(cuda::make_device_codec("auto", "fp32", 100, 2) == nullptr);
  CHECK(cuda::make_device_codec("run16", "fp32", 100, 2) == nullptr);
  CHECK(cuda::make_device_codec("ans", "fp32", 100, 2) == nullptr);
}

}  // namespace
}  // namespace topknot

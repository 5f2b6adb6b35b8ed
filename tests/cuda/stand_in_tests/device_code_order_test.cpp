// Blocks of threads and their threads in the other order: the same bytes.
#include "compress/codec/codec.h"
#include "compress/codec/cuda/device_codec.h"
#include "tests/cuda/device_vector.h"
#include "tests/cuda/fixture.h"
#include "tests/cuda/stand_in_tests/machine_settings.h"
#include "tests/support/catch.h"

namespace topknot {
namespace {

using testing::DeviceVector;

TEST_CASE("codes on a GPU do not depend on the order of threads") {
  const stand_in::Reversed reversed;
  const OnGpu gpu;
  const std::size_t numel = 70001, count = 2500, capacity = 2600;
  SparseVector entries;
  for (std::size_t i = 0; i < count; ++i) {
    entries.indices.push_back(static_cast<std::uint32_t>(i * i % 17 + 28 * i));
    entries.values.push_back(0.001f * static_cast<float>(i) - 1.0f);
  }
  const DeviceVector<std::uint32_t> positions(entries.indices), stats(std::vector<std::uint32_t>{count, 1});
  const DeviceVector<float> values(entries.values);
  for (const char* layout : {"raw", "rice", "bitmap"})
    for (const char* value : {"fp32", "bf16", "fp16", "int8"}) {
      INFO(layout << " " << value);
      const auto* const index_codec = &index_codecs().find(layout);
      const auto* const value_codec = &value_codecs().find(value);
      std::vector<std::byte> expected = write_block(entries, numel, *index_codec, *value_codec);
      SparseVector decoded;
      read_block(expected, numel, *index_codec, *value_codec, decoded);
      const auto code = cuda::make_device_codec(layout, value, numel, 1);
      code->set_capacity(capacity);
      expected.resize(code->block_bytes());
      DeviceVector<std::byte> block(code->block_bytes());
      code->write(gpu.stream(), {positions.data(), values.data(), stats.data(), stats.data() + 1},
                  block.data());
      CHECK(block.host() == expected);
      DeviceVector<std::uint32_t> indices(capacity);
      DeviceVector<float> out(capacity);
      DeviceVector<cuda::DecodedStats> found(1);
      code->read(gpu.stream(), block.data(), {indices.data(), out.data(), found.data()});
      CHECK(found.host()[0].damaged == 0);
      CHECK(found.host()[0].count == count);
      CHECK(testing::to_host<std::uint32_t>(indices.data(), count) == decoded.indices);
      CHECK(testing::to_host<float>(out.data(), count) == decoded.values);
    }
}

}  // namespace
}  // namespace topknot

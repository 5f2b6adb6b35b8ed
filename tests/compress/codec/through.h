#pragma once
// Values as a code gives them back, and blocks with a changed word.

#include "compress/codec/codec.h"
#include "tests/compress/simulated_ranks.h"

namespace topknot::testing {

inline std::vector<float> through(const std::string& code, const std::vector<float>& values) {
  const ValueCodec& codec = value_codecs().find(code);
  std::vector<std::byte> bytes;
  codec.encode(values, bytes);
  if (!codec.least) REQUIRE(bytes.size() == codec.bytes(values.size()));
  std::vector<float> back(values.size());
  codec.decode(bytes, back);
  return back;
}

template <class T>
std::vector<std::byte> with(std::vector<std::byte> block, std::size_t at, T value) {
  REQUIRE(at + sizeof value <= block.size());
  std::memcpy(block.data() + at, &value, sizeof value);
  return block;
}

}  // namespace topknot::testing

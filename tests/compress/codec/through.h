#pragma once
// Values as a code gives them back.

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

}  // namespace topknot::testing

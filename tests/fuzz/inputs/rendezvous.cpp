// Messages of the rendezvous.
#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "dist/launch/tcp_store.h"
#include "nn/core/base/check.h"
#include "tests/fuzz/inputs/input_target.h"

namespace topknot::fuzz {
namespace {

struct Received {
  std::string frames;  // encoded again
  bool refused = false;
};

// The stream as it comes in parts of `part` bytes.
Received receive(std::string_view stream, std::size_t part) {
  Received received;
  std::string buffer, payload;
  Frame type;
  try {
    for (; !stream.empty(); stream.remove_prefix(std::min(part, stream.size()))) {
      buffer += stream.substr(0, part);
      while (take_frame(buffer, type, payload)) received.frames += encode_frame(type, payload);
    }
  } catch (const Error&) {
    received.refused = true;
  }
  return received;
}

void frames(Bytes input) {
  const std::string_view stream = text_of(input);
  const Received whole = receive(stream, std::max<std::size_t>(1, stream.size()));
  expect(stream.starts_with(whole.frames), "the frames are not the stream's");
  for (const std::size_t part : {1, 7}) {
    const Received parts = receive(stream, part);
    expect(parts.frames == whole.frames && parts.refused == whole.refused, "the frames depend on the parts");
  }
}

const bool added = [] {
  input_targets().add("frames", "frames of the rendezvous, as they arrive", frames);
  return true;
}();

}  // namespace
}  // namespace topknot::fuzz

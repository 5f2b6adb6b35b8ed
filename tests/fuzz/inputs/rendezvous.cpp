// Messages of the rendezvous.
#include <fmt/format.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <string>
#include <utility>
#include <vector>

#include "dist/rendezvous/tcp_store.h"
#include "nn/base/check.h"
#include "nn/base/checksum.h"
#include "nn/base/log.h"
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

// What a stranger sends to the server of a run.
void stranger(Bytes input) {
  set_log_level(LogLevel::quiet);  // each refusal is a warning
  const auto deadline = [] { return Clock::now() + kHang / 2; };
  // No input has its own checksum; one fixed token would be found by the fuzzer, which sees what bytes are
  // compared with.
  Checksum checksum;
  checksum.update(input);
  TcpStoreServer server("127.0.0.1", 0, 2, 1e6, fmt::format("{:016x}", checksum.value()));
  const Fd fd =
      connect_to("127.0.0.1", server.port(), Patience(std::chrono::duration<double>(kHang).count() / 2));
  write_all(fd.get(), text_of(input), deadline());
  shutdown(fd.get(), SHUT_WR);
  char bytes[4096];
  for (ssize_t n = 1; n > 0;) {  // until the server closes
    pollfd entry{fd.get(), POLLIN, 0};
    const auto until = deadline();
    int ready = 0;
    do {
      const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(until - Clock::now()).count();
      ready = poll(&entry, 1, int(std::max<std::int64_t>(left, 0)));
    } while (ready < 0 && errno == EINTR);  // libFuzzer's own alarm
    expect(ready > 0, "the server keeps a stranger");
    n = recv(fd.get(), bytes, sizeof bytes, 0);
  }
  expect(server.first_reason().empty(), "a stranger ends the run: " + server.first_reason());
}

const bool added = [] {
  input_targets().add("frames", "frames of the rendezvous, as they arrive", frames);
  input_targets().add("stranger", "what a stranger sends to the rendezvous", stranger);
  return true;
}();

}  // namespace
}  // namespace topknot::fuzz

#include "dist/launch/frame.h"

#include <algorithm>
#include <cstring>

#include "nn/base/check.h"

namespace topknot {
namespace {

// The number changes with the protocol.
constexpr std::string_view kGreeting = "topknot rendezvous 2\n";

template <class T>
void put(std::string& to, T value) {
  to.append(reinterpret_cast<const char*>(&value), sizeof value);
}

template <class T>
T take(std::string_view& from) {
  T value;
  std::memcpy(&value, from.data(), sizeof value);
  from.remove_prefix(sizeof value);
  return value;
}

}  // namespace

std::string encode_frame(Frame type, std::string_view payload) {
  std::string result;
  result.reserve(2 * sizeof(std::uint32_t) + payload.size());
  put(result, static_cast<std::uint32_t>(type));
  put(result, static_cast<std::uint32_t>(payload.size()));
  result += payload;
  return result;
}

bool take_frame(std::string& buffer, Frame& type, std::string& payload, std::size_t longest_payload) {
  std::uint32_t header[2];
  if (buffer.size() < sizeof header) return false;
  std::memcpy(header, buffer.data(), sizeof header);
  if (header[0] < static_cast<std::uint32_t>(Frame::hello) ||
      header[0] > static_cast<std::uint32_t>(Frame::peers) || header[1] > longest_payload)
    throw Error("what came over the connection is not of a Topknot rendezvous");
  if (buffer.size() < sizeof header + header[1]) return false;
  type = static_cast<Frame>(header[0]);
  payload = buffer.substr(sizeof header, header[1]);
  buffer.erase(0, sizeof header + header[1]);
  return true;
}

std::string encode_hello(const Hello& hello) {
  std::string result(kGreeting);
  put(result, static_cast<std::int32_t>(hello.rank));
  put(result, static_cast<std::int32_t>(hello.size));
  return result + hello.token;
}

std::optional<Hello> parse_hello(std::string_view payload) {
  if (payload.substr(0, kGreeting.size()) != kGreeting) return {};
  payload.remove_prefix(kGreeting.size());
  if (payload.size() < 2 * sizeof(std::int32_t)) return {};
  Hello hello;
  hello.rank = take<std::int32_t>(payload);
  hello.size = take<std::int32_t>(payload);
  hello.token = payload;
  return hello;
}

std::string encode_peers(const std::vector<PeerState>& peers) {
  std::string result;
  for (const PeerState& peer : peers) {
    put(result, peer.calls);
    put(result, peer.silent);
  }
  return result;
}

std::vector<PeerState> parse_peers(std::string_view payload) {
  std::vector<PeerState> peers;
  while (payload.size() >= sizeof(PeerState::calls) + sizeof(PeerState::silent)) {
    const auto calls = take<std::uint64_t>(payload);
    peers.push_back({calls, take<std::uint32_t>(payload)});
  }
  return peers;
}

}  // namespace topknot

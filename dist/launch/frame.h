#pragma once
// The messages of the rendezvous (dist/launch/tcp_store.h): frames of type, length and bytes. Numbers are sent in the
// host's byte order, which is the same for all ranks.

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace topknot {

enum class Frame : std::uint32_t {
  hello = 1,  // to the server, first: Hello
  refused,    // from the server: why; it then closes
  welcome,    // from the server: all ranks have come; an address, see TcpStoreServer
  set,        // to the server: key \0 value
  get,        // to the server: key, answered by `value` as soon as it is set
  value,      // from the server: key \0 value
  abort,      // either way: a signal's number as one byte, 0 for none, and the reason
  leave,      // to the server: this rank has ended in order
  all_left,   // from the server: so have all
  beat,       // to the server, twice a second: std::uint64_t, the collectives that this rank has started
  ask,        // to the server, answered by `peers`
  peers,      // from the server: one PeerState per rank
};

inline constexpr std::size_t kLongestPayload = 1 << 20;

std::string encode_frame(Frame type, std::string_view payload);
// Takes one whole frame off the front of `buffer`. False: more bytes are needed. Throws Error for what is no
// frame, or has a longer payload.
bool take_frame(std::string& buffer, Frame& type, std::string& payload,
                std::size_t longest_payload = kLongestPayload);

struct Hello {
  int rank = 0, size = 1;
  std::string token;  // of the job; "": none
};
inline constexpr std::size_t kLongestToken = 256;
std::string encode_hello(const Hello& hello);
// Nothing where another program, or another version of this one, sent it.
std::optional<Hello> parse_hello(std::string_view payload);

// What the server knows of a rank.
struct PeerState {
  std::uint64_t calls = 0;   // collectives started, as of its last beat
  std::uint32_t silent = 0;  // ms since the server last heard of it
};
std::string encode_peers(const std::vector<PeerState>& peers);
std::vector<PeerState> parse_peers(std::string_view payload);

}  // namespace topknot

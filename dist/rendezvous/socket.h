#pragma once
// TCP for the rendezvous (dist/rendezvous/tcp_store.h): connecting with a deadline, listening, and the frames
// that are sent. No call waits without a deadline.

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "nn/base/check.h"
#include "nn/base/clock.h"
#include "nn/base/file.h"

namespace topknot {

// The ranks of a split as the run numbers them, which messages call them by; empty: the ranks of the run.
using RunRanks = std::vector<int>;
inline int run_rank(const RunRanks& ranks, int r) {
  return ranks.empty() || r < 0 ? r : ranks.at(static_cast<std::size_t>(r));
}
inline std::string rank_name(const RunRanks& ranks, int r) {
  return "rank " + std::to_string(run_rank(ranks, r));
}

// How long a rank waits for the others to come.
struct MeetingPatience {
  bool unlimited = false;   // else dist.timeout_s
  double after_stop_s = 0;  // once this process has a stop signal
};

// A collective, or a wait for the ranks to come, that did not finish. `what()` names this rank, the operation
// and what is known of the peers.
class CollectiveError : public Error {
 public:
  using Error::Error;
};

struct HostPort {
  std::string host;
  int port = 0;
};
// "node0:29500" or "[::1]:29500"; throws UserError naming `key`.
HostPort parse_host_port(const std::string& text, const std::string& key);
// The inverse of parse_host_port().
std::string host_port_text(const std::string& host, int port);
bool is_ipv6(const std::string& address);  // of a numeric address, without brackets
// Without the brackets of an IPv6 address.
std::string without_brackets(const std::string& host);

// A listening socket: on 127.0.0.1 if `host` is "127.0.0.1" or "localhost", on ::1 if it is that, else on
// every address of this machine (a host's own name may resolve to a loopback address on itself). Port 0 picks
// a free one. Throws UserError if the port cannot be had.
Fd listen_on(const std::string& host, int port);
int local_port(int fd);

// Tries as long as the patience lasts, since the other side may start later. Throws UserError for a name that
// does not resolve within a minute and if this process has no file descriptors left, CollectiveError when no
// process answers in time, and Interrupted after a stop signal. `server`: the rank whose address it is, for
// messages.
Fd connect_to(const std::string& host, int port, Patience patience, int server = 0);

// The numeric addresses of this end of a connection and of the other, and whether one is a loopback address.
std::string local_address(int fd);
std::string peer_address(int fd);
bool is_loopback(const std::string& address);

// Writes all bytes; false when the connection is gone or the deadline passed.
bool write_all(int fd, std::string_view bytes, Deadline deadline);

// Frames: type, length and bytes. Numbers are sent in the host's byte order, which is the same for all ranks.
enum class Frame : std::uint32_t {
  hello = 1,  // to the server, first: Hello
  refused,    // from the server: why; it then closes
  welcome,    // from the server: all ranks have come; an address, see TcpStoreServer
  set,        // to the server: key \0 value
  get,        // to the server: key, answered by `value` as soon as it is set
  value,      // from the server: key \0 value
  abort,      // either way: a signal's number as one byte, 0 for none, and the reason
  leave,      // to the server: this rank has ended in order; last words
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
// Nothing if another program, or another version of this one, sent it.
std::optional<Hello> parse_hello(std::string_view payload);

// A rank's state as the server knows it.
struct PeerState {
  std::uint64_t calls = 0;   // collectives started, as of its last beat
  std::uint32_t silent = 0;  // ms since the server last heard of it
};
std::string encode_peers(const std::vector<PeerState>& peers);
std::vector<PeerState> parse_peers(std::string_view payload);

}  // namespace topknot

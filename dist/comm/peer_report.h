#pragma once
// Which rank the others wait for, by what the rendezvous store knows of each: the collectives that it has started and how
// long it has been silent. A rank that waits sees only its own connections, and may wait for one that waits itself.

#include <functional>
#include <string>
#include <vector>

#include "dist/launch/frame.h"

namespace topknot {

// A rank is silent where two beats did not come.
inline constexpr std::uint32_t kSilentMs = 1200;

// Whether no rank but `rank` is silent.
bool peers_alive(const std::vector<PeerState>& peers, int rank);

struct PeerReport {
  int awaited = -1;   // the rank at fault; -1: not known
  std::string calls;  // "rank 0 #811 (silent for 9.8 s), ranks 1 to 3 #812"
};
// For `rank`, whose call number is `call` and which sees itself wait for `awaited` (-1: for none in particular). At
// fault is, among the ranks that have not started the call, else among all others, a silent one; else the one with
// the lowest number; else `awaited`.
PeerReport report_peers(const std::vector<PeerState>& peers, int rank, std::uint64_t call, int awaited);

}  // namespace topknot

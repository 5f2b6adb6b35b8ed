#include "dist/comm/peer_report.h"

#include <fmt/format.h>

#include <algorithm>

namespace topknot {

bool peers_alive(const std::vector<PeerState>& peers, int rank) {
  for (std::size_t r = 0; r < peers.size(); ++r)
    if (static_cast<int>(r) != rank && peers[r].silent >= kSilentMs) return false;
  return true;
}

PeerReport report_peers(const std::vector<PeerState>& peers, int rank, std::uint64_t call, int awaited) {
  const int size = static_cast<int>(peers.size());
  const auto calls = [&](int r) { return r == rank ? call : peers[static_cast<std::size_t>(r)].calls; };
  const auto silent = [&](int r) {
    return r != rank && peers[static_cast<std::size_t>(r)].silent >= kSilentMs;
  };
  PeerReport report;
  // Behind before level, silent before heard, then the lowest number.
  const auto worse = [&](int a, int b) {
    if ((calls(a) < call) != (calls(b) < call)) return calls(a) < call;
    if (silent(a) != silent(b)) return silent(a);
    return calls(a) < calls(b);
  };
  for (int r = 0; r < size; ++r)
    if (r != rank && (report.awaited < 0 || worse(r, report.awaited))) report.awaited = r;
  if (report.awaited < 0 || (calls(report.awaited) >= call && !silent(report.awaited)))
    report.awaited = awaited;

  constexpr int most = 8;
  int parts = 0;
  for (int first = 0; first < size;) {
    int last = first;
    while (!silent(first) && last + 1 < size && !silent(last + 1) && calls(last + 1) == calls(first)) ++last;
    if (++parts > most) {
      report.calls += ", ...";
      break;
    }
    report.calls += fmt::format(
        "{}{} #{}", report.calls.empty() ? "" : ", ",
        first == last ? fmt::format("rank {}", first) : fmt::format("ranks {} to {}", first, last),
        calls(first));
    if (silent(first))
      report.calls +=
          fmt::format(" (silent for {:.1f} s)", peers[static_cast<std::size_t>(first)].silent * 1e-3);
    first = last + 1;
  }
  return report;
}

}  // namespace topknot

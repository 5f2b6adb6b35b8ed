#pragma once
// A network link's parameters, their units, modelled times of collectives over it, and emulated links.

#include <string>
#include <utility>
#include <vector>

namespace topknot {

struct Link {
  double alpha = 0;     // seconds per message, sender to receiver
  double beta = 0;      // seconds per byte of one direction of a rank's link
  double overhead = 0;  // seconds that a further message at the same time adds
};

// The fraction of a nominal rate that TCP over Ethernet leaves to the payload.
inline constexpr double kTcpEfficiency = 0.96;

// Bits per second: "100mbit", "1gbit", "2.5gbit", "64kbit" (powers of 1000), or a plain number of 1 to 1e15;
// also 100Mbit. Throws UserError for anything else; `key` names in its message what was given.
double parse_rate(const std::string& key, const std::string& text);

// Seconds: "50us", "0.2ms", "1s", or a plain number of seconds, 0 to 10. Throws as parse_rate().
double parse_latency(const std::string& key, const std::string& text);

// Modelled times of collectives, from a link's parameters. Merge plans, the choice of a collective and
// predictions use them. The cost of a sparse collective stands in its own file
// (dist/sparse/sparse_collective.h). All times are seconds on every one of `ranks` equal ranks that start
// together, 0 for one rank or none; sizes are bytes of payload, >= 0, not necessarily whole.
//
// The model is the usual latency and bandwidth one (alpha, beta) with LogGP's overhead (Alexandrov
// et al., "LogGP", SPAA 1995): messages that a rank sends to several others at once share one alpha, follow
// each other by `overhead`, and share the rank's link; a rank sends and receives at the same time at full
// rate. Headers, additions, selections and stragglers are not in it.

// Every rank's block of `bytes` goes to all others, over each link one at a time: alpha + (P-1) bytes beta.
// Over gloo the first 4 kB of a block go straight to all and announce it, the rest around the ring; what a
// step of the ring costs besides its bytes is in `overhead`, with what a further message costs. (The TopK
// all-gather of Shi et al., "A distributed synchronous SGD algorithm with global top-k sparsification", ICDCS
// 2019, has alpha log2 P in place of our alpha.)
double all_gather_cost(const Link& link, int ranks, double bytes);

// Dense sum around the ring (Patarasuk and Yuan, 2009): 2 (P-1) (alpha + bytes / P beta).
double ring_all_reduce_cost(const Link& link, int ranks, double bytes);

// Dense sum in rank order: slices to their owners, all at once, and back: 2 (alpha + (P-1) / P bytes beta).
// The direct form of Thakur et al., "Optimization of collective communication operations in MPICH", 2005.
double ordered_all_reduce_cost(const Link& link, int ranks, double bytes);

// From one rank over a binomial tree: ceil(log2 P) (alpha + bytes beta). Thakur et al., 2005.
double broadcast_cost(const Link& link, int ranks, double bytes);

// seconds = alpha + beta * bytes.
struct LinearFit {
  double alpha = 0, beta = 0;  // both >= 0
  double seconds(double bytes) const { return alpha + beta * bytes; }
};

// dist.link: a network for ranks that have none. The ranks of the `threads` backend share memory; over an
// emulated link the result of a collective arrives when the cost model says that it would over such links:
// its modelled time after the last rank came to it. The data are the same, bit for bit. As over gloo,
// collectives run during the backward pass and queue one after another. A collective longer than
// dist.timeout_s ends the run; a stop signal ends all waits. lab/netlab.md compares it with shaped TCP.
struct EmulatedLink {
  Link link;
  // The links that follow, by rising seconds since the ranks began.
  std::vector<std::pair<double, Link>> later = {};
  const Link& at(double seconds) const;
  std::string text;        // for messages and records: "emulated link 100mbit, 50us"
  int ranks_per_host = 1;  // neighbouring ranks that share a host: a split of such ranks only has no link
};

// Makes the link from dist.link.rate and dist.link.latency, in the notation of parse_rate() and
// parse_latency(). The rate may change at given seconds after the ranks began: "1gbit,50mbit@20,1gbit@40".
// TCP leaves kTcpEfficiency of the rate to the payload. A further message at the same time costs the latency
// once more, as each step of a ring does. Throws UserError.
EmulatedLink make_emulated_link(const std::string& rate, const std::string& latency, int ranks_per_host);

}  // namespace topknot

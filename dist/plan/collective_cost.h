#pragma once
// How long the collectives take, modelled from a link's figures: what plans, the choice of a collective and
// predictions rest on. Pure arithmetic, no communication. All times are seconds on every one of `ranks` equal
// ranks that start together, 0 for one rank or none; sizes are bytes of payload, >= 0, not necessarily whole.
//
// The model is the usual latency and bandwidth one (alpha, beta), with LogGP's overhead beside it (Alexandrov
// et al., "LogGP", SPAA 1995): messages that a rank sends to several others at once share one alpha, follow
// each other by `overhead`, and share the rank's link; a rank sends and receives at the same time at full
// rate. Headers, additions, selections and stragglers are not in it.

#include <cstddef>
#include <span>
#include <string>

namespace topknot {

struct Link {
  double alpha = 0;     // seconds per message, sender to receiver
  double beta = 0;      // seconds per byte of one direction of a rank's link
  double overhead = 0;  // seconds that a further message at the same time adds
};

// Every rank's block of `bytes` goes to all others, over each link one at a time: alpha + (P-1) bytes beta. Over
// gloo the first 4 kB of a block go straight to all and announce it, the rest around the ring; what a step of the
// ring costs beside its bytes is in `overhead`, with what a further message costs. (The TopK all-gather
// of Shi et al., "A distributed synchronous SGD algorithm with global top-k sparsification", ICDCS 2019, has
// alpha log2 P in place of our alpha.)
double all_gather_cost(const Link& link, int ranks, double bytes);

// Dense sum around the ring: 2 (P-1) (alpha + bytes / P beta). Patarasuk and Yuan, "Bandwidth optimal
// all-reduce algorithms", 2009.
double ring_all_reduce_cost(const Link& link, int ranks, double bytes);

// Dense sum in rank order: slices to their owners, all at once, and back: 2 (alpha + (P-1) / P bytes beta).
// The direct form of Thakur et al., "Optimization of collective communication operations in MPICH", 2005.
double ordered_all_reduce_cost(const Link& link, int ranks, double bytes);

// From one rank over a binomial tree: ceil(log2 P) (alpha + bytes beta). Thakur et al., 2005.
double broadcast_cost(const Link& link, int ranks, double bytes);

// gTop-k of `k` entries: a binomial tree of ceil(log2 P) rounds to rank 0, each of at most k entries, and the
// same back: 2 ceil(log2 P) (alpha + k b beta). Shi et al., ICDCS 2019, who count the way there only.
double gtopk_cost(const Link& link, int ranks, double k, double bytes_per_entry);

// Ok-Topk with balanced regions and k winners: k / P entries to each of the others, then an all-gather of
// k / P winners each: 2 (alpha + (P-1) / P k b beta). Rounds that re-estimate thresholds and regions come
// once in tens of steps and are left out.
double oktopk_cost(const Link& link, int ranks, double k, double bytes_per_entry);

// The bound of Li and Hoefler, "Near-optimal sparse allreduce for distributed deep learning" (Ok-Topk), PPoPP
// 2022, whose entry is two words: (2 P + 2 log2 P) alpha + 6 k (P-1) / P words. It counts an alpha for each
// message, and a split and a gather that are out of balance.
double oktopk_bound(const Link& link, int ranks, double k, double bytes_per_entry);

// "all_gather", "gtopk" or "oktopk", the one that takes the least time here; the first of them where they
// tie. They are different algorithms: all_gather sums every entry that any rank sent, the other two keep about
// k of all and return the rest to the residuals. With overhead 0, gtopk is never the cheapest.
std::string cheapest_collective(const Link& link, int ranks, double k, double bytes_per_entry);

// seconds = alpha + beta * bytes.
struct LinearFit {
  double alpha = 0, beta = 0;  // both >= 0
  double seconds(double bytes) const { return alpha + beta * bytes; }
};

// Least squares, as MG-WFBP (Shi, Chu, Li, INFOCOM 2019) fits its all-reduce; the best fit with no negative
// alpha or beta. From sizes that are all alike it takes beta 0. Needs at least two points of finite, not
// negative values and as many sizes as seconds (Error).
LinearFit fit_line(std::span<const double> bytes, std::span<const double> seconds);

}  // namespace topknot

#pragma once
// Modelled times of collectives, from a link's parameters. Merge plans, the choice of a collective and predictions
// use them. The cost of a sparse collective stands in its own file (dist/sparse/sparse_collective.h). All times are
// seconds on every one of `ranks` equal ranks that start together, 0 for one rank or none; sizes are bytes of payload,
// >= 0, not necessarily whole.
//
// The model is the usual latency and bandwidth one (alpha, beta), with LogGP's overhead beside it (Alexandrov
// et al., "LogGP", SPAA 1995): messages that a rank sends to several others at once share one alpha, follow
// each other by `overhead`, and share the rank's link; a rank sends and receives at the same time at full
// rate. Headers, additions, selections and stragglers are not in it.

#include "dist/comm/link.h"

namespace topknot {

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

// seconds = alpha + beta * bytes.
struct LinearFit {
  double alpha = 0, beta = 0;  // both >= 0
  double seconds(double bytes) const { return alpha + beta * bytes; }
};

}  // namespace topknot

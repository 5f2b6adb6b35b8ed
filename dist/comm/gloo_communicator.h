#pragma once
// The `gloo` backend: ranks are processes (or, in tests, threads) that talk TCP over Gloo's transport.
//
// - all_gather: the first 4 kB of each block straight to every other rank, the rest around the ring.
// - all_reduce in rank order: each rank receives its slice from every rank, adds in rank order, sends the sum
//   to all. Where a rank receives up to 8,192 floats that way: all-gather and add. Bit-identical with the threads backend.
// - all_reduce, SumOrder::library: a ring (reduce-scatter, then all-gather, in segments of 1 MB); small ones
//   as above.
// - all_to_all and send_receive: straight from rank to rank. With check_calls every
//   send_receive first compares who sends to whom; without, only the two that talk exchange messages.
// - split: the first rank of a color serves a store of its own, at a free port of the address under which the
//   others reach it; all its members connect anew.
//
// A failed call closes this rank's connections, so that the peers' calls end too; the message carries the
// first error of the run, as the rendezvous store knows it. After a failure every call throws. abort() may
// come from any thread. SIGPIPE is ignored from the first connection on, unless the program handles it: a
// peer's death is an error, not a signal.

#include "dist/comm/backend.h"

namespace topknot {

// Collective over all ranks. Throws UserError (port in use, unknown host) or CollectiveError (a rank did
// not come).
std::unique_ptr<Communicator> make_gloo_communicator(const GroupOptions& options);

}  // namespace topknot

#pragma once
// The `threads` backend: the ranks are threads of one process. Every collective is a meeting of all ranks,
// the work split between them, and a second meeting. Sums are always in rank order, whatever SumOrder asks for.
// Operation, sequence number and size are compared across ranks in every call.
//
// With an emulated link (dist.link) a collective takes the time that such a link would; only then is there something
// to wait for beside the callers' computation, and overlaps() is true.
//
// A rank that does not come within the timeout, calls abort(), or destroys its communicator while others wait
// ends the calls of all others with CollectiveError and the first reason; afterwards every call of the group
// throws.

#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "dist/comm/communicator.h"
#include "dist/comm/emulated_link.h"

namespace topknot {

// One communicator for each rank, to be used by one thread each. timeout_s <= 0: no deadline.
// `link`: collectives go over it.
std::vector<std::unique_ptr<Communicator>> make_thread_group(int ranks, double timeout_s,
                                                             const std::optional<EmulatedLink>& link = {});

// Runs body once per rank, each on a thread of its own, and waits for all of them. When a rank throws, the others' calls
// end with its error. After all have ended, the error of the rank that aborted the group first is thrown here.
void run_thread_ranks(int ranks, double timeout_s, const std::function<void(Communicator&)>& body,
                      const std::optional<EmulatedLink>& link = {});

}  // namespace topknot

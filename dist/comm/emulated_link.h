#pragma once
// dist.link: a network for ranks that have none. The ranks of the `threads` backend share memory; over an emulated link
// the result of a collective arrives when the cost model (dist/comm/collective_cost.h) says that it would over such
// links: its modelled time after the last rank came to it. The data are the same, bit for bit. As over gloo, collectives
// run beside the backward pass and queue behind each other. A collective that would take longer than dist.timeout_s ends
// the run; after a stop signal nothing is waited for. docs/netlab.md compares it with shaped TCP.

#include <string>

#include "dist/comm/link.h"

namespace topknot {

struct EmulatedLink {
  Link link;
  std::string text;        // for messages and records: "emulated link 100mbit, 50us"
  int ranks_per_host = 1;  // neighbouring ranks that share a host: a split of such ranks only has no link
};

// Of dist.link.rate and dist.link.latency, in the notation of dist/comm/link.h. Of the rate, TCP leaves kTcpEfficiency
// to the payload; a further message at the same time costs the latency once more, as each step of a ring does. Throws
// UserError.
EmulatedLink make_emulated_link(const std::string& rate, const std::string& latency, int ranks_per_host);

}  // namespace topknot

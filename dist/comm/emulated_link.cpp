#include "dist/comm/emulated_link.h"

#include <fmt/format.h>

#include <algorithm>

namespace topknot {

EmulatedLink make_emulated_link(const std::string& rate, const std::string& latency, int ranks_per_host) {
  const double alpha = parse_latency("dist.link.latency", latency);
  const double beta = 8 / (kTcpEfficiency * parse_rate("dist.link.rate", rate));
  return {
      {alpha, beta, alpha}, fmt::format("emulated link {}, {}", rate, latency), std::max(1, ranks_per_host)};
}

}  // namespace topknot

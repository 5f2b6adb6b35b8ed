#include "dist/comm/collective_cost.h"

#include <bit>

namespace topknot {
namespace {

// Messages of `bytes` to each of the others at once, and as many from them.
double to_all_others(const Link& link, int ranks, double bytes) {
  return link.alpha + (ranks - 2) * link.overhead + (ranks - 1) * bytes * link.beta;
}

double one_message(const Link& link, double bytes) {
  return link.alpha + bytes * link.beta;
}

// ceil(log2(ranks)).
int tree_rounds(int ranks) {
  return std::bit_width(static_cast<unsigned>(ranks - 1));
}

}  // namespace

double all_gather_cost(const Link& link, int ranks, double bytes) {
  return ranks < 2 ? 0 : to_all_others(link, ranks, bytes);
}

double ring_all_reduce_cost(const Link& link, int ranks, double bytes) {
  return ranks < 2 ? 0 : 2 * (ranks - 1) * one_message(link, bytes / ranks);
}

double ordered_all_reduce_cost(const Link& link, int ranks, double bytes) {
  return ranks < 2 ? 0 : 2 * to_all_others(link, ranks, bytes / ranks);
}

double broadcast_cost(const Link& link, int ranks, double bytes) {
  return ranks < 2 ? 0 : tree_rounds(ranks) * one_message(link, bytes);
}

}  // namespace topknot

#include "dist/sparse/sparse_collective.h"

namespace topknot {

Registry<CollectiveType>& collectives() {
  static Registry<CollectiveType> registry("collective (exchange.collective)");
  return registry;
}

double collective_cost(const std::string& name, const Link& link, int ranks, double k,
                       double bytes_per_entry) {
  const CollectiveType& type = collectives().find(name);
  if (!type.cost)
    throw UserError("exchange.collective: " + name +
                    " has no cost model, which merge plans and predictions need; use exchange.merge=auto, or "
                    "register one with it");
  return type.cost(link, ranks, k, bytes_per_entry);
}

std::string cheapest_collective(const Link& link, int ranks, double k, double bytes_per_entry) {
  std::string cheapest = "all_gather";
  double least = collective_cost(cheapest, link, ranks, k, bytes_per_entry);
  for (const std::string& name : collectives().names()) {
    if (!collectives().find(name).cost) continue;
    const double seconds = collective_cost(name, link, ranks, k, bytes_per_entry);
    if (seconds >= least) continue;
    least = seconds;
    cheapest = name;
  }
  return cheapest;
}

namespace {

const bool registered =
    (collectives().add("all_gather", "every block to every rank, which adds them itself",
                       {.cost = [](const Link& link, int ranks, double k,
                                   double entry) { return all_gather_cost(link, ranks, k * entry); }}),
     true);

}  // namespace

}  // namespace topknot

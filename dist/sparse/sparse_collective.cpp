#include "dist/sparse/sparse_collective.h"

#include <algorithm>
#include <functional>

#include "compress/select/passes/keys.h"

namespace topknot {

Registry<CollectiveType>& collectives() {
  static Registry<CollectiveType> registry("collective (exchange.collective)");
  return registry;
}

bool codes_sums(const std::string& name) {
  return collectives().contains(name) && collectives().find(name).of_sums;
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

const bool sparse_collective_registered =
    collectives().add("all_gather", "every block to every rank, which adds them itself",
                      {.cost = [](const Link& link, int ranks, double k, double entry) {
                        return all_gather_cost(link, ranks, k * entry);
                      }});

void clear_unless_finite(SparseVector& entries) {
  if (largest_key(entries.values.data(), entries.values.size()) > kLargestFinite) entries.finite = false;
  if (entries.finite) return;
  entries.indices.clear();
  entries.values.clear();
}

}  // namespace

void add_entries(const SparseVector& a, const SparseVector& b, SparseVector& sum) {
  const std::size_t na = a.indices.size(), nb = b.indices.size();
  sum.finite = a.finite && b.finite;
  sum.indices.resize(na + nb);
  sum.values.resize(na + nb);
  std::size_t i = 0, j = 0, n = 0;
  for (; i < na && j < nb; ++n) {
    const std::uint32_t x = a.indices[i], y = b.indices[j];
    sum.indices[n] = std::min(x, y);
    sum.values[n] = x == y ? a.values[i] + b.values[j] : x < y ? a.values[i] : b.values[j];
    i += x <= y;
    j += y <= x;
  }
  for (; i < na; ++i, ++n) sum.indices[n] = a.indices[i], sum.values[n] = a.values[i];
  for (; j < nb; ++j, ++n) sum.indices[n] = b.indices[j], sum.values[n] = b.values[j];
  sum.indices.resize(n);
  sum.values.resize(n);
  clear_unless_finite(sum);
}

void keep_k_largest(SparseVector& entries, std::size_t k, std::vector<std::uint32_t>& dropped) {
  dropped.clear();
  const std::size_t count = entries.indices.size();
  if (count <= k) return;
  // The k-th largest, and how many of its equals there is room for.
  MagnitudeKey least = kLargestFinite;
  std::size_t equals = 0;
  if (k > 0) {
    std::vector<MagnitudeKey> keys(count);
    std::transform(entries.values.begin(), entries.values.end(), keys.begin(), key_of);
    const auto kth = keys.begin() + static_cast<std::ptrdiff_t>(k - 1);
    std::nth_element(keys.begin(), kth, keys.end(), std::greater<>());
    least = *kth;
    equals = static_cast<std::size_t>(std::count(keys.begin(), kth + 1, least));
  }
  std::size_t kept = 0;
  for (std::size_t i = 0; i < count; ++i) {
    const MagnitudeKey key = key_of(entries.values[i]);
    const bool equal = key == least && equals > 0;
    if (key > least || equal) {
      equals -= equal;
      entries.indices[kept] = entries.indices[i];
      entries.values[kept++] = entries.values[i];
    } else {
      dropped.push_back(entries.indices[i]);
    }
  }
  entries.indices.resize(kept);
  entries.values.resize(kept);
}

float kth_largest(std::vector<float>& magnitudes, std::size_t k) {
  if (magnitudes.size() < k) return 0;
  const auto kth = magnitudes.begin() + static_cast<std::ptrdiff_t>(k - 1);
  std::nth_element(magnitudes.begin(), kth, magnitudes.end(), std::greater<>());
  return *kth;
}

void take_finite(const SparseVector& mine, SparseVector& copy) {
  copy = mine;
  clear_unless_finite(copy);
}

}  // namespace topknot

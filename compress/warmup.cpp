#include "compress/warmup.h"

#include <algorithm>
#include <string>

#include "nn/core/check.h"

namespace topknot {

void check_warmup(std::span<const double> warmup) {
  for (std::size_t i = 0; i < warmup.size(); ++i)
    if (!(warmup[i] > 0 && warmup[i] <= 1))
      throw UserError("compress.warmup: value " + std::to_string(i + 1) + " is " + std::to_string(warmup[i]) +
                      "; densities are above 0 and at most 1, one for each epoch");
}

double density_at(std::int64_t epoch, double density, std::span<const double> warmup) {
  if (epoch < 0 || epoch >= static_cast<std::int64_t>(warmup.size())) return density;
  return std::max(density, warmup[static_cast<std::size_t>(epoch)]);
}

}  // namespace topknot

#pragma once
// Density warm-up (Lin et al., "Deep Gradient Compression", ICLR 2018; the lists of Shi et al., arXiv
// 1911.08772): the first epochs send more. compress.warmup: [0.015625, 0.004] gives epoch 0 the first value,
// epoch 1 the second, and every later one compress.density; never less than compress.density.

#include <cstdint>
#include <span>

namespace topknot {

// Throws UserError for a value outside (0, 1].
void check_warmup(std::span<const double> warmup);

// max(density, warmup[epoch]); density after the list. Epochs count from 0.
double density_at(std::int64_t epoch, double density, std::span<const double> warmup);

}  // namespace topknot

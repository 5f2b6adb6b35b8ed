#pragma once
// The adaptive densities of LAGS-SGD: a layer may send as much as travels while it is being computed.
// Shi et al., "Layer-wise Adaptive Gradient Sparsification for Distributed Deep Learning with Convergence
// Guarantees", ECAI 2020, arXiv 1911.08727.

#include <cstddef>
#include <vector>

namespace topknot {

// The densities of the layers, as in the authors' code (predict_density_with_size_and_computation; there it
// is switched off by an early return):
//
//   t = t_comp - log2(P) * alpha                           time left once the messages have begun
//   rho = base where t <= 0, else t / (2 (P - 1) beta m)   a position and a value from each other rank
//   rho = 0.05 where rho > 1
//   rho = max(rho, base)
//
// `times`: seconds of each layer's backward pass, t_comp; `sizes`: elements, m; alpha: seconds a message takes
// to begin with; beta: seconds an element (4 bytes) takes, above 0; `base`: the least density, in (0, 1], 0.001
// in their code. The result is in (0, 1]. Throws Error where the lists differ in length or a number is out of
// range.
//
// To be known about it: a layer whose whole gradient would travel in time (rho > 1) gets 0.05, less than a
// layer for which it is just not so (rho = 0.9). t_comp is the layer's own time, though its message travels
// beside the layers that come after it; the paper bounds the communication of layer l by the computation of
// layer l - 1. The time of selecting is left out. With one rank the formula divides by zero; nothing travels
// then, and every layer gets `base`.
std::vector<double> lags_densities(const std::vector<double>& times, const std::vector<std::size_t>& sizes,
                                   double alpha, double beta, int ranks, double base);

}  // namespace topknot

// LAGS-SGD: layer-wise top-k with error feedback, the learning rate inside the accumulator. For layer l,
// rank p:
//
//   a_t = residual_{t-1} + lr_{t-1} * g_{t-1};  residual_t = a_t - TopK(a_t, k_l)
//   w_t = w_{t-1} - (1/P) * sum_p TopK(a_t, k_l)
//
// Shi, Zhao, Wang, Tang, Chu, "Layer-wise Adaptive Gradient Sparsification for Distributed Deep Learning with
// Convergence Guarantees", ECAI 2020, arXiv 1911.08727, algorithm 1. This is topk under three keys:
// compress.scope=tensor (each layer its own k), compress.lr_inside=true with optimizer.momentum=0 (false: the
// authors' later code, which keeps the rate outside; the two differ wherever the rate changes), and
// compress.layer_density for k adapted to each layer (train/plan/lags.h).
#include "compress/sparse_compressor.h"

namespace topknot {
namespace {

const bool registered = [] {
  add_sparse("lags", "LAGS-SGD: topk layer by layer (compress.scope=tensor), with compress.lr_inside",
             {.select = "topk"});
  return true;
}();

}  // namespace
}  // namespace topknot

// GaussianK-SGD: about k entries above a threshold that a fitted normal distribution suggests, with error
// feedback. Shi, Chu, Cheung, See, "Understanding Top-k Sparsification in Distributed Deep Learning", arXiv
// 1911.08772.
#include "compress/sparse_compressor.h"

namespace topknot {
namespace {

const bool registered = [] {
  add_sparse("gaussiank",
             "about k entries above a fitted threshold, without a search; error feedback keeps the rest",
             {.select = "gaussiank"});
  return true;
}();

}  // namespace
}  // namespace topknot

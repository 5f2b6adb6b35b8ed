// GaussianK-SGD: about k entries above a threshold that a fitted normal distribution suggests, with error
// feedback. Shi, Chu, Cheung, See, "Understanding Top-k Sparsification in Distributed Deep Learning", arXiv
// 1911.08772.
#include "compress/sparse_compressor.h"

namespace topknot {
namespace {

const bool registered = [] {
  compressors().add(
      "gaussiank",
      "about k entries above a fitted threshold, without a search; error feedback keeps the rest",
      [](const CompressOptions& options, const GroupSpec& group) {
        return make_sparse({.select = "gaussiank"}, options, group);
      });
  return true;
}();

}  // namespace
}  // namespace topknot

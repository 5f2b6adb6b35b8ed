// GaussianK with a threshold that is calibrated from step to step, so that the count stays close to k under
// error feedback: compress/select/gaussiank_calibrated.h says how it differs from Shi et al., arXiv 1911.08772.
#include "compress/sparse_compressor.h"

namespace topknot {
namespace {

const bool registered = [] {
  add_sparse("gaussiank_calibrated",
             "within 8 % of k entries above a carried, fitted threshold; error feedback keeps the rest",
             {.select = "gaussiank_calibrated"});
  return true;
}();

}  // namespace
}  // namespace topknot

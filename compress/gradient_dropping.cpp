// Gradient dropping: entries above a threshold that a sample suggests, with error feedback and the optimizer's
// ordinary momentum. Aji, Heafield, "Sparse communication for distributed gradient descent", EMNLP 2017; the
// baseline of table 2 of Lin et al., "Deep Gradient Compression", ICLR 2018. The sample is that paper's
// (compress.sample_ratio; Aji and Heafield take 0.1 %).
#include "compress/sparse_compressor.h"

namespace topknot {
namespace {

const bool registered = [] {
  add_sparse("gradient_dropping",
             "about k entries above a sampled threshold, with error feedback and ordinary momentum",
             {.select = "dgc_sampled"});
  return true;
}();

}  // namespace
}  // namespace topknot

// A fixed threshold with error feedback. Strom, "Scalable distributed DNN training using commodity GPU cloud
// computing", Interspeech 2015; Dutta et al., AAAI 2020.
#include "compress/sparse_compressor.h"

namespace topknot {
namespace {

const bool registered = [] {
  add_sparse("threshold", "the entries above compress.threshold; error feedback keeps the rest",
             {.select = "threshold"});
  return true;
}();

}  // namespace
}  // namespace topknot

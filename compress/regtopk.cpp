// RegTop-k SGD with error feedback: Top-k where entries that the other ranks cancelled in the last average
// count for less.
// Bereyhi, Liang, Boudreau, Afana, "Regularized Top-k", arXiv 2409.14893 (MLSP 2024) and 2501.05633.
#include "compress/sparse_compressor.h"

namespace topknot {
namespace {

const bool registered = [] {
  add_sparse("regtopk", "Top-k regularised by what the last average kept of each entry; error feedback",
             {.select = "regtopk"});
  return true;
}();

}  // namespace
}  // namespace topknot

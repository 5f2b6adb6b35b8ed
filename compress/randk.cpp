// RandK-SGD: k random entries of gradient + residual travel. Stich, Cordonnier, Jaggi, "Sparsified SGD with
// Memory", NeurIPS 2018; Shi et al., arXiv 1911.08772, have it with error feedback (this preset) and without
// (compress.memory: none).
#include "compress/sparse_compressor.h"

namespace topknot {
namespace {

const bool registered = [] {
  add_sparse("randk", "k entries at random positions; error feedback keeps the rest", {.select = "randk"});
  return true;
}();

}  // namespace
}  // namespace topknot

// TopK-SGD with error feedback: the k largest entries of gradient + residual travel.
// Stich, Cordonnier, Jaggi, "Sparsified SGD with Memory", NeurIPS 2018; operator as in Shi et al., arXiv
// 1911.08772.
#include "compress/sparse_compressor.h"

namespace topknot {
namespace {

const bool registered = [] {
  add_sparse("topk", "the k largest entries, exactly; error feedback keeps the rest", {.select = "topk"});
  return true;
}();

}  // namespace
}  // namespace topknot

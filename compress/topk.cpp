// TopK-SGD with error feedback: the k largest entries of gradient + residual travel.
// Stich, Cordonnier, Jaggi, "Sparsified SGD with Memory", NeurIPS 2018; operator as in Shi et al., arXiv
// 1911.08772.
#include "compress/sparse_compressor.h"

namespace topknot {
namespace {

const bool registered = [] {
  compressors().add("topk", "the k largest entries, exactly; error feedback keeps the rest",
                    [](const CompressOptions& options, const GroupSpec& group) {
                      return make_sparse({.select = "topk"}, options, group);
                    });
  return true;
}();

}  // namespace
}  // namespace topknot

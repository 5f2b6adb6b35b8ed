// MSTopK-SGD: exactly k entries, found by bisecting a threshold, with error feedback. Shi et al., "Towards
// scalable distributed training of deep learning on public cloud clusters", MLSys 2021, arXiv 2010.10458.
#include "compress/sparse_compressor.h"

namespace topknot {
namespace {

const bool registered = [] {
  add_sparse("mstopk", "exactly k entries, nearly the largest, by bisection; error feedback keeps the rest",
             {.select = "mstopk"});
  return true;
}();

}  // namespace
}  // namespace topknot

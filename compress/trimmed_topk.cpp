// RedSync's trimming with error feedback. Fang, Fu, Yang, Hsieh, "RedSync", JPDC 2019; operator as in Shi et
// al., arXiv 1911.08772, which sends what trimming leaves without selecting from it.
#include "compress/sparse_compressor.h"

namespace topknot {
namespace {

const bool registered = [] {
  add_sparse("trimmed_topk", "at least k entries above a trimming threshold; error feedback keeps the rest",
             {.select = "trimmed_topk"});
  return true;
}();

}  // namespace
}  // namespace topknot

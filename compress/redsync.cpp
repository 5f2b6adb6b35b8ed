// RedSync's threshold search with error feedback. Fang, Fu, Yang, Hsieh, "RedSync", JPDC 2019; operator as in
// Shi et al., arXiv 1911.08772.
#include "compress/sparse_compressor.h"

namespace topknot {
namespace {

const bool registered = [] {
  add_sparse("redsync", "about k entries above a searched threshold; error feedback keeps the rest",
             {.select = "redsync"});
  return true;
}();

}  // namespace
}  // namespace topknot

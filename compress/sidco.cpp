// SIDCo: entries above a threshold that a fitted distribution suggests, with error feedback. Abdelmoniem,
// Elzanaty, Alouini, Canini, "An efficient statistical-based gradient compression technique for distributed
// training systems", MLSys 2021.
#include "compress/sparse_compressor.h"

namespace topknot {
namespace {

const bool registered = [] {
  add_sparse("sidco", "about k entries above a threshold fitted in stages; error feedback keeps the rest",
             {.select = "sidco"});
  return true;
}();

}  // namespace
}  // namespace topknot

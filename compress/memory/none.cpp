#include "compress/memory/none.h"

namespace topknot {
namespace {

const bool registered = [] {
  add_memory<NoMemory>("none", "what is not sent is lost");
  return true;
}();

}  // namespace
}  // namespace topknot

#include "compress/memory/none.h"

namespace topknot {
namespace {

const bool registered = [] {
  memories().add("none", "what is not sent is lost",
                 [](const CompressOptions&) -> std::unique_ptr<Memory<float>> {
                   return std::make_unique<NoMemory<float>>();
                 });
  return true;
}();

}  // namespace
}  // namespace topknot

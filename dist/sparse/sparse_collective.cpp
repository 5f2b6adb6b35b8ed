#include "dist/sparse/sparse_collective.h"

namespace topknot {

Registry<SparseCollectiveFactory>& sparse_collectives() {
  static Registry<SparseCollectiveFactory> registry("collective (exchange.collective)");
  return registry;
}

}  // namespace topknot

// Nothing here can be tested without a GPU: the program then ends at once with the one reason, and not with
// each case's. On the CUDA emulator there is one.
#define CATCH_CONFIG_EXTERNAL_INTERFACES
#include "nn/base/check.h"
#include "nn/core/cuda/context.h"
#include "tests/support/catch.h"

namespace topknot {
namespace {

#if __has_include(<catch2/catch_all.hpp>)
using Listener = Catch::EventListenerBase;
#else
using Listener = Catch::TestEventListenerBase;
#endif

class MachineHasGpu : public Listener {
 public:
  using Listener::Listener;
  // Catch prints what is thrown here, and the program's status is not 0.
  void testRunStarting(const Catch::TestRunInfo&) override {
    if (const std::string why = cuda::problem(); !why.empty())
      throw UserError("the tests of the CUDA backend cannot run: " + why);
  }
};
CATCH_REGISTER_LISTENER(MachineHasGpu)

}  // namespace
}  // namespace topknot

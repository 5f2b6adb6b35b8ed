#include "nn/base/clock.h"

#include <thread>

#include "tests/support/catch.h"

namespace topknot {

TEST_CASE("of a long time in which nobody looked, as of a suspended process, half a second counts") {
  Patience patience(0.6);
  Patience unlimited;
  std::this_thread::sleep_for(std::chrono::milliseconds(1200));
  CHECK_FALSE(patience.over());
  CHECK(patience.passed() < 0.6);
  while (!patience.over()) std::this_thread::sleep_for(std::chrono::milliseconds(20));
  CHECK(patience.left() <= 0);
  CHECK_FALSE(unlimited.over());
  CHECK(unlimited.passed() > 0);
}

}  // namespace topknot

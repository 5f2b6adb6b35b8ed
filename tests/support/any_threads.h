#pragma once
// What must not depend on the number of compute threads.

#include "tests/support/catch.h"
#include "tests/support/threads.h"

namespace topknot::testing {

// What `run` gives is the same on one thread and on several.
template <class Run>
void check_any_threads(const Run& run) {
  const auto on = [&](int threads) {
    const Threads scope(threads);
    return run();
  };
  const auto one = on(1);
  for (const int threads : {2, 3, 5, 7}) {
    INFO(threads << " threads");
    CHECK((on(threads) == one));
  }
}

}  // namespace topknot::testing

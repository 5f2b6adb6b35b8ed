#pragma once
// How long a piece of work takes.

#include "nn/base/clock.h"

namespace topknot {

// Times one call of `work`.
double seconds_for(auto&& work) {
  const auto start = Clock::now();
  work();
  return seconds_since(start);
}
double milliseconds_of(auto&& work) {
  return 1e3 * seconds_for(work);
}

}  // namespace topknot

#pragma once
// What every selection is measured against, and how.

#include <chrono>
#include <cstddef>
#include <span>
#include <vector>

namespace topknot::bench {

// r += g over all threads: the 12 bytes an element that error feedback cannot go below.
void plain_pass(std::span<float> r, std::span<const float> g);

// Throws Error where there are no values.
double median(std::vector<double> values);

template <class Work>
double milliseconds(Work&& work) {
  const auto start = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace topknot::bench

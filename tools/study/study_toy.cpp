#include "tools/study/study_toy.h"

#include <cmath>

#include "tools/study/study_ranks.h"

namespace topknot {

ToyTrace toy_trace(const CompressOptions& options, int iterations) {
  constexpr double points[2][2] = {{100, 1}, {-100, 1}};
  constexpr double learning_rate = 0.9;
  std::array<double, 2> w = {0, 1};
  StudyRanks<double> ranks(options, 2, 2);
  ToyTrace trace;
  const auto record = [&] {
    double loss = 0;
    for (const auto& x : points) loss += std::log1p(std::exp(-(w[0] * x[0] + w[1] * x[1]))) / 2;
    trace.loss.push_back(loss);
    trace.weights.push_back(w);
  };
  record();
  for (int t = 0; t < iterations; ++t) {
    for (std::size_t r = 0; r < 2; ++r) {
      const auto& x = points[r];
      const double slope = -1 / (1 + std::exp(w[0] * x[0] + w[1] * x[1]));
      for (std::size_t j = 0; j < 2; ++j) ranks.gradient(r)[j] = slope * x[j];
    }
    const std::span<const double> average = ranks.step(0.5);
    for (std::size_t j = 0; j < 2; ++j) w[j] -= learning_rate * average[j];
    if (!ranks.sent()[0].indices.empty())
      trace.sent.push_back({ranks.sent()[0].indices.at(0), ranks.sent()[1].indices.at(0)});
    record();
  }
  return trace;
}

}  // namespace topknot

#include "dist/plan/schedule.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "nn/base/check.h"

namespace topknot {
namespace {

double checked(double value, const char* what) {
  TOPKNOT_CHECK(std::isfinite(value) && value >= 0,
                fmt::format("{} must be finite and not negative: {}", what, value));
  return value;
}

}  // namespace

Timeline evaluate(std::span<const LayerCost> layers, std::span<const std::size_t> groups,
                  const CostModel& model) {
  Timeline timeline;
  timeline.groups.reserve(groups.size());
  double compute = 0, network = 0;  // when each is free
  std::size_t layer = 0;
  for (const std::size_t count : groups) {
    TOPKNOT_CHECK(count > 0 && count <= layers.size() - layer, "the groups do not match the layers");
    double elements = 0;
    for (const std::size_t end = layer + count; layer < end; ++layer) {
      elements += checked(layers[layer].elements, "a layer's size");
      compute += checked(layers[layer].backward, "a layer's backward time");
    }
    GroupTime time;
    time.ready = compute;
    time.encoded = compute += checked(model.sparsify(elements), "the time of selection");
    time.begin = std::max(network, compute);
    time.end = network = time.begin + checked(model.communicate(elements), "the time of a collective");
    timeline.groups.push_back(time);
  }
  TOPKNOT_CHECK(layer == layers.size(), "the groups do not match the layers");
  timeline.makespan = network;
  return timeline;
}

}  // namespace topknot

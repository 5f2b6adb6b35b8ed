// The pointwise ops do not lean on the order of blocks and threads.
#include "nn/ops/elementwise.h"
#include "nn/ops/shortcut.h"
#include "tests/cuda/probe.h"
#include "tests/cuda/stand_in/machine.h"
#include "tests/support/catch.h"

namespace topknot {
namespace {

using namespace test;

TEST_CASE("pointwise ops give the same whatever the order of blocks and threads") {
  const Shape shape{2, 40, 7, 6};
  const std::vector<std::pair<Op, std::int64_t>> ops{
      {[](auto x) { return relu(x[0]); }, shape.numel()},
      {[](auto x) { return add(x[0], x[0]); }, shape.numel()},
      {[](auto x) { return dropout(x[0], 0.5f, CounterRng(1, RngUse::dropout)); }, shape.numel()},
      {[](auto x) { return subsample_and_pad(x[0], 64); }, 2 * 64 * 4 * 3},
      {[](auto x) { return flatten(x[0]); }, shape.numel()}};
  for (const auto precision : {cuda::Precision::fp32, cuda::Precision::bf16})
    for (const auto& [op, outputs] : ops) {
      std::vector<Probe> results;
      for (const bool reverse : {false, true}) {
        stand_in::reset();
        stand_in::machine().reverse = reverse;
        const OnGpu gpu(precision);
        results.push_back(
            probe(op, {{shape, random_values(shape.numel(), 1)}}, random_values(outputs, 2), true));
      }
      stand_in::reset();
      CHECK(results[0] == results[1]);
    }
}

}  // namespace
}  // namespace topknot

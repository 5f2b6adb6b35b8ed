#include "compress/select/selector.h"

#include "nn/base/check.h"
#include "tests/compress/select/select_once.h"
#include "tests/support/catch.h"

using namespace topknot;
using namespace topknot::testing;

namespace {

CompressOptions threshold_of(double t) {
  CompressOptions options;
  options.set("threshold", t);
  return options;
}

}  // namespace

TEST_CASE("threshold selects what exceeds it, strictly, whatever the density") {
  const auto selector = make_selector("threshold", threshold_of(0.5));
  const std::vector<float> x = {0.5f, -0.5f, std::nextafter(0.5f, 1.0f), -3, 0};
  const auto selected = select_from_copy(*selector, x, {0.2});
  CHECK(selected.indices == std::vector<std::uint32_t>{2, 3});
  CHECK(well_formed(selected, x));
  CHECK(selected.threshold == 0.5);
  CHECK(select_from_copy(*selector, x, {0.9}).indices == selected.indices);
}

TEST_CASE("threshold holds for a single element too, of which k is all; density 1 sends everything") {
  const auto selector = make_selector("threshold", threshold_of(0.5));
  CHECK(select_from_copy(*selector, {0.1f}, {0.001}).indices.empty());
  CHECK(select_from_copy(*selector, {0.6f}, {0.001}).indices.size() == 1);
  CHECK(select_from_copy(*selector, {0.1f}, {1.0}).indices.size() == 1);
}

TEST_CASE("threshold finds all of few, of many, and of few again") {
  const auto selector = make_selector("threshold", threshold_of(1.25));
  std::vector<float> residual = noise(200000, 1);
  for (const double scale : {0.5, 10.0, 0.01, 1.0}) {
    std::vector<float> u = residual;
    for (float& v : u) v *= static_cast<float>(scale);
    std::vector<float> sum = u;
    for (std::size_t i = 0; i < u.size(); ++i) sum[i] += residual[i];
    const auto selected = select_once(*selector, u, residual, {});
    CHECK(u == sum);
    CHECK(selected.indices == positions_above(sum, 1.25));
    CHECK(well_formed(selected, sum));
    selector->commit({});
  }
}

TEST_CASE("a threshold of 0 or below, or none at all, is refused with the key's name") {
  for (const double t : {0.0, -1.0, std::nan(""), HUGE_VAL})
    CHECK_THROWS_WITH(make_selector("threshold", threshold_of(t)), Catch::Contains("compress.threshold "));
  CHECK_THROWS_AS(make_selector("threshold", threshold_of(0)), UserError);
}

TEST_CASE("a threshold beyond float's range selects nothing, the least double all that is not zero") {
  std::vector<float> x = {0.0f, -1e-45f, 1e38f};
  const auto high = make_selector("threshold", threshold_of(1e300)),
             low = make_selector("threshold", threshold_of(5e-324));
  CHECK(select_from_copy(*high, x, {0.5}).indices.empty());
  CHECK(select_from_copy(*low, x, {0.5}).indices == std::vector<std::uint32_t>{1, 2});
}

// What every compressor owes, whatever it does: run over all that are registered.
#include "tests/compress/every_method.h"

#include <numeric>

#include "compress/memory/memory.h"
#include "compress/sparse.h"
#include "nn/base/check.h"
#include "tests/support/catch.h"

using namespace topknot;
using namespace topknot::testing;

namespace {

void load_gradients(SimulatedRanks& ranks, std::int64_t step, std::size_t n) {
  for (std::size_t r = 0; r < ranks.size(); ++r) ranks[r].gradient = gradient_of(step, r, n);
}

bool averages_agree(SimulatedRanks& ranks) {
  for (std::size_t r = 1; r < ranks.size(); ++r)
    if (!same_bits<float>(std::span<const float>(ranks[0].average), ranks[r].average)) return false;
  return true;
}

// Two tensors, one of them a matrix, and two selection ranges.
GroupSpec two_tensors(int ranks) {
  GroupSpec spec;
  spec.numel = 4096 + 96 * 40;
  spec.segments = {{0, 4096}, {4096, spec.numel}};
  spec.ranks = ranks;
  spec.tensors = {{0, 64, 64}, {4096, 96, 40}};
  return spec;
}

bool keeps_residual(const std::string& method) {
  if (!sparse_presets().contains(method))
    return method != "dense" && method != "qsgd" && method != "terngrad";
  return sparse_presets().find(method).memory == "residual";
}

}  // namespace

TEST_CASE("all ranks get the same bits from every method, with counts that differ by rank") {
  const GroupSpec spec = two_tensors(3);
  for (const std::string& method : methods()) {
    INFO(method);
    SimulatedRanks ranks(options_for(method), spec);
    for (std::int64_t step = 0; step < 6; ++step) {
      load_gradients(ranks, step, spec.numel);
      REQUIRE(ranks.step(step, 0.02, {0.5f, 1.0f, 1.5f}));
      REQUIRE(averages_agree(ranks));
      for (const float x : ranks[0].average) REQUIRE(std::isfinite(x));
    }
  }
}

TEST_CASE("with error feedback nothing is lost: residuals plus what was applied are the gradients") {
  const GroupSpec spec = two_tensors(3);
  const std::vector<float> weights = {0.5f, 1.0f, 1.5f};
  for (const std::string& method : methods()) {
    if (!keeps_residual(method)) continue;
    INFO(method);
    SimulatedRanks ranks(options_for(method), spec);
    std::vector<double> left(spec.numel), scale(spec.numel);
    for (std::int64_t step = 0; step < 8; ++step) {
      load_gradients(ranks, step, spec.numel);
      for (std::size_t r = 0; r < 3; ++r)
        for (std::size_t i = 0; i < spec.numel; ++i) {
          left[i] += static_cast<double>(weights[r]) * ranks[r].gradient[i];
          scale[i] += std::abs(static_cast<double>(ranks[r].gradient[i]));
        }
      REQUIRE(ranks.step(step, 0.02, weights));
      for (std::size_t i = 0; i < spec.numel; ++i) left[i] -= 3.0 * ranks[0].average[i];
    }
    for (std::size_t r = 0; r < 3; ++r)
      for (std::size_t i = 0; i < spec.numel; ++i)
        left[i] -= static_cast<double>(weights[r]) * ranks[r].residual[i];
    const double error = std::sqrt(std::inner_product(left.begin(), left.end(), left.begin(), 0.0));
    const double norm = std::sqrt(std::inner_product(scale.begin(), scale.end(), scale.begin(), 0.0));
    CHECK(error / norm < 1e-6);
  }
}

TEST_CASE("a step that is not committed leaves no trace in any method") {
  const GroupSpec spec = two_tensors(2);
  for (const std::string& method : methods()) {
    INFO(method);
    SimulatedRanks ranks(options_for(method), spec), undisturbed(options_for(method), spec);
    for (std::int64_t step = 0; step < 6; ++step) {
      load_gradients(ranks, step, spec.numel);
      load_gradients(undisturbed, step, spec.numel);
      if (step == 1 || step == 3) {  // once refused by all, once a NaN on one rank
        const auto state = ranks[0].compressor->state();
        const auto residual = ranks[0].residual;
        if (step == 3) ranks[1].gradient[17] = std::numeric_limits<float>::quiet_NaN();
        REQUIRE_FALSE(ranks.step(step, 0.02, {}, step == 3));
        CHECK(same_bits(ranks[0].residual, residual));
        CHECK(ranks[0].compressor->state() == state);
        load_gradients(ranks, step, spec.numel);
      }
      REQUIRE(ranks.step(step, 0.02));
      REQUIRE(undisturbed.step(step, 0.02));
      REQUIRE(same_bits<float>(std::span<const float>(ranks[0].average), undisturbed[0].average));
    }
  }
}

TEST_CASE("the state of every method round-trips: a restarted run gives the bits of an uninterrupted one") {
  const GroupSpec spec = two_tensors(2);
  for (const std::string& method : methods()) {
    INFO(method);
    SimulatedRanks whole(options_for(method), spec), restarted(options_for(method), spec);
    for (std::int64_t step = 0; step < 12; ++step) {
      if (step == 7)
        for (std::size_t r = 0; r < 2; ++r) {
          restarted[r].compressor->load_state(whole[r].compressor->state());
          restarted[r].residual = whole[r].residual;
        }
      load_gradients(whole, step, spec.numel);
      REQUIRE(whole.step(step, 0.02));
      if (step < 7) continue;
      load_gradients(restarted, step, spec.numel);
      REQUIRE(restarted.step(step, 0.02));
      REQUIRE(same_bits<float>(std::span<const float>(whole[0].average), restarted[0].average));
    }
    auto state = whole[0].compressor->state();
    CHECK(state == restarted[0].compressor->state());
    state.push_back(std::byte{0});
    CHECK_THROWS_AS(restarted[0].compressor->load_state(state), Error);
    state.resize(state.size() - 2 < state.size() ? state.size() - 2 : 0);
    if (state.size() + 1 == whole[0].compressor->state().size())
      CHECK_THROWS_AS(restarted[0].compressor->load_state(state), Error);
  }
}

TEST_CASE("vectors at the edge end well in every method") {
  for (const std::string& method : methods())
    for (const std::size_t n : {std::size_t{1}, std::size_t{5}, std::size_t{3000}})
      for (const EdgeVector& edge : edge_vectors(n))
        for (const double density : {1e-9, 0.01, 1.0}) {
          INFO(method << ", " << n << " times " << edge.what << ", density " << density);
          SimulatedRanks ranks(options_for(method), whole_group(n, 2));
          for (std::int64_t step = 0; step < 3; ++step) {
            ranks[0].gradient = edge.values;
            ranks[1].gradient = gradient_of(step, 1, n);
            REQUIRE(ranks.step(step, density) == edge.finite);
            if (!edge.finite) continue;
            REQUIRE(averages_agree(ranks));
            for (const float x : ranks[0].average) REQUIRE(std::isfinite(x));
            for (const float x : ranks[0].residual) REQUIRE(std::isfinite(x));
          }
          if (!edge.finite) CHECK(ranks[0].residual == std::vector<float>(n));
        }
}

TEST_CASE("a group without elements is sent as an empty message in every method") {
  for (const std::string& method : methods()) {
    INFO(method);
    SimulatedRanks ranks(options_for(method), GroupSpec{0, {}, 2});
    for (std::int64_t step = 0; step < 2; ++step) CHECK(ranks.step(step, 0.01));
    CHECK(ranks[0].average.empty());
  }
}

TEST_CASE("nothing beyond the capacity is sent, and what stays is not lost") {
  const std::size_t n = 5000;
  for (const std::string& method : methods()) {
    if (!sparse_presets().contains(method)) continue;
    INFO(method);
    CompressOptions options = options_for(method);
    options.capacity = 1.0;
    SimulatedRanks ranks(options, whole_group(n, 2));
    for (std::int64_t step = 0; step < 5; ++step) {
      load_gradients(ranks, step, n);
      REQUIRE(ranks.step(step, 0.01));
      const std::size_t k = selectors().find(sparse_presets().find(method).select).traits.target(0.01, n);
      for (std::size_t r = 0; r < 2; ++r) CHECK(ranks[r].compressor->selected() <= k);
    }
  }
}

TEST_CASE("at density 1 every selection with error feedback averages as the dense method does") {
  const GroupSpec spec = two_tensors(3);
  for (const std::string& select : selectors().names()) {
    if (select == "threshold") continue;  // its own rule decides, not the density
    INFO(select);
    CompressOptions options = options_for("topk");
    options.select = select;
    SimulatedRanks sparse(options, spec), dense(named("dense"), spec);
    for (std::int64_t step = 0; step < 4; ++step) {
      load_gradients(sparse, step, spec.numel);
      load_gradients(dense, step, spec.numel);
      REQUIRE(sparse.step(step, 1.0));
      REQUIRE(dense.step(step, 1.0));
      CHECK(same_bits<float>(std::span<const float>(sparse[0].average), dense[0].average));
      CHECK(sparse[0].residual == std::vector<float>(spec.numel));
    }
  }
}

TEST_CASE("finite gradients whose sum overflows skip the step in every method") {
  const std::size_t n = 3000;
  for (const std::string& method : methods()) {
    INFO(method);
    SimulatedRanks ranks(options_for(method), whole_group(n, 3));
    for (std::size_t r = 0; r < 3; ++r) ranks[r].gradient[5] = 3e38f;
    if (ranks.step(0, 0.01))  // where the large entry was not selected, or was clipped
      for (const float x : ranks[0].average) REQUIRE(std::isfinite(x));
    if (method == "dense" || method == "topk") CHECK(ranks[0].average.empty());
  }
}

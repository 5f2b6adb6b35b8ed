#include "optim/clip.h"

#include <omp.h>

#include <cmath>
#include <limits>

#include "nn/core/base/check.h"
#include "nn/core/rng.h"
#include "tests/support/catch.h"

using namespace topknot;

namespace {

void zeros(std::span<float> values, const CounterRng&) {
  for (float& value : values) value = 0;
}

struct Model {
  ParameterStore store;
  ParameterArena* arena;
  Model() {
    store.add("a", {4}, zeros);
    store.add("b", {2}, zeros);
    arena = &store.build([](const Parameter&) { return true; }, 1);
    // Norms 6 and 8; of both together 10.
    for (const auto& p : store.parameters())
      for (std::size_t i = 0; i < p->numel(); ++i)
        p->gradient()[i] = p->name() == "a" ? -3.0f : 8.0f / std::sqrt(2.0f);
  }
  double norm(int index) {
    Parameter& p = *store.parameters()[index];
    return l2_norm({p.gradient(), p.numel()});
  }
};

}  // namespace

TEST_CASE("the norm agrees with a plain double sum and has the same bits for any number of threads") {
  for (std::size_t size : {0u, 1u, 15u, 17u, 8192u, 300007u}) {
    std::vector<float> values(size);
    const CounterRng rng(1, RngUse::test, 0);
    double squares = 0;
    for (std::size_t i = 0; i < size; ++i)
      values[i] = rng.normal(i), squares += double(values[i]) * values[i];
    const int threads = omp_get_max_threads();
    omp_set_num_threads(1);
    const double one = sum_of_squares(values);
    omp_set_num_threads(3);
    CHECK(sum_of_squares(values) == one);
    omp_set_num_threads(threads);
    CHECK(one == Approx(squares).epsilon(1e-12));
  }
}

TEST_CASE("whole-model clipping keeps the direction and meets the norm") {
  Model model;
  CHECK(clip_gradients(model.arena->parameters(), 5) == Approx(10));
  CHECK(model.norm(0) == Approx(3));
  CHECK(model.norm(1) == Approx(4));
  CHECK(model.store.parameters()[0]->gradient()[3] == Approx(-1.5));
}

TEST_CASE("per-tensor clipping leaves the tensors below the norm alone") {
  Model model;
  for (Parameter* p : model.arena->parameters()) clip_gradient(*p, 7);
  CHECK(model.norm(0) == 6);
  CHECK(model.norm(1) == Approx(7));
}

TEST_CASE("a gradient that is not finite stays visible") {
  Model model;
  model.store.parameters()[0]->gradient()[1] = std::numeric_limits<float>::infinity();
  clip_gradients(model.arena->parameters(), 5);
  CHECK(std::isinf(model.store.parameters()[0]->gradient()[1]));
  CHECK(model.store.parameters()[0]->gradient()[0] == -3.0f);
  CHECK(clip_factor(std::nan(""), 1) == 1);
}

TEST_CASE("a clipping norm of 0 or less is refused") {
  CHECK_THROWS_AS(clip_factor(1, 0), UserError);
  CHECK_THROWS_AS(clip_factor(1, -1), UserError);
  CHECK(clip_factor(4, 1) == 0.25);
  CHECK(clip_factor(1, 1) == 1);
}

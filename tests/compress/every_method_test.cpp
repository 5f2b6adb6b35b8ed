// What every compressor owes, whatever it does: run over all that are registered.
#include "tests/compress/every_method.h"

#include "compress/codec/codec.h"
#include "compress/memory/memory.h"
#include "compress/parallel.h"
#include "compress/select/selector.h"
#include "compress/sparse.h"

using namespace topknot;
using namespace topknot::testing;

namespace {

void load_gradients(SimulatedRanks& ranks, std::int64_t step, std::size_t n) {
  for (std::size_t r = 0; r < ranks.size(); ++r) ranks[r].gradient = gradient_of(step, r, n);
}

auto gradients(std::int64_t step, std::size_t n) {
  return [=](std::size_t rank) { return gradient_of(step, rank, n); };
}

void check_finite(std::span<const float> values) {
  for (const float x : values) REQUIRE(std::isfinite(x));
}

// Two matrices and a vector, in two selection ranges.
GroupSpec three_tensors(int ranks) {
  constexpr std::size_t vector = 4096 + 96 * 40, n = vector + 33;
  return {n, {{0, 4096}, {4096, n}}, ranks, 0, {{0, 64, 64}, {4096, 96, 40}, {vector, 33, 1}}};
}

// Every method, and what the memory and the form of momentum make of some.
std::vector<CompressOptions> variants() {
  std::vector<CompressOptions> all;
  for (const std::string& method : methods()) all.push_back(options_for(method));
  const auto add = [&](const std::string& method, const std::string& memory, const std::string& values = "") {
    all.push_back(options_for(method, {"memory=" + memory, "values=" + values}));
  };
  for (const std::string& memory : memories().names()) add("topk", memory);
  for (const char* method : {"powersgd", "acpsgd", "signsgd", "randk"}) add(method, "none");
  add("qsgd", "residual");
  for (const char* memory : {"residual", "none"})
    for (const char* values : {"int8", "fp8", "fp16"}) add("dense", memory, values);
  all.push_back(options_for("dgc"));
  all.back().nesterov = true;
  return all;
}

void check_same(SimulatedRanks& a, SimulatedRanks& b) {
  REQUIRE(a.blocks() == b.blocks());
  for (std::size_t r = 0; r < a.size(); ++r) {
    REQUIRE(same_bits<float>(std::span<const float>(a[r].average), b[r].average));
    REQUIRE(same_bits(a[r].residual, b[r].residual));
    REQUIRE(a[r].compressor->state() == b[r].compressor->state());
    CHECK(a[r].compressor->diagnostics().threshold == b[r].compressor->diagnostics().threshold);
  }
}

std::string memory_of(const CompressOptions& options) {
  const std::string& method = options.name;
  if (!options.memory.empty()) return options.memory;
  if (sparse_presets().contains(method)) return sparse_presets().find(method).memory;
  return method == "dense" || method == "qsgd" || method == "terngrad" ? "none" : "residual";
}

bool refused(const std::string& select, const std::string& memory) {
  return select == "regtopk" && memory == "ef21";
}

void run(const CompressOptions& options) {
  constexpr std::size_t n = 2500;
  SimulatedRanks ranks(options, {n, {{0, 2300}, {2300, n}}, 2});
  for (std::int64_t step = 0; step < 4; ++step) {
    step_alike({&ranks}, gradients(step, n), step, 0.03);
    check_finite(ranks[0].average);
    check_finite(ranks[0].residual);
  }
}

}  // namespace

TEST_CASE("all ranks get the same bits from every method, with counts that differ by rank") {
  const GroupSpec spec = three_tensors(3);
  for (const std::string& method : methods()) {
    INFO(method);
    SimulatedRanks ranks(options_for(method), spec);
    for (std::int64_t step = 0; step < 6; ++step) {
      step_alike({&ranks}, gradients(step, spec.numel), step, 0.02, {0.5f, 1.0f, 1.5f});
      check_finite(ranks[0].average);
    }
  }
}

TEST_CASE("with error feedback residuals and what was applied are the gradients; without, none is touched") {
  const GroupSpec spec = three_tensors(3);
  const std::vector<float> weights = {0.5f, 1.0f, 1.5f};
  for (CompressOptions options : variants()) {
    const std::string memory = memory_of(options);
    if (memory != "residual" && memory != "none") continue;
    INFO(options.name << " " << options.memory);
    // sparseloco forgets and adds more; residuals of demo are coefficients.
    options.aggregate = "ranks", options.feedback_decay = 1, options.transform = "none";
    SimulatedRanks ranks(options, spec);
    std::vector<double> left(spec.numel), scale(spec.numel);
    for (std::int64_t step = 0; step < 8; ++step) {
      load_gradients(ranks, step, spec.numel);
      for (std::size_t r = 0; r < 3; ++r)
        for (std::size_t i = 0; i < spec.numel; ++i) {
          left[i] += double(weights[r]) * ranks[r].gradient[i];
          scale[i] += std::abs(double(ranks[r].gradient[i]));
        }
      REQUIRE(ranks.step(step, 0.02, weights));
      for (std::size_t i = 0; i < spec.numel; ++i) left[i] -= 3.0 * ranks[0].average[i];
    }
    for (std::size_t r = 0; r < 3; ++r) {
      if (memory == "none") CHECK(ranks[r].residual == std::vector<float>(spec.numel));
      for (std::size_t i = 0; i < spec.numel; ++i) left[i] -= double(weights[r]) * ranks[r].residual[i];
    }
    const double error = std::sqrt(std::inner_product(left.begin(), left.end(), left.begin(), 0.0));
    const double norm = std::sqrt(std::inner_product(scale.begin(), scale.end(), scale.begin(), 0.0));
    if (memory == "residual") CHECK(error / norm < 1e-6);
  }
}

TEST_CASE("each entry is either sent or kept, bit for bit what was accumulated, by every selection") {
  const std::size_t n = 2500, ranks = 2;
  for (const std::string& select : selectors().names()) {
    INFO(select);
    SimulatedRanks steppers(options_for("topk", {"select=" + select}), whole_group(n, ranks));
    for (std::int64_t step = 0; step < 10; ++step) {
      load_gradients(steppers, step, n);
      std::vector<std::vector<float>> u;
      for (std::size_t r = 0; r < ranks; ++r) {
        u.push_back(steppers[r].gradient);
        for (std::size_t i = 0; i < n; ++i) u[r][i] += steppers[r].residual[i];
      }
      REQUIRE(steppers.step(step, 0.02, {0.5f, 1.5f}));
      for (std::size_t r = 0; r < ranks; ++r) {
        const SparseVector& sent = steppers.sent()[r];
        CHECK(sent.indices.size() == steppers[r].compressor->diagnostics().selected);
        std::vector<float> restored = steppers[r].residual;
        for (std::size_t i = 0; i < sent.indices.size(); ++i) {
          REQUIRE(restored[sent.indices[i]] == 0);
          restored[sent.indices[i]] = sent.values[i];
        }
        REQUIRE(same_bits(restored, u[r]));
      }
    }
  }
}

TEST_CASE("no method's results depend on the number of threads") {
  GroupSpec spec = whole_group(300 * 500 + 77 + 512 * 700, 2);
  spec.tensors = {{0, 300, 500}, {150000, 77, 1}, {150077, 512, 700}};
  REQUIRE(spec.numel / 3 > 4 * kChunk);
  std::vector<CompressOptions> all = variants();
  all.push_back(options_for("qsgd", {"levels=3", "bucket=100"}));
  for (const CompressOptions& options : all) {
    INFO(options.name << " " << options.memory);
    const auto by_threads = [&](int threads) {
      const Threads scope(threads);
      SimulatedRanks ranks(options, spec);
      for (std::int64_t step = 0; step < 2; ++step)
        step_alike({&ranks}, gradients(step, spec.numel), step, 0.01);
      return ranks;
    };
    SimulatedRanks one = by_threads(1), three = by_threads(3);
    check_same(one, three);
  }
}

TEST_CASE("a step that is not committed leaves no trace in any method") {
  const GroupSpec spec = three_tensors(2);
  for (const CompressOptions& options : variants())
    for (const std::string why : {"not agreed on", "NaN", "infinity"}) {
      INFO(options.name << " " << options.memory << ", " << why);
      SimulatedRanks ranks(options, spec), undisturbed(options, spec);
      for (std::int64_t step = 0; step < 6; ++step) {
        if (step % 2 == 0) {  // the first step too
          load_gradients(ranks, 100 + step, spec.numel);
          for (float& x : ranks[0].gradient) x *= 50;
          if (why == "NaN") ranks[1].gradient[17] = std::numeric_limits<float>::quiet_NaN();
          if (why == "infinity") ranks[0].gradient[4097] = -std::numeric_limits<float>::infinity();
          const auto state = ranks[0].compressor->state();
          const auto residual = ranks[0].residual;
          REQUIRE_FALSE(ranks.step(step, 0.03, {}, why != "not agreed on"));
          for (std::size_t r = 0; r < ranks.size() && sparse_presets().contains(options.name); ++r)
            CHECK(ranks[r].compressor->finite() == (why == "not agreed on"));  // all ranks say the same
          CHECK(same_bits(ranks[0].residual, residual));
          CHECK(ranks[0].compressor->state() == state);
        }
        step_alike({&ranks, &undisturbed}, gradients(step, spec.numel), step, 0.02);
        check_same(ranks, undisturbed);
      }
    }
}

TEST_CASE("the state of every method round-trips: a restarted run gives the bits of an uninterrupted one") {
  const GroupSpec spec = three_tensors(2);
  for (const CompressOptions& options : variants())
    for (const std::int64_t cut : {0, 3, 4, 7}) {
      INFO(options.name << " " << options.memory << " restarted at " << cut);
      SimulatedRanks whole(options, spec), restarted(options, spec);
      for (std::int64_t step = 0; step < 12; ++step) {
        for (std::size_t r = 0; r < 2 && step == cut; ++r) {
          restarted[r].compressor->load_state(whole[r].compressor->state());
          restarted[r].residual = whole[r].residual;
        }
        step_alike({&whole}, gradients(step, spec.numel), step, 0.02);
        if (step < cut) continue;
        step_alike({&restarted}, gradients(step, spec.numel), step, 0.02);
        check_same(whole, restarted);
      }
      auto state = whole[0].compressor->state();
      state.push_back(std::byte{0});
      CHECK_THROWS_AS(restarted[0].compressor->load_state(state), Error);
      state.resize(state.size() - 2 < state.size() ? state.size() - 2 : 0);
      if (state.size() + 1 == whole[0].compressor->state().size())
        CHECK_THROWS_AS(restarted[0].compressor->load_state(state), Error);
    }
}

TEST_CASE("vectors at the edge end well in every method") {
  for (const CompressOptions& options : variants())
    for (const std::size_t n : {std::size_t{1}, std::size_t{5}, std::size_t{3000}})
      for (const EdgeVector& edge : edge_vectors(n))
        for (const double density : {1e-9, 0.01, 1.0}) {
          INFO(options.name << " " << options.memory << ", " << n << " times " << edge.what << ", density "
                            << density);
          SimulatedRanks ranks(options, whole_group(n, 2));
          for (std::int64_t step = 0; step < 3; ++step) {
            ranks[0].gradient = edge.values;
            ranks[1].gradient = gradient_of(step, 1, n);
            REQUIRE(ranks.step(step, density) == edge.finite);
            if (!edge.finite) continue;
            check_finite(ranks[0].average);
            check_finite(ranks[0].residual);
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

TEST_CASE("at density 1 every selection with error feedback averages as the dense method does") {
  const GroupSpec spec = three_tensors(3);
  for (const std::string& select : selectors().names()) {
    if (select == "threshold") continue;  // its own rule decides, not the density
    INFO(select);
    SimulatedRanks sparse(options_for("topk", {"select=" + select}), spec), dense(named("dense"), spec);
    for (std::int64_t step = 0; step < 4; ++step) {
      const auto gradient = [&](std::size_t rank) {
        std::vector<float> g = gradient_of(step, rank, spec.numel);
        g[7] = -0.0f, g[8] = std::numeric_limits<float>::denorm_min();
        return g;
      };
      step_alike({&sparse, &dense}, gradient, step, 1.0,
                 step % 2 ? std::vector<float>{0.5f, 1.25f, 1.25f} : std::vector<float>{});
      CHECK(same_bits<float>(std::span<const float>(sparse[0].average), dense[0].average));
      CHECK(sparse[0].residual == std::vector<float>(spec.numel));
    }
  }
}

TEST_CASE("finite gradients whose sum or product overflows skip the step in every method") {
  const GroupSpec spec = three_tensors(3);
  for (const CompressOptions& options : variants())
    for (const std::size_t count : {1u, 400u}) {  // of a matrix
      INFO(options.name << " " << options.memory << " " << options.values << ", " << count);
      SimulatedRanks ranks(options, spec);
      for (std::size_t r = 0; r < 3; ++r) std::fill_n(ranks[r].gradient.begin() + 5, count, 3.4e38f);
      if (ranks.step(0, 0.01)) {  // where large entries were not selected, or were clipped
        check_finite(ranks[0].average);
        check_finite(ranks[0].residual);
      }
      if (options.name == "dense" || (options.name == "topk" && options.memory.empty()))
        CHECK(ranks[0].average.empty());
    }
}

TEST_CASE("every selection goes with every memory, except what is refused with its reason") {
  for (const std::string& select : selectors().names())
    for (const std::string& memory : memories().names()) {
      INFO(select << " with " << memory);
      const CompressOptions options = options_for("topk", {"select=" + select, "memory=" + memory});
      if (refused(select, memory))
        CHECK(user_error([&] { run(options); }, {select, memory, "makes no sense"}));
      else
        run(options);
    }
}

TEST_CASE("the error of an inexact value codec stays in the residual, with every index codec") {
  for (const std::string& code : index_codecs().names())
    for (const std::string& values : value_codecs().names()) {
      INFO(code << ", " << values);
      const std::size_t n = 800;
      SimulatedRanks ranks(options_for("topk", {"codec=" + code, "values=" + values}), whole_group(n, 1));
      const std::vector<float> g = gradient_of(0, 0, n);
      ranks[0].gradient = g;
      REQUIRE(ranks.step(0, 0.1));
      std::size_t sent = 0, inexact = 0;
      for (std::size_t i = 0; i < n; ++i) {
        REQUIRE(ranks[0].residual[i] == g[i] - ranks[0].average[i]);
        sent += ranks[0].average[i] != 0.0f;
        inexact += ranks[0].average[i] != 0.0f && ranks[0].residual[i] != 0.0f;
      }
      CHECK(sent >= 72);  // of 80; int8 may round the smallest of a block to 0
      CHECK((inexact > 0) == (values != "fp32"));
    }
}

TEST_CASE("a learning rate inside the accumulator goes with plain memories only, and without momentum") {
  const auto refusal = [](const std::vector<std::string>& keys) {
    const CompressOptions options = with(options_for("topk", {"lr_inside=true"}), keys);
    return error_text<UserError>([&] { make_compressor(options, whole_group(10, 1)); });
  };
  CHECK(says(refusal({}), {"optimizer.momentum"}));
  CHECK(refusal({"momentum=0"}).empty());
  for (const std::string memory : {"ef21", "dgc"})
    CHECK(says(refusal({"momentum=0", "memory=" + memory}), {"compress.memory: " + memory}));
}

TEST_CASE("an entry that the collective rejected stays in the residual, and was not sent as to selection") {
  SimulatedRanks ranks(named("regtopk"), whole_group(4, 1));
  ranks[0].gradient = {4, 3, 2, 1};
  ranks[0].rejected = {0};
  REQUIRE(ranks.step(0, 0.25));
  REQUIRE(ranks.sent()[0].indices == std::vector<std::uint32_t>{0});
  CHECK(ranks[0].residual == std::vector<float>{4, 3, 2, 1});
  // Sent and accepted, the entry would count tanh(1/4) of its magnitude now, and the second one would be
  // sent.
  ranks[0].gradient.assign(4, 0);
  REQUIRE(ranks.step(1, 0.25));
  CHECK(ranks.sent()[0].indices == std::vector<std::uint32_t>{0});
}

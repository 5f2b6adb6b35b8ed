// Compressors on a GPU against the CPU's, step by step.
#include "compress/cuda/device_compressor.h"

#include "compress/codec/cuda/device_codec.h"
#include "compress/memory/cuda/device_memory.h"
#include "nn/core/cuda/trial.h"
#include "tests/cuda/compressor_ranks.h"
#include "tests/cuda/fixture.h"

namespace topknot {
namespace {

using namespace testing;

TEST_CASE("compressors on a GPU make the CPU's blocks, averages and residuals, with 1 to 5 ranks") {
  const OnGpu gpu;
  const std::size_t n = 1101;
  for (const char* name : kMethods)
    for (const int ranks : {1, 2, 3, 5}) {
      INFO(name);
      BothRanks both(options_of(name), whole_group(n, ranks));
      ten_steps(both, n);
    }
}

TEST_CASE("quantisers on a GPU make the CPU's blocks, averages and residuals, with 1 to 5 ranks") {
  const OnGpu gpu;
  using Case = std::vector<std::string>;
  for (const Case& c : {Case{"signsgd", "memory=residual"},
                        {"signsgd", "memory=none"},
                        {"qsgd", "memory=none", "levels=127", "bucket=128"},
                        {"qsgd", "memory=residual", "levels=127", "bucket=128"},
                        {"qsgd", "memory=none", "levels=1", "bucket=64"},
                        {"qsgd", "memory=none", "levels=9", "bucket=1000"},
                        {"qsgd", "memory=none", "levels=32767", "bucket=100"}})
    for (const int ranks : {1, 2, 5})
      for (const std::size_t n : {1, 33, 777, 17001}) {
        INFO(c[0] << ' ' << c[1] << ' ' << c.back() << ", " << ranks << " ranks, " << n);
        const CompressOptions options = with(named(c[0], {"seed=3"}), {c.begin() + 1, c.end()});
        GroupSpec group = whole_group(n, ranks);
        group.offset = 1001;  // which numbers the random streams
        if (n == 777) group.segments = {{0, 5}, {5, 6}, {6, 700}, {700, n}};
        for (const bool graphs : {false, true}) {
          BothRanks both(options, group, graphs);
          ten_steps(both, n, ranks == 2 ? std::vector<float>{0.5f, 1.5f} : std::vector<float>{});
        }
      }
}

TEST_CASE("a quantised vector of zeros, and one whose norm is beyond float") {
  const OnGpu gpu;
  for (const char* name : {"signsgd", "qsgd"}) {
    BothRanks both(named(name, {"memory=none"}), whole_group(300, 2));
    both.set_density(1);
    for (std::size_t r = 0; r < 2; ++r) both.gradient(r).assign(300, r == 0 ? 0.0f : -0.0f);
    both.step(0);
    CHECK(both.status(0).bad == 0);
    for (std::size_t r = 0; r < 2; ++r) both.gradient(r).assign(300, 3e38f);
    both.step(1);
    CHECK(both.status(1).bad == 1);
  }
}

TEST_CASE("several segments are sent as one list") {
  const OnGpu gpu;
  GroupSpec small{900, {{0, 300}, {300, 303}, {303, 304}, {304, 900}}, 3};
  small.offset = 1000;
  // Of several tiles, chunks and blocks each; one is not aligned.
  const GroupSpec large{32001, {{0, 9001}, {9001, 9002}, {9002, 29000}, {29000, 32001}}, 2};
  for (const GroupSpec& group : {small, large})
    for (const char* name : kMethods)
      for (const std::string values : {"fp32", "fp16"}) {
        INFO(name << " " << values << ", " << group.numel << " elements");
        BothRanks both(with(options_of(name), {"values=" + values, "capacity=2"}), group);
        ten_steps(both, group.numel,
                  group.ranks == 3 ? std::vector{0.5f, 1.75f, 0.75f} : std::vector{0.5f, 1.5f});
        both.lower_density(0.01);  // less is selected than there is room for
        for (std::int64_t step = 10; step < 13; ++step) {
          load_gradients(both, step, group.numel);
          both.step(step);
        }
        both.compare_states();
      }
}

TEST_CASE("every layout and value codec keeps what it loses in the residual") {
  const OnGpu gpu;
  const std::size_t n = 800;
  for (const std::string code : {"raw", "rice", "bitmap"})
    for (const std::string values : {"fp32", "bf16", "fp16", "int8"}) {
      INFO(code << " " << values);
      BothRanks both(with(options_of("topk"), {"codec=" + code, "values=" + values}), whole_group(n, 2));
      ten_steps(both, n, {1.25f, 0.75f});
    }
}

TEST_CASE("no memory, the rate inside, and densities by segment") {
  const OnGpu gpu;
  const std::size_t n = 1200;
  for (const char* key : {"memory=none", "lr_inside=true"}) {
    BothRanks both(with(options_of("topk"), {key}), whole_group(n, 2));
    ten_steps(both, n);
  }
  GroupSpec layers{n, {{0, 500}, {500, 1200}}, 2};
  layers.densities = {0.1, 0.001};
  BothRanks by_layer(options_of("topk"), layers);
  ten_steps(by_layer, n);
}

TEST_CASE("a captured step is right in every replay, in any order of blocks and threads") {
  const auto order = GENERATE(from_range(orders()))();
  const OnGpu gpu;
  const std::size_t n = 1800;
  for (const char* name : kMethods) {
    INFO(name);
    BothRanks both(with(options_of(name), {"codec=rice", "values=fp16"}), {n, {{0, 800}, {800, n}}, 2}, true);
    ten_steps(both, n, {1.5f, 0.5f});
  }
}

// A trial's runs come before the first step: nothing of them may stay.
TEST_CASE("topk's message is the CPU's by one block, many and a trial's: any memory, captured or not") {
  struct Case {
    const char *forced, *memory;
    bool graphs;
  };
  const auto [forced, memory, graphs] =
      GENERATE(Case{"topk=one block", "none", true}, Case{"topk=one block", "residual", false},
               Case{"topk=one block", "dgc", true}, Case{"topk=many blocks", "residual", true},
               Case{"", "residual", false}, Case{"", "dgc", false});
  INFO(forced << ", " << memory);
  const OnGpu gpu(cuda::Precision::fp32, false);
  cuda::Trial::force(forced);
  const std::size_t n = 9001;
  BothRanks both(with(options_of("topk"), {"codec=raw", std::string("memory=") + memory, "momentum=0.9"}),
                 whole_group(n, 2), graphs);
  ten_steps(both, n, {1.5f, 0.5f});
  both.lower_density(0.01);  // zeros behind fewer entries
  for (std::int64_t step = 10; step < 13; ++step) {
    load_gradients(both, step, n);
    for (std::size_t r = 0; step == 12 && r < 2; ++r)
      both.gradient(r).assign(n, 0.5f);  // ties beyond the k-th
    both.step(step);
  }
  both.compare_states();
}

TEST_CASE("velocities on a GPU are the CPU's: any momentum, with Nesterov and masking or without") {
  const OnGpu gpu;
  for (const std::size_t n : {1, 7, 1500})
    for (const double momentum : {0.0, 0.5, 0.9})
      for (const bool nesterov : {false, true})
        for (const bool masking : {false, true})
          for (const char* values : {"fp32", "bf16"}) {
            INFO(n << ", momentum " << momentum << (nesterov ? ", Nesterov" : "")
                   << (masking ? ", masking, " : ", ") << values);
            CompressOptions options = named("dgc");
            options.momentum = momentum, options.nesterov = nesterov && momentum > 0, options.values = values;
            options.set("momentum_masking", masking);
            BothRanks both(options, whole_group(n, 1));
            ten_steps(both, n, {1.5f});
          }
}

TEST_CASE("a saved state goes from CPU to GPU and back, a velocity to either of its places") {
  const OnGpu gpu;
  const std::size_t n = 900;
  for (const char* name : kMethods) {
    INFO(name);
    BothRanks both(options_of(name), {n, {{0, 400}, {400, n}}, 2});
    for (const int later : {0, 1}) {
      ten_steps(both, n);
      if (later) load_gradients(both, 10, n), both.step(10);
      both.exchange_states();
    }
    ten_steps(both, n);
    CHECK_THROWS_AS(both.on_gpu(0).load_state(std::vector<std::byte>(16)), Error);
  }
}

TEST_CASE("a velocity of another length, without momentum or not finite is refused by the GPU's memory") {
  const OnGpu gpu;
  const auto load = [&](double momentum, std::size_t n, float value = 0) {
    StateWriter writer;
    writer.put_list(std::vector<float>(5, value));
    const std::vector<std::byte> bytes = writer.take();
    StateReader reader(bytes);
    CompressOptions options;
    options.momentum = momentum;
    cuda::make_device_memory("dgc", options, n)->load(reader);
  };
  CHECK_THROWS_AS(load(0.9, 6), Error);
  CHECK_THROWS_AS(load(0, 5), Error);
  CHECK_THROWS_AS(load(0.9, 5, std::numeric_limits<float>::infinity()), Error);
  load(0.9, 5);
}

TEST_CASE("a velocity refuses a slice in other memory than before; ef21 has no kernels") {
  const OnGpu gpu;
  CompressOptions options;
  options.momentum = 0.9;
  const auto memory = cuda::make_device_memory("dgc", options, 8);
  const DeviceVector<float> one(8), two(8), other(8);
  const auto accumulate = [&](const auto& gradient, const auto& residual) {
    memory->accumulate({{gradient.data(), 8}, {residual.data(), 8}}, nullptr);
  };
  accumulate(one, two), accumulate(two, one);
  CHECK_THROWS_AS(accumulate(other, one), Error);
  CHECK(cuda::make_device_memory("ef21", {}, 10) == nullptr);
}

TEST_CASE("a damaged block is a bad step on all ranks, and the residual stays") {
  const OnGpu gpu;
  const std::size_t n = 500;
  BothRanks both(options_of("topk"), whole_group(n, 3));
  both.set_density(0.1);
  for (std::int64_t step = 0; step < 4; ++step) {
    load_gradients(both, step, n);
    if (step == 2) both.damage_next(1);
    both.step(step, {}, step != 2);
    for (std::size_t r = 0; r < both.ranks(); ++r) CHECK(both.status(r).bad_rank == (step == 2 ? 1 : -1));
  }
}

// docs/examples/cuda/cyclic.cu.
TEST_CASE("a selection of a file of its own sends what it takes, and a NaN shows") {
  const OnGpu gpu;
  const std::size_t n = 5000;
  for (const auto& segments :
       {std::vector<std::pair<std::size_t, std::size_t>>{{0, n}}, {{0, 4000}, {4000, n}}}) {
    BothRanks both(named("cyclic", {"phase=3"}), {n, segments, 2});
    both.set_density(0.1);
    for (std::int64_t step = 0; step < 3; ++step) {
      load_gradients(both, step, n);
      if (step == 1) both.gradient(1)[7] = std::numeric_limits<float>::quiet_NaN();
      both.step(step);
    }
  }
}

TEST_CASE("an empty group sends headers") {
  const OnGpu gpu;
  BothRanks both(options_of("topk"), {0, {}, 2});
  both.set_density(0.1);
  both.step(0);
  CHECK(both.block_bytes() == 16 + cuda::kTrailerBytes);
}

TEST_CASE("a sum that could overflow, and zeros, are told apart") {
  const OnGpu gpu;
  constexpr float most = std::numeric_limits<float>::max();
  const std::size_t n = 300;
  BothRanks both(options_of("topk"), whole_group(n, 2));
  both.set_density(0.05);
  for (std::size_t r = 0; r < 2; ++r) both.gradient(r).assign(n, 0.0f);
  both.step(0);
  CHECK(both.status(0).bad == 0);
  for (std::size_t r = 0; r < 2; ++r) both.gradient(r).assign(n, 0.6f * most);
  both.step(1);
  CHECK(both.status(1).bad == 1);
  CHECK(both.status(1).bad_rank == -1);
}

TEST_CASE("methods and pieces without kernels are left to the CPU, wrong ones are refused") {
  const OnGpu gpu;
  const auto made = [](const CompressOptions& options) {
    return cuda::make_device_compressor(options, whole_group(100, 2)) != nullptr;
  };
  for (const char* name : {"powersgd", "terngrad", "randk", "chunk_topk", "sparseloco", "demo"})
    CHECK_FALSE(made(named(name)));
  for (const char* key :
       {"codec=auto", "values=centroid2", "memory=ef21", "aggregate=contributors", "feedback_decay=0.5"})
    CHECK_FALSE(made(named("topk", {key})));
  CHECK(
      says(error_text([&] { made(named("topk", {"capacity=0.5"})); }), {"compress.capacity", "at least 1"}));
}

}  // namespace
}  // namespace topknot

// Compressors on a GPU against the CPU's, step by step.
#include "compress/cuda/device_compressor.h"

#include <limits>

#include "compress/codec/cuda/device_codec.h"
#include "compress/memory/cuda/device_memory.h"
#include "nn/core/cuda/trial.h"
#include "tests/cuda/compressor_ranks.h"
#include "tests/cuda/fixture.h"
#include "tests/support/error_text.h"

namespace topknot {
namespace {

using testing::BothRanks;
using testing::gradient_of;
using testing::kMethods;
using testing::named;
using testing::options_of;
using testing::ten_steps;
using testing::whole_group;

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
  struct Case {
    const char *name, *memory;
    int levels, bucket;
  };
  for (const Case& c :
       {Case{"signsgd", "residual", 0, 0}, Case{"signsgd", "none", 0, 0}, Case{"qsgd", "none", 127, 128},
        Case{"qsgd", "residual", 127, 128}, Case{"qsgd", "none", 1, 64}, Case{"qsgd", "none", 9, 1000},
        Case{"qsgd", "none", 32767, 100}})
    for (const int ranks : {1, 2, 5})
      for (const std::size_t n : {1, 33, 777, 17001}) {
        INFO(c.name << ' ' << c.memory << ", levels " << c.levels << ", " << ranks << " ranks, " << n);
        CompressOptions options = named(c.name);
        options.memory = c.memory;
        options.seed = 3;
        if (c.levels > 0) options.set("levels", c.levels), options.set("bucket", c.bucket);
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
    CompressOptions options = named(name);
    options.memory = "none";
    BothRanks both(options, whole_group(300, 2));
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
      for (const char* values : {"fp32", "fp16"}) {
        INFO(name << " " << values << ", " << group.numel << " elements");
        CompressOptions options = options_of(name);
        options.values = values;
        options.capacity = 2;
        BothRanks both(options, group);
        ten_steps(both, group.numel,
                  group.ranks == 3 ? std::vector{0.5f, 1.75f, 0.75f} : std::vector{0.5f, 1.5f});
        both.lower_density(0.01);  // less is selected than there is room for
        for (std::int64_t step = 10; step < 13; ++step) {
          for (std::size_t r = 0; r < both.ranks(); ++r) both.gradient(r) = gradient_of(step, r, group.numel);
          both.step(step);
        }
        both.compare_states();
      }
}

TEST_CASE("every layout and value codec keeps what it loses in the residual") {
  const OnGpu gpu;
  const std::size_t n = 800;
  for (const char* code : {"raw", "rice", "bitmap"})
    for (const char* values : {"fp32", "bf16", "fp16", "int8"}) {
      INFO(code << " " << values);
      CompressOptions options = options_of("topk");
      options.codec = code;
      options.values = values;
      BothRanks both(options, whole_group(n, 2));
      ten_steps(both, n, {1.25f, 0.75f});
    }
}

TEST_CASE("no memory, the rate inside, and densities by segment") {
  const OnGpu gpu;
  const std::size_t n = 1200;
  CompressOptions options = options_of("topk");
  options.memory = "none";
  BothRanks without(options, whole_group(n, 2));
  ten_steps(without, n);
  options.memory.clear();
  options.lr_inside = true;
  BothRanks with_rate(options, whole_group(n, 2));
  ten_steps(with_rate, n);
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
    CompressOptions options = options_of(name);
    options.codec = "rice";
    options.values = "fp16";
    BothRanks both(options, {n, {{0, 800}, {800, n}}, 2}, true);
    ten_steps(both, n, {1.5f, 0.5f});
  }
}

// A trial's runs come before the first step: nothing of them may stay.
TEST_CASE(
    "topk's message is the CPU's by one block, by many and after a trial: any memory, captured or not") {
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
  CompressOptions options = options_of("topk");
  options.codec = "raw", options.memory = memory, options.momentum = 0.9;
  BothRanks both(options, whole_group(n, 2), graphs);
  ten_steps(both, n, {1.5f, 0.5f});
  both.lower_density(0.01);  // zeros behind fewer entries
  for (std::int64_t step = 10; step < 13; ++step) {
    for (std::size_t r = 0; r < both.ranks(); ++r) {
      both.gradient(r) = gradient_of(step, r, n);
      if (step == 12) both.gradient(r).assign(n, 0.5f);  // ties beyond the k-th
    }
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
      for (std::size_t r = 0; later && r < 2; ++r) both.gradient(r) = gradient_of(10, r, n);
      if (later) both.step(10);
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
  const testing::DeviceVector<float> one(8), two(8), other(8);
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
    for (std::size_t r = 0; r < both.ranks(); ++r) both.gradient(r) = gradient_of(step, r, n);
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
    CompressOptions options = named("cyclic");
    options.set("phase", 3);
    BothRanks both(options, {n, segments, 2});
    both.set_density(0.1);
    for (std::int64_t step = 0; step < 3; ++step) {
      for (std::size_t r = 0; r < 2; ++r) both.gradient(r) = gradient_of(step, r, n);
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
  const GroupSpec group = whole_group(100, 2);
  for (const char* name : {"powersgd", "terngrad", "randk", "chunk_topk", "sparseloco", "demo"})
    CHECK(cuda::make_device_compressor(named(name), group) == nullptr);
  CompressOptions options = named("topk");
  options.codec = "auto";
  CHECK(cuda::make_device_compressor(options, group) == nullptr);
  options = named("topk");
  options.values = "centroid2";
  CHECK(cuda::make_device_compressor(options, group) == nullptr);
  options = named("topk");
  options.memory = "ef21";
  CHECK(cuda::make_device_compressor(options, group) == nullptr);
  options = named("topk");
  options.aggregate = "contributors";
  CHECK(cuda::make_device_compressor(options, group) == nullptr);
  options = named("topk");
  options.feedback_decay = 0.5;
  CHECK(cuda::make_device_compressor(options, group) == nullptr);
  options = named("topk");
  options.capacity = 0.5;
  CHECK(says(error_text([&] { cuda::make_device_compressor(options, group); }),
             {"compress.capacity", "at least 1"}));
}

}  // namespace
}  // namespace topknot

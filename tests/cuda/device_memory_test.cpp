// The memories on the GPU against the CPU's, step by step: what is kept, what a bad step leaves, and saved
// states.
#include "compress/memory/cuda/device_memory.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>

#include "compress/memory/memory.h"
#include "nn/core/rng.h"
#include "tests/compress/select/select_once.h"
#include "tests/cuda/device_vector.h"
#include "tests/cuda/fixture.h"
#include "tests/support/catch.h"

namespace topknot {
namespace {

using cuda::DeviceMemory;
using testing::DeviceVector;

// A memory on either side, its slice, and the step that is under way.
struct Both {
  Both(const std::string& name, const CompressOptions& options, std::size_t n)
      : n(n),
        on_cpu(memories().find(name).make(options)),
        on_gpu(cuda::make_device_memory(name, options, n)),
        parameters(1),
        status(1),
        positions(n),
        sent(n),
        count(1),
        weights(std::vector<float>{1.5f}),
        received(1) {
    for (auto& memory : cpu) memory.assign(n, 0);
    for (auto& memory : gpu) memory = DeviceVector<float>(std::vector<float>(n));
  }

  Slice slice() { return {{gpu[turn].data(), n}, {gpu[1 - turn].data(), n}}; }

  // The pass of a selection, by the same functor, on the host.
  void accumulate_on_gpu() {
    const cuda::Accumulate made = on_gpu->accumulate(slice(), parameters.data());
    std::vector<float> u = testing::to_host(made.u, n), residual, velocity, next(n);
    cuda::Accumulate here = made;
    here.u = u.data();
    if (made.residual) residual = testing::to_host(made.residual, n), here.residual = residual.data();
    if (made.velocity) {
      velocity = testing::to_host(made.velocity, n);
      here.velocity = velocity.data(), here.next_velocity = next.data();
    }
    StepParameters step;
    if (made.times_lr) step = parameters.host()[0], here.times_lr = &step;
    for (std::size_t i = 0; i < n; ++i) here(i);
    testing::to_device(made.u, u);
    if (made.velocity) testing::to_device(made.next_velocity, next);
  }

  // A step that sends every third entry or so, coarsely where `coarse`.
  void encode(std::uint32_t number, bool coarse, float lr = 1, bool lr_inside = false) {
    cpu[turn] = testing::noise(n, number);
    gpu[turn].set(cpu[turn]);
    if (lr_inside)
      for (float& g : cpu[turn]) g *= lr;
    on_cpu->input(cpu[turn], cpu[1 - turn]).add_to(cpu[turn]);
    StepParameters step;
    step.lr = lr;
    parameters.set({step});
    accumulate_on_gpu();
    indices.clear();
    values.clear();
    for (std::size_t i = number % 3; i < n; i += 1 + (i * 7 + number) % 5) {
      indices.push_back(static_cast<std::uint32_t>(i));
      values.push_back(coarse ? std::round(cpu[turn][i] * 4) / 4 : cpu[turn][i]);
    }
    positions.set(indices);
    sent.set(values);
    count.set({static_cast<std::uint32_t>(indices.size())});
    received.set({{static_cast<std::uint32_t>(indices.size()), 1, 0, 0}});
  }

  void set_status(bool bad) {
    StepStatus word;
    word.bad = bad;
    status.set({word});
  }
  std::span<float> commit_on_gpu(cudaStream_t stream) {
    const cuda::DecodedEntries lists{positions.data(), sent.data(), received.data()};
    return on_gpu->commit(stream, status.data(), slice(), {positions.data(), sent.data(), count.data()},
                          {lists, n, 1, weights.data()});
  }
  // The average of the one rank, and the swap.
  void finish(bool bad, std::span<float> average) {
    const std::size_t place = on_gpu->has_residual() ? 1 - turn : turn;
    REQUIRE(average.data() == gpu[place].data());
    std::vector<float> expected = cpu[place];
    if (!bad) expected.assign(n, 0);
    for (std::size_t i = 0; !bad && i < indices.size(); ++i) expected[indices[i]] += 1.5f * values[i];
    REQUIRE(same_bits(gpu[place].host(), expected));
    if (bad)
      on_cpu->discard();
    else
      on_cpu->commit(cpu[turn], cpu[1 - turn], {indices, values}, {});
    if (!on_gpu->has_residual()) return;
    if (bad) cpu[turn] = cpu[1 - turn];  // so that the CPU's may swap as well
    gpu[1 - turn].set(std::vector<float>(n, 7));
    turn = 1 - turn;
    REQUIRE(same_bits(gpu[1 - turn].host(), cpu[1 - turn]));
  }
  void step(cudaStream_t stream, std::uint32_t number, bool coarse, bool bad) {
    encode(number, coarse);
    REQUIRE(same_bits(gpu[turn].host(), cpu[turn]));
    set_status(bad);
    finish(bad, commit_on_gpu(stream));
  }

  std::vector<std::byte> cpu_state() const { return testing::saved(*on_cpu); }
  std::vector<std::byte> gpu_state() const { return testing::saved(*on_gpu); }

  std::size_t n;
  std::unique_ptr<Memory> on_cpu;
  std::unique_ptr<DeviceMemory> on_gpu;
  std::vector<float> cpu[2];
  DeviceVector<float> gpu[2];
  std::size_t turn = 0;  // which memory holds the gradient
  DeviceVector<StepParameters> parameters;
  DeviceVector<StepStatus> status;
  DeviceVector<std::uint32_t> positions;
  DeviceVector<float> sent;
  DeviceVector<std::uint32_t> count;
  DeviceVector<float> weights;
  DeviceVector<cuda::DecodedStats> received;
  std::vector<std::uint32_t> indices;
  std::vector<float> values;
};

CompressOptions momentum(float value, bool nesterov = false, bool masking = true) {
  CompressOptions options;
  options.momentum = value;
  options.nesterov = nesterov;
  options.set("momentum_masking", masking);
  return options;
}

}  // namespace

TEST_CASE("residuals and velocities on the GPU are the CPU's, through good and bad steps") {
  const OnGpu gpu;
  const std::string name = GENERATE(as<std::string>{}, "residual", "dgc");
  const std::size_t n = GENERATE(1, 7, 1500);
  const CompressOptions options = GENERATE(momentum(0), momentum(0.9f), momentum(0.9f, true),
                                           momentum(0.9f, false, false), momentum(0.5f, true, false));
  Both both(name, options, n);
  CHECK(both.on_gpu->has_residual());
  CHECK(both.on_gpu->owns_momentum() == (name == "dgc"));
  CHECK(both.gpu_state() == both.cpu_state());
  const std::string pattern = "bggbbgbg";
  for (std::uint32_t i = 0; i < pattern.size(); ++i) {
    both.step(gpu.stream(), i, i % 4 == 2, pattern[i] == 'b');
    REQUIRE(both.gpu_state() == both.cpu_state());
  }
}

TEST_CASE("memory none on the GPU adds nothing, keeps nothing and swaps nothing") {
  const OnGpu gpu;
  Both both("none", {}, 300);
  CHECK_FALSE(both.on_gpu->has_residual());
  CHECK_FALSE(both.on_gpu->owns_momentum());
  for (std::uint32_t i = 0; i < 4; ++i) both.step(gpu.stream(), i, false, i % 2 == 1);
  CHECK(both.gpu_state().empty());
}

TEST_CASE("the learning rate goes inside the memory where it is asked to") {
  const OnGpu gpu;
  CompressOptions options;
  options.lr_inside = true;
  Both both("residual", options, 200);
  for (std::uint32_t i = 0; i < 3; ++i) {
    both.encode(i, false, 0.1f * static_cast<float>(i + 1), true);
    REQUIRE(same_bits(both.gpu[both.turn].host(), both.cpu[both.turn]));
    both.set_status(false);
    both.finish(false, both.commit_on_gpu(gpu.stream()));
  }
}

TEST_CASE("a captured commit, replayed for either order of a slice's memories, is the CPU's") {
  const OnGpu gpu;
  Both both("dgc", momentum(0.9f, GENERATE(false, true)), 700);
  std::optional<testing::CapturedGraph> graphs[2];
  std::span<float> averages[2];
  const std::string pattern = "ggbgbbgg";
  for (std::uint32_t i = 0; i < pattern.size(); ++i) {
    both.encode(i, i % 2 == 1);
    both.set_status(pattern[i] == 'b');
    auto& graph = graphs[both.turn];
    if (!graph) graph.emplace(gpu.stream(), [&] { averages[both.turn] = both.commit_on_gpu(gpu.stream()); });
    graph->launch(gpu.stream());
    both.finish(pattern[i] == 'b', averages[both.turn]);
    REQUIRE(both.gpu_state() == both.cpu_state());
  }
}

TEST_CASE("a velocity saved on either device goes on on the other") {
  const OnGpu gpu;
  const CompressOptions options = momentum(0.9f);
  Both first("dgc", options, 90);
  for (std::uint32_t i = 0; i < 3; ++i) first.step(gpu.stream(), i, false, i == 1);
  for (const int later : {0, 1}) {  // the slice's memories in either order
    Both second("dgc", options, 90);
    for (int i = 0; i < later; ++i) second.step(gpu.stream(), 50, false, false);
    const std::vector<std::byte> gpu_bytes = first.gpu_state(), cpu_bytes = first.cpu_state();
    StateReader to_cpu(gpu_bytes), to_gpu(cpu_bytes);
    second.on_cpu->load(to_cpu);
    second.on_gpu->load(to_gpu);
    for (std::uint32_t i = 10; i < 13; ++i) second.step(gpu.stream(), i, false, i == 10);
    CHECK(second.gpu_state() == second.cpu_state());
    CHECK(second.gpu_state() != gpu_bytes);
  }
}

TEST_CASE("a velocity of another length, without momentum or not finite is refused by the GPU's memory") {
  const OnGpu gpu;
  const auto load = [&](const CompressOptions& options, std::size_t n, float value = 0) {
    StateWriter writer;
    writer.put_list(std::vector<float>(5, value));
    const std::vector<std::byte> bytes = writer.take();
    StateReader reader(bytes);
    cuda::make_device_memory("dgc", options, n)->load(reader);
  };
  CHECK_THROWS_AS(load(momentum(0.9f), 6), Error);
  CHECK_THROWS_AS(load(momentum(0), 5), Error);
  CHECK_THROWS_AS(load(momentum(0.9f), 5, std::numeric_limits<float>::infinity()), Error);
  load(momentum(0.9f), 5);
}

TEST_CASE("a velocity refuses a slice in other memory than before") {
  const OnGpu gpu;
  Both both("dgc", momentum(0.9f), 8);
  both.step(gpu.stream(), 0, false, false);
  DeviceVector<float> other(8);
  CHECK_THROWS_AS(both.on_gpu->accumulate({{other.data(), 8}, {both.gpu[0].data(), 8}}, nullptr), Error);
}

TEST_CASE("memories without kernels are no memories of a GPU") {
  CHECK(cuda::make_device_memory("ef21", {}, 10) == nullptr);
}

}  // namespace topknot

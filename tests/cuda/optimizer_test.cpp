// Optimizers and clipping on a GPU change weights, states and gradients as the CPU does, bit for bit.
#include "optim/optimizer.h"
#include "optim/clip.h"
#include "optim/muon.h"
#include "tests/compress/select/select_once.h"
#include "tests/cuda/device_vector.h"
#include "tests/cuda/fixture.h"
#include "tests/support/fill_normal.h"

namespace topknot {
namespace {

using namespace testing;

// Matrices and vectors take turns, so that runs that decay and runs that do not are short and many.
struct Model {
  ParameterStore store;
  ParameterArena* arena;
  explicit Model(Device device = {}, std::int64_t rows = 61) : store(device) {
    for (const std::int64_t i : {0, 1, 2, 3}) {
      store.add("weight" + std::to_string(i), {3 + i, 7}, fill_normal);
      store.add("bias" + std::to_string(i), {3 + i}, fill_normal);
    }
    store.add("wide", {rows, 37}, fill_normal);
    arena = &store.build([](const Parameter&) { return true; }, 1);
  }
};

struct OptimizerCase {
  OptimizerOptions options;
  Applied applied = Applied::nothing;
};

std::vector<OptimizerCase> all_rules() {
  std::vector<OptimizerCase> cases;
  for (const bool decay_1d : {false, true})
    for (const double decay : {0.0, 0.1}) {
      OptimizerOptions o;
      o.weight_decay = decay, o.decay_1d = decay_1d;
      cases.push_back({o, Applied::nothing});
      cases.push_back({o, Applied::learning_rate});
      o.momentum = 0.9;
      for (const bool nesterov : {false, true}) {
        o.nesterov = nesterov;
        cases.push_back({o, Applied::nothing});
        cases.push_back({o, Applied::momentum});
      }
      o.name = "adamw";
      cases.push_back({o, Applied::nothing});
    }
  return cases;
}

using Slices = std::vector<std::pair<std::size_t, std::size_t>>;

// Two steps on both and a bad one on the GPU, which changes nothing; `shift`: floats by which the GPU's
// gradient is off a 16-byte address.
void check_case(const OptimizerCase& c, const Slices& slices, std::size_t shift, std::int64_t rows = 61) {
  const OnGpu gpu;
  Model here({}, rows), there(gpu.device(), rows);
  const std::size_t size = here.arena->size();
  const auto cpu = make_optimizer(c.options, *here.arena);
  const auto device = make_optimizer(c.options, *there.arena);
  DeviceVector<StepParameters> parameters(1);
  DeviceVector<StepStatus> status(1);
  for (const std::uint32_t step : {0u, 1u, 2u}) {
    const bool bad = step == 2;
    const StepParameters numbers{.step = step, .lr = 0.1 / (1 + step), .gradient_scale = 1.0 / 3};
    status.set({{.bad = bad}}), parameters.set({numbers});
    const auto gradient = gradient_of_step(size, step);
    std::vector<float> shifted(shift, 0.0f);
    shifted.insert(shifted.end(), gradient.begin(), gradient.end());
    const DeviceVector<float> there_gradient(shifted);
    for (const auto& [begin, end] : slices) {
      if (!bad)
        cpu->update(begin, std::span(gradient).subspan(begin, end - begin),
                    {step, numbers.lr, numbers.gradient_scale}, c.applied);
      device->update(begin, {there_gradient.data() + shift + begin, end - begin},
                     StepState{parameters.data(), status.data()}, c.applied);
    }
  }
  CHECK(same_bits(there.arena->host_weights(), here.arena->host_weights()));
  REQUIRE(device->state().size() == cpu->state().size());
  for (std::size_t i = 0; i < cpu->state().size(); ++i) {
    const auto expected = cpu->state()[i];
    const auto actual = device->state()[i];
    CHECK(same_bits(to_host(actual.data(), actual.size()),
                    std::vector<float>(expected.begin(), expected.end())));
  }
}

TEST_CASE("an optimizer on a GPU is the CPU's bit for bit: every rule, with decay of 1-D and without") {
  for (const OptimizerCase& c : all_rules()) {
    INFO(c.options.name << ", momentum " << c.options.momentum << ", nesterov " << c.options.nesterov
                        << ", decay " << c.options.weight_decay << ", decay_1d " << c.options.decay_1d
                        << ", applied " << int(c.applied));
    const std::size_t size = Model().arena->size();
    for (const Order order : orders()) {
      const auto scope = order();
      check_case(c, {{0, size}}, 0);
    }
  }
}

TEST_CASE("an update on a GPU depends neither on how the arena is cut nor on where a gradient lies") {
  for (const char* name : {"sgd", "adamw"}) {
    INFO(name);
    OptimizerCase c;
    c.options.name = name;
    c.options.momentum = 0.9, c.options.nesterov = true, c.options.weight_decay = 0.1;
    const std::size_t size = Model().arena->size();
    check_case(c, {{0, 21}, {21, 22}, {22, 150}, {150, 150}, {150, size}}, 0);
    check_case(c, {{0, size}}, 1);
    check_case(c, {{4, size}, {0, 4}}, 0);
  }
}

TEST_CASE("AdamW's few blocks go over a large arena in strides") {
  constexpr std::int64_t rows = 28500;  // 1,054,500 elements, of which 1,024 blocks take 1,048,576 at a time
  OptimizerCase c;
  c.options.name = "adamw", c.options.weight_decay = 0.1;
  check_case(c, {{0, Model({}, rows).arena->size()}}, 0, rows);
}

TEST_CASE("a captured update reads each step's learning rate and scale") {
  const OnGpu gpu;
  OptimizerOptions options;
  Model here, there(gpu.device());
  const auto cpu = make_optimizer(options, *here.arena);
  const auto device = make_optimizer(options, *there.arena);
  const auto gradient = gradient_of_step(here.arena->size(), 3);
  const DeviceVector<float> there_gradient(gradient);
  DeviceVector<StepParameters> parameters(1);
  CapturedGraph graph(gpu.stream(), [&] {
    device->update(0, {there_gradient.data(), gradient.size()}, StepState{parameters.data()});
  });
  for (const double lr : {0.5, 0.25}) {
    const StepParameters numbers{.lr = lr, .gradient_scale = lr / 3};
    parameters.set({numbers});
    graph.launch(gpu.stream());
    cpu->update(0, gradient, {0, numbers.lr, numbers.gradient_scale});
    CHECK(same_bits(there.arena->host_weights(), here.arena->host_weights()));
  }
}

TEST_CASE("muon on a GPU makes the CPU's steps but for the order of sums, and none of a bad step") {
  struct MuonModel {
    ParameterStore store;
    ParameterArena* arena;
    explicit MuonModel(Device device = {}) : store(device) {
      store.add("filters", {2, 1, 3, 3}, fill_normal);
      store.add("tall", {61, 37}, fill_normal);
      store.add("bias", {7}, fill_normal);
      store.add("wide", {20, 3, 5, 3}, fill_normal);
      store.add("output", {4, 3}, fill_normal);
      arena = &store.build([](const Parameter&) { return true; }, 1);
    }
  };
  const OnGpu gpu;
  const auto& keys = optimizers().options("muon");
  for (const std::string& variant : std::ranges::find(keys, "variant", &Option::name)->choices) {
    INFO(variant);
    OptimizerOptions options;
    options.name = "muon", options.set("variant", variant), options.weight_decay = 0.1;
    MuonModel here, there(gpu.device());
    const auto cpu = make_optimizer(options, *here.arena), device = make_optimizer(options, *there.arena);
    const std::size_t size = here.arena->size();
    DeviceVector<StepParameters> parameters(1);
    DeviceVector<StepStatus> status(1);
    DeviceVector<float> gradient(size);
    CapturedGraph graph(gpu.stream(), [&] {
      device->update(0, {gradient.data(), size}, StepState{parameters.data(), status.data()});
    });
    const auto step_on_gpu = [&](std::uint32_t step, bool bad) {
      status.set({{.bad = bad}});
      parameters.set({{.step = step, .lr = 0.1 / (1 + step), .gradient_scale = 1.0 / 3}});
      gradient.set(gradient_of_step(size, step));
      graph.launch(gpu.stream());
    };
    const auto state_on_gpu = [&] {
      const auto momentum = device->state().at(0);
      return to_host(momentum.data(), momentum.size());
    };
    for (const std::uint32_t step : {0u, 1u, 2u}) {
      step_on_gpu(step, false);
      cpu->update(0, gradient_of_step(size, step), {step, 0.1 / (1 + step), 1.0 / 3});
    }
    const std::vector<float> weights = there.arena->host_weights(), momentum = state_on_gpu();
    const auto close = [](const std::vector<float>& actual, std::span<const float> expected) {
      double worst = 0;
      for (std::size_t i = 0; i < actual.size(); ++i)
        worst = std::max(worst, std::abs(double(actual[i]) - expected[i]));
      return worst < 2e-5;
    };
    CHECK(close(weights, here.arena->weights()));
    CHECK(close(momentum, cpu->state().at(0)));
    step_on_gpu(3, true);
    CHECK(same_bits(there.arena->host_weights(), weights));
    CHECK(same_bits(state_on_gpu(), momentum));
  }
}

TEST_CASE("an optimizer on a GPU refuses what has no kernels, and forms and slices as the CPU's") {
  const OnGpu gpu;
  Model model(gpu.device());
  const auto make = [&](const OptimizerOptions& o) {
    return error_text([&] { make_optimizer(o, *model.arena); });
  };
  OptimizerOptions options;
  static const bool unported =
      (optimizers().add("unported", "without kernels", {[](const OptimizerOptions&, ParameterArena&) {
                          return std::unique_ptr<Optimizer>();
                        }}),
       true);
  REQUIRE(unported);
  options.name = "unported";
  CHECK(says(make(options), {"optimizer.name", "unported", "no kernels for a GPU", "sgd"}));
  options = {};
  options.momentum = 0.5;
  const auto optimizer = make_optimizer(options, *model.arena);
  const auto update = [&](std::size_t offset, Applied applied) {
    optimizer->update(offset, {model.arena->weights().data(), 8}, StepState{}, applied);
  };
  CHECK_THROWS_AS(update(0, Applied::learning_rate), Error);
  CHECK_THROWS_AS(update(model.arena->size() - 7, Applied::nothing), Error);
}

TEST_CASE("a sum of squares on a GPU has the CPU's bits, whatever the length") {
  const OnGpu gpu;
  Clip clip(gpu.device(), 300000);
  const auto sum = [&] { return to_host(clip.sum(), 1); };
  for (const std::size_t n : {0, 1, 15, 17, 255, 4099, 8191, 8192, 8193, 131072 + 5, 300000}) {
    INFO(n);
    const auto values = noise(n, 1);
    const DeviceVector<float> there(values);
    const std::vector<std::span<float>> once(1, {there.data(), n}), twice(2, {there.data(), n});
    clip.sum_of_squares(once);
    CHECK(same_bits(sum(), {sum_of_squares(values)}));
    if (2 * n > 300000) continue;
    clip.sum_of_squares(twice);
    CHECK(same_bits(sum(), {sum_of_squares(values) + sum_of_squares(values)}));
  }
  const std::span<float> longer(static_cast<float*>(nullptr), 300001);
  CHECK_THROWS_AS(clip.sum_of_squares({&longer, 1}), Error);
}

// More than a launch takes, some of them empty or of several blocks.
TEST_CASE("many vectors are clipped on a GPU as on a CPU, together and one by one, with the same bits") {
  const OnGpu gpu;
  std::vector<std::size_t> sizes(2 * ClipVectors::kMost + 7);
  std::size_t all = 0;
  for (std::size_t i = 0; i < sizes.size(); ++i) all += sizes[i] = i % 50 == 3 ? 20000 + i : 7 * i % 41;
  std::vector<float> values(noise(all, 1));
  const auto vectors_of = [&](float* data) {
    std::vector<std::span<float>> vectors;
    for (const std::size_t size : sizes) vectors.emplace_back(data, size), data += size;
    return vectors;
  };
  Clip on_gpu(gpu.device(), all), on_cpu(Device{}, all);
  const DeviceVector<float> there(values);
  const auto gpus = vectors_of(there.data()), cpus = vectors_of(values.data());
  on_cpu.sum_of_squares(cpus), on_gpu.sum_of_squares(gpus);
  double sum = 0;
  for (const std::span<float> vector : cpus) sum += sum_of_squares(vector);
  CHECK(*on_cpu.sum() == sum);
  CHECK(same_bits(to_host(on_gpu.sum(), 1), {sum}));
  on_cpu.scale(cpus, 0.7 * std::sqrt(sum)), on_gpu.scale(gpus, 0.7 * std::sqrt(sum));
  CHECK(std::sqrt(sum_of_squares(values)) == Approx(0.7 * std::sqrt(sum)));
  CHECK(same_bits(there.host(), values));
  const double longest = l2_norm(cpus[3]), limit = l2_norm(cpus[8]);
  REQUIRE(longest > limit);
  on_cpu.clip_each(cpus, limit), on_gpu.clip_each(gpus, limit);
  CHECK(same_bits(there.host(), values));
  CHECK(l2_norm(cpus[3]) == Approx(limit));
  CHECK(l2_norm(cpus[8]) == limit);  // is not cut
}

TEST_CASE("clipping on a GPU scales what the CPU scales, and nothing that is not finite") {
  const auto order = GENERATE(from_range(orders()))();
  const OnGpu gpu;
  const std::size_t n = 5000;
  Clip clip(gpu.device(), n);
  DeviceVector<StepParameters> parameters(std::vector<StepParameters>(1));
  for (const float odd :
       {0.5f, std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()})
    for (const double max_norm : {0.25, 70.0, 1e6}) {
      auto values = noise(n, 1);
      values[77] = odd;
      DeviceVector<float> there(values);
      const std::span<float> vector(there.data(), n);
      clip.sum_of_squares({&vector, 1});
      clip.scale({&vector, 1}, max_norm);
      clip.set_gradient_scale(max_norm, parameters.data());
      const double factor = clip_factor(l2_norm(values), max_norm);
      scale(values, factor);
      CHECK(same_bits(there.host(), values));
      CHECK(parameters.host()[0].gradient_scale == factor);
      CHECK(parameters.host()[0].lr == 1.0);
    }
  CHECK_THROWS_AS(clip.set_gradient_scale(0, parameters.data()), UserError);
}

}  // namespace
}  // namespace topknot

#pragma once
// A selector and its CUDA counterpart, led through the same steps and compared after each; and a vector that
// is a group's only range, for what a GPU's selector finds out on the way.
#include <optional>

#include "compress/select/cuda/device_selector.h"
#include "tests/compress/select/select_once.h"
#include "tests/cuda/device_vector.h"
#include "tests/cuda/fixture.h"

namespace topknot::testing {

struct BothSelectors {
  BothSelectors(const std::string& name, const CompressOptions& options, std::size_t n,
                std::size_t position = 0, double densest = 1)
      : n(n),
        target(selectors().find(name).traits.target),
        position(position),
        capacity(options.capacity),
        cpu(selectors().find(name).make(options)),
        gpu(cuda::make_device_selector(name, options, {{0, n, position, 0}})),
        u(n),
        residual(n),
        average(n),
        parameters(1),
        status(1),
        weight(1) {
    REQUIRE(gpu);
    set_density(densest);
  }

  void set_density(double densest) {
    gpu->set_density({densest});
    memory = cuda::SelectMemory({{0, n, position, 0}}, {densest}, *gpu);
    range = to_host(memory.ranges().range, 1)[0];
    sent = DeviceVector<float>(memory.capacity());
  }

  // What is put on the stream, for graphs.
  void put_selection(cudaStream_t stream, bool with_residual) {
    cuda::Accumulate accumulate;
    accumulate.u = u.data();
    if (with_residual) accumulate.residual = residual.data();
    gpu->select(stream, memory.ranges(), accumulate, parameters.data());
  }
  void put_commit(cudaStream_t stream, int ranks) {
    gpu->commit(stream, memory.ranges(), status.data(), {sent.data(), average.data(), weight.data(), ranks});
  }

  void set_inputs(const std::vector<float>& gradient, const std::vector<float>& addend, const Asked& asked) {
    u.set(gradient);
    if (!addend.empty()) residual.set(addend);
    parameters.set({{.step = asked.step, .density = asked.density, .rank = asked.rank}});
  }

  // The CPU's selection of the same, cut to compress.capacity.
  void expect(std::vector<float> gradient, const std::vector<float>& addend, Asked asked) {
    asked.position = position;
    asked.target = target;
    expected = select_once(*cpu, gradient, addend, asked);
    expected_u = std::move(gradient);
    expected_over = 0;
    if (capacity == 0) return;
    const double room = capacity * double(target(asked.density, n, {}));
    const std::size_t count = expected.indices.size();
    if (double(count) > room) keep_largest(expected, std::size_t(room));
    expected_over = count - expected.indices.size();
  }
  // What is in the GPU's memory is that.
  void check() const {
    const cuda::SelectStats found = to_host(range.stats, 1)[0];
    REQUIRE(found.finite == expected.finite);
    REQUIRE(found.count == expected.indices.size());
    REQUIRE(found.over == expected_over);
    REQUIRE(found.threshold == float(expected.threshold));
    REQUIRE(to_host(range.taken.indices, found.count) == expected.indices);
    REQUIRE(same_bits(to_host(range.taken.values, found.count), expected.values));
    if (expected.finite) REQUIRE(same_bits(u.host(), expected_u));
  }
  void compare(const std::vector<float>& gradient, const std::vector<float>& addend, const Asked& asked) {
    INFO("n " << n << ", density " << asked.density << ", step " << asked.step);
    expect(gradient, addend, asked);
    check();
  }

  void select(cudaStream_t stream, const std::vector<float>& gradient, const std::vector<float>& addend,
              const Asked& asked) {
    set_inputs(gradient, addend, asked);
    put_selection(stream, !addend.empty());
    compare(gradient, addend, asked);
  }

  void set_outcome(bool bad, const std::vector<float>& sent_values, const std::vector<float>& mean,
                   float own_weight, int ranks) {
    cpu_sent = sent_values;
    cpu_average = mean;
    cpu_weight = double(own_weight) / ranks;
    sent.set(cpu_sent);
    average.set(cpu_average);
    weight.set({own_weight});
    status.set({{.bad = bad}});
  }
  // What ranks might make of the selection: values cut to some bits, and an average that strangers changed.
  void set_outcome(bool bad, float own_weight, int ranks, std::uint32_t draw) {
    std::vector<float> cut = expected.values, mean(n);
    for (float& x : cut) x = float(std::int64_t(std::clamp(x, -1e9f, 1e9f) * 4096)) / 4096;
    const std::vector<float> others = noise(n, 900 + draw);
    for (std::size_t i = 0; i < cut.size(); ++i) {
      const std::uint32_t at = expected.indices[i];
      mean[at] = cut[i] / float(ranks);
      if (i % 3 == 0) mean[at] += others[at];
      if (i % 7 == 1) mean[at] = 0;  // cancelled
    }
    set_outcome(bad, cut, mean, own_weight, ranks);
  }
  void commit_cpu(bool bad) {
    if (bad) return cpu->discard();
    cpu->commit({{expected.indices, cpu_sent}, cpu_average, cpu_weight});
  }
  void commit(cudaStream_t stream, bool bad, float own_weight, int ranks, std::uint32_t draw) {
    set_outcome(bad, own_weight, ranks, draw);
    put_commit(stream, ranks);
    commit_cpu(bad);
    REQUIRE(saved(*gpu) == saved(*cpu));
  }

  std::size_t n;
  decltype(SelectorTraits::target) target;
  std::size_t position;
  double capacity;
  std::unique_ptr<Selector> cpu;
  std::unique_ptr<cuda::DeviceSelector> gpu;
  DeviceVector<float> u, residual, average;
  DeviceVector<StepParameters> parameters;
  DeviceVector<StepStatus> status;
  DeviceVector<float> weight;
  DeviceVector<float> sent;
  cuda::SelectMemory memory;
  cuda::SelectRange range;
  Selection expected;
  std::vector<float> expected_u;  // with the addend
  std::size_t expected_over = 0;
  std::vector<float> cpu_sent, cpu_average;
  double cpu_weight = 1;
};

// A gradient of the given kind, of a run's life: 0 noise, 1 noise of another size, 2 zeros, 3 a constant, 4
// few distinct values, 5 denormal numbers, 6 huge ones, 7 all that is large in one place, 8 the least number
// everywhere, 9 the largest, 10 heavy tails, 11 noise far from zero, then with a NaN, an Inf.
inline constexpr int kFiniteGradients = 12, kNaN = 12, kGradients = 14;
inline std::vector<float> gradient_of_kind(int kind, std::size_t n, std::uint32_t stream) {
  using Limits = std::numeric_limits<float>;
  const CounterRng rng(31, RngUse::test, stream);
  std::vector<float> g(n);
  for (std::size_t i = 0; i < n; ++i) {
    g[i] = rng.normal(i) * (i % 3 == 0 ? 1.0f : 0.1f);
    if (kind == 1) g[i] *= 1e-3f;
    if (kind == 2) g[i] = i % 2 ? 0.0f : -0.0f;
    if (kind == 3) g[i] = 0.25f;
    if (kind == 4) g[i] = float(rng.below(i, 3)) - 1;
    if (kind == 5) g[i] *= 1e-42f;
    if (kind == 6) g[i] *= 1e37f;
    if (kind == 7 && i / 1500 == 1) g[i] *= 1e6f;
    if (kind == 8) g[i] = Limits::denorm_min();
    if (kind == 9) g[i] = Limits::max();
    if (kind == 10) g[i] = std::pow(g[i], 9.0f);
    if (kind == 11) g[i] = 0.1f * g[i] - 5;
  }
  if (kind == kNaN) g[n / 2] = Limits::quiet_NaN();
  if (kind == kNaN + 1) g[n - 1] = -Limits::infinity();
  return g;
}

// Both through steps of error feedback, with what three ranks might make of each selection.
class SelectPair {
 public:
  // `graph`: steps are captured once and replayed as long as set_density() is not called.
  SelectPair(const std::string& name, const CompressOptions& options, std::size_t n, bool graph = false)
      : both_(name, options, n, 7 * n + 3), residual_(n), graph_(graph) {}

  void set_density(double density) {
    executable_.reset();
    both_.set_density(density);
  }

  // A step of gradient g. `good`: whether the ranks accept it, if it is finite. Returns the CPU's selection.
  Selection step(const std::vector<float>& g, double density, bool good = true) {
    const Asked asked{density, time_, int(time_ % 4)};
    const auto draw = std::uint32_t(time_++);
    both_.expect(g, residual_, asked);
    good = good && both_.expected.finite;
    both_.set_inputs(g, residual_, asked);
    both_.set_outcome(!good, 0.75f + 0.25f * float(draw % 3), kRanks, draw);
    run();
    both_.check();
    both_.commit_cpu(!good);
    REQUIRE(saved(*both_.gpu) == saved(*both_.cpu));
    if (good) {
      residual_ = both_.expected_u;
      for (const std::uint32_t i : both_.expected.indices) residual_[i] = 0;
      for (float& r : residual_)  // one huge gradient is not to hide all that follow
        if (!(std::abs(r) < 1e10f)) r = 0;
    }
    return both_.expected;
  }

  BothSelectors& both() { return both_; }
  std::size_t capacity() const { return both_.memory.capacity(); }
  void clear_residual() { residual_.assign(residual_.size(), 0); }

 private:
  static constexpr int kRanks = 3;

  void run() {
    const cudaStream_t stream = cuda::Context::current().stream();
    const auto enqueue = [&] {
      both_.put_selection(stream, true);
      both_.put_commit(stream, kRanks);
    };
    if (!graph_) return enqueue();
    if (!executable_) executable_ = std::make_unique<CapturedGraph>(stream, enqueue);
    executable_->launch(stream);
  }

  BothSelectors both_;
  std::vector<float> residual_;
  std::int64_t time_ = 0;
  bool graph_;
  std::unique_ptr<CapturedGraph> executable_;
};

// With room for what is selected of it.
struct OneRange {
  OneRange(std::size_t n, std::size_t limit, std::size_t room) : OneRange(n, 1.0, Rooms(limit, room)) {}
  // What the selector asks for.
  OneRange(std::size_t n, double density, const cuda::DeviceSelector& selector)
      : memory({{0, n}}, {density}, selector), range(to_host(ranges().range, 1)[0]) {
    to_device(range.taken.indices, std::vector<std::uint32_t>(range.taken.capacity, 77));
    to_device(range.taken.values, std::vector<float>(range.taken.capacity, -7));
  }
  const cuda::SelectRanges& ranges() const { return memory.ranges(); }
  std::vector<std::uint32_t> indices() const { return to_host(range.taken.indices, range.taken.capacity); }
  std::vector<float> values() const { return to_host(range.taken.values, range.taken.capacity); }
  cuda::SelectStats stats() const { return to_host(range.stats, 1)[0]; }

  // Asks for memory, and selects nothing.
  struct Rooms final : cuda::DeviceSelector {
    Rooms(std::size_t of_list, std::size_t taken) : limit(of_list), room(taken) {}
    std::size_t capacity(std::size_t, double) const override { return room; }
    std::size_t list_limit(std::size_t, double) const override { return limit; }
    void select(cudaStream_t, const cuda::SelectRanges&, const cuda::Accumulate&,
                const StepParameters*) override {}
    std::size_t limit, room;
  };

  cuda::SelectMemory memory;
  cuda::SelectRange range;
};

}  // namespace topknot::testing

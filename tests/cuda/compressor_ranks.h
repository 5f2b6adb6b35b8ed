#pragma once
// A group's ranks with compressors on the CPU and on a GPU, step by step: blocks, averages, residuals, states
// and verdicts are compared bit for bit.
#include <optional>

#include "compress/cuda/device_compressor.h"
#include "tests/cuda/device_vector.h"

namespace topknot::testing {

// A group's ranks on the CPU and, one after the other on one stream, on the GPU.
class BothRanks {
 public:
  BothRanks(const CompressOptions& options, const GroupSpec& group, bool graphs = false)
      : group_(group), graphs_(graphs), on_cpu_(options, group), weights_(ranks()) {
    keeps_ = options.memory != "none";
    for (std::size_t r = 0; r < ranks(); ++r) {
      Rank& rank = ranks_.emplace_back();
      rank.compressor = cuda::make_device_compressor(options, group);
      REQUIRE(rank.compressor);
      for (auto& memory : rank.memory) memory = DeviceVector<float>(std::vector<float>(group.numel));
      rank.parameters = DeviceVector<StepParameters>(1);
      rank.status = DeviceVector<StepStatus>(1);
      CHECK(rank.compressor->applied() == on_cpu_[r].compressor->applied());
    }
  }

  std::size_t ranks() const { return std::size_t(group_.ranks); }
  std::vector<float>& gradient(std::size_t rank) { return on_cpu_[rank].gradient; }
  Compressor& on_gpu(std::size_t rank) { return *ranks_[rank].compressor; }
  StepStatus status(std::size_t rank) { return ranks_[rank].status.host()[0]; }
  std::size_t block_bytes() const { return blocks_.size() / ranks(); }

  void set_density(double density) {
    density_ = density;
    std::size_t bytes = 0;
    for (Rank& rank : ranks_) bytes = rank.compressor->reserve(density);
    REQUIRE(bytes % 16 == 0);
    blocks_ = DeviceVector<std::byte>(bytes * ranks());
    for (auto& graph : graph_) graph.reset();
  }

  // Of the steps to come, with memory as it is; not more than before.
  void lower_density(double density) { density_ = density; }

  // The gradients are in place on the CPU. `agree`: false where another group refuses the step.
  void step(std::int64_t number, std::vector<float> weights = {}, bool agree = true) {
    INFO("step " << number << ", " << ranks() << " ranks");
    cuda::Context& context = cuda::Context::current();
    if (weights.empty()) weights.assign(ranks(), 1.0f);
    const double lr = 0.1 * double(1 + number % 3);
    weights_.set(weights);
    for (std::size_t r = 0; r < ranks(); ++r) {
      Rank& rank = ranks_[r];
      to_device(rank.memory[turn_].data(), gradient(r));
      rank.parameters.set({{.step = number, .lr = lr, .density = density_, .rank = int(r)}});
      rank.status.set({{.bad = agree || damaged_ ? 0u : 1u}});
    }
    if (graphs_) {
      auto& graph = graph_[turn_];
      if (!graph) graph.emplace(context.stream(), [&] { run(context.stream()); });
      graph->launch(context.stream());
    } else {
      run(context.stream());
    }
    context.synchronize();
    const bool good = on_cpu_.step(number, density_, weights, agree, lr);
    compare(good);
    if (keeps_) turn_ = 1 - turn_;
    damaged_.reset();
  }

  // In the next step this rank's block arrives with a position beyond the group.
  void damage_next(std::size_t rank) { damaged_ = rank; }
  void compare_states() {
    for (std::size_t r = 0; r < ranks(); ++r)
      CHECK(ranks_[r].compressor->state() == on_cpu_[r].compressor->state());
  }
  void exchange_states() {
    for (std::size_t r = 0; r < ranks(); ++r) {
      ranks_[r].compressor->load_state(on_cpu_[r].compressor->state());
      on_cpu_[r].compressor->load_state(ranks_[r].compressor->state());
    }
  }

 private:
  struct Rank {
    std::unique_ptr<Compressor> compressor;
    DeviceVector<float> memory[2];  // the slice's; which is the gradient's changes from step to step
    DeviceVector<StepParameters> parameters;
    DeviceVector<StepStatus> status;
  };

  const DeviceVector<float>& average_of(const Rank& rank) const {
    return rank.memory[keeps_ ? 1 - turn_ : turn_];
  }

  void run(cudaStream_t stream) {
    const std::size_t n = group_.numel, bytes = block_bytes();
    for (std::size_t r = 0; r < ranks(); ++r) {
      Rank& rank = ranks_[r];
      const StepContext context{.weights = {weights_.data(), ranks()},
                                .rank = int(r),
                                .parameters = rank.parameters.data(),
                                .status = rank.status.data()};
      const Message message = rank.compressor->encode(
          {{rank.memory[turn_].data(), n}, {rank.memory[1 - turn_].data(), n}}, context);
      REQUIRE(message.bytes() == bytes);
      TOPKNOT_CUDA(cudaMemcpyAsync(blocks_.data() + r * bytes, message.gpu_block.data(), bytes,
                                   cudaMemcpyDeviceToDevice, stream));
    }
    const std::size_t position = 16 + 4 * 20;
    if (damaged_)
      TOPKNOT_CUDA(cudaMemsetAsync(blocks_.data() + *damaged_ * bytes + position, 0x7F, 4, stream));
    Round round;
    round.gpu_blocks = {blocks_.data(), blocks_.size()};
    for (Rank& rank : ranks_) rank.compressor->decode(round);
    for (Rank& rank : ranks_) {
      const std::span<float> average = rank.compressor->commit({});
      REQUIRE(average.data() == average_of(rank).data());
    }
  }

  void compare(bool good) {
    const std::vector<std::byte> blocks = blocks_.host();
    for (std::size_t r = 0; r < ranks(); ++r) {
      INFO("rank " << r);
      Rank& rank = ranks_[r];
      std::vector<std::byte> expected = on_cpu_.blocks()[r];
      REQUIRE(expected.size() <= block_bytes());
      expected.resize(block_bytes());
      const auto first = blocks.begin() + std::ptrdiff_t(r * block_bytes());
      if (damaged_ != r) CHECK(std::equal(expected.begin(), expected.end(), first));
      const StepStatus status = rank.status.host()[0];
      CHECK((status.bad == 0) == good);
      CHECK(status.selected == on_cpu_[r].compressor->diagnostics().selected);
      CHECK(status.over_capacity == on_cpu_[r].compressor->diagnostics().over_capacity);
      CHECK(status.threshold == float(on_cpu_[r].compressor->diagnostics().threshold));
      if (good)
        CHECK(same_bits(average_of(rank).host(), {on_cpu_[r].average.begin(), on_cpu_[r].average.end()}));
      if (keeps_) CHECK(same_bits(rank.memory[turn_].host(), on_cpu_[r].residual));
    }
  }

  GroupSpec group_;
  bool graphs_ = false, keeps_ = true;
  double density_ = 1;
  SimulatedRanks on_cpu_;
  std::vector<Rank> ranks_;
  DeviceVector<float> weights_;
  DeviceVector<std::byte> blocks_;
  std::optional<std::size_t> damaged_;
  int turn_ = 0;
  std::optional<CapturedGraph> graph_[2];
};

inline std::vector<float> normal_gradient(std::int64_t step, std::size_t rank, std::size_t n) {
  const CounterRng rng(17, RngUse::test, std::uint32_t(step), std::uint32_t(rank));
  std::vector<float> g(n);
  for (std::size_t i = 0; i < n; ++i) g[i] = rng.normal(i) * (i % 13 == 0 ? 3.0f : 1.0f);
  return g;
}

inline void load_gradients(BothRanks& both, std::int64_t step, std::size_t n) {
  for (std::size_t r = 0; r < both.ranks(); ++r) both.gradient(r) = normal_gradient(step, r, n);
}

// Ten steps with two densities. Two are bad: one has a NaN on the last rank, the other is refused by others.
inline void ten_steps(BothRanks& both, std::size_t n, const std::vector<float>& weights = {}) {
  constexpr float nan = std::numeric_limits<float>::quiet_NaN();
  for (std::int64_t step = 0; step < 10; ++step) {
    if (step == 0) both.set_density(0.25);
    if (step == 3) both.set_density(0.02);
    load_gradients(both, step, n);
    if (step == 5) both.gradient(both.ranks() - 1)[n / 3] = nan;
    both.step(step, weights, step != 7);
    const auto expected = step == 5 ? std::int32_t(both.ranks() - 1) : -1;
    CHECK(both.status(0).bad_rank == expected);
    if (step == 6) both.compare_states();
  }
  both.compare_states();
}

inline CompressOptions options_of(const std::string& name) {
  return with(named(name, {"seed=3"}), name == "dgc"
                                           ? std::vector<std::string>{"momentum=0.9", "nesterov=true"}
                                           : std::vector<std::string>{"momentum=0.0"});
}

inline constexpr const char* kMethods[] = {"topk", "gaussiank", "dgc", "regtopk"};

}  // namespace topknot::testing

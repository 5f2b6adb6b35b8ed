// The CPU's exchange for gradients in GPU memory: a group's gradient goes to the host as soon as it is complete,
// beside the backward pass; dist/exchange/exchange.h does the rest over a host arena of the arena in host memory.
#include <cmath>
#include <deque>
#include <unordered_map>
#include <utility>

#include "dist/exchange/cuda/device_exchange_make.h"
#include "dist/exchange/cuda/device_step.h"
#include "nn/core/base/check.h"

namespace topknot::cuda {
namespace {

// Parameters of the same names, shapes and order in host memory. Page-locked where the system allows it, so
// that copies run beside the host.
class HostArena {
 public:
  explicit HostArena(const ParameterArena& original) {
    std::unordered_map<std::string, bool> compressible;
    const auto order = original.parameters();
    for (std::size_t i = order.size(); i-- > 0;) {  // the arena reverses the order of registration
      store_.add(order[i]->name(), order[i]->shape(), [](std::span<float>, const CounterRng&) {});
      compressible[order[i]->name()] = order[i]->compressible();
    }
    arena_ = &store_.build([&](const Parameter& p) { return compressible.at(p.name()); }, 0);
    for (std::size_t i = 0; i < order.size(); ++i)
      TOPKNOT_CHECK(arena_->parameters()[i]->name() == order[i]->name() &&
                        arena_->parameters()[i]->offset() == order[i]->offset(),
                    "a host arena of the arena with another order");
    for (const std::span<float> side :
         {arena_->gradient(0, arena_->size()), arena_->residual(0, arena_->size())})
      if (!side.empty() &&
          cudaHostRegister(side.data(), side.size_bytes(), cudaHostRegisterPortable) == cudaSuccess)
        locked_.push_back(side.data());
    cudaGetLastError();
  }
  ~HostArena() {
    for (float* side : locked_) cudaHostUnregister(side);
    cudaGetLastError();
  }
  HostArena(const HostArena&) = delete;
  HostArena& operator=(const HostArena&) = delete;
  ParameterArena& arena() { return *arena_; }

 private:
  ParameterStore store_;
  ParameterArena* arena_ = nullptr;
  std::vector<float*> locked_;
};

class StagedExchange final : public DeviceExchange {
 public:
  StagedExchange(ParameterArena& arena, CollectiveQueue& queue, const ExchangeOptions& options)
      : arena_(arena),
        host_arena_(std::make_unique<HostArena>(arena)),
        exchange_(host_arena_->arena(), queue, options),
        groups_(plan_groups(arena, options.compress.name != "dense", options.scope, options.merge,
                            options.groups)),
        rank_(queue.communicator().rank()),
        step_(0),
        loss_(sizeof(float)),
        copied_(groups_.size()) {
    for (std::size_t index = 0; index < groups_.size(); ++index)
      for (const Parameter* parameter : groups_[index].parameters) places_[parameter] = {index, false};
  }

  ~StagedExchange() override {
    // Copies work on the host arena's memory. Nothing on these streams waits for another rank.
    if (Context* const context = Context::current_or_null()) {
      cudaStreamSynchronize(context->stream());
      cudaStreamSynchronize(context->communication());
    }
    cudaGetLastError();
  }

  const std::vector<Group>& groups() const override { return groups_; }
  std::uint64_t planned_bytes(double density) const override { return exchange_.planned_bytes(density); }

  void begin_step(std::int64_t step, double density, std::span<const float> weights, double lr) override {
    exchange_.begin_step(step, density, weights, lr);
    StepParameters parameters;
    parameters.step = step, parameters.density = density, parameters.lr = lr;
    parameters.rank = rank_;
    step_.begin(compute(), parameters, {});
    pending_.clear();
    for (const Group& group : groups_) pending_.push_back(group.parameters.size());
    for (auto& [parameter, place] : places_) place.second = false;
    result_ = {};
  }

  void ready(Parameter& parameter) override {
    const auto place = places_.find(&parameter);
    TOPKNOT_CHECK(place != places_.end() && !pending_.empty(),
                  "ready('" + parameter.name() + "') outside a step");
    TOPKNOT_CHECK(!place->second.second, "'" + parameter.name() + "' was ready before");
    place->second.second = true;
    if (--pending_[place->second.first] == 0) to_host(place->second.first);
  }

  void complete(const float* loss) override {
    TOPKNOT_CHECK(!pending_.empty() || groups_.empty(), "finish() without begin_step()");
    bool zeroed = false;
    for (std::size_t index = 0; index < groups_.size(); ++index) {
      if (pending_[index] == 0) continue;
      if (!zeroed) arena_.zero_unwritten_gradients();
      zeroed = true;
      to_host(index);
    }
    auto* const value = reinterpret_cast<float*>(loss_.data());
    *value = 0;
    if (loss) TOPKNOT_CUDA(cudaMemcpyAsync(value, loss, sizeof(float), cudaMemcpyDeviceToHost, compute()));
    encoded_.record(compute());
  }

  void collectives() override {
    for (std::size_t index = 0; index < groups_.size(); ++index) {
      copied_[index].synchronize();
      for (Parameter* parameter : exchange_.groups()[index].parameters) exchange_.ready(*parameter);
    }
    encoded_.synchronize();
    result_ = exchange_.finish(std::isfinite(*reinterpret_cast<const float*>(loss_.data())));
  }

  void decode() override {
    pending_.clear();
    if (result_.committed)
      for (const Group& group : exchange_.groups()) {
        const std::span<const float> average = exchange_.averaged(group);
        TOPKNOT_CUDA(cudaMemcpyAsync(arena_.gradient(group.begin, group.end).data(), average.data(),
                                     average.size_bytes(), cudaMemcpyHostToDevice, compute()));
      }
    StepStatus status;
    status.bad = !result_.committed;
    status.bad_rank = result_.bad_rank;
    status.selected = result_.stats.selected;
    status.over_capacity = result_.stats.over_capacity;
    status.threshold = result_.stats.threshold;
    step_.set_status(compute(), status);
  }

  void end_step() override {}

  std::span<float> averaged(const Group& group) override { return arena_.gradient(group.begin, group.end); }
  GradientForm form(const Group& group) const override { return exchange_.form(group); }
  StepParameters* parameters() override { return step_.parameters(); }
  StepStatus* status() override { return step_.status(); }
  std::uint64_t bytes_sent() const override { return result_.stats.bytes_sent; }
  std::uint64_t bytes_received() const override { return result_.stats.bytes_received; }
  Capture capture() const override { return Capture::none; }
  std::uint64_t capture_key() const override { return 0; }

  std::vector<std::byte> state() const override {
    for (const Group& group : groups_) {
      const std::span<const float> residual = host_arena_->arena().residual(group.begin, group.end);
      backend(arena_.device())
          .to_device(arena_.residual(group.begin, group.end).data(), residual.data(), residual.size());
    }
    return exchange_.state();
  }

  void load_state(std::span<const std::byte> bytes) override {
    exchange_.load_state(bytes);
    for (const Group& group : groups_) {
      const std::span<float> residual = host_arena_->arena().residual(group.begin, group.end);
      backend(arena_.device())
          .to_host(residual.data(), arena_.residual(group.begin, group.end).data(), residual.size());
    }
  }

 private:
  static cudaStream_t compute() { return Context::current().stream(); }
  static cudaStream_t communication() { return Context::current().communication(); }

  // Of a group that is complete.
  void to_host(std::size_t index) {
    const Group& group = groups_[index];
    const std::span<const float> gradient = arena_.gradient(group.begin, group.end);
    encoded_.record(compute());
    encoded_.wait(communication());
    TOPKNOT_CUDA(cudaMemcpyAsync(host_arena_->arena().gradient(group.begin, group.end).data(),
                                 gradient.data(), gradient.size_bytes(), cudaMemcpyDeviceToHost,
                                 communication()));
    copied_[index].record(communication());
  }

  ParameterArena& arena_;
  const std::unique_ptr<HostArena> host_arena_;
  Exchange exchange_;                // over the host arena
  const std::vector<Group> groups_;  // of the arena
  const int rank_;
  DeviceStep step_;
  PinnedMemory loss_;
  std::deque<Event> copied_;  // one a group
  Event encoded_;
  std::unordered_map<const Parameter*, std::pair<std::size_t, bool>> places_;  // group; whether it is ready
  std::vector<std::size_t> pending_;  // parameters that are not ready, by group; empty outside of a step
  StepResult result_;
};

}  // namespace

std::unique_ptr<DeviceExchange> make_staged_exchange(ParameterArena& arena, CollectiveQueue& queue,
                                                     const ExchangeOptions& options) {
  return std::make_unique<StagedExchange>(arena, queue, options);
}

}  // namespace topknot::cuda

// Pipelines of GPU gradients that are exchanged on the host: a group's gradient is copied to the host as soon as it is
// complete, beside the backward pass; a host pipeline (dist/exchange/host_pipeline.h) works on the copy; the average is
// copied back. Residuals stay in host memory.
#include <cmath>
#include <utility>

#include "dist/exchange/cuda/device_exchange.h"
#include "dist/exchange/host_pipeline.h"
#include "nn/base/check.h"

namespace topknot::cuda {
namespace {

// Zeroed host memory, page-locked where the system allows it, so that copies run beside the host.
class HostMemory {
 public:
  explicit HostMemory(std::size_t floats) : data_(cpu_backend().allocate(floats)), size_(floats) {
    cpu_backend().fill_zero(data_, size_);
    locked_ =
        size_ > 0 && cudaHostRegister(data_, size_ * sizeof(float), cudaHostRegisterPortable) == cudaSuccess;
    cudaGetLastError();
  }
  ~HostMemory() {
    if (locked_) cudaHostUnregister(data_);
    cudaGetLastError();
    cpu_backend().release(data_, size_);
  }
  HostMemory(const HostMemory&) = delete;
  HostMemory& operator=(const HostMemory&) = delete;
  std::span<float> slice(const Group& group) { return {data_ + group.begin, group.numel()}; }

 private:
  float* data_;
  std::size_t size_;
  bool locked_ = false;
};

class StagedPipeline final : public GroupPipeline {
 public:
  StagedPipeline(const Group& group, ParameterArena& arena, Slice host, std::unique_ptr<GroupPipeline> inner)
      : group_(group), arena_(arena), host_(host), inner_(std::move(inner)) {}

  void begin_step(const StepContext& info) override { inner_->begin_step(info); }
  void encode(Slice slice) override {
    average_ = slice.gradient;
    encoded_.record(Context::current().stream());
    const cudaStream_t stream = Context::current().communication();
    encoded_.wait(stream);
    TOPKNOT_CUDA(cudaMemcpyAsync(host_.gradient.data(), slice.gradient.data(), slice.gradient.size_bytes(),
                                 cudaMemcpyDeviceToHost, stream));
    copied_.record(stream);
  }
  void send() override {
    copied_.synchronize();
    inner_->encode(host_);
    inner_->send();
  }
  void flush() override { inner_->flush(); }
  bool decode() override { return inner_->decode(); }
  bool finite() const override { return inner_->finite(); }
  bool own_values_finite() const override { return inner_->own_values_finite(); }
  bool commit() override {
    if (inner_->commit()) std::swap(host_.gradient, host_.residual);
    TOPKNOT_CUDA(cudaMemcpyAsync(average_.data(), host_.gradient.data(), average_.size_bytes(),
                                 cudaMemcpyHostToDevice, Context::current().stream()));
    return false;
  }
  void discard() override { inner_->discard(); }
  GradientForm form() const override { return inner_->form(); }
  void add_stats(ExchangeStats& stats) const override { inner_->add_stats(stats); }
  void save(StateWriter& writer) const override {
    backend(arena_.device())
        .to_device(arena_.residual(group_.begin, group_.end).data(), host_.residual.data(),
                   host_.residual.size());
    inner_->save(writer);
  }
  void load(StateReader& reader) override {
    inner_->load(reader);
    backend(arena_.device())
        .to_host(host_.residual.data(), arena_.residual(group_.begin, group_.end).data(),
                 host_.residual.size());
  }

 private:
  const Group& group_;
  ParameterArena& arena_;
  Slice host_;  // takes the place of the arena's slice
  const std::unique_ptr<GroupPipeline> inner_;
  std::span<float> average_;  // GPU memory
  Event encoded_, copied_;
};

class StagedExecution final : public DeviceExecution {
 public:
  StagedExecution(ParameterArena& arena, CollectiveQueue& queue, const ExchangeOptions& options)
      : DeviceExecution(queue.communicator().size()),
        arena_(arena),
        host_(queue, options),
        gradients_(arena.size()),
        residuals_(arena.size()),
        loss_(sizeof(float)) {}

  int rank() const override { return host_.rank(); }
  int ranks() const override { return host_.ranks(); }
  std::unique_ptr<GroupPipeline> make_pipeline(const Group& group, int index) override {
    return std::make_unique<StagedPipeline>(group, arena_,
                                            Slice{gradients_.slice(group), residuals_.slice(group)},
                                            host_.make_pipeline(group, index));
  }
  void begin_step(const StepContext& info) override {
    host_.begin_step(info);
    DeviceExecution::begin_step(info);
  }
  // The host would wait for the GPU in ready().
  bool sends_early() const override { return false; }
  void complete(const float* loss) override {
    *loss_on_host() = 0;
    if (loss)
      TOPKNOT_CUDA(cudaMemcpyAsync(loss_on_host(), loss, sizeof(float), cudaMemcpyDeviceToHost, compute()));
    loss_copied_.record(compute());
  }
  void submit_agreement() override {
    loss_copied_.synchronize();
    host_.complete(loss_on_host());
    host_.submit_agreement();
  }
  void receive_agreement() override { host_.receive_agreement(); }
  Agreed agree(std::span<const std::unique_ptr<GroupPipeline>> pipelines) override {
    return host_.agree(pipelines);
  }
  void finish_step(StepResult& result) override {
    host_.finish_step(result);
    step().set_status(compute(), *host_.step_state().status);
  }
  const std::vector<ExchangeSpan>& spans() const override { return host_.spans(); }
  // Copies work on the host memory. Nothing on these streams waits for another rank.
  void quiesce() noexcept override {
    if (Context* const context = Context::current_or_null()) {
      cudaStreamSynchronize(context->stream());
      cudaStreamSynchronize(context->communication());
    }
    cudaGetLastError();
    host_.quiesce();
  }

 private:
  float* loss_on_host() { return reinterpret_cast<float*>(loss_.data()); }

  ParameterArena& arena_;
  HostExecution host_;
  HostMemory gradients_, residuals_;
  PinnedMemory loss_;
  Event loss_copied_;
};

}  // namespace

std::unique_ptr<DeviceExchange> make_staged_exchange(ParameterArena& arena, CollectiveQueue& queue,
                                                     const ExchangeOptions& options) {
  return std::make_unique<DeviceExchange>(arena, plan_groups(arena, options),
                                          std::make_unique<StagedExecution>(arena, queue, options));
}

}  // namespace topknot::cuda

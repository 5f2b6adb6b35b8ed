// The transport of GPU gradients that are exchanged on the host: a group's gradient is copied to the host as
// soon as it is complete, during the backward pass; the bucket works on the copy, which goes the host's way;
// the average is copied back. Residuals stay in host memory.
#include <deque>
#include <utility>

#include "dist/exchange/cuda/device_exchange.h"

namespace topknot::cuda {
namespace {

// Zeroed host memory, page-locked if the system allows it, so that copies are asynchronous.
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

class StagedTransport final : public HostTransport {
 public:
  StagedTransport(ParameterArena& arena, CollectiveQueue& queue, const ExchangeOptions& options,
                  const std::vector<Group>& groups)
      : HostTransport(queue, options),
        arena_(arena),
        gradients_(arena.size()),
        residuals_(arena.size()),
        ways_(groups.size()),
        step_(traits().ranks),
        loss_(sizeof(float)) {
    for (std::size_t index = 0; index < groups.size(); ++index)
      ways_[index].host = {gradients_.slice(groups[index]), residuals_.slice(groups[index])};
    // The host would wait for the GPU in ready().
    traits_.encodes_early = traits_.sends_early = false;
    step_state_ = {step_.parameters(), step_.status()};
  }
  // Copies work on the host memory, as the queue's jobs do. Nothing on these streams waits for another rank.
  ~StagedTransport() override {
    if (Context* const context = Context::current_or_null()) {
      cudaStreamSynchronize(context->stream());
      cudaStreamSynchronize(context->communication());
    }
    cudaGetLastError();
    quiesce();
  }
  DeviceTimes& times() { return times_; }

  StepContext begin(const StepContext& context, std::span<Bucket> buckets) override {
    const StepContext on_host = HostTransport::begin(context, buckets);
    step_.begin(compute(), context);
    return on_host;
  }

  Slice take(const Bucket& bucket, Slice slice) override {
    Way& way = this->way(bucket);
    way.average = slice.gradient;
    way.complete.record(compute());
    const cudaStream_t stream = Context::current().communication();
    way.complete.wait(stream);
    TOPKNOT_CUDA(cudaMemcpyAsync(way.host.gradient.data(), slice.gradient.data(), slice.gradient.size_bytes(),
                                 cudaMemcpyDeviceToHost, stream));
    way.copied.record(stream);
    return way.host;
  }
  void around(ExchangeSpan::Kind kind, const Bucket& bucket, const Work& work) override {
    if (kind == ExchangeSpan::Kind::encode) way(bucket).copied.synchronize();
    HostTransport::around(kind, bucket, work);
  }
  void start(Leg leg, Bucket& bucket) override {
    if (leg != Leg::message) way(bucket).copied.synchronize();
    HostTransport::start(leg, bucket);
  }

  void take_loss(const float* loss) override {
    *loss_on_host() = 0;
    if (loss)
      TOPKNOT_CUDA(cudaMemcpyAsync(loss_on_host(), loss, sizeof(float), cudaMemcpyDeviceToHost, compute()));
    loss_copied_.record(compute());
  }
  void start_agreement() override {
    loss_copied_.synchronize();
    HostTransport::take_loss(loss_on_host());
    HostTransport::start_agreement();
  }

  // The average goes back; the residual stays.
  bool committed(const Bucket& bucket, bool in_residual) override {
    Way& way = this->way(bucket);
    if (in_residual) std::swap(way.host.gradient, way.host.residual);
    TOPKNOT_CUDA(cudaMemcpyAsync(way.average.data(), way.host.gradient.data(), way.average.size_bytes(),
                                 cudaMemcpyHostToDevice, compute()));
    return false;
  }
  void finish(StepReport& report) override {
    HostTransport::finish(report);
    step_.set_status(compute(), status_);
  }

  void copy_residual(const Bucket& bucket, bool to_arena) override {
    const std::span<float> residual = way(bucket).host.residual;
    float* const in_arena = arena_.residual(bucket.group.begin, bucket.group.end).data();
    if (to_arena)
      backend(arena_.device()).to_device(in_arena, residual.data(), residual.size());
    else
      backend(arena_.device()).to_host(residual.data(), in_arena, residual.size());
  }

 private:
  // One per group.
  struct Way {
    Slice host;                // takes the place of the arena's slice
    std::span<float> average;  // GPU memory
    Event complete, copied;
  };

  static cudaStream_t compute() { return Context::current().stream(); }
  Way& way(const Bucket& bucket) { return ways_[static_cast<std::size_t>(bucket.index)]; }
  float* loss_on_host() { return reinterpret_cast<float*>(loss_.data()); }

  ParameterArena& arena_;
  HostMemory gradients_, residuals_;
  std::deque<Way> ways_;
  DeviceStep step_;
  DeviceTimes times_;
  PinnedMemory loss_;
  Event loss_copied_;
};

}  // namespace

std::unique_ptr<DeviceExchange> make_staged_exchange(ParameterArena& arena, CollectiveQueue& queue,
                                                     const ExchangeOptions& options) {
  std::vector<Group> groups = plan_groups(arena, options);
  auto transport = std::make_unique<StagedTransport>(arena, queue, options, groups);
  DeviceTimes& times = transport->times();
  return std::make_unique<DeviceExchange>(arena, std::move(groups), std::move(transport), times, options);
}

}  // namespace topknot::cuda

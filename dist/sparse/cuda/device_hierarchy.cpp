#include "dist/sparse/cuda/device_hierarchy.h"

#include "nn/base/check.h"

namespace topknot::cuda {
namespace {

class DeviceHosts final : public DeviceCommunicator {
 public:
  // `across`: null on ranks that are not their host's first.
  DeviceHosts(DeviceCommunicator& inside, DeviceCommunicator* across, const Communicator& hosts)
      : inside_(inside), across_(across), host_(hosts.rank()), hosts_(hosts.size()) {}

  int rank() const override { return host_; }
  int size() const override { return hosts_; }
  std::string backend() const override { return inside_.backend(); }
  bool capturable() const override { return inside_.capturable(); }

  void all_gather(const std::byte* mine, std::byte* all, std::size_t bytes, cudaStream_t stream) override {
    if (across_) across_->all_gather(mine, all, bytes, stream);
    inside_.broadcast(all, bytes * static_cast<std::size_t>(hosts_), 0, stream);
  }
  void all_reduce(float* data, std::size_t n, SumOrder order, cudaStream_t stream) override {
    if (across_) across_->all_reduce(data, n, order, stream);
    inside_.broadcast(reinterpret_cast<std::byte*>(data), n * sizeof(float), 0, stream);
  }
  void all_reduce_bfloat16(void* data, std::size_t n, SumOrder order, cudaStream_t stream) override {
    if (across_) across_->all_reduce_bfloat16(data, n, order, stream);
    inside_.broadcast(static_cast<std::byte*>(data), n * sizeof(std::uint16_t), 0, stream);
  }
  void broadcast(std::byte* data, std::size_t bytes, int root, cudaStream_t stream) override {
    if (across_) across_->broadcast(data, bytes, root, stream);
    inside_.broadcast(data, bytes, 0, stream);
  }
  std::unique_ptr<DeviceCommunicator> split(Communicator&) override {
    throw Error("a hierarchy of ranks cannot be split");
  }
  void wait(cudaStream_t stream) override { inside_.wait(stream); }
  void abort(const std::string& reason) noexcept override {
    inside_.abort(reason);
    if (across_) across_->abort(reason);
  }

 private:
  DeviceCommunicator& inside_;
  DeviceCommunicator* const across_;
  const int host_, hosts_;
};

}  // namespace

DeviceHierarchy::DeviceHierarchy(CollectiveQueue& queue, DeviceCommunicator& all, int ranks_per_host,
                                 bool parts)
    : hierarchy_(queue, ranks_per_host, parts),
      inside_(all.split(hierarchy_.inside())),
      across_(hierarchy_.across() ? all.split(*hierarchy_.across()) : nullptr),
      hosts_(parts ? nullptr : std::make_unique<DeviceHosts>(*inside_, across_.get(), hierarchy_.hosts())) {}

StepContext DeviceHierarchy::begin_step(const StepContext& context) {
  StepContext of_hosts = hierarchy_.begin_step(context);
  weights_.assign(of_hosts.weights.begin(), of_hosts.weights.end());
  weights_.insert(weights_.end(), {hierarchy_.weight(), hierarchy_.total()});
  of_hosts.weights = weights_;
  return of_hosts;
}

}  // namespace topknot::cuda

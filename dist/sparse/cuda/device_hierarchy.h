#pragma once
// exchange.ranks_per_host for gradients in GPU memory: the hosts of dist/sparse/hierarchical.h as a
// communicator of GPUs.

#include <memory>
#include <vector>

#include "dist/comm/cuda/device_communicator.h"
#include "dist/sparse/hierarchical.h"

namespace topknot::cuda {

class DeviceHierarchy {
 public:
  // Collective, on the current context's GPU. `all`: of the queue's ranks. Both outlive this. Throws as
  // Hierarchy.
  DeviceHierarchy(CollectiveQueue& queue, DeviceCommunicator& all, int ranks_per_host, bool parts);

  Hierarchy& hierarchy() { return hierarchy_; }
  // Without parts, every rank of a host makes the same calls with the same bits; the first talks to the other
  // hosts, and broadcasts.
  DeviceCommunicator& hosts() { return hosts_ ? *hosts_ : *across_; }
  DeviceCommunicator& inside() { return *inside_; }

  // Hierarchy::begin_step() with two more weights: this rank's, and the sum of its host's ranks'.
  StepContext begin_step(const StepContext& context);
  int weights() { return hosts().size() + 2; }

 private:
  Hierarchy hierarchy_;
  std::unique_ptr<DeviceCommunicator> inside_, across_, hosts_;
  std::vector<float> weights_;
};

}  // namespace topknot::cuda

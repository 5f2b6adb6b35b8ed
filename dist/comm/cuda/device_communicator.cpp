#include "dist/comm/cuda/device_backends.h"

namespace topknot::cuda {

std::unique_ptr<DeviceCommunicator> make_device_communicator(Communicator& host, double timeout_s) {
  return host.backend() == "threads" ? make_device_threads(host, timeout_s)
                                     : make_nccl_communicator(host, timeout_s);
}

}  // namespace topknot::cuda

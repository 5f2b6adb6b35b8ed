#include "dist/exchange/cuda/device_exchange_make.h"
#include "nn/core/base/log.h"

namespace topknot::cuda {

std::unique_ptr<DeviceExchange> make_device_exchange(ParameterArena& arena, CollectiveQueue& queue,
                                                     DeviceCommunicator* device,
                                                     const ExchangeOptions& options) {
  if (!device) return make_staged_exchange(arena, queue, options);
  std::string why = what_needs_the_host(options, queue.communicator().size());
  if (why.empty()) {
    if (auto exchange = make_gpu_exchange(arena, *device, options, make_device_compressor)) return exchange;
    why = "compress.name: " + options.compress.name + " with these options";
  }
  auto exchange = make_staged_exchange(arena, queue, options);  // refuses what contradicts itself
  log_info(why + " has no kernels: gradients go through the CPU, over " + queue.communicator().backend());
  return exchange;
}

}  // namespace topknot::cuda

#pragma once
// The two kinds of DeviceExchange, for make_device_exchange() and for tests.

#include <functional>
#include <memory>

#include "dist/exchange/cuda/device_exchange.h"

namespace topknot::cuda {

using DeviceCompressorFactory =
    std::function<std::unique_ptr<DeviceCompressor>(const CompressOptions& options, const GroupSpec& group)>;

// "" where gradients can stay on the GPU; else the key that keeps them from it and its value, for the log. What
// only the compressors know is not looked at.
std::string what_needs_the_host(const ExchangeOptions& options, int ranks);

// Gradients stay on the GPU. Null where the factory has no compressor for a group; options that need the host are
// refused by what_needs_the_host() before. Throws UserError as Exchange.
std::unique_ptr<DeviceExchange> make_gpu_exchange(ParameterArena& arena, DeviceCommunicator& device,
                                                  const ExchangeOptions& options,
                                                  const DeviceCompressorFactory& factory);

// Gradients go to the host, where dist/exchange/exchange.h does its work, and the averages back. Residuals stay on the
// host; state() also writes them to the arena's residuals, and load_state() takes them from there.
std::unique_ptr<DeviceExchange> make_staged_exchange(ParameterArena& arena, CollectiveQueue& queue,
                                                     const ExchangeOptions& options);

}  // namespace topknot::cuda

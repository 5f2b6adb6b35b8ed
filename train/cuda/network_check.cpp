#include <fmt/format.h>

#include <chrono>

#include "dist/comm/cuda/device_communicator.h"
#include "nn/core/cuda/context.h"
#include "train/network_check.h"

namespace topknot {
namespace {

using Clock = std::chrono::steady_clock;

void copy(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind, cudaStream_t stream) {
  TOPKNOT_CUDA(cudaMemcpyAsync(to, from, bytes, kind, stream));
}

}  // namespace

std::string gpu_name(int gpu) {
  cudaDeviceProp properties{};
  char bus[32] = "";
  TOPKNOT_CUDA(cudaGetDeviceProperties(&properties, gpu));
  TOPKNOT_CUDA(cudaDeviceGetPCIBusId(bus, sizeof bus, gpu));
  return fmt::format("{}: {}, {}", gpu, properties.name, bus);
}

std::vector<NetworkRow> check_gpu_path(Communicator& host, int gpu, double timeout_s) {
  using namespace cuda;
  Context context({gpu, host.rank(), Precision::fp32, true});
  const Context::Use use(context);
  const auto device = make_device_communicator(host, timeout_s);
  const cudaStream_t stream = context.communication();
  // Earlier work on the stream ends before the clock starts, so the time is the collective's alone.
  const auto timed = [&](const auto& call) {
    device->wait(stream);
    host.barrier();
    const auto start = Clock::now();
    call();
    device->wait(stream);
    return std::chrono::duration<double>(Clock::now() - start).count();
  };
  NetworkPath path;
  path.over = "GPU, " + device->backend();
  path.gather = [&](std::span<const std::byte> mine, std::span<std::byte> all) {
    const DeviceArray<std::byte> block(mine.size()), blocks(all.size());
    context.synchronize();  // memory is handed out in the order of another stream
    copy(block.data(), mine.data(), mine.size(), cudaMemcpyHostToDevice, stream);
    const double seconds =
        timed([&] { device->all_gather(block.data(), blocks.data(), mine.size(), stream); });
    copy(all.data(), blocks.data(), all.size(), cudaMemcpyDeviceToHost, stream);
    device->wait(stream);
    return seconds;
  };
  path.sum = [&](std::span<float> data) {
    const DeviceArray<float> memory(data.size());
    context.synchronize();
    copy(memory.data(), data.data(), data.size_bytes(), cudaMemcpyHostToDevice, stream);
    const double seconds =
        timed([&] { device->all_reduce(DType::f32, memory.data(), data.size(), SumOrder::library, stream); });
    copy(data.data(), memory.data(), data.size_bytes(), cudaMemcpyDeviceToHost, stream);
    device->wait(stream);
    return seconds;
  };
  return check_path(host, path);
}

}  // namespace topknot

#include "dist/exchange/cuda/device_times.h"

#include "nn/base/check.h"

namespace topknot::cuda {

void DeviceTimes::turn_on(std::size_t most) {
  clock_ = DeviceArray<std::uint64_t>(2 * most);
  const cudaStream_t stream = Context::current().stream();
  TOPKNOT_CUDA(cudaMemsetAsync(clock_.data(), 0, clock_.bytes(), stream));
  write_time(stream, clock_.data());
  TOPKNOT_CUDA(cudaMemcpyAsync(&zero_, clock_.data(), sizeof zero_, cudaMemcpyDeviceToHost, stream));
  TOPKNOT_CUDA(cudaStreamSynchronize(stream));
  host_zero_ = std::chrono::steady_clock::now();
}

std::size_t DeviceTimes::begin(const Mark& mark, cudaStream_t stream) {
  if (!on()) return 0;
  const std::size_t place = 2 * marks_.size();
  TOPKNOT_CHECK(place + 1 < clock_.size(), "more marks than a step was said to have");
  marks_.push_back(mark);
  write_time(stream, clock_.data() + place);
  return place;
}

void DeviceTimes::end(std::size_t place, cudaStream_t stream) {
  if (on()) write_time(stream, clock_.data() + place + 1);
}

std::vector<DeviceTimes::Mark> DeviceTimes::since(std::size_t first) const {
  return {marks_.begin() + static_cast<std::ptrdiff_t>(first), marks_.end()};
}

void DeviceTimes::append(const std::vector<Mark>& marks) {
  marks_.insert(marks_.end(), marks.begin(), marks.end());
}

DeviceTimes::Time DeviceTimes::host_time(std::uint64_t nanoseconds) const {
  return host_zero_ + std::chrono::nanoseconds(static_cast<std::int64_t>(nanoseconds - zero_));
}

}  // namespace topknot::cuda

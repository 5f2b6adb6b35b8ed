// The compressor of dense groups on a GPU: compress/dense.cpp, operation for operation.
#include "compress/cuda/device_compressor.h"
#include "compress/state.h"
#include "nn/core/cuda/context.h"
#include "nn/core/cuda/kernel_tools.h"

namespace topknot::cuda {
namespace {

constexpr int kTile = 4 * kThreads;  // elements of a block

__device__ bool not_finite(float x) {
  return (__float_as_uint(x) & 0x7f800000u) == 0x7f800000u;
}

__device__ bool whole_and_aligned(const float* x, std::size_t tile, std::size_t n) {
  return tile + kTile <= n && reinterpret_cast<std::uintptr_t>(x) % sizeof(float4) == 0;
}

// fn(element) for this thread's elements of [tile, n), of a block's tile at most.
__device__ void over_tile(std::size_t tile, std::size_t n, auto fn) {
  for (std::size_t i = tile + threadIdx.x, j = 0; j < 4 && i < n; ++j, i += kThreads) fn(i);
}

// x[i] = fn(x[i]) over a block's tile, by fours where the memory allows.
__device__ void change_tile(float* x, std::size_t n, auto fn) {
  const std::size_t tile = std::size_t{blockIdx.x} * kTile;
  if (whole_and_aligned(x, tile, n)) {
    float4* const at = reinterpret_cast<float4*>(x + tile) + threadIdx.x;
    float4 four = __ldcs(at);
    four.x = fn(four.x), four.y = fn(four.y), four.z = fn(four.z), four.w = fn(four.w);
    *at = four;
  } else {
    over_tile(tile, n, [&](std::size_t i) { x[i] = fn(x[i]); });
  }
}

__global__ void __launch_bounds__(kThreads) multiply_kernel(float* x, std::size_t n, const float* weight) {
  await_previous();
  const float w = *weight;
  if (w == 1.0f) return;
  change_tile(x, n, [w](float value) { return value * w; });
}

__global__ void __launch_bounds__(kThreads) divide_kernel(float* x, std::size_t n, const float* total) {
  await_previous();
  const float sum = *total;
  if (sum == 0.0f || sum == 1.0f) return;
  change_tile(x, n, [sum](float value) { return value / sum; });
}

// to = bfloat16(x * *weight), to nearest, ties to even.
__global__ void __launch_bounds__(kThreads)
    narrow_kernel(const float* x, std::size_t n, const float* weight, __nv_bfloat16* to) {
  await_previous();
  const float w = *weight;
  over_tile(std::size_t{blockIdx.x} * kTile, n,
            [&](std::size_t i) { to[i] = __float2bfloat16_rn(__ldcs(x + i) * w); });
}

// x = (x + 0) * factor, bad status if x was not finite. Adding 0 turns -0 into +0, as sparse averages do.
__global__ void __launch_bounds__(kThreads)
    average_kernel(float* x, std::size_t n, float factor, StepStatus* status) {
  await_previous();
  bool bad = false;
  change_tile(x, n, [&bad, factor](float sum) {
    bad |= not_finite(sum);
    return (sum + 0.0f) * factor;
  });
  if (bad) atomicOr(&status->bad, 1u);
}

// The same of a sum of bfloat16 numbers, to floats.
__global__ void __launch_bounds__(kThreads)
    average_bfloat16_kernel(const __nv_bfloat16* sum, float* x, std::size_t n, float factor,
                            StepStatus* status) {
  await_previous();
  bool bad = false;
  over_tile(std::size_t{blockIdx.x} * kTile, n, [&](std::size_t i) {
    const float value = __bfloat162float(sum[i]);
    bad |= not_finite(value);
    x[i] = (value + 0.0f) * factor;
  });
  if (bad) atomicOr(&status->bad, 1u);
}

class DeviceDenseCompressor final : public Compressor {
 public:
  DeviceDenseCompressor(const GroupSpec& group, bool narrow)
      : numel_(group.numel), ranks_(group.ranks), narrow_(narrow ? group.numel : 0) {}

  std::size_t reserve(double) override { return numel_ * (narrow() ? sizeof(BFloat16) : sizeof(float)); }

  Message encode(Slice slice, const StepContext& context) override {
    TOPKNOT_CHECK(slice.gradient.size() == numel_, "a slice of another length than the group's");
    gradient_ = slice.gradient;
    status_ = context.status;
    const float* const weight = context.weights.data() + context.rank;
    if (!narrow()) {
      multiply_by_weight(stream(), gradient_.data(), numel_, weight);
      return sum_message(gradient_);
    }
    if (numel_ > 0)
      launch(narrow_kernel, grid_for(numel_, kTile), kThreads, stream(), gradient_.data(), numel_, weight,
             bfloat16());
    Message message;
    message.kind = Message::Kind::sum_bfloat16;
    message.sum_bfloat16 = {narrow_.data(), narrow_.size()};
    return message;
  }

  std::optional<Message> decode(const Round&) override {
    if (numel_ == 0) return std::nullopt;
    const float factor = 1.0f / static_cast<float>(ranks_);
    const dim3 grid = grid_for(numel_, kTile);
    if (narrow())
      launch(average_bfloat16_kernel, grid, kThreads, stream(), bfloat16(), gradient_.data(), numel_, factor,
             status_);
    else
      launch(average_kernel, grid, kThreads, stream(), gradient_.data(), numel_, factor, status_);
    return std::nullopt;
  }

  // Nothing reads the average of a bad step.
  std::span<float> commit(std::span<const std::uint32_t>) override { return gradient_; }

  void load(StateReader& reader) override {
    if (!reader.at_end()) StateReader::fail("has bytes for a group that is not compressed");
  }

 private:
  static cudaStream_t stream() { return Context::current().stream(); }
  bool narrow() const { return narrow_.size() > 0; }
  __nv_bfloat16* bfloat16() { return reinterpret_cast<__nv_bfloat16*>(narrow_.data()); }

  const std::size_t numel_;
  const int ranks_;
  const DeviceArray<BFloat16> narrow_;  // what is sent, if it is not the gradient itself
  std::span<float> gradient_;
  StepStatus* status_ = nullptr;
};

const bool registered = device_methods().add(
    "dense", "", {[](const CompressOptions& options, const GroupSpec& group) -> std::unique_ptr<Compressor> {
      if (!sums_plainly(options.name, options.values)) return nullptr;
      return std::make_unique<DeviceDenseCompressor>(group, options.values == "bf16");
    }});

}  // namespace

void multiply_by_weight(cudaStream_t stream, float* x, std::size_t n, const float* weight) {
  if (n > 0) launch(multiply_kernel, grid_for(n, kTile), kThreads, stream, x, n, weight);
}

void divide_by_total(cudaStream_t stream, float* x, std::size_t n, const float* total) {
  if (n > 0) launch(divide_kernel, grid_for(n, kTile), kThreads, stream, x, n, total);
}

}  // namespace topknot::cuda

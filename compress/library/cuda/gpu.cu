// A compressor of libtopknot on a GPU: gradients, messages and averages lie there, and compressors are those of
// compress/cuda/device_compressor.h. A call ends when the GPU is done with it.
//
// A block has one length on all ranks, which depends on the density alone: the parts' messages one after the other, each at
// a multiple of 16 bytes, sums too, which are then added in rank order.
#include <cuda_fp16.h>

#include <cstdint>
#include <optional>
#include <utility>

#include "compress/cuda/device_compressor.h"
#include "compress/cuda/device_step.h"
#include "compress/library/handle.h"
#include "nn/base/text.h"
#include "nn/core/cuda/context.h"
#include "nn/core/cuda/kernel_tools.h"
#include "nn/core/cuda/pool.h"

namespace topknot {
namespace cuda {

__device__ inline float as_float(__half x) {
  return __half2float(x);
}
template <>
__device__ inline __half from_float<__half>(float x) {
  return __float2half_rn(x);
}

namespace {

template <class From, class To>
__global__ void __launch_bounds__(kThreads)
    convert_kernel(const From* from, To* to, std::size_t n, float scale) {
  await_previous();
  for (std::size_t i = std::size_t{blockIdx.x} * kThreads + threadIdx.x; i < n;
       i += std::size_t{gridDim.x} * kThreads)
    to[i] = from_float<To>(as_float(from[i]) * scale);
}

template <class From, class To>
void convert(cudaStream_t stream, const void* from, void* to, std::size_t n, float scale) {
  if (n > 0)
    launch(convert_kernel<From, To>, grid_for(n, kThreads * 4, 4096), kThreads, stream,
           static_cast<const From*>(from), static_cast<To*>(to), n, scale);
}

constexpr std::size_t kLongestRow = 0x7fffffff;  // of a copy in two dimensions

std::size_t aligned(std::size_t bytes) {
  return (bytes + 15) / 16 * 16;
}

std::span<std::byte> bytes_of(Message& message) {
  return message.kind == Message::Kind::gpu_block ? message.gpu_block : summed_bytes(message);
}

struct GpuRound : RoundMemory {
  std::shared_ptr<DeviceStep> step;
  DeviceArray<std::byte> message;                // the block, or the sums of several parts
  std::vector<DeviceArray<std::byte>> received;  // by part, all ranks'; until the commit
  StepStatus status;
};

// A thread works on the place's GPU, and then on its own again.
class Entered {
 public:
  explicit Entered(Context& context) {
    TOPKNOT_CUDA(cudaGetDevice(&before_));
    use_.emplace(context);
  }
  ~Entered() {
    use_.reset();
    cudaSetDevice(before_);
  }
  Entered(const Entered&) = delete;
  Entered& operator=(const Entered&) = delete;

 private:
  int before_ = 0;
  std::optional<Context::Use> use_;
};

class Gpu final : public Place {
 public:
  Gpu(int index, int rank)
      : context_(std::make_unique<Context>(ContextOptions{.device = index, .rank = rank})) {}
  ~Gpu() override {
    int before = 0;
    cudaGetDevice(&before);
    steps_.clear();
    context_.reset();
    cudaSetDevice(before);
  }

  std::shared_ptr<void> enter() override { return std::make_shared<Entered>(*context_); }

  std::unique_ptr<Compressor> make_compressor(const CompressOptions& options,
                                              const GroupSpec& group) const override {
    std::unique_ptr<Compressor> compressor = make_device_compressor(options, group);
    if (!compressor)
      refuse("method '" + options.name +
             "' with these keys has no kernels for a GPU; remove key 'device', and " +
             "give gradients in the host's memory");
    return compressor;
  }

  Floats zeros(std::size_t count) const override {
    const auto memory = std::make_shared<DeviceArray<float>>(count);
    if (count > 0) TOPKNOT_CUDA(cudaMemsetAsync(memory->data(), 0, memory->bytes(), stream()));
    return {std::shared_ptr<float>(memory, memory->data()), count};
  }

  void copy(const float* from, float* to, std::size_t count) const override {
    if (count == 0) return;
    TOPKNOT_CUDA(cudaMemcpyAsync(to, from, count * sizeof(float), cudaMemcpyDefault, stream()));
    wait();
  }

  void read(const void* from, topknot_type type, float scale, std::span<float> to) const override {
    if (type == TOPKNOT_BFLOAT16)
      return convert<__nv_bfloat16, float>(stream(), from, to.data(), to.size(), scale);
    if (type == TOPKNOT_FLOAT16) return convert<__half, float>(stream(), from, to.data(), to.size(), scale);
    if (scale != 1) return convert<float, float>(stream(), from, to.data(), to.size(), scale);
    TOPKNOT_CUDA(cudaMemcpyAsync(to.data(), from, to.size_bytes(), cudaMemcpyDeviceToDevice, stream()));
  }

  void write(std::span<const float> from, float scale, topknot_type type, void* to) const override {
    if (type == TOPKNOT_BFLOAT16)
      convert<float, __nv_bfloat16>(stream(), from.data(), to, from.size(), scale);
    else if (type == TOPKNOT_FLOAT16)
      convert<float, __half>(stream(), from.data(), to, from.size(), scale);
    else if (scale != 1)
      convert<float, float>(stream(), from.data(), to, from.size(), scale);
    else
      TOPKNOT_CUDA(cudaMemcpyAsync(to, from.data(), from.size_bytes(), cudaMemcpyDeviceToDevice, stream()));
  }

  StepContext begin(topknot_round& round, const StepContext& of_rank) override {
    const auto memory = std::make_shared<GpuRound>();
    round.memory = memory;
    const auto ranks = static_cast<std::size_t>(round.owner->ranks);
    const std::vector<float> equal(ranks, 1.0f);
    StepContext context = of_rank;
    if (context.weights.empty()) context.weights = equal;
    memory->step = free_step(round.owner->ranks);
    memory->step->begin(stream(), context);
    for (const std::size_t p : round.parts) {
      Part& part = round.owner->parts[p];
      if (part.reserved == context.density) continue;
      if (std::exchange(part.reserved, 0.0) > context.density) shrink(part);
      part.compressor->reserve(context.density);
      part.reserved = context.density;
    }
    context.weights = {memory->step->weights(), ranks};
    context.parameters = memory->step->parameters();
    context.status = memory->step->status();
    return context;
  }

  void pack(topknot_round& round) override {
    auto& memory = static_cast<GpuRound&>(*round.memory);
    std::vector<std::span<std::byte>> parts;
    std::size_t bytes = 0;
    for (auto& message : round.messages) {
      if (!message) continue;
      parts.push_back(bytes_of(*message));
      bytes += round.blocks ? aligned(parts.back().size()) : parts.back().size();
    }
    std::byte* all = parts[0].data();
    if (parts.size() > 1) {
      if (memory.message.size() < bytes) memory.message = DeviceArray<std::byte>(bytes);
      std::byte* to = all = memory.message.data();
      for (const std::span<std::byte> part : parts) {
        const std::size_t gap = round.blocks ? aligned(part.size()) - part.size() : 0;
        TOPKNOT_CUDA(cudaMemcpyAsync(to, part.data(), part.size(), cudaMemcpyDeviceToDevice, stream()));
        if (gap > 0) TOPKNOT_CUDA(cudaMemsetAsync(to + part.size(), 0, gap, stream()));
        to += part.size() + gap;
      }
    }
    if (round.blocks)
      round.message.block = all, round.message.block_bytes = bytes;
    else
      round.message.sum = all;
    wait();
  }

  void decode(topknot_round& round, std::span<const std::span<const std::byte>> blocks) override {
    auto& memory = static_cast<GpuRound&>(*round.memory);
    for (std::size_t r = 0; r < blocks.size(); ++r) {
      if (reinterpret_cast<std::uintptr_t>(blocks[r].data()) % sizeof(float) != 0)
        refuse("rank " + std::to_string(r) + "'s block begins at no multiple of 4 bytes");
      if (blocks[r].size() != round.message.block_bytes)
        refuse("rank " + std::to_string(r) + "'s message has " +
               count_text(static_cast<std::int64_t>(blocks[r].size()), "byte") + ", not this rank's " +
               std::to_string(round.message.block_bytes) + "; did all ranks encode the same tensors?");
    }
    std::size_t at = 0;
    for (std::size_t i = 0; i < round.parts.size(); ++i) {
      std::optional<Message>& message = round.messages[i];
      if (!message) continue;
      Round result;
      const std::span<std::byte> own = bytes_of(*message);
      if (message->kind == Message::Kind::gpu_block) {
        result.gpu_blocks = gather(memory, blocks, at, own.size());
      } else {
        if (round.blocks)
          add_ranks(*message, blocks, at);
        else if (const auto* from = static_cast<const std::byte*>(round.message.sum) + at; from != own.data())
          TOPKNOT_CUDA(cudaMemcpyAsync(own.data(), from, own.size(), cudaMemcpyDeviceToDevice, stream()));
        result.sum = message->sum, result.sum_bfloat16 = message->sum_bfloat16;
      }
      at += round.blocks ? aligned(own.size()) : own.size();
      message = round.owner->parts[round.parts[i]].compressor->decode(result);
    }
    TOPKNOT_CUDA(cudaMemcpyAsync(&memory.status, memory.step->status(), sizeof memory.status,
                                 cudaMemcpyDeviceToHost, stream()));
    wait();
  }

  bool finite(const topknot_round& round) const override {
    return static_cast<const GpuRound&>(*round.memory).status.bad == 0;
  }

  // Compressors on a GPU take back a step that has a bad status.
  void discard(Part& part, topknot_round& round) override {
    auto& memory = static_cast<GpuRound&>(*round.memory);
    try {
      memory.step->set_status(stream(), {.bad = 1});
      const std::span<float> average = part.compressor->commit({});
      if (average.data() == part.residual.span().data()) std::swap(part.gradient, part.residual);
    } catch (const Error&) {  // the GPU is lost, or the commit failed after this part
    }
  }

  void finish() const override { wait(); }

 private:
  cudaStream_t stream() const { return context_->stream(); }
  void wait() const { TOPKNOT_CUDA(cudaStreamSynchronize(stream())); }

  // Compressors keep the memory of their highest density; a warm-up's would be taken from the program for good.
  void shrink(Part& part) {
    part.compressor = renewed(*this, part, part.compressor->state());
    context_->pool()->release_cached();
  }

  // One that no round has: page-locked memory takes long to get.
  std::shared_ptr<DeviceStep> free_step(int ranks) {
    for (const auto& step : steps_)
      if (step.use_count() == 1) return step;
    return steps_.emplace_back(std::make_shared<DeviceStep>(ranks));
  }

  // `bytes` of every rank's block, one rank after the other, as compressors want them.
  std::span<const std::byte> gather(GpuRound& memory, std::span<const std::span<const std::byte>> blocks,
                                    std::size_t at, std::size_t bytes) {
    const std::size_t ranks = blocks.size();
    bool in_order = true;
    for (std::size_t r = 1; r < ranks; ++r)
      in_order &= blocks[r].data() == blocks[0].data() + r * blocks[0].size();
    const DeviceArray<std::byte>& all = memory.received.emplace_back(ranks * bytes);
    if (in_order && blocks[0].size() <= kLongestRow)
      TOPKNOT_CUDA(cudaMemcpy2DAsync(all.data(), bytes, blocks[0].data() + at, blocks[0].size(), bytes, ranks,
                                     cudaMemcpyDeviceToDevice, stream()));
    else
      for (std::size_t r = 0; r < ranks; ++r)
        TOPKNOT_CUDA(cudaMemcpyAsync(all.data() + r * bytes, blocks[r].data() + at, bytes,
                                     cudaMemcpyDeviceToDevice, stream()));
    return {all.data(), all.size()};
  }

  void add_ranks(Message& message, std::span<const std::span<const std::byte>> blocks, std::size_t at) {
    std::byte* const sum = summed_bytes(message).data();
    const bool narrow = message.kind == Message::Kind::sum_bfloat16;
    TOPKNOT_CUDA(
        cudaMemcpyAsync(sum, blocks[0].data() + at, message.bytes(), cudaMemcpyDeviceToDevice, stream()));
    for (std::size_t r = 1; r < blocks.size(); ++r)
      add(stream(), narrow ? DType::bf16 : DType::f32, sum, blocks[r].data() + at, sum,
          narrow ? message.sum_bfloat16.size() : message.sum.size());
  }

  std::unique_ptr<Context> context_;
  std::vector<std::shared_ptr<DeviceStep>> steps_;
};

}  // namespace
}  // namespace cuda

std::unique_ptr<Place> make_gpu(int index, int rank) {
  if (const std::string why = cuda::problem(); !why.empty()) refuse(why);
  int current = 0;
  TOPKNOT_CUDA(cudaGetDevice(&current));
  std::unique_ptr<Place> gpu;
  try {
    gpu = std::make_unique<cuda::Gpu>(index < 0 ? current : index, rank);
  } catch (...) {
    cudaSetDevice(current);
    throw;
  }
  TOPKNOT_CUDA(cudaSetDevice(current));
  return gpu;
}

}  // namespace topknot

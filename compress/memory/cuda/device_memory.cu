#include "compress/memory/cuda/device_memory.h"

#include <topknot_kernel.h>

#include <utility>
#include <vector>

#include "compress/memory/memory.h"
#include "nn/base/check.h"
#include "nn/core/cuda/kernel_tools.h"

namespace topknot::cuda {
namespace {

struct MemoryCommit {
  const StepStatus* status = nullptr;
  std::size_t n = 0;
  float* u = nullptr;
  const float* residual = nullptr;      // the old one; null without error feedback
  const float* old_velocity = nullptr;  // null without momentum
  float* velocity = nullptr;            // this step's
  bool masking = false;                 // what was sent loses its velocity
  std::uint32_t* current = nullptr;  // becomes `written`, then 1 if the step is good; null without momentum
  std::uint32_t written = 0;
  DeviceSent sent;
};

constexpr std::uint32_t kTile = 4096;  // floats; 16 KiB
constexpr int kRanks = kThreads / 2;   // whose entries are looked up at a time

// A block of threads serves one tile of the group. It makes the average in shared memory: zeros, plus the
// entries of rank after rank, which has a position once, so that no two threads meet; multiplied and written.
__global__ void __launch_bounds__(kThreads)
    commit_kernel(MemoryCommit step, DeviceRound round, float factor, float* average) {
  await_previous();
  __shared__ float tile[kTile];
  __shared__ std::uint32_t bounds[kThreads];  // of each list's entries in the tile: begin, end
  const std::size_t first = std::size_t{blockIdx.x} * kTile;
  const std::size_t end = first + kTile < step.n ? first + kTile : step.n;
  if (blockIdx.x == 0 && threadIdx.x == 0 && step.current) {
    step.current[0] = step.written;
    if (step.status->bad == 0) step.current[1] = 1;
  }
  if (step.status->bad != 0) {
    for (std::size_t i = first + threadIdx.x; step.residual && i < end; i += kThreads) {
      __stcs(step.u + i, __ldcs(step.residual + i));
      if (step.velocity) __stcs(step.velocity + i, __ldcs(step.old_velocity + i));
    }
    return;
  }
  for (std::uint32_t i = threadIdx.x; i < kTile; i += kThreads) tile[i] = 0;
  if (step.residual) {
    if (threadIdx.x < 2)
      bounds[threadIdx.x] = lower_bound(step.sent.positions, *step.sent.count, first + threadIdx.x * kTile);
    __syncthreads();
    for (std::uint32_t i = bounds[0] + threadIdx.x; i < bounds[1]; i += kThreads) {
      const std::uint32_t at = step.sent.positions[i];
      step.u[at] -= step.sent.values[i];  // +0 if values are sent exactly, else the coding error
      if (step.velocity && step.masking) step.velocity[at] = 0;
    }
    __syncthreads();
  }
  const std::size_t capacity = round.capacity;
  for (int from = 0; from < round.ranks; from += kRanks) {
    const int mine = from + static_cast<int>(threadIdx.x / 2);
    if (mine < round.ranks)
      bounds[threadIdx.x] = lower_bound(round.lists.indices + mine * capacity, round.lists.stats[mine].count,
                                        first + (threadIdx.x & 1) * kTile);
    __syncthreads();
    for (int rank = from; rank < round.ranks && rank < from + kRanks; ++rank) {
      const std::uint32_t begin = bounds[2 * (rank - from)], past = bounds[2 * (rank - from) + 1];
      if (begin == past) continue;
      const float weight = round.weights[rank];
      for (std::uint32_t i = begin + threadIdx.x; i < past; i += kThreads)
        tile[round.lists.indices[rank * capacity + i] - first] +=
            weight * round.lists.values[rank * capacity + i];
      __syncthreads();
    }
    __syncthreads();
  }
  for (std::size_t i = first + threadIdx.x; i < end; i += kThreads)
    average[i] = round.ranks > 1 ? tile[i - first] * factor : tile[i - first];
}

}  // namespace

DeviceMemory::DeviceMemory(Kind kind, const CompressOptions& options, std::size_t n)
    : kind_(kind), n_(n), lr_inside_(options.lr_inside && kind != Kind::dgc) {
  if (kind != Kind::dgc) return;
  momentum_ = static_cast<float>(options.momentum);
  nesterov_ = options.nesterov;
  masking_ = momentum_masking(options);
  if (momentum_ == 0) return;
  current_ = DeviceArray<std::uint32_t>(2);
  for (auto& velocity : velocity_) velocity = DeviceArray<float>(n);
  clear();
}

Accumulate DeviceMemory::accumulate(const Slice& slice, const StepParameters* step) {
  Accumulate made;
  made.u = slice.gradient.data();
  if (lr_inside_) made.times_lr = step;
  if (kind_ == Kind::none) return made;
  TOPKNOT_CHECK(slice.gradient.size() == n_ && slice.residual.size() == n_,
                "error feedback needs a residual as long as the gradient");
  made.residual = slice.residual.data();
  if (momentum_ == 0) return made;
  if (!first_) {
    first_ = slice.gradient.data();
    second_ = slice.residual.data();
  }
  const std::size_t read = read_by(slice);
  made.velocity = velocity_[read].data();
  made.next_velocity = velocity_[1 - read].data();
  made.momentum = momentum_;
  made.nesterov = nesterov_;
  return made;
}

std::span<float> DeviceMemory::commit(cudaStream_t stream, const StepStatus* status, const Slice& slice,
                                      const DeviceSent& sent, const DeviceRound& round) {
  const std::span<float> average = has_residual() ? slice.residual : slice.gradient;
  MemoryCommit step;
  step.status = status;
  step.n = n_;
  if (has_residual()) step.u = slice.gradient.data(), step.residual = slice.residual.data();
  if (momentum_ != 0) {
    const std::size_t read = read_by(slice);
    step.old_velocity = velocity_[read].data();
    step.velocity = velocity_[1 - read].data();
    step.masking = masking_;
    step.current = current_.data();
    step.written = static_cast<std::uint32_t>(1 - read);
  }
  step.sent = sent;
  if (n_ > 0)
    launch(commit_kernel, grid_for(n_, kTile), kThreads, stream, step, round,
           1.0f / static_cast<float>(round.ranks), average.data());
  return average;
}

void DeviceMemory::save(StateWriter& writer) const {
  if (kind_ != Kind::dgc) return;
  std::vector<std::uint32_t> current(2);
  if (momentum_ != 0) current = on_host(current_.data(), 2);
  writer.put_device_list({velocity_[current[0]].data(), current[1] ? n_ : 0});
}

void DeviceMemory::load(StateReader& reader) {
  if (kind_ != Kind::dgc) return;
  const std::vector<float> velocity = reader.get_finite_list<float>();
  if (momentum_ == 0 && !velocity.empty()) StateReader::fail("has a velocity, and optimizer.momentum is 0");
  if (!velocity.empty() && velocity.size() != n_) StateReader::fail("has a velocity of another length");
  if (momentum_ == 0) return;
  if (velocity.empty()) return clear();
  // Both, so that it does not matter in which order the slice's memories are found next.
  const cudaStream_t stream = Context::current().stream();
  const std::uint32_t current[2] = {0, 1};
  TOPKNOT_CUDA(cudaMemcpyAsync(current_.data(), current, sizeof current, cudaMemcpyHostToDevice, stream));
  for (auto& buffer : velocity_)
    TOPKNOT_CUDA(
        cudaMemcpyAsync(buffer.data(), velocity.data(), buffer.bytes(), cudaMemcpyHostToDevice, stream));
  TOPKNOT_CUDA(cudaStreamSynchronize(stream));
}

// Which velocity a step reads that finds the gradient there.
std::size_t DeviceMemory::read_by(const Slice& slice) const {
  const bool as_first = slice.gradient.data() == first_ && slice.residual.data() == second_;
  TOPKNOT_CHECK(as_first || (slice.gradient.data() == second_ && slice.residual.data() == first_),
                "a slice in other memory than in the steps before");
  return as_first ? 0 : 1;
}

void DeviceMemory::clear() {
  const cudaStream_t stream = Context::current().stream();
  TOPKNOT_CUDA(cudaMemsetAsync(current_.data(), 0, current_.bytes(), stream));
  for (auto& velocity : velocity_)
    if (velocity.size() > 0) TOPKNOT_CUDA(cudaMemsetAsync(velocity.data(), 0, velocity.bytes(), stream));
  TOPKNOT_CUDA(cudaStreamSynchronize(stream));
}

std::unique_ptr<DeviceMemory> make_device_memory(const std::string& memory, const CompressOptions& options,
                                                 std::size_t n) {
  using Kind = DeviceMemory::Kind;
  for (const auto& [name, kind] :
       {std::pair{"none", Kind::none}, std::pair{"residual", Kind::residual}, std::pair{"dgc", Kind::dgc}})
    if (memory == name) return std::make_unique<DeviceMemory>(kind, options, n);
  return nullptr;
}

}  // namespace topknot::cuda

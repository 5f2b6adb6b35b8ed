#include "compress/memory/cuda/device_memory.h"

#include <vector>

#include "compress/memory/cuda/device_memory_kernels.h"
#include "compress/memory/memory.h"
#include "nn/base/check.h"
#include "nn/core/cuda/context.h"

namespace topknot::cuda {
namespace {

class NoMemory final : public DeviceMemory {
 public:
  explicit NoMemory(const CompressOptions& options) : lr_inside_(options.lr_inside) {}

  Accumulate accumulate(const DeviceSlice& slice, const StepParameters* step) override {
    Accumulate made;
    made.u = slice.gradient.data();
    if (lr_inside_) made.times_lr = step;
    return made;
  }
  std::span<float> commit(cudaStream_t, const StepStatus*, const DeviceSlice& slice,
                          const DeviceSent&) override {
    return slice.gradient;
  }
  bool has_residual() const override { return false; }
  bool owns_momentum() const override { return false; }
  void save(StateWriter&) const override {}
  void load(StateReader&) override {}

 private:
  bool lr_inside_;
};

// The residual memory, and DGC's, which is one with a velocity where there is momentum.
class KeepingMemory final : public DeviceMemory {
 public:
  KeepingMemory(const CompressOptions& options, std::size_t n, bool dgc)
      : n_(n), dgc_(dgc), lr_inside_(options.lr_inside && !dgc) {
    if (!dgc) return;
    momentum_ = static_cast<float>(options.momentum);
    nesterov_ = options.nesterov;
    masking_ = momentum_masking(options);
    if (momentum_ == 0) return;
    current_ = DeviceArray<std::uint32_t>(1);
    for (auto& velocity : velocity_) velocity = DeviceArray<float>(n);
    clear();
  }

  Accumulate accumulate(const DeviceSlice& slice, const StepParameters* step) override {
    TOPKNOT_CHECK(slice.gradient.size() == n_ && slice.spare.size() == n_,
                  "error feedback needs a residual as long as the gradient");
    Accumulate made;
    made.u = slice.gradient.data();
    made.residual = slice.spare.data();
    if (lr_inside_) made.times_lr = step;
    if (momentum_ == 0) return made;
    started_ = true;
    if (!first_) {
      first_ = slice.gradient.data();
      second_ = slice.spare.data();
    }
    const std::size_t read = read_by(slice);
    made.velocity = velocity_[read].data();
    made.next_velocity = velocity_[1 - read].data();
    made.momentum = momentum_;
    made.nesterov = nesterov_;
    return made;
  }

  std::span<float> commit(cudaStream_t stream, const StepStatus* status, const DeviceSlice& slice,
                          const DeviceSent& sent) override {
    MemoryCommit step;
    step.status = status;
    step.n = n_;
    step.u = slice.gradient.data();
    step.residual = slice.spare.data();
    if (momentum_ != 0) {
      const std::size_t read = read_by(slice);
      step.old_velocity = velocity_[read].data();
      step.velocity = velocity_[1 - read].data();
      step.masking = masking_;
      step.current = current_.data();
      step.written = static_cast<std::uint32_t>(1 - read);
    }
    step.positions = sent.positions;
    step.values = sent.values;
    step.count = sent.count;
    step.capacity = sent.capacity;
    commit_memory(stream, step);
    return slice.spare;
  }

  bool has_residual() const override { return true; }
  bool owns_momentum() const override { return dgc_; }

  void save(StateWriter& writer) const override {
    if (!dgc_) return;
    std::uint32_t current = 0;
    if (started_) to_host(&current, current_.data(), sizeof current);
    writer.put_device_list({velocity_[current].data(), started_ ? n_ : 0});
  }

  void load(StateReader& reader) override {
    if (!dgc_) return;
    const std::vector<float> velocity = reader.get_list<float>();
    if (momentum_ == 0 && !velocity.empty()) StateReader::fail("has a velocity, and optimizer.momentum is 0");
    if (!velocity.empty() && velocity.size() != n_) StateReader::fail("has a velocity of another length");
    started_ = !velocity.empty();
    if (momentum_ == 0) return;
    if (!started_) return clear();
    // Both, so that it does not matter in which order the slice's memories are found next.
    const cudaStream_t stream = Context::current().stream();
    for (auto& buffer : velocity_)
      TOPKNOT_CUDA(
          cudaMemcpyAsync(buffer.data(), velocity.data(), buffer.bytes(), cudaMemcpyHostToDevice, stream));
    TOPKNOT_CUDA(cudaStreamSynchronize(stream));
  }

 private:
  // Which velocity a step reads that finds the gradient there.
  std::size_t read_by(const DeviceSlice& slice) const {
    const bool as_first = slice.gradient.data() == first_ && slice.spare.data() == second_;
    TOPKNOT_CHECK(as_first || (slice.gradient.data() == second_ && slice.spare.data() == first_),
                  "a slice in other memory than in the steps before");
    return as_first ? 0 : 1;
  }
  void clear() {
    const cudaStream_t stream = Context::current().stream();
    TOPKNOT_CUDA(cudaMemsetAsync(current_.data(), 0, current_.bytes(), stream));
    for (auto& velocity : velocity_)
      if (velocity.size() > 0) TOPKNOT_CUDA(cudaMemsetAsync(velocity.data(), 0, velocity.bytes(), stream));
    TOPKNOT_CUDA(cudaStreamSynchronize(stream));
  }
  static void to_host(void* host, const void* device, std::size_t bytes) {
    Context& context = Context::current();
    context.synchronize();
    TOPKNOT_CUDA(cudaMemcpyAsync(host, device, bytes, cudaMemcpyDeviceToHost, context.stream()));
    TOPKNOT_CUDA(cudaStreamSynchronize(context.stream()));
  }

  std::size_t n_;
  bool dgc_, lr_inside_;
  float momentum_ = 0;
  bool nesterov_ = false, masking_ = false;
  DeviceArray<float> velocity_[2];
  DeviceArray<std::uint32_t>
      current_;  // the velocity of the last committed step; graphs have no host that knows
  const float *first_ = nullptr, *second_ = nullptr;  // the slice's memories, as the first step found them
  bool started_ = false;                              // a step was begun: there is a velocity to save
};

}  // namespace

std::unique_ptr<DeviceMemory> make_device_memory(const std::string& memory, const CompressOptions& options,
                                                 std::size_t n) {
  if (memory == "none") return std::make_unique<NoMemory>(options);
  if (memory == "residual" || memory == "dgc")
    return std::make_unique<KeepingMemory>(options, n, memory == "dgc");
  return nullptr;
}

}  // namespace topknot::cuda

// Compressors and collectives of the CPU behind the GPU's interfaces.
#include <cstring>

#include "dist/communicator.h"
#include "nn/core/device_kernels.h"
#include "tests/cuda/device_exchange_fixture.h"
#include "tests/cuda/fixture.h"

namespace topknot::testing {
namespace {

template <class T>
std::vector<T> to_host(cudaStream_t stream, const T* from, std::size_t n) {
  std::vector<T> values(n);
  TOPKNOT_CUDA(cudaMemcpyAsync(values.data(), from, n * sizeof(T), cudaMemcpyDeviceToHost, stream));
  TOPKNOT_CUDA(cudaStreamSynchronize(stream));
  return values;
}

template <class T>
void to_gpu(cudaStream_t stream, T* to, const T* values, std::size_t n) {
  TOPKNOT_CUDA(cudaMemcpyAsync(to, values, n * sizeof(T), cudaMemcpyHostToDevice, stream));
  TOPKNOT_CUDA(cudaStreamSynchronize(stream));
}

class BorrowedCompressor final : public cuda::DeviceCompressor {
 public:
  BorrowedCompressor(const CompressOptions& options, const GroupSpec& group,
                     const std::vector<float>& weights)
      : compressor_(make_compressor(options, group)),
        numel_(group.numel),
        ranks_(static_cast<std::size_t>(group.ranks)),
        weights_(weights) {}

  std::size_t block_bytes() const override { return bytes_; }
  void set_density(double density) override {
    bytes_ = 1024 + static_cast<std::size_t>(density * static_cast<double>(numel_)) * 16 * 16;
  }

  void encode(cudaStream_t stream, cuda::DeviceSlice slice, const cuda::StepWords* step, cuda::Verdict*,
              std::byte* block) override {
    slice_ = slice;
    gradient_ = to_host(stream, slice.gradient.data(), numel_);
    spare_ = to_host(stream, slice.spare.data(), numel_);
    const cuda::StepWords words = to_host(stream, step, 1)[0];
    info_.step = words.step, info_.density = words.density, info_.lr = words.lr, info_.rank = words.rank;
    info_.weights = weights_;
    const Message message = compressor_->encode({gradient_, spare_}, info_);
    std::vector<std::byte> bytes(bytes_);
    const std::uint64_t length = message.block.size();
    if (length + sizeof length > bytes_) throw Error("a block too long for this test");
    std::memcpy(bytes.data(), &length, sizeof length);
    std::memcpy(bytes.data() + sizeof length, message.block.data(), length);
    to_gpu(stream, block, bytes.data(), bytes_);
  }

  void decode(cudaStream_t stream, const std::byte* blocks, const float* weights,
              cuda::Verdict* verdict) override {
    if (!weights_.empty() && to_host(stream, weights, ranks_) != weights_) throw Error("other weights");
    const std::vector<std::byte> bytes = to_host(stream, blocks, ranks_ * bytes_);
    std::vector<std::vector<std::byte>> all(ranks_);
    for (std::size_t rank = 0; rank < ranks_; ++rank) {
      std::uint64_t length = 0;
      const std::byte* at = bytes.data() + rank * bytes_;
      std::memcpy(&length, at, sizeof length);
      all[rank].assign(at + sizeof length, at + sizeof length + length);
    }
    Round round;
    round.blocks = all;
    compressor_->decode(round);
    cuda::Verdict found = to_host(stream, verdict, 1)[0];
    if (!compressor_->finite()) found.bad = 1;
    found.selected += compressor_->selected();
    to_gpu(stream, verdict, &found, 1);
  }

  std::span<float> commit(cudaStream_t stream, const cuda::Verdict* verdict) override {
    if (to_host(stream, verdict, 1)[0].bad) {
      compressor_->discard();
      gradient_ = spare_;  // the old residual, where the next residual is looked for
    } else {
      compressor_->commit({});
    }
    to_gpu(stream, slice_.gradient.data(), gradient_.data(), numel_);
    to_gpu(stream, slice_.spare.data(), spare_.data(), numel_);
    return slice_.spare;
  }

  GradientForm form() const override { return compressor_->form(); }
  std::vector<std::byte> state() const override { return compressor_->state(); }
  void load_state(std::span<const std::byte> bytes) override { compressor_->load_state(bytes); }

 private:
  std::unique_ptr<Compressor> compressor_;
  std::size_t numel_, ranks_, bytes_ = 0;
  cuda::DeviceSlice slice_;
  std::vector<float> gradient_, spare_;
  const std::vector<float> weights_;  // the CPU's compressors ask for them when they encode
  StepInfo info_;
};

class BorrowedCommunicator final : public cuda::DeviceCommunicator {
 public:
  explicit BorrowedCommunicator(Communicator& host) : host_(host) {}
  int rank() const override { return host_.rank(); }
  int size() const override { return host_.size(); }
  std::string backend() const override { return "borrowed"; }
  bool capturable() const override { return false; }

  void all_gather(const std::byte* mine, std::byte* all, std::size_t bytes, cudaStream_t stream) override {
    std::vector<std::vector<std::byte>> blocks;
    host_.all_gather(to_host(stream, mine, bytes), blocks);
    for (std::size_t rank = 0; rank < blocks.size(); ++rank)
      to_gpu(stream, all + rank * bytes, blocks[rank].data(), bytes);
  }
  void all_reduce(float* data, std::size_t n, SumOrder order, cudaStream_t stream) override {
    std::vector<float> values = to_host(stream, data, n);
    host_.all_reduce(std::span<float>(values), order);
    to_gpu(stream, data, values.data(), n);
  }
  void all_reduce_bfloat16(void* data, std::size_t n, SumOrder order, cudaStream_t stream) override {
    std::vector<BFloat16> values = to_host(stream, static_cast<const BFloat16*>(data), n);
    host_.all_reduce(std::span<BFloat16>(values), order);
    to_gpu(stream, static_cast<BFloat16*>(data), values.data(), n);
  }
  void broadcast(std::byte*, std::size_t, int, cudaStream_t) override { throw Error("not here"); }
  void wait(cudaStream_t stream) override { TOPKNOT_CUDA(cudaStreamSynchronize(stream)); }
  void abort(const std::string& reason) noexcept override { host_.abort(reason); }

 private:
  Communicator& host_;
};

class EchoCommunicator final : public cuda::DeviceCommunicator {
 public:
  int rank() const override { return 0; }
  int size() const override { return 2; }
  std::string backend() const override { return "echo"; }
  bool capturable() const override { return true; }

  void all_gather(const std::byte* mine, std::byte* all, std::size_t bytes, cudaStream_t stream) override {
    for (const std::size_t rank : {0, 1})
      TOPKNOT_CUDA(cudaMemcpyAsync(all + rank * bytes, mine, bytes, cudaMemcpyDeviceToDevice, stream));
  }
  void all_reduce(float* data, std::size_t n, SumOrder, cudaStream_t stream) override {
    cuda::add_floats(stream, data, data, data, n);
  }
  void all_reduce_bfloat16(void* data, std::size_t n, SumOrder, cudaStream_t stream) override {
    cuda::add_bfloat16(stream, data, data, data, n);
  }
  void broadcast(std::byte*, std::size_t, int, cudaStream_t) override {}
  void wait(cudaStream_t stream) override { TOPKNOT_CUDA(cudaStreamSynchronize(stream)); }
  void abort(const std::string&) noexcept override {}
};

}  // namespace

std::unique_ptr<cuda::DeviceCommunicator> echo_communicator() {
  return std::make_unique<EchoCommunicator>();
}

std::unique_ptr<cuda::DeviceCompressor> borrowed_compressor(const CompressOptions& options,
                                                            const GroupSpec& group,
                                                            const std::vector<float>& weights) {
  return std::make_unique<BorrowedCompressor>(options, group, weights);
}

std::unique_ptr<cuda::DeviceCommunicator> borrowed_communicator(Communicator& host) {
  return std::make_unique<BorrowedCommunicator>(host);
}

}  // namespace topknot::testing

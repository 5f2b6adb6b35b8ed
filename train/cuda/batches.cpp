#include "train/cuda/batches.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <deque>
#include <utility>
#include <vector>

#include "data/cuda/device_dataset.h"
#include "dist/exchange/cuda/step_kernels.h"
#include "nn/base/check.h"
#include "nn/core/cuda/context.h"
#include "nn/ops/cuda/layout.h"
#include "train/setup.h"

namespace topknot::cuda {
namespace {

constexpr std::size_t kStagings = 4;  // at least; the host may be twice as many batches ahead

bool fits_on_device(const Config& config, const Dataset& dataset, int neighbours) {
  if (dataset.task() == Task::language_model) return false;  // a batch is a few kB, and its windows overlap
  if (dataset.task() == Task::transcription) return false;   // of any length
  if (dataset.on_demand()) {
    if (config.data.on_device == "true")
      throw UserError(fmt::format(
          "data.on_device: the samples of {} are decoded when they are needed and do not lie on the "
          "GPU; give auto or false",
          dataset.name()));
    return false;
  }
  if (config.data.on_device != "auto") return config.data.on_device == "true";
  const std::size_t sample =
      static_cast<std::size_t>(dataset.sample_shape().numel()) * (dataset.bytes(0) ? 1 : sizeof(float));
  std::size_t free = 0, total = 0;
  TOPKNOT_CUDA(cudaMemGetInfo(&free, &total));
  return sample * static_cast<std::size_t>(dataset.size()) <=
         total / 4 / static_cast<std::size_t>(neighbours);
}

class DeviceBatches {
 public:
  // With `parts` batches per step.
  DeviceBatches(const Config& config, const Dataset& dataset, const Module& model, bool train, int parts,
                int neighbours)
      : dataset_(dataset),
        model_(model),
        data_(fits_on_device(config, dataset, neighbours)
                  ? std::make_unique<DeviceDataset>(
                        dataset, train && resolve_augment(config.data.augment, dataset), config.seed)
                  : nullptr),
        batches_(static_cast<std::size_t>(parts)),
        staging_(std::max(kStagings, batches_.size())) {}
  bool has_data() const { return data_ != nullptr; }
  // Batches::Bring, on the context's stream.
  const BatchView* bring(Loader& loader, int part) {
    Batch batch;
    if (!loader.next(batch)) return nullptr;
    DeviceBatch& to = batches_[static_cast<std::size_t>(part)];
    shape(to, batch);
    to.view.losses = data_ ? batch.size() : batch.losses();
    if (data_)
      make(batch, loader.epoch(), to);
    else
      copy(batch, to);
    if (batch.frames.empty()) return &to.view;
    to.host = std::move(batch);
    to.host.images = {};
    to.view.host = &to.host;
    return &to.view;
  }

 private:
  struct DeviceBatch {
    BatchView view;  // of what follows
    DeviceArray<std::int32_t> labels, lengths, frames;
    Batch host;  // transcription: the batch that they came from, without its images
    std::int64_t size = 0;
  };
  // A batch on its way: page-locked memory, its copy on the GPU, and when that has come and been read.
  struct Staging {
    std::unique_ptr<PinnedMemory> memory;
    DeviceArray<std::byte> device;
    Event arrived, read;
  };
  // The next one, of at least `bytes`, which nothing reads any more.
  Staging& staging(std::size_t bytes) {
    Staging& next = staging_[next_staging_++ % staging_.size()];
    next.arrived.synchronize();  // at once for an event that was never recorded
    if (!next.memory || next.memory->size() < bytes) {
      next.memory = std::make_unique<PinnedMemory>(bytes);
      next.device = {};
      next.device = DeviceArray<std::byte>(bytes);
      next.read.record(Context::current().stream());  // whoever had the memory before
    }
    return next;
  }
  // Copies the first `bytes` by the stream of copies, and lets the compute stream wait for them.
  void send(Staging& staging, std::size_t bytes) {
    staging.read.wait(copies_.get());
    TOPKNOT_CUDA(cudaMemcpyAsync(staging.device.data(), staging.memory->data(), bytes, cudaMemcpyHostToDevice,
                                 copies_.get()));
    staging.arrived.record(copies_.get());
    staging.arrived.wait(Context::current().stream());
  }
  void shape(DeviceBatch& batch, const Batch& from) {
    const std::int64_t size = from.size();
    const Context& context = Context::current();
    BatchView& view = batch.view;
    if (!from.frames.empty()) {  // of another shape each time
      view.images =
          Tensor::empty(from.images.shape(), Layout::nhwc, context.device(), context.activation_type());
      batch.labels = DeviceArray<std::int32_t>(from.labels.size());
      batch.lengths = DeviceArray<std::int32_t>(from.lengths.size());
      batch.frames = DeviceArray<std::int32_t>(from.frames.size());
    } else {
      if (batch.size == size) return;
      const Shape sample = dataset_.sample_shape();
      const bool tokens = dataset_.task() == Task::language_model;
      view.images = Tensor::empty({size, sample[0], sample[1], sample[2]}, Layout::nhwc, context.device(),
                                  tokens ? DType::f32 : context.activation_type());
      if (dataset_.classes() > 0)
        batch.labels =
            DeviceArray<std::int32_t>(static_cast<std::size_t>(size * dataset_.labels_per_sample()));
      else
        view.targets = Tensor::empty({size, dataset_.targets()}, Layout::plain, context.device());
    }
    batch.size = size;
    const auto span_of = [](const DeviceArray<std::int32_t>& values) {
      return std::span<const std::int32_t>(values.data(), values.size());
    };
    view.labels = span_of(batch.labels), view.lengths = span_of(batch.lengths),
    view.frames = span_of(batch.frames);
  }
  void copy(const Batch& from, DeviceBatch& to) {
    const cudaStream_t stream = Context::current().stream();
    struct Part {
      const void* from;
      std::size_t bytes, at;
      void* to;  // null: the images, which are transformed
    };
    std::vector<Part> parts;
    std::size_t total = 0;
    const auto add = [&](const void* data, std::size_t bytes, void* device) {
      parts.push_back({data, bytes, total, device});
      total += (bytes + 15) / 16 * 16;
    };
    const std::vector<std::int32_t> frames =
        from.frames.empty() ? std::vector<std::int32_t>() : output_frames(model_, from);
    if (from.bytes.empty())
      add(from.images.data(), from.images.bytes(), nullptr);
    else
      add(from.bytes.data(), from.bytes.size(), nullptr);
    add(from.labels.data(), from.labels.size() * sizeof(std::int32_t), to.labels.data());
    if (from.targets.defined()) add(from.targets.data(), from.targets.bytes(), to.view.targets.data());
    add(from.lengths.data(), from.lengths.size() * sizeof(std::int32_t), to.lengths.data());
    add(frames.data(), frames.size() * sizeof(std::int32_t), to.frames.data());

    Staging& staged = staging(total);
    for (const Part& part : parts)
      if (part.bytes > 0) std::memcpy(staged.memory->data() + part.at, part.from, part.bytes);
    send(staged, total);
    for (const Part& part : parts)
      if (part.to && part.bytes > 0)
        TOPKNOT_CUDA(cudaMemcpyAsync(part.to, staged.device.data() + part.at, part.bytes,
                                     cudaMemcpyDeviceToDevice, stream));
    if (from.bytes.empty()) {
      const Tensor plain = Tensor::view(reinterpret_cast<float*>(staged.device.data()), from.images.shape(),
                                        Context::current().device());
      const Tensor activation = dataset_.task() == Task::language_model ? plain : to_activation(plain);
      TOPKNOT_CUDA(cudaMemcpyAsync(to.view.images.data(), activation.data(), activation.bytes(),
                                   cudaMemcpyDeviceToDevice, stream));
    } else {
      normalise(staged.device.data(), to.view.images);
    }
    staged.read.record(stream);
  }
  // Makes normalised pictures, [n, C, H, W] on the GPU, from the data set's bytes.
  void normalise(const std::byte* bytes, Tensor& images) {
    if (statistics_.size() == 0) statistics_ = device_statistics(dataset_);
    const Shape shape = dataset_.sample_shape();
    const auto word = [](std::int64_t value) { return static_cast<std::uint32_t>(value); };
    StoredSamples stored{};
    stored.samples = bytes;
    stored.as_bytes = stored.channels_first = true;
    stored.channels = word(shape[0]), stored.height = word(shape[1]), stored.width = word(shape[2]);
    stored.statistics = statistics_.data();
    BatchMemory batch{};
    batch.n = word(images.shape()[0]);
    batch.images = images.data();
    batch.bf16 = images.dtype() == DType::bf16;
    batch.nhwc = images.layout() == Layout::nhwc;
    make_batch_images(Context::current().stream(), stored, batch, false, {}, nullptr);
  }
  void make(const Batch& from, std::int64_t epoch, DeviceBatch& to) {
    const cudaStream_t stream = Context::current().stream();
    if (std::exchange(epoch_there_, epoch) != epoch)
      count_up(stream, epoch_.data(), static_cast<std::uint32_t>(epoch), 1);
    const std::size_t bytes = from.indices.size() * sizeof(std::int32_t);
    Staging& host = staging(bytes);
    auto* indices = reinterpret_cast<std::int32_t*>(host.memory->data());
    for (std::size_t i = 0; i < from.indices.size(); ++i)
      indices[i] = static_cast<std::int32_t>(from.indices[i]);
    send(host, bytes);
    data_->make_batch(stream, reinterpret_cast<const std::int32_t*>(host.device.data()), from.size(),
                      epoch_.data(), to.view.images, to.labels.data(), to.view.targets);
    host.read.record(stream);
  }

  const Dataset& dataset_;
  const Module& model_;
  std::unique_ptr<DeviceDataset> data_;  // null: batches come from the loader
  DeviceArray<std::uint32_t> epoch_{1};  // for data_
  std::int64_t epoch_there_ = -1;        // that was written to it last
  std::vector<DeviceBatch> batches_;     // one per part
  DeviceArray<float> statistics_;        // of the channels, where batches come as bytes
  Stream copies_;                        // concurrent with the steps
  std::deque<Staging> staging_;          // used in turn; a step's batches at least
  std::size_t next_staging_ = 0;
};

}  // namespace

std::unique_ptr<Batches> make_device_batches(const Config& config, const Dataset& dataset,
                                             const Module& model, bool train, int rank, int ranks,
                                             int neighbours) {
  const int parts = train ? config.train.accumulate : 1;
  const auto device = std::make_shared<DeviceBatches>(config, dataset, model, train, parts, neighbours);
  LoaderOptions options = loader_options(config, dataset, train, rank, ranks);
  options.samples = !device->has_data();
  if (device->has_data()) options.workers = 0;
  options.bytes = true;
  return std::make_unique<Batches>(
      dataset, options, [device](Loader& loader, int part) { return device->bring(loader, part); }, parts);
}

}  // namespace topknot::cuda

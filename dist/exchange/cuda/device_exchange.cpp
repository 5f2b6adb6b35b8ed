// Pipelines of gradients that stay on the GPU. Encoding and decoding run on the compute stream, the collectives, in the
// order of the groups, on the communication stream, joined by events; so a whole step can be one graph.
#include "dist/exchange/cuda/device_exchange.h"

#include <fmt/format.h>

#include <exception>
#include <utility>

#include "compress/codec/cuda/device_codec.h"
#include "compress/cuda/device_compressor.h"
#include "compress/state.h"
#include "dist/exchange/cuda/device_exchange_kernels.h"
#include "nn/core/base/check.h"
#include "nn/core/base/log.h"

namespace topknot::cuda {
namespace {

using Compressors = std::vector<std::unique_ptr<DeviceCompressor>>;  // by group; null: a dense one

class DevicePipeline;

class GpuExecution final : public DeviceExecution {
 public:
  GpuExecution(DeviceCommunicator& device, const ExchangeOptions& options, Compressors compressors)
      : DeviceExecution(device.size()),
        device_(device),
        order_(options.compressing() || options.ordered_sum ? SumOrder::ranks : SumOrder::library),
        narrow_(!options.compressing() && options.compress.values == "bf16"),
        compressors_(std::move(compressors)),
        my_status_(1),
        all_statuses_(static_cast<std::size_t>(device.size())) {}

  int rank() const override { return device_.rank(); }
  int ranks() const override { return device_.size(); }
  std::unique_ptr<GroupPipeline> make_pipeline(const Group& group, int index) override;

  // Without graphs for collectives, a graph that ready() is captured in cannot hold them.
  bool sends_early() const override { return capture() == Exchange::Capture::whole; }
  void complete(const float* loss) override;
  void begin_collectives() override {
    if (ranks() == 1) return;
    encoded_.record(compute());
    encoded_.wait(communication());
  }
  void submit_agreement() override {
    if (ranks() == 1) return;
    send_status();
    sent_.record(communication());
    // A graph of its own for decoding cannot wait for what happened outside of it.
    if (!sends_early()) sent_.wait(compute());
  }
  void receive_agreement() override {
    if (!joined()) sent_.wait(compute());
  }
  Agreed agree(std::span<const std::unique_ptr<GroupPipeline>>) override;
  bool decides_on_host() const override { return false; }
  void finish_step(StepResult&) override {}
  Exchange::Capture capture() const override {
    return ranks() == 1 || device_.capturable() ? Exchange::Capture::whole : Exchange::Capture::parts;
  }
  // A rank that gave up may leave collectives under way; memory is given back in the compute stream's order.
  void quiesce() noexcept override {
    try {
      sent_.record(communication());
      sent_.wait(compute());
    } catch (const std::exception&) {  // the GPU is lost, and the first error is being handled already
    }
  }

 private:
  friend class DevicePipeline;
  // Whether decode_and_commit() finds the compute stream behind all collectives.
  bool joined() const { return ranks() == 1 || !sends_early(); }
  void send_status();

  DeviceCommunicator& device_;
  const SumOrder order_;
  const bool narrow_;  // dense sums travel as bfloat16
  Compressors compressors_;
  DevicePipeline* carrier_ =
      nullptr;  // whose blocks bring the statuses; null: of one rank, or all groups are dense
  DeviceArray<RankStatus> my_status_, all_statuses_;
  Event encoded_, sent_;  // all groups
};

// A compressed group has a compressor with kernels; a dense one is summed, as floats or (compress.values bf16) as
// bfloat16 numbers, and averaged as compress/dense.cpp does it.
class DevicePipeline final : public GroupPipeline {
 public:
  DevicePipeline(const Group& group, std::unique_ptr<DeviceCompressor> compressor, GpuExecution& execution)
      : group_(group),
        execution_(execution),
        compressor_(std::move(compressor)),
        narrow_(execution.narrow_ && !compressor_) {
    if (narrow_) narrowed_ = DeviceArray<std::uint16_t>(group.numel());
  }

  void begin_step(const StepInfo& info) override {
    if (!compressor_ || std::exchange(density_, info.density) == info.density) return;
    compressor_->set_density(info.density);
    const std::size_t bytes = compressor_->block_bytes(), ranks = info.weights.size();
    TOPKNOT_CHECK(bytes > 0 && bytes % 16 == 0, "a block's length is a multiple of 16");
    mine_ = {}, all_ = {};  // the old memory first, so that the new may take its place
    mine_ = DeviceArray<std::byte>(bytes);
    if (ranks > 1) all_ = DeviceArray<std::byte>(ranks * bytes);
  }

  void encode(Slice slice) override {
    slice_ = {slice.gradient, slice.spare};
    const DeviceStep& step = execution_.step();
    const float* weight = step.weights() + execution_.rank();
    if (compressor_)
      compressor_->encode(compute(), slice_, step.parameters(), step.status(), mine_.data());
    else if (narrow_)
      narrow_by_weight(compute(), slice_.gradient.data(), group_.numel(), weight, narrowed_.data());
    else
      multiply_by_weight(compute(), slice_.gradient.data(), group_.numel(), weight);
    if (!execution_.joined() && !carries()) encoded_.record(compute());
  }

  // The carrier's waits for the loss, which the end of the backward pass brings too.
  void send() override {
    if (execution_.ranks() > 1 && !carries()) start();
  }

  // Of the carrier: this rank's status is written into the block behind its entries, which is then sent.
  void write_status(const float* loss) {
    write_rank_status(compute(), loss,
                      reinterpret_cast<RankStatus*>(mine_.data() + mine_.size() - kTrailerBytes));
    if (!execution_.joined()) encoded_.record(compute());
  }
  void agree() const {
    cuda::agree(compute(), reinterpret_cast<const RankStatus*>(all_.data() + mine_.size() - kTrailerBytes),
                mine_.size(), execution_.ranks(), execution_.step().status());
  }

  void start() {
    const bool early = execution_.sends_early();
    const cudaStream_t stream = Context::current().communication();
    if (early) encoded_.wait(stream);
    if (compressor_)
      execution_.device_.all_gather(mine_.data(), all_.data(), mine_.size(), stream);
    else if (narrow_)
      execution_.device_.all_reduce_bfloat16(narrowed_.data(), group_.numel(), execution_.order_, stream);
    else
      execution_.device_.all_reduce(slice_.gradient.data(), group_.numel(), execution_.order_, stream);
    if (early) arrived_.record(stream);
  }

  bool decode() override {
    if (!execution_.joined()) arrived_.wait(compute());
    const float factor = 1.0f / static_cast<float>(execution_.ranks());
    const DeviceStep& step = execution_.step();
    float* const gradient = slice_.gradient.data();
    if (compressor_)
      compressor_->decode(compute(), execution_.ranks() > 1 ? all_.data() : mine_.data(), step.weights(),
                          step.status());
    else if (narrow_)
      average_sum_bfloat16(compute(), narrowed_.data(), gradient, group_.numel(), factor, step.status());
    else
      average_sum(compute(), gradient, group_.numel(), factor, step.status());
    return false;  // a method with more rounds has no kernels
  }

  bool commit() override {
    if (!compressor_) return false;
    const std::span<float> average = compressor_->commit(compute(), execution_.step().status());
    TOPKNOT_CHECK(average.size() == group_.numel(), "an average of another length than its group");
    return average.data() == slice_.spare.data();
  }

  GradientForm form() const override { return compressor_ ? compressor_->form() : GradientForm::plain; }

  // Blocks have equal lengths, so nothing depends on the data.
  void add_stats(ExchangeStats& stats) const override {
    const std::uint64_t sent =
        compressor_ ? mine_.size() : group_.numel() * (narrow_ ? sizeof(std::uint16_t) : sizeof(float));
    const auto others = static_cast<std::uint64_t>(execution_.ranks() - 1);
    stats.bytes_sent += sent;
    if (others > 0) stats.bytes_received += compressor_ ? sent * others : sent;
  }

  void save(StateWriter& writer) const override {
    // The host's compressor of a dense group carries nothing, in as many bytes.
    writer.put_nested([this](StateWriter& nested) {
      if (compressor_) compressor_->save(nested);
    });
  }

  void load(StateReader& reader) override {
    const auto bytes = reader.get_list<std::byte>();
    if (compressor_)
      compressor_->load_state(bytes);
    else if (!bytes.empty())
      StateReader::fail("has bytes for a group that is not compressed");
  }

 private:
  static cudaStream_t compute() { return Context::current().stream(); }
  bool carries() const { return execution_.carrier_ == this; }

  const Group& group_;
  GpuExecution& execution_;
  const std::unique_ptr<DeviceCompressor> compressor_;
  const bool narrow_;
  double density_ = 0;
  DeviceSlice slice_;
  DeviceArray<std::byte> mine_, all_;    // a compressed group's blocks
  DeviceArray<std::uint16_t> narrowed_;  // what travels, where it is not the gradient itself
  Event encoded_, arrived_;              // on the compute and on the communication stream
};

std::unique_ptr<GroupPipeline> GpuExecution::make_pipeline(const Group& group, int index) {
  auto pipeline = std::make_unique<DevicePipeline>(
      group, std::move(compressors_[static_cast<std::size_t>(index)]), *this);
  // The last one, since it waits for the loss.
  if (group.compressed && group.numel() > 0 && ranks() > 1) carrier_ = pipeline.get();
  return pipeline;
}

void GpuExecution::complete(const float* loss) {
  if (carrier_)
    carrier_->write_status(loss);
  else
    write_rank_status(compute(), loss, my_status_.data());
}

void GpuExecution::send_status() {
  if (carrier_)
    carrier_->start();
  else
    device_.all_gather(reinterpret_cast<const std::byte*>(my_status_.data()),
                       reinterpret_cast<std::byte*>(all_statuses_.data()), sizeof(RankStatus),
                       communication());
}

StepExecution::Agreed GpuExecution::agree(std::span<const std::unique_ptr<GroupPipeline>>) {
  if (carrier_)
    carrier_->agree();
  else
    cuda::agree(compute(), ranks() == 1 ? my_status_.data() : all_statuses_.data(), sizeof(RankStatus),
                ranks(), step().status());
  return {};
}

}  // namespace

void DeviceExecution::begin_step(const StepInfo& info) {
  StepParameters parameters;
  parameters.step = info.step;
  parameters.density = info.density;
  parameters.lr = info.lr;
  parameters.rank = info.rank;
  step_.begin(compute(), parameters, info.weights);
}

std::string what_needs_the_host(const ExchangeOptions& options, int ranks) {
  if (options.collective != "all_gather") return "exchange.collective: " + options.collective;
  if (options.ranks_per_host > 1 && ranks > 1)
    return fmt::format("exchange.ranks_per_host: {}", options.ranks_per_host);
  if (options.compressing() && options.dense_values != "fp32")
    return "compress.dense_values: " + options.dense_values;
  return "";
}

std::unique_ptr<DeviceExchange> make_gpu_exchange(ParameterArena& arena, DeviceCommunicator& device,
                                                  const ExchangeOptions& options) {
  std::vector<Group> groups = plan_groups(arena, options);
  Compressors compressors;
  for (const Group& group : groups) {
    const GroupSpec spec = group_spec(group, options.scope, device.size(), options.layer_density);
    std::unique_ptr<DeviceCompressor>& compressor = compressors.emplace_back();
    if (group.compressed && !(compressor = make_device_compressor(options.compress, spec))) return nullptr;
    if (!options.compressing()) planned_bytes(options.compress, spec, 1.0);  // validates the options
  }
  return std::make_unique<DeviceExchange>(
      arena, std::move(groups), std::make_unique<GpuExecution>(device, options, std::move(compressors)));
}

std::unique_ptr<DeviceExchange> make_device_exchange(ParameterArena& arena, CollectiveQueue& queue,
                                                     DeviceCommunicator* device,
                                                     const ExchangeOptions& options) {
  if (!device) return make_staged_exchange(arena, queue, options);
  std::string why = what_needs_the_host(options, queue.communicator().size());
  if (why.empty()) {
    if (auto exchange = make_gpu_exchange(arena, *device, options)) return exchange;
    why = fmt::format("compress.name: {} with these options", options.compress.name);
  }
  auto exchange = make_staged_exchange(arena, queue, options);  // refuses what contradicts itself
  log_info(fmt::format("{} has no kernels: gradients go through the CPU, over {}", why,
                       queue.communicator().backend()));
  return exchange;
}

}  // namespace topknot::cuda

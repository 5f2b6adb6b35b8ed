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
#include "dist/exchange/host_sum.h"
#include "dist/sparse/cuda/device_hierarchy.h"
#include "nn/base/check.h"
#include "nn/base/log.h"

namespace topknot::cuda {
namespace {

using Kind = ExchangeSpan::Kind;
using Compressors = std::vector<std::unique_ptr<DeviceCompressor>>;  // by group; null: a dense one

class DevicePipeline;
class DeviceHostSum;

class GpuExecution final : public DeviceExecution {
 public:
  // `hierarchy`: null where every rank encodes for itself.
  GpuExecution(DeviceCommunicator& all, std::unique_ptr<DeviceHierarchy> hierarchy,
               const ExchangeOptions& options, Compressors compressors)
      : DeviceExecution(hierarchy ? hierarchy->weights() : all.size()),
        all_(all),
        hierarchy_(std::move(hierarchy)),
        device_(hierarchy_ ? hierarchy_->hosts() : all),
        order_(options.compressing() || options.ordered_sum ? SumOrder::ranks : SumOrder::library),
        narrow_(!options.compressing() && options.compress.values == "bf16"),
        compressors_(std::move(compressors)),
        my_status_(1),
        all_statuses_(static_cast<std::size_t>(all.size())) {}

  int rank() const override { return all_.rank(); }
  int ranks() const override { return all_.size(); }
  std::unique_ptr<GroupPipeline> make_pipeline(const Group& group, int index) override;
  void begin_step(const StepContext& info) override {
    DeviceExecution::begin_step(hierarchy_ ? hierarchy_->begin_step(info) : info);
  }

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
    if (!sends_early()) wait_for(sent_, ExchangeSpan::kAgreement);
  }
  void receive_agreement() override {
    if (!joined()) wait_for(sent_, ExchangeSpan::kAgreement);
  }
  Agreed agree(std::span<const std::unique_ptr<GroupPipeline>>) override;
  bool decides_on_host() const override { return false; }
  void finish_step(StepResult&) override {}
  Exchange::Capture capture() const override {
    if (ranks() == 1 || all_.capturable()) return Exchange::Capture::whole;
    // A hierarchy encodes between the collectives, which the host starts.
    return hierarchy_ ? Exchange::Capture::none : Exchange::Capture::parts;
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
  friend class DeviceHostSum;
  // Whether decode_and_commit() finds the compute stream behind all collectives.
  bool joined() const { return ranks() == 1 || !sends_early(); }
  // Whether groups are encoded while collectives are under way.
  bool interleaved() const { return !joined() || hierarchy_; }
  void send_status();
  // On the compute stream, for an event of the communication stream.
  void wait_for(Event& event, int group, int round = 0) {
    times().around({nullptr, {Kind::wait, group, round, {}, {}}}, compute(), [&] { event.wait(compute()); });
  }

  DeviceCommunicator& all_;  // of the ranks
  const std::unique_ptr<DeviceHierarchy> hierarchy_;
  HostSum* held_ = nullptr;     // whose message waits for the sum inside the host
  DeviceCommunicator& device_;  // of those that encode for themselves: ranks, or hosts
  const SumOrder order_;
  const bool narrow_;  // dense sums are sent as bfloat16
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
  DevicePipeline(const Group& group, int index, std::unique_ptr<DeviceCompressor> compressor,
                 GpuExecution& execution)
      : group_(group),
        index_(index),
        execution_(execution),
        compressor_(std::move(compressor)),
        narrow_(execution.narrow_ && !compressor_) {
    if (narrow_) narrowed_ = DeviceArray<std::uint16_t>(group.numel());
  }

  void begin_step(const StepContext& info) override {
    if (!compressor_ || std::exchange(density_, info.density) == info.density) return;
    compressor_->set_density(info.density);
    const std::size_t bytes = compressor_->block_bytes(), ranks = info.weights.size();
    TOPKNOT_CHECK(bytes > 0 && bytes % 16 == 0, "a block's length is a multiple of 16");
    mine_ = {}, all_ = {};  // the old memory first, so that the new may take its place
    mine_ = DeviceArray<std::byte>(bytes);
    if (ranks > 1) all_ = DeviceArray<std::byte>(ranks * bytes);
  }

  void encode(Slice slice) override {
    slice_ = {slice.gradient, slice.residual};
    const DeviceStep& step = execution_.step();
    const float* weight = step.weights() + execution_.device_.rank();
    execution_.times().around(mark(Kind::encode), compute(), [&] {
      if (compressor_)
        compressor_->encode(compute(), slice_, step.parameters(), step.status(), mine_.data());
      else if (narrow_)
        narrow_by_weight(compute(), slice_.gradient.data(), group_.numel(), weight, narrowed_.data());
      else
        multiply_by_weight(compute(), slice_.gradient.data(), group_.numel(), weight);
    });
    if (execution_.interleaved()) encoded_.record(compute());
  }

  // The carrier's waits for the loss, which the end of the backward pass brings too.
  void send() override {
    if (execution_.device_.size() > 1 && !carries()) start();
  }

  // Of the carrier's block, behind its entries.
  RankStatus* my_status() {
    return reinterpret_cast<RankStatus*>(mine_.data() + mine_.size() - kTrailerBytes);
  }
  const RankStatus* first_status() const {
    return reinterpret_cast<const RankStatus*>(all_.data() + mine_.size() - kTrailerBytes);
  }
  std::size_t status_stride() const { return mine_.size(); }

  void await_encoded(cudaStream_t stream) {
    if (execution_.interleaved()) encoded_.wait(stream);
  }
  void start() {
    const bool early = execution_.sends_early();
    const cudaStream_t stream = Context::current().communication();
    await_encoded(stream);
    DeviceCommunicator& device = execution_.device_;
    execution_.times().around(mark(Kind::communicate), stream, [&] {
      if (compressor_)
        device.all_gather(mine_.data(), all_.data(), mine_.size(), stream);
      else if (narrow_)
        device.all_reduce_bfloat16(narrowed_.data(), group_.numel(), execution_.order_, stream);
      else
        device.all_reduce(slice_.gradient.data(), group_.numel(), execution_.order_, stream);
    });
    if (early) arrived_.record(stream);
  }

  bool decode() override {
    if (!execution_.joined() && execution_.device_.size() > 1) execution_.wait_for(arrived_, index_);
    const int encoding = execution_.device_.size();
    const float factor = 1.0f / static_cast<float>(encoding);
    const DeviceStep& step = execution_.step();
    float* const gradient = slice_.gradient.data();
    execution_.times().around(mark(Kind::decode), compute(), [&] {
      if (compressor_)
        compressor_->decode(compute(), encoding > 1 ? all_.data() : mine_.data(), step.weights(),
                            step.status());
      else if (narrow_)
        average_sum_bfloat16(compute(), narrowed_.data(), gradient, group_.numel(), factor, step.status());
      else
        average_sum(compute(), gradient, group_.numel(), factor, step.status());
    });
    return false;  // a method with more rounds has no kernels
  }

  bool commit() override {
    if (!compressor_) return false;
    std::span<float> average;
    execution_.times().around(mark(Kind::commit), compute(),
                              [&] { average = compressor_->commit(compute(), execution_.step().status()); });
    TOPKNOT_CHECK(average.size() == group_.numel(), "an average of another length than its group");
    return average.data() == slice_.residual.data();
  }

  GradientForm form() const override { return compressor_ ? compressor_->form() : GradientForm::plain; }

  // Blocks have equal lengths, so nothing depends on the data.
  void add_stats(ExchangeStats& stats) const override {
    const std::uint64_t sent =
        compressor_ ? mine_.size() : group_.numel() * (narrow_ ? sizeof(std::uint16_t) : sizeof(float));
    const auto others = static_cast<std::uint64_t>(execution_.device_.size() - 1);
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
  DeviceTimes::Mark mark(Kind kind) const { return {nullptr, {kind, index_, 0, {}, {}}}; }

  const Group& group_;
  const int index_;
  GpuExecution& execution_;
  const std::unique_ptr<DeviceCompressor> compressor_;
  const bool narrow_;
  double density_ = 0;
  DeviceSlice slice_;
  DeviceArray<std::byte> mine_, all_;    // a compressed group's blocks
  DeviceArray<std::uint16_t> narrowed_;  // what is sent, where it is not the gradient itself
  Event encoded_, arrived_;              // on the compute and on the communication stream
};

// The sum inside the host on the communication stream.
class DeviceHostSum final : public HostSum {
 public:
  DeviceHostSum(std::unique_ptr<GroupPipeline> inner, int index, GpuExecution& execution)
      : HostSum(std::move(inner), execution.hierarchy_->hierarchy(), execution.held_),
        index_(index),
        execution_(execution),
        device_(*execution.hierarchy_) {}

 private:
  void start(std::span<float> gradient) override {
    Context& context = Context::current();
    const cudaStream_t stream = context.communication();
    const float* const weight = execution_.step().weights() + device_.hosts().size();
    complete_.record(context.stream());
    complete_.wait(stream);
    const ExchangeSpan span{Kind::communicate, index_, ExchangeSpan::kInsideHost, {}, {}};
    execution_.times().around({nullptr, span}, stream, [&] {
      multiply_by_weight(stream, gradient.data(), gradient.size(), weight);
      device_.inside().all_reduce(gradient.data(), gradient.size(), SumOrder::ranks, stream);
      divide_by_total(stream, gradient.data(), gradient.size(), weight + 1);
    });
    summed_.record(stream);
  }
  void wait() override { execution_.wait_for(summed_, index_, ExchangeSpan::kInsideHost); }

  const int index_;
  GpuExecution& execution_;
  DeviceHierarchy& device_;
  Event complete_, summed_;  // on the compute and on the communication stream
};

std::unique_ptr<GroupPipeline> GpuExecution::make_pipeline(const Group& group, int index) {
  auto pipeline = std::make_unique<DevicePipeline>(
      group, index, std::move(compressors_[static_cast<std::size_t>(index)]), *this);
  // The last one, since it waits for the loss.
  if (group.compressed && group.numel() > 0 && device_.size() > 1) carrier_ = pipeline.get();
  if (!hierarchy_) return pipeline;
  return std::make_unique<DeviceHostSum>(std::move(pipeline), index, *this);
}

void GpuExecution::complete(const float* loss) {
  const bool in_block = carrier_ && !hierarchy_;
  write_rank_status(compute(), loss, rank(), in_block ? carrier_->my_status() : my_status_.data());
}

void GpuExecution::send_status() {
  const auto gather = [this](DeviceCommunicator& communicator) {
    times().around({nullptr, {Kind::communicate, ExchangeSpan::kAgreement, 0, {}, {}}}, communication(), [&] {
      communicator.all_gather(reinterpret_cast<const std::byte*>(my_status_.data()),
                              reinterpret_cast<std::byte*>(all_statuses_.data()), sizeof(RankStatus),
                              communication());
    });
  };
  if (!carrier_) return gather(all_);
  if (hierarchy_) {
    gather(hierarchy_->inside());
    carrier_->await_encoded(communication());  // encoding writes zeros where the status goes
    join_rank_statuses(communication(), all_statuses_.data(), hierarchy_->inside().size(),
                       carrier_->my_status());
  }
  carrier_->start();
}

StepExecution::Agreed GpuExecution::agree(std::span<const std::unique_ptr<GroupPipeline>>) {
  const int per_host = ranks() / device_.size();
  if (carrier_)
    cuda::agree(compute(), carrier_->first_status(), carrier_->status_stride(), device_.size(), per_host,
                step().status());
  else
    cuda::agree(compute(), ranks() == 1 ? my_status_.data() : all_statuses_.data(), sizeof(RankStatus),
                ranks(), per_host, step().status());
  return {};
}

}  // namespace

void DeviceExecution::begin_step(const StepContext& info) {
  StepParameters parameters;
  parameters.step = info.step;
  parameters.density = info.density;
  parameters.lr = info.lr;
  parameters.rank = info.rank;
  step_.begin(compute(), parameters, info.weights);
}

std::string what_needs_the_host(const ExchangeOptions& options) {
  if (options.collective != "all_gather") return "exchange.collective: " + options.collective;
  if (options.compressing() && options.dense_values != "fp32")
    return "compress.dense_values: " + options.dense_values;
  return "";
}

std::unique_ptr<DeviceExchange> make_gpu_exchange(ParameterArena& arena, CollectiveQueue& queue,
                                                  DeviceCommunicator& device,
                                                  const ExchangeOptions& options) {
  std::vector<Group> groups = plan_groups(arena, options);
  const bool hierarchical = options.hierarchical(device.size());
  const int encoding = hierarchical ? device.size() / options.ranks_per_host : device.size();
  Compressors compressors;
  for (const Group& group : groups) {
    const GroupSpec spec = group_spec(group, options.scope, encoding, options.layer_density);
    std::unique_ptr<DeviceCompressor>& compressor = compressors.emplace_back();
    if (group.compressed && !(compressor = make_device_compressor(options.compress, spec))) return nullptr;
    if (!options.compressing()) planned_bytes(options.compress, spec, 1.0);  // validates the options
  }
  std::unique_ptr<DeviceHierarchy> hierarchy;
  if (hierarchical) hierarchy = std::make_unique<DeviceHierarchy>(queue, device, options.ranks_per_host);
  return std::make_unique<DeviceExchange>(
      arena, std::move(groups),
      std::make_unique<GpuExecution>(device, std::move(hierarchy), options, std::move(compressors)));
}

std::unique_ptr<DeviceExchange> make_device_exchange(ParameterArena& arena, CollectiveQueue& queue,
                                                     DeviceCommunicator* device,
                                                     const ExchangeOptions& options) {
  if (!device) return make_staged_exchange(arena, queue, options);
  std::string why = what_needs_the_host(options);
  if (why.empty()) {
    if (auto exchange = make_gpu_exchange(arena, queue, *device, options)) return exchange;
    why = fmt::format("compress.name: {} with these options", options.compress.name);
  }
  auto exchange = make_staged_exchange(arena, queue, options);  // refuses what contradicts itself
  log_info(fmt::format("{} has no kernels: gradients go through the CPU, over {}", why,
                       queue.communicator().backend()));
  return exchange;
}

}  // namespace topknot::cuda

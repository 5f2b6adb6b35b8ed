// The transport of gradients that stay on the GPU. Encoding and decoding run on the compute stream, the
// collectives, in the order of the groups, on the communication stream, joined by events, fit for one graph.
#include "dist/exchange/cuda/device_exchange.h"

#include <fmt/format.h>

#include <deque>
#include <exception>

#include "compress/codec/cuda/device_codec.h"
#include "compress/cuda/device_compressor.h"
#include "dist/exchange/cuda/step_kernels.h"
#include "dist/sparse/hierarchical.h"
#include "nn/base/check.h"
#include "nn/base/log.h"

namespace topknot::cuda {
namespace {

using Kind = ExchangeSpan::Kind;

// All ranks' bytes up to which a dense group is gathered with blocks: 40 us at 25 GB/s. An estimate.
constexpr std::size_t kMostGathered = 1 << 20;

// The hosts of dist/sparse/hierarchical.h as a communicator of GPUs. Every rank of a host makes the same calls with
// the same bits; the first talks to the other hosts, and broadcasts.
class DeviceHosts final : public DeviceCommunicator {
 public:
  // `across`: null on ranks that are not their host's first.
  DeviceHosts(DeviceCommunicator& inside, DeviceCommunicator* across, const Communicator& hosts)
      : inside_(inside), across_(across), host_(hosts.rank()), hosts_(hosts.size()) {}

  int rank() const override { return host_; }
  int size() const override { return hosts_; }
  std::string backend() const override { return inside_.backend(); }
  bool capturable() const override { return inside_.capturable(); }

  void all_gather(const std::byte* mine, std::byte* all, std::size_t bytes, cudaStream_t stream) override {
    if (across_) across_->all_gather(mine, all, bytes, stream);
    inside_.broadcast(all, bytes * static_cast<std::size_t>(hosts_), 0, stream);
  }
  void all_reduce(DType type, void* data, std::size_t n, SumOrder order, cudaStream_t stream) override {
    if (across_) across_->all_reduce(type, data, n, order, stream);
    inside_.broadcast(static_cast<std::byte*>(data), n * size_of(type), 0, stream);
  }
  void broadcast(std::byte* data, std::size_t bytes, int root, cudaStream_t stream) override {
    if (across_) across_->broadcast(data, bytes, root, stream);
    inside_.broadcast(data, bytes, 0, stream);
  }
  std::unique_ptr<DeviceCommunicator> split(Communicator&) override {
    throw Error("a hierarchy of ranks cannot be split");
  }
  void wait(cudaStream_t stream) override { inside_.wait(stream); }
  void abort(const std::string& reason) noexcept override {
    inside_.abort(reason);
    if (across_) across_->abort(reason);
  }

 private:
  DeviceCommunicator& inside_;
  DeviceCommunicator* const across_;
  const int host_, hosts_;
};

// exchange.ranks_per_host for gradients in GPU memory.
class DeviceHierarchy {
 public:
  // Collective, on the context's GPU. `all`: of the queue's ranks. Both outlive this. Throws as Hierarchy.
  DeviceHierarchy(CollectiveQueue& queue, DeviceCommunicator& all, int ranks_per_host, bool parts)
      : hierarchy_(queue, ranks_per_host, parts),
        inside_(all.split(hierarchy_.inside())),
        across_(hierarchy_.across() ? all.split(*hierarchy_.across()) : nullptr),
        hosts_(parts ? nullptr : std::make_unique<DeviceHosts>(*inside_, across_.get(), hierarchy_.hosts())) {
  }

  Hierarchy& hierarchy() { return hierarchy_; }
  DeviceCommunicator& hosts() { return hosts_ ? *hosts_ : *across_; }
  DeviceCommunicator& inside() { return *inside_; }

  // Hierarchy::begin_step() with two more weights: this rank's, and the sum of its host's ranks'.
  StepContext begin_step(const StepContext& context) {
    StepContext of_hosts = hierarchy_.begin_step(context);
    weights_.assign(of_hosts.weights.begin(), of_hosts.weights.end());
    weights_.insert(weights_.end(), {hierarchy_.weight(), hierarchy_.total()});
    of_hosts.weights = weights_;
    return of_hosts;
  }
  int weights() { return hosts().size() + 2; }

 private:
  Hierarchy hierarchy_;
  std::unique_ptr<DeviceCommunicator> inside_, across_, hosts_;
  std::vector<float> weights_;
};

class DeviceTransport final : public Transport {
 public:
  // `hierarchy`: null if every rank encodes for itself.
  DeviceTransport(DeviceCommunicator& all, std::unique_ptr<DeviceHierarchy> hierarchy,
                  const ExchangeOptions& options, const std::vector<Group>& groups)
      : all_(all),
        hierarchy_(std::move(hierarchy)),
        device_(hierarchy_ ? hierarchy_->hosts() : all),
        order_(options.compressing() || options.ordered_sum ? SumOrder::ranks : SumOrder::library),
        step_(hierarchy_ ? hierarchy_->weights() : all.size()),
        ways_(groups.size()),
        my_status_(1),
        all_statuses_(static_cast<std::size_t>(all.size())) {
    step_state_ = {step_.parameters(), step_.status()};
    traits_.rank = all.rank();
    traits_.ranks = all.size();
    traits_.encoders = device_.size();
    if (hierarchy_) {
      const Hierarchy& hosts = hierarchy_->hierarchy();
      traits_.parts = hosts.parts(), traits_.part = hosts.part();
      traits_.counts_bytes = hosts.leads();
      if (traits_.parts > 1) found_ = DeviceArray<StepStatus>(static_cast<std::size_t>(traits_.parts));
    }
    traits_.encodes_early = !hierarchy_;
    traits_.decides_on_host = false;
    // A hierarchy encodes between the collectives, which the host starts.
    traits_.capture = traits_.ranks == 1 || all.capturable() ? Exchange::Capture::whole
                      : hierarchy_                           ? Exchange::Capture::none
                                                             : Exchange::Capture::parts;
    // Without graphs for collectives, a graph that ready() is captured in cannot hold them.
    traits_.sends_early = traits_.capture == Exchange::Capture::whole;
    for (std::size_t index = 0; index < groups.size(); ++index)
      if (groups[index].compressed && groups[index].numel() > 0 && device_.size() > 1)
        status_group_ = static_cast<int>(index);
    if (hierarchy_ || device_.size() == 1 || groups.empty()) return;
    if (status_group_ < 0)
      for (std::size_t index = 0; index < groups.size(); ++index)
        if (groups[index].numel() > 0) loss_group_ = static_cast<int>(index);
    if (status_group_ < 0) return;
    const Group& last = groups.back();
    if (!last.compressed && last.numel() > 0 &&
        last.numel() * sizeof(float) * static_cast<std::size_t>(traits_.ranks) <= kMostGathered)
      rider_ = static_cast<int>(groups.size()) - 1;
  }
  // A rank that gave up may leave collectives under way; memory is given back in the compute stream's order.
  ~DeviceTransport() override {
    try {
      sent_.record(communication());
      sent_.wait(compute());
    } catch (const std::exception&) {  // the GPU is lost, and the first error is being handled already
    }
  }
  DeviceTimes& times() { return times_; }

  StepContext begin(const StepContext& of_run, std::span<Bucket> buckets) override {
    buckets_ = buckets;
    all_awaited_ = false;
    for (Bucket& bucket : buckets) reserve(bucket, of_run.density);
    StepContext context = hierarchy_ ? hierarchy_->begin_step(of_run) : of_run;
    step_.begin(compute(), context);
    context.weights = {step_.weights(), static_cast<std::size_t>(device_.size())};
    context.parameters = step_.parameters();
    context.status = step_.status();
    return context;
  }
  void around(Kind kind, const Bucket& bucket, const Work& work) override {
    if (kind == Kind::commit && !bucket.group.compressed) return work();
    times_.around({nullptr, {kind, bucket.index, bucket.round, {}, {}}}, compute(), work);
    if (kind == Kind::encode) note_encoded(bucket);
  }
  // The status group's, or the loss group's, waits for the loss, which the end of the backward pass brings too.
  void start(Leg leg, Bucket& bucket) override {
    if (leg != Leg::message) return start_inside(leg, bucket);
    if (device_.size() > 1 && bucket.index != status_group_ && bucket.index != loss_group_ &&
        bucket.index != rider_)
      send(bucket);
  }
  Round wait(Leg leg, Bucket& bucket) override {
    if (leg != Leg::message) {
      wait_for(way(bucket).inside, bucket.index, ExchangeSpan::kInsideHost);
      return {};
    }
    const bool alone = device_.size() == 1;
    if (!joined() && !alone) wait_for(way(bucket).arrived, bucket.index);
    const DeviceArray<std::byte>& blocks = way(bucket).blocks;
    Round round;
    round.gpu_blocks = alone ? bucket.message.gpu_block : std::span(blocks.data(), blocks.size());
    round.sum = bucket.message.sum;
    round.sum_bfloat16 = bucket.message.sum_bfloat16;
    return round;
  }
  void take_loss(const float* loss) override {
    const bool in_block = status_group_ >= 0 && !hierarchy_;
    write_rank_status(compute(), loss, traits_.rank, in_block ? status_in_block() : my_status_.data());
    if (loss_group_ < 0 || !loss) return;
    const Bucket& bucket = buckets_[static_cast<std::size_t>(loss_group_)];
    spoil_if_not_finite(compute(), loss, bucket.message.sum.data(), bucket.message.sum_bfloat16.data());
    note_encoded(bucket);
  }
  void start_agreement() override {
    if (traits_.ranks == 1) return;
    await_all_encoded();
    send_status();
    sent_.record(communication());
    // A graph of its own for decoding cannot wait for what happened outside of it.
    if (!traits_.sends_early) wait_for(sent_, ExchangeSpan::kAgreement);
  }
  Agreed agree(std::span<const Bucket>) override {
    if (!joined()) wait_for(sent_, ExchangeSpan::kAgreement);
    if (traits_.parts > 1) join_hosts_statuses();
    const int per_host = traits_.ranks / device_.size();
    const bool own = traits_.ranks == 1 || loss_group_ >= 0;
    if (status_group_ >= 0)
      cuda::agree(compute(), first_status(), ways_[static_cast<std::size_t>(status_group_)].bytes,
                  device_.size(), per_host, false, step_.status());
    else
      cuda::agree(compute(), own ? my_status_.data() : all_statuses_.data(), sizeof(RankStatus),
                  own ? 1 : traits_.ranks, per_host, traits_.ranks == 1, step_.status());
    return {};
  }
  void finish(StepReport&) override {}

 private:
  // One per group.
  struct Way {
    double density = 0;             // that the compressor is made for
    std::size_t bytes = 0;          // of a message
    DeviceArray<std::byte> blocks;  // a compressed group's, of all that encode
    Event complete, encoded;        // on the compute stream: for start_inside(), for send()
    Event inside, arrived;          // on the communication stream: of these
  };

  static cudaStream_t compute() { return Context::current().stream(); }
  static cudaStream_t communication() { return Context::current().communication(); }
  // Whether decode_and_commit() finds the compute stream after all collectives.
  bool joined() const { return traits_.ranks == 1 || !traits_.sends_early; }
  // Whether groups are encoded while collectives are under way.
  bool interleaved() const { return !joined() || hierarchy_; }
  Way& way(const Bucket& bucket) { return ways_[static_cast<std::size_t>(bucket.index)]; }
  // Blocks have equal lengths, so nothing depends on the data.
  void reserve(Bucket& bucket, double density) {
    Way& way = this->way(bucket);
    const auto others = static_cast<std::uint64_t>(device_.size() - 1);
    if (std::exchange(way.density, density) != density) {
      way.bytes = bucket.compressor->reserve(density);
      if (bucket.group.compressed) {
        TOPKNOT_CHECK(way.bytes > 0 && way.bytes % 16 == 0, "a block's length is a multiple of 16");
        way.blocks = {};  // the old memory first, so that the new may take its place
        if (others > 0) way.blocks = DeviceArray<std::byte>((others + 1) * way.bytes);
      }
    }
    bucket.bytes_sent = way.bytes;
    if (others > 0) bucket.bytes_received = bucket.group.compressed ? way.bytes * others : way.bytes;
  }
  void start_inside(Leg leg, Bucket& bucket) {
    if (leg == Leg::gather)
      for (const std::span<float> values : bucket.not_own())
        if (!values.empty()) TOPKNOT_CUDA(cudaMemsetAsync(values.data(), 0, values.size_bytes(), compute()));
    Way& way = this->way(bucket);
    way.complete.record(compute());
    way.complete.wait(communication());
    const ExchangeSpan span{Kind::communicate, bucket.index, ExchangeSpan::kInsideHost, {}, {}};
    times_.around({nullptr, span}, communication(), [&] {
      if (leg == Leg::gather) {
        const std::span<float> average = bucket.average();
        hierarchy_->inside().all_gather_slices(average.data(), average.size(), communication());
        return;
      }
      const std::span<float> gradient = bucket.slice.gradient;
      const float* const weight = step_.weights() + device_.size();
      multiply_by_weight(communication(), gradient.data(), gradient.size(), weight);
      const std::span<float> own = bucket.own_of(gradient);
      if (traits_.parts > 1)
        hierarchy_->inside().reduce_scatter(gradient.data(), gradient.size(), communication());
      else
        hierarchy_->inside().all_reduce(DType::f32, gradient.data(), gradient.size(), SumOrder::ranks,
                                        communication());
      divide_by_total(communication(), own.data(), own.size(), weight + 1);
    });
    way.inside.record(communication());
  }
  void send(Bucket& bucket) {
    Bucket* const rider =
        bucket.index == status_group_ && rider_ >= 0 ? &buckets_[static_cast<std::size_t>(rider_)] : nullptr;
    if (!traits_.sends_early) await_all_encoded();
    await_encoded(bucket);  // start_agreement() has waited for the rider's
    const Message& message = bucket.message;
    times_.around({nullptr, {Kind::communicate, bucket.index, 0, {}, {}}}, communication(), [&] {
      if (rider)
        device_.all_gather_and_reduce(message.gpu_block.data(), way(bucket).blocks.data(), message.bytes(),
                                      rider->message.sum.data(), rider->message.sum.size(), communication());
      else if (message.kind == Message::Kind::gpu_block)
        device_.all_gather(message.gpu_block.data(), way(bucket).blocks.data(), message.bytes(),
                           communication());
      else if (message.kind == Message::Kind::sum_bfloat16)
        device_.all_reduce(DType::bf16, message.sum_bfloat16.data(), message.sum_bfloat16.size(), order_,
                           communication());
      else
        device_.all_reduce(DType::f32, message.sum.data(), message.sum.size(), order_, communication());
    });
    if (!traits_.sends_early) return;
    way(bucket).arrived.record(communication());
    if (rider) way(*rider).arrived.record(communication());
  }
  void send_status() {
    const auto gather = [this](DeviceCommunicator& communicator) {
      times_.around({nullptr, {Kind::communicate, ExchangeSpan::kAgreement, 0, {}, {}}}, communication(),
                    [&] {
                      communicator.all_gather(reinterpret_cast<const std::byte*>(my_status_.data()),
                                              reinterpret_cast<std::byte*>(all_statuses_.data()),
                                              sizeof(RankStatus), communication());
                    });
    };
    if (loss_group_ >= 0) return send(buckets_[static_cast<std::size_t>(loss_group_)]);
    if (status_group_ < 0) return gather(all_);
    Bucket& bucket = buckets_[static_cast<std::size_t>(status_group_)];
    if (hierarchy_) {
      gather(hierarchy_->inside());
      await_encoded(bucket);  // encoding writes zeros where the status goes
      join_rank_statuses(communication(), all_statuses_.data(), hierarchy_->inside().size(),
                         status_in_block());
    }
    send(bucket);
  }
  // A rank has decoded its part alone; the ranks of its index on all hosts have found the same.
  void join_hosts_statuses() {
    decoded_.record(compute());
    decoded_.wait(communication());
    const ExchangeSpan span{Kind::communicate, ExchangeSpan::kAgreement, ExchangeSpan::kInsideHost, {}, {}};
    times_.around({nullptr, span}, communication(), [&] {
      hierarchy_->inside().all_gather(reinterpret_cast<const std::byte*>(step_.status()),
                                      reinterpret_cast<std::byte*>(found_.data()), sizeof(StepStatus),
                                      communication());
    });
    sent_.record(communication());
    wait_for(sent_, ExchangeSpan::kAgreement, ExchangeSpan::kInsideHost);
    join_step_statuses(compute(), found_.data(), traits_.parts, step_.status());
  }
  void note_encoded(const Bucket& bucket) {
    if (interleaved()) way(bucket).encoded.record(compute());
  }
  // On the communication stream.
  void await_encoded(const Bucket& bucket) {
    if (interleaved()) way(bucket).encoded.wait(communication());
  }
  void await_all_encoded() {
    if (std::exchange(all_awaited_, true)) return;
    all_encoded_.record(compute());
    all_encoded_.wait(communication());
  }
  // On the compute stream, for an event of the communication stream.
  void wait_for(Event& event, int group, int round = 0) {
    times_.around({nullptr, {Kind::wait, group, round, {}, {}}}, compute(), [&] { event.wait(compute()); });
  }
  // After the entries of that group's blocks: this rank's, and the first one's of all.
  RankStatus* status_in_block() {
    const std::span<std::byte> block = buckets_[static_cast<std::size_t>(status_group_)].message.gpu_block;
    return reinterpret_cast<RankStatus*>(block.data() + block.size() - kTrailerBytes);
  }
  const RankStatus* first_status() {
    const Way& way = ways_[static_cast<std::size_t>(status_group_)];
    return reinterpret_cast<const RankStatus*>(way.blocks.data() + way.bytes - kTrailerBytes);
  }

  DeviceCommunicator& all_;  // of the ranks
  const std::unique_ptr<DeviceHierarchy> hierarchy_;
  DeviceCommunicator& device_;  // of those that encode for themselves: ranks, or hosts
  const SumOrder order_;
  DeviceStep step_;
  DeviceTimes times_;
  std::deque<Way> ways_;
  std::span<Bucket> buckets_;
  // The group whose blocks bring the statuses: the last, for the loss; -1: one rank, or all groups are dense.
  int status_group_ = -1;
  // If all groups are dense, the last one: it waits for the loss too, and where that is not finite a NaN goes into its
  // sum, which all ranks find. Which rank's loss it was that rank alone knows. -1: there are statuses.
  int loss_group_ = -1;
  // A short dense group after the status group, sent with its blocks in one launch; -1: there is none.
  int rider_ = -1;
  DeviceArray<RankStatus> my_status_, all_statuses_;
  DeviceArray<StepStatus> found_;  // of parts: in the step, by the ranks of the host
  bool all_awaited_ = false;       // await_all_encoded() was called in this step
  Event all_encoded_, sent_, decoded_;
};

}  // namespace

void DeviceTimes::turn_on(std::size_t most) {
  clock_ = DeviceArray<std::uint64_t>(2 * most);
  const cudaStream_t stream = Context::current().stream();
  TOPKNOT_CUDA(cudaMemsetAsync(clock_.data(), 0, clock_.bytes(), stream));
  write_time(stream, clock_.data());
  TOPKNOT_CUDA(cudaMemcpyAsync(&zero_, clock_.data(), sizeof zero_, cudaMemcpyDeviceToHost, stream));
  TOPKNOT_CUDA(cudaStreamSynchronize(stream));
  host_zero_ = std::chrono::steady_clock::now();
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
  const int parts = hierarchical && options.in_parts() ? options.ranks_per_host : 1;
  const int encoding = hierarchical ? device.size() / options.ranks_per_host : device.size();
  std::vector<std::unique_ptr<Compressor>> compressors;  // by group
  for (const Group& group : groups) {
    const ElementRange own = slice_of(group.numel(), parts, device.rank() % parts);
    const GroupSpec whole = group_spec(group, options.scope, encoding, options.layer_density);
    if (!compressors.emplace_back(
            make_device_compressor(group_options(group, options), part_of(whole, own.begin, own.end))))
      return nullptr;
  }
  std::unique_ptr<DeviceHierarchy> hierarchy;
  if (hierarchical)
    hierarchy = std::make_unique<DeviceHierarchy>(queue, device, options.ranks_per_host, parts > 1);
  auto transport = std::make_unique<DeviceTransport>(device, std::move(hierarchy), options, groups);
  DeviceTimes& times = transport->times();
  return std::make_unique<DeviceExchange>(arena, std::move(groups), std::move(transport), times, options,
                                          std::move(compressors));
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

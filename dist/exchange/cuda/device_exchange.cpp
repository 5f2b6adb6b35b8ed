// The exchange whose gradients stay on the GPU. Two streams: encoding and decoding on the compute stream, the
// collectives, in the order of the groups, on the other one, joined by events; so a whole step is one graph.
#include <algorithm>
#include <deque>
#include <exception>
#include <unordered_map>
#include <utility>

#include "compress/state.h"
#include "dist/exchange/cuda/device_exchange_kernels.h"
#include "dist/exchange/cuda/device_exchange_make.h"
#include "dist/exchange/cuda/device_pipeline.h"
#include "dist/exchange/cuda/device_step.h"
#include "dist/exchange/group_pipeline.h"
#include "nn/core/base/check.h"

namespace topknot::cuda {
namespace {

class GpuExchange final : public DeviceExchange {
 public:
  GpuExchange(ParameterArena& arena, DeviceCommunicator& device, const ExchangeOptions& options)
      : arena_(arena),
        device_(device),
        options_(options),
        compressing_(options.compress.name != "dense"),
        groups_(plan_groups(arena, compressing_, options.scope, options.merge, options.groups)),
        step_(device.size()),
        my_status_(1),
        all_statuses_(static_cast<std::size_t>(device.size())) {
    sum_order_ = compressing_ || options.ordered_sum ? SumOrder::ranks : SumOrder::library;
  }

  // A rank that gave up may leave collectives under way; memory is given back in the compute stream's order.
  ~GpuExchange() override {
    try {
      sent_.record(communication());
      sent_.wait(compute());
    } catch (const std::exception&) {  // the GPU is lost, and the first error is on its way already
    }
  }

  // False where a group has no compressor.
  bool make_pipelines(const DeviceCompressorFactory& factory) {
    for (std::size_t index = 0; index < groups_.size(); ++index) {
      const Group& group = groups_[index];
      const GroupSpec spec = group_spec(group, options_.scope, ranks(), options_.layer_density);
      std::unique_ptr<DeviceCompressor> compressor;
      if (group.compressed && !(compressor = factory(options_.compress, spec))) return false;
      if (!compressing_)
        make_compressor(options_.compress, spec);  // refuses options that dense has no use for
      const bool narrow = !compressing_ && options_.compress.values == "bf16";
      pipelines_.emplace_back(group, std::move(compressor), narrow, device_.rank(), ranks());
      for (const Parameter* parameter : group.parameters) places_[parameter] = {index, false};
    }
    return true;
  }

  const std::vector<Group>& groups() const override { return groups_; }

  std::uint64_t planned_bytes(double density) const override {
    std::uint64_t bytes = 0;
    int index = 0;
    for (const Group& group : groups_)
      bytes += GroupPipeline(group, index++, compressing_, options_, ranks()).planned_bytes(density);
    return bytes;
  }

  void begin_step(std::int64_t step, double density, std::span<const float> weights, double lr) override {
    TOPKNOT_CHECK(!in_step_, "begin_step() before end_step() of the step before");
    TOPKNOT_CHECK(density > 0 && density <= 1, "density must be in (0, 1]");
    if (density != density_) {
      for (DevicePipeline& pipeline : pipelines_) pipeline.set_density(density);
      density_ = density;
      ++version_;
    }
    StepParameters parameters;
    parameters.step = step, parameters.density = density, parameters.lr = lr;
    parameters.rank = device_.rank();
    const std::vector<float> equal(static_cast<std::size_t>(ranks()), 1.0f);
    step_.begin(compute(), parameters, weights.empty() ? std::span<const float>(equal) : weights);
    for (DevicePipeline& pipeline : pipelines_) pipeline.begin_step();
    for (auto& [parameter, place] : places_) place.second = false;
    next_to_send_ = 0;
    in_step_ = true;
  }

  void ready(Parameter& parameter) override {
    const auto place = places_.find(&parameter);
    TOPKNOT_CHECK(in_step_ && place != places_.end(), "ready('" + parameter.name() + "') outside a step");
    TOPKNOT_CHECK(!place->second.second, "'" + parameter.name() + "' was ready before");
    place->second.second = true;
    DevicePipeline& pipeline = pipelines_[place->second.first];
    if (pipeline.ready()) take(pipeline);
  }

  void complete(const float* loss) override {
    TOPKNOT_CHECK(in_step_, "finish() without begin_step()");
    bool zeroed = false;
    for (DevicePipeline& pipeline : pipelines_) {
      if (pipeline.is_complete()) continue;
      if (!zeroed) arena_.zero_unwritten_gradients();
      zeroed = true;
      pipeline.complete();
      take(pipeline);
    }
    write_rank_status(compute(), loss, step_.status(), my_status_.data());
  }

  void collectives() override {
    TOPKNOT_CHECK(in_step_, "collectives() outside a step");
    if (ranks() == 1) return;
    encoded_.record(compute());
    encoded_.wait(communication());
    // Replayed graphs do not call ready(); for parts, nothing was sent there.
    if (capture() == Capture::parts)
      for (DevicePipeline& pipeline : pipelines_) pipeline.send(communication(), device_, sum_order_);
    device_.all_gather(reinterpret_cast<const std::byte*>(my_status_.data()),
                       reinterpret_cast<std::byte*>(all_statuses_.data()), sizeof(RankStatus),
                       communication());
    sent_.record(communication());
    // A graph of its own for decoding cannot wait for what happened outside of it.
    if (capture() == Capture::parts) sent_.wait(compute());
  }

  void decode() override {
    const bool joined = ranks() == 1 || capture() == Capture::parts;
    for (DevicePipeline& pipeline : pipelines_) {
      if (!joined) pipeline.arrived.wait(compute());
      pipeline.decode(compute(), slice(pipeline.group()), step_);
    }
    if (!joined) sent_.wait(compute());
    agree(compute(), ranks() == 1 ? my_status_.data() : all_statuses_.data(), ranks(), step_.status());
    for (DevicePipeline& pipeline : pipelines_) pipeline.commit(compute(), slice(pipeline.group()), step_);
  }

  void end_step() override {
    TOPKNOT_CHECK(in_step_, "end_step() outside a step");
    for (const DevicePipeline& pipeline : pipelines_)
      if (pipeline.swaps()) arena_.swap_gradient_and_residual(pipeline.group().begin, pipeline.group().end);
    in_step_ = false;
  }

  std::span<float> averaged(const Group& group) override {
    const bool in_spare = in_step_ && pipeline_of(group).swaps();
    return in_spare ? arena_.residual(group.begin, group.end) : arena_.gradient(group.begin, group.end);
  }
  GradientForm form(const Group& group) const override { return pipeline_of(group).form(); }
  StepParameters* parameters() override { return step_.parameters(); }
  StepStatus* status() override { return step_.status(); }
  std::uint64_t bytes_sent() const override {
    std::uint64_t bytes = 0;
    for (const DevicePipeline& pipeline : pipelines_) bytes += pipeline.bytes_sent();
    return bytes;
  }
  std::uint64_t bytes_received() const override {
    std::uint64_t bytes = 0;
    for (const DevicePipeline& pipeline : pipelines_) bytes += pipeline.bytes_received();
    return bytes;
  }

  Capture capture() const override {
    return ranks() == 1 || device_.capturable() ? Capture::whole : Capture::parts;
  }

  // Every slice that swaps does so in every step, so one of them speaks for all.
  std::uint64_t capture_key() const override {
    std::uint64_t side = 0;
    for (const Group& group : groups_)
      if (group.compressed && group.numel() > 0) {
        side =
            arena_.gradient(group.begin, group.end).data() < arena_.residual(group.begin, group.end).data();
        break;
      }
    return version_ * 2 + side;
  }

  std::vector<std::byte> state() const override {
    StateWriter writer;
    writer.put<std::uint64_t>(pipelines_.size());
    for (const DevicePipeline& pipeline : pipelines_) pipeline.save(writer);
    return writer.take();
  }

  void load_state(std::span<const std::byte> bytes) override {
    StateReader reader(bytes);
    const auto groups = reader.get<std::uint64_t>();
    if (groups != pipelines_.size())
      StateReader::fail("is of " + std::to_string(groups) + " groups where there are " +
                        std::to_string(pipelines_.size()));
    for (DevicePipeline& pipeline : pipelines_) pipeline.load(reader);
    reader.finish();
  }

 private:
  static cudaStream_t compute() { return Context::current().stream(); }
  static cudaStream_t communication() { return Context::current().communication(); }
  int ranks() const { return device_.size(); }
  DeviceSlice slice(const Group& group) {
    return {arena_.gradient(group.begin, group.end), arena_.residual(group.begin, group.end)};
  }

  // Of a group that is complete.
  void take(DevicePipeline& pipeline) {
    pipeline.encode(compute(), slice(pipeline.group()), step_);
    if (ranks() == 1 || capture() == Capture::parts) return;
    pipeline.encoded.record(compute());
    // Strictly in the order of groups: one that is complete early waits for its predecessors.
    for (; next_to_send_ < pipelines_.size() && pipelines_[next_to_send_].is_complete(); ++next_to_send_) {
      pipelines_[next_to_send_].encoded.wait(communication());
      pipelines_[next_to_send_].send(communication(), device_, sum_order_);
      pipelines_[next_to_send_].arrived.record(communication());
    }
  }

  const DevicePipeline& pipeline_of(const Group& group) const {
    for (const DevicePipeline& pipeline : pipelines_)
      if (pipeline.group().begin == group.begin && pipeline.group().end == group.end) return pipeline;
    throw Error("not a group of this exchange");
  }

  ParameterArena& arena_;
  DeviceCommunicator& device_;
  const ExchangeOptions options_;
  const bool compressing_;
  const std::vector<Group> groups_;
  SumOrder sum_order_ = SumOrder::ranks;
  std::deque<DevicePipeline> pipelines_;
  std::unordered_map<const Parameter*, std::pair<std::size_t, bool>> places_;  // group; whether it is ready
  DeviceStep step_;
  DeviceArray<RankStatus> my_status_, all_statuses_;
  Event encoded_, sent_;  // everything is
  double density_ = 0;
  std::uint64_t version_ = 0;
  std::size_t next_to_send_ = 0;
  bool in_step_ = false;
};

}  // namespace

std::string what_needs_the_host(const ExchangeOptions& options, int ranks) {
  if (options.collective != "all_gather") return "exchange.collective: " + options.collective;
  if (options.ranks_per_host > 1 && ranks > 1)
    return "exchange.ranks_per_host: " + std::to_string(options.ranks_per_host);
  if (options.compress.name != "dense" && options.dense_values != "fp32")
    return "compress.dense_values: " + options.dense_values;
  return "";
}

std::unique_ptr<DeviceExchange> make_gpu_exchange(ParameterArena& arena, DeviceCommunicator& device,
                                                  const ExchangeOptions& options,
                                                  const DeviceCompressorFactory& factory) {
  compressors().find(options.compress.name);  // a wrong name is an error even where everything stays dense
  auto exchange = std::make_unique<GpuExchange>(arena, device, options);
  if (!exchange->make_pipelines(factory)) return nullptr;
  return exchange;
}

}  // namespace topknot::cuda

// The engine on a GPU: the host puts steps on a stream, after the first ones as graphs, and reads some steps later
// what became of them. Nothing of a step waits for the host.
#include <nvtx3/nvToolsExt.h>

#include <cmath>
#include <cstring>
#include <map>
#include <optional>

#include "dist/comm/cuda/device_communicator.h"
#include "dist/exchange/cuda/device_exchange.h"
#include "nn/core/base/check.h"
#include "nn/core/base/log.h"
#include "nn/core/cuda/context.h"
#include "nn/core/cuda/graph.h"
#include "nn/ops/loss.h"
#include "optim/cuda/device_optimizer.h"
#include "train/checksum.h"
#include "train/cuda/engine_kernels.h"
#include "train/cuda/inputs.h"
#include "train/engine.h"
#include "train/plan/exchange_choice.h"
#include "train/recorder.h"
#include "train/trainer.h"

namespace topknot {
namespace cuda {
namespace {

// A named range in the timeline of Nsight Systems, to the end of the scope; nothing where no profiler listens.
class NvtxRange {
 public:
  explicit NvtxRange(const char* name) { nvtxRangePushA(name); }
  ~NvtxRange() { nvtxRangePop(); }
  NvtxRange(const NvtxRange&) = delete;
  NvtxRange& operator=(const NvtxRange&) = delete;
};

constexpr std::int64_t kStepsAhead = 16;
constexpr std::size_t kGraphs = 8;  // kept; densities come and go

Precision precision_of(const std::string& name) {
  return name == "bf16" ? Precision::bf16 : name == "tf32" ? Precision::tf32 : Precision::fp32;
}

ContextOptions context_options(const RunInputs& inputs, const Communicator& communicator) {
  const auto& train = inputs.config.train;
  return {inputs.gpu, communicator.rank(), precision_of(train.precision), train.deterministic};
}

void refuse_what_needs_the_cpu(const Config& config) {
  const auto refuse = [](const std::string& key, const std::string& instead) {
    throw UserError(key + " is for train.device=cpu; " + instead);
  };
  if (config.train.profile_steps > 0)
    refuse("train.profile_steps", "a GPU's steps are shown by `nsys profile train ...`: set it to 0");
  if (config.train.distribution_every > 0)
    refuse("train.distribution_every", "set it to 0, or train on the CPU");
}

class CudaEngine final : public Engine {
 public:
  CudaEngine(const RunInputs& inputs, Communicator& communicator)
      : config_((refuse_what_needs_the_cpu(inputs.config), inputs.config)),
        communicator_(communicator),
        context_(context_options(inputs, communicator)),
        use_(context_),
        parts_(config_.train.accumulate),
        model_(build_model(config_, *inputs.data.train, context_.device())),
        arena_(model_->store.arena()),
        queue_(communicator),
        settled_(settle_exchange(inputs, arena_, queue_, communicator)),
        device_(config_.dist.backend == "gloo"
                    ? nullptr
                    : make_device_communicator(communicator, config_.dist.timeout_s)),
        exchange_(make_device_exchange(arena_, queue_, device_.get(), settled_.options)),
        optimizer_(make_device_optimizer(optimizer_options(config_), arena_)),
        clip_(arena_.size()),
        train_(config_, *inputs.data.train, true, communicator.rank(), communicator.size(), parts_),
        test_(config_, *inputs.data.test, false, communicator.rank(), communicator.size(), 1),
        weights_(train_.loader().weights()),
        statistics_(model_->store.device_statistics().size()),
        loss_(1),
        norm_(1),
        dropout_steps_(static_cast<std::size_t>(parts_)),
        result_(1),
        results_(kStepsAhead * sizeof(StepReport)),
        recorder_(config_, inputs.folder, arena_, nullptr, communicator.rank() == 0) {
    if (communicator.rank() == 0 && (settled_.choice.planned || settled_.choice.chosen))
      log_warning("exchange: the plan is made from this host's CPU times, and the run computes on a GPU");
  }

  const ParameterArena& arena() const override { return arena_; }
  const std::vector<Group>& groups() const override { return exchange_->groups(); }
  const Loader& train_loader() const override { return train_.loader(); }
  std::string device() const override {
    cudaDeviceProp properties{};
    TOPKNOT_CUDA(cudaGetDeviceProperties(&properties, context_.options().device));
    return std::string(properties.name) + ", " + config_.train.precision;
  }
  double modelled_makespan() const override { return settled_.modelled_makespan(exchange_->groups()); }

  void start_epoch(std::int64_t epoch) override { train_.start_epoch(epoch); }
  std::int64_t steps_ahead() const override { return records() ? 1 : kStepsAhead; }

  void step(const StepRequest& request) override {
    const NvtxRange range("step");
    const cudaStream_t stream = context_.stream();
    for (int part = 0; part < parts_; ++part)
      TOPKNOT_CHECK(train_.next(part), "an epoch has fewer batches than its steps");
    count_up(stream, dropout_steps_.data(), static_cast<std::uint32_t>(request.step * parts_),
             static_cast<std::uint32_t>(parts_));
    exchange_->begin_step(request.step, request.density, weights_, request.lr);
    recorder_.begin_step(request.step);
    run_step(request.step);
    const ExchangeStats exchanged = exchange_->end_step().stats;
    auto* slot = reinterpret_cast<StepReport*>(results_.data()) + pending_;
    TOPKNOT_CUDA(
        cudaMemcpyAsync(slot, result_.data(), sizeof *slot, cudaMemcpyDeviceToHost, context_.stream()));
    bytes_.emplace_back(exchanged.bytes_sent, exchanged.bytes_received);
    TOPKNOT_CHECK(++pending_ <= kStepsAhead, "stats() comes at least every steps_ahead() steps");
  }

  std::vector<StepStats> stats() override {
    wait();
    std::vector<StepStats> stats(static_cast<std::size_t>(pending_));
    for (std::size_t i = 0; i < stats.size(); ++i) {
      StepReport parameters;
      std::memcpy(&parameters, results_.data() + i * sizeof parameters, sizeof parameters);
      stats[i].loss = parameters.loss;
      stats[i].committed = parameters.status.bad == 0;
      stats[i].bad_rank = parameters.status.bad_rank;
      stats[i].bytes_sent = bytes_[i].first;
      stats[i].bytes_received = bytes_[i].second;
      stats[i].selected = parameters.status.selected;
      stats[i].threshold = parameters.status.threshold;
    }
    pending_ = 0;
    bytes_.clear();
    return stats;
  }

  void end_step(const StepRecord& record, MetricsWriter* metrics) override {
    if (metrics) recorder_.end_step(record, *metrics);
  }

  void all_reduce(std::span<double> sums) override {
    queue_.run([&](Communicator& c) { c.all_reduce(sums); });
  }

  Evaluation evaluate() override {
    const NvtxRange range("evaluate");
    model_->store.statistics_to_host();
    synchronize_statistics(model_->store, config_.train.bn_stats, queue_, communicator_);
    model_->store.statistics_to_device();
    const cudaStream_t stream = context_.stream();
    DeviceArray<double> device(2);  // loss, correct
    TOPKNOT_CUDA(cudaMemsetAsync(device.data(), 0, device.bytes(), stream));
    ForwardContext context;
    context.training = false;
    std::vector<double> sums(3);  // and samples
    test_.start_epoch(0);
    while (test_.next(0)) {
      const DeviceBatch& batch = test_.batch(0);
      const Variable output = model_->module->forward(Variable(batch.images), context);
      const Variable loss = batch_loss(output, batch);
      add_scaled(stream, device.data(), loss.value().data(), static_cast<double>(batch.size));
      if (!batch.targets.defined()) count_correct(output.value(), labels_of(batch), device.data() + 1);
      sums[2] += static_cast<double>(batch.size);
    }
    TOPKNOT_CUDA(cudaMemcpyAsync(sums.data(), device.data(), device.bytes(), cudaMemcpyDeviceToHost, stream));
    wait();
    all_reduce(sums);
    const double samples = std::max(1.0, sums[2]);
    return {sums[0] / samples, sums[1] / samples};
  }

  void check_parameters(const std::string& when) override {
    check_same_parameters(arena_, queue_, communicator_, when);
  }

  std::string checksum() override { return checksum_hex(arena_.host_weights()); }
  void finish() override {
    wait();
    recorder_.finish();
  }

 private:
  // Recorded gradients are copied to the host in the hooks, which no graph can do. The same on all ranks.
  bool records() const { return config_.train.record_gradients > 0; }

  static Variable batch_loss(const Variable& output, const DeviceBatch& batch) {
    return batch.targets.defined() ? mean_squared_error(output, batch.targets)
                                   : softmax_cross_entropy(output, labels_of(batch));
  }
  static std::span<const std::int32_t> labels_of(const DeviceBatch& batch) {
    return {batch.labels.data(), batch.labels.size()};
  }

  void wait() {
    if (device_)
      device_->wait(context_.stream());
    else
      context_.synchronize();
  }

  // Eagerly at first, so that algorithms are chosen and memory is there, then as graphs.
  void run_step(std::int64_t step) {
    using Capture = Exchange::Capture;
    const Capture capture = config_.train.graphs && !records() ? exchange_->capture() : Capture::none;
    const auto forward = [&] { forward_and_backward(step); };
    const auto collect = [&] { exchange_->communicate(); };
    const auto finish = [&] { decode_and_update(); };
    if (capture != Capture::none && graphs_.size() > kGraphs) graphs_.clear();
    StepGraphs* graphs = capture == Capture::none ? nullptr : &graphs_[exchange_->capture_key()];
    if (!graphs || !graphs->warm) {
      forward(), collect(), finish();
      if (graphs) graphs->warm = true;
      return;
    }
    const cudaStream_t stream = context_.stream();
    if (capture == Capture::whole) {
      if (!graphs->first)
        graphs->first = Graph(stream, graph_memory_, [&] { forward(), collect(), finish(); });
      graphs->first.launch(stream);
      if (device_) device_->launched(stream);  // the graph's collectives have a deadline too
      return;
    }
    if (!graphs->first) graphs->first = Graph(stream, graph_memory_, forward);
    graphs->first.launch(stream);
    collect();
    if (!graphs->second) graphs->second = Graph(stream, graph_memory_, finish);
    graphs->second.launch(stream);
  }

  void forward_and_backward(std::int64_t step) {
    const NvtxRange range("forward and backward");
    const cudaStream_t stream = context_.stream();
    DeviceBackend& device = backend(context_.device());
    arena_.clear_gradients();
    const std::span<float> statistics = model_->store.device_statistics();
    if (!statistics.empty()) device.copy(statistics.data(), statistics_.data(), statistics.size());
    device.fill(loss_.data(), 1, 0.0f);
    const double clip_norm = local_clip(config_, communicator_.size());
    const bool clip = clip_norm > 0, clip_model = clip && config_.train.clip_local_scope == "model";
    const GradientHook hook = [&](Parameter& parameter) {
      recorder_.take(parameter);
      if (clip) clip_one(parameter, clip_norm);
      exchange_->ready(parameter);
    };
    for (int part = 0; part < parts_; ++part) {
      ForwardContext context;
      context.seed = config_.seed;
      context.rank = static_cast<std::uint32_t>(communicator_.rank());
      context.gpu_step = dropout_steps_.data() + part;
      const DeviceBatch& batch = train_.batch(part);
      const Variable loss = batch_loss(model_->module->forward(Variable(batch.images), context), batch);
      add_scaled(stream, loss_.data(), loss.value().data(), 1.0f / static_cast<float>(parts_));
      backward(loss, part + 1 == parts_ && !clip_model ? hook : GradientHook{},
               1.0f / static_cast<float>(parts_));
    }
    if (step == 0 && communicator_.rank() == 0)
      for (const Parameter* parameter : arena_.zero_unwritten_gradients())
        log_warning(parameter->name() + " has no part in the loss: its gradient is zero");
    if (!clip_model) return exchange_->complete(loss_.data());
    arena_.zero_unwritten_gradients();
    bool add = false;
    for (const Parameter* p : arena_.parameters()) recorder_.take(*p);
    for (const Parameter* p : arena_.parameters())
      clip_.sum_of_squares(stream, {p->gradient(), p->numel()}, norm_.data(), std::exchange(add, true));
    for (const Parameter* p : arena_.parameters())
      clip_.scale(stream, {p->gradient(), p->numel()}, norm_.data(), clip_norm);
    for (Parameter* parameter : arena_.parameters()) exchange_->ready(*parameter);
    exchange_->complete(loss_.data());
  }

  void clip_one(const Parameter& parameter, double clip_norm) {
    const std::span<float> gradient{parameter.gradient(), parameter.numel()};
    clip_.sum_of_squares(context_.stream(), gradient, norm_.data(), false);
    clip_.scale(context_.stream(), gradient, norm_.data(), clip_norm);
  }

  void decode_and_update() {
    const NvtxRange range("decode and update");
    const cudaStream_t stream = context_.stream();
    exchange_->decode_and_commit();
    if (config_.train.clip_global > 0) {
      bool add = false;
      for (const Group& group : exchange_->groups())
        clip_.sum_of_squares(stream, exchange_->averaged(group), norm_.data(), std::exchange(add, true));
      clip_.set_gradient_scale(stream, norm_.data(), config_.train.clip_global, exchange_->parameters());
    }
    for (const Group& group : exchange_->groups())
      optimizer_->update(stream, group.begin, exchange_->averaged(group), exchange_->parameters(),
                         exchange_->status(), exchange_->form(group));
    // Batch norm's running statistics, which the forward pass has moved already.
    const std::span<float> statistics = model_->store.device_statistics();
    restore_if_bad(stream, exchange_->status(), statistics_.data(), statistics.data(), statistics.size());
    write_result(stream, exchange_->status(), loss_.data(), result_.data());
  }

  struct StepGraphs {
    bool warm = false;    // has run once without a graph
    Graph first, second;  // second: after the collectives, where these are not in a graph
  };

  const Config& config_;
  Communicator& communicator_;
  Context context_;
  Context::Use use_;
  const int parts_;
  std::unique_ptr<BuiltModel> model_;
  ParameterArena& arena_;
  CollectiveQueue queue_;
  const SettledExchange settled_;
  std::unique_ptr<DeviceCommunicator> device_;  // null: collectives are the host's
  std::unique_ptr<DeviceExchange> exchange_;
  std::unique_ptr<DeviceOptimizer> optimizer_;
  DeviceClip clip_;
  CudaInputs train_, test_;
  const std::vector<float> weights_;
  DeviceArray<float> statistics_;  // as before this step
  DeviceArray<float> loss_;        // the mean over the step's parts
  DeviceArray<double> norm_;
  DeviceArray<std::uint32_t> dropout_steps_;  // one a part
  DeviceArray<StepReport> result_;
  PinnedMemory results_;                                        // of the steps since stats()
  std::vector<std::pair<std::uint64_t, std::uint64_t>> bytes_;  // sent and received, likewise
  std::int64_t pending_ = 0;
  Recorder recorder_;
  GraphMemory graph_memory_{context_.pool()};
  std::map<std::uint64_t, StepGraphs> graphs_;
};

}  // namespace
}  // namespace cuda

std::unique_ptr<Engine> make_cuda_engine(const RunInputs& inputs, Communicator& communicator) {
  return std::make_unique<cuda::CudaEngine>(inputs, communicator);
}

}  // namespace topknot

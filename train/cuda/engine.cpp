// The engine on a GPU: the host puts steps on a stream, after the first ones as graphs, and reads their outcome
// some steps later. Nothing of a step waits for the host.
#include <nvtx3/nvToolsExt.h>

#include <array>
#include <cstring>
#include <map>

#include "dist/comm/cuda/device_communicator.h"
#include "dist/exchange/cuda/device_exchange.h"
#include "nn/base/check.h"
#include "nn/base/log.h"
#include "nn/core/cuda/context.h"
#include "nn/core/cuda/graph.h"
#include "nn/ops/ctc_loss.h"
#include "nn/ops/loss.h"
#include "train/cuda/engine_kernels.h"
#include "train/cuda/inputs.h"
#include "train/cuda/step_times.h"
#include "train/step_engine.h"

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

constexpr std::size_t kStepsAhead = 32;

Precision precision_of(const std::string& name) {
  return name == "bf16" ? Precision::bf16 : name == "tf32" ? Precision::tf32 : Precision::fp32;
}

ContextOptions context_options(const RunInputs& inputs, const Communicator& communicator) {
  const auto& train = inputs.config.train;
  return {inputs.gpu,          communicator.rank(),     precision_of(train.precision),
          train.deterministic, communicator.size() > 1, algorithm_cache_folder(train.algorithm_cache)};
}

void refuse_what_needs_the_cpu(const Config& config) {
  if (config.train.distribution_every > 0)
    throw UserError("train.distribution_every is for train.device=cpu; set it to 0, or train on the CPU");
}

// Made before the engine's model, and gone after it.
struct CurrentContext {
  explicit CurrentContext(const ContextOptions& options) : context_(options), use_(context_) {}
  Context context_;
  Context::Use use_;
};

class CudaEngine final : private CurrentContext, public StepEngine {
 public:
  CudaEngine(const RunInputs& inputs, Communicator& communicator)
      : CurrentContext((refuse_what_needs_the_cpu(inputs.config), context_options(inputs, communicator))),
        StepEngine(inputs, communicator, context_.device()),
        device_(config_.dist.backend == "gloo"
                    ? nullptr
                    : make_device_communicator(communicator, config_.dist.timeout_s)),
        exchange_(make_device_exchange(arena_, queue_, device_.get(), settled_.options)),
        train_(config_, *inputs.data.train, *model_->module, true, communicator.rank(), communicator.size(),
               parts_),
        test_(config_, *inputs.data.test, *model_->module, false, communicator.rank(), communicator.size(),
              1),
        held_out_data_(inputs.data.held_out.get()),
        dropout_steps_(static_cast<std::size_t>(parts_)),
        result_(1),
        clock_bytes_(start_clock()),
        results_(kStepsAhead * (sizeof(StepReport) + clock_bytes_)),
        recorder_(config_, inputs.folder, arena_, nullptr, root_, inputs.resume),
        trace_({config_.train.profile_from, config_.train.profile_steps,
                plan_steps(config_, train_.loader()).total_steps},
               inputs.folder.path, exchange_->groups(), communicator.rank(), true) {
    weights_ = train_.loader().weights();
    attach(*exchange_, recorder_);
    if (root_ && (settled_.choice.planned || settled_.choice.chosen))
      log_warning("exchange: the plan is made from this host's CPU times, and the run computes on a GPU");
  }

  const Loader& train_loader() const override { return train_.loader(); }
  std::string device() const override {
    cudaDeviceProp properties{};
    TOPKNOT_CUDA(cudaGetDeviceProperties(&properties, context_.options().device));
    return std::string(properties.name) + ", " + config_.train.precision;
  }

  void start_epoch(std::int64_t epoch, std::int64_t first_step) override {
    StepEngine::start_epoch(epoch, first_step);
    train_.start_epoch(epoch, first_step * parts_);
  }
  std::int64_t steps_ahead() const override { return records() ? 1 : std::int64_t{kStepsAhead}; }
  void step(const StepRequest& request) override {
    const NvtxRange range("step");
    // Another density has other buffers. NCCL may have registered the old ones for the graphs: these go first, when the GPU
    // is done with them.
    if (std::exchange(density_, request.density) != request.density && !graphs_.empty()) {
      wait();
      graphs_.clear();
    }
    StepEngine::step(request);
  }

  std::vector<StepStats> stats(std::size_t count) override {
    TOPKNOT_CHECK(count > 0 && count <= pending_.size(), "statistics of steps that were not made");
    // By a stream of its own, so that later steps need not be done.
    there_[(steps_ - pending_.size() + count - 1) % kStepsAhead].wait(reading_.get());
    wait(reading_.get());
    std::vector<StepStats> stats;
    for (std::size_t i = 0; i < count; ++i)
      stats.push_back(outcome(pending_[i], slot(steps_ - pending_.size() + i)));
    pending_.erase(pending_.begin(), pending_.begin() + static_cast<std::ptrdiff_t>(count));
    return stats;
  }

  void end_step(const StepRecord& record, MetricsWriter* metrics) override {
    if (metrics) recorder_.end_step(record, *metrics);
  }

  std::optional<Evaluation> evaluate(Split split, const EvaluationHook& hook) override {
    const NvtxRange range("evaluate");
    return StepEngine::evaluate(split, hook);
  }
  void finish() override {
    wait();
    recorder_.finish();
    trace_.finish();
  }

 private:
  // Recorded gradients are copied to the host in the hooks, which no graph can do. The same on all ranks.
  bool records() const { return config_.train.record_gradients > 0; }
  // Recordings have lengths of their own, and a graph has one shape.
  bool varies() const { return train_.loader().dataset().task() == Task::transcription; }

  static Variable batch_loss(const Variable& output, const DeviceBatch& batch, double label_smoothing = 0) {
    if (batch.frames.size() > 0)
      return ctc_loss(output, {labels_of(batch), span_of(batch.lengths), span_of(batch.frames)});
    return batch.targets.defined()
               ? mean_squared_error(output, batch.targets)
               : softmax_cross_entropy(output, labels_of(batch), static_cast<float>(label_smoothing));
  }
  static std::span<const std::int32_t> span_of(const DeviceArray<std::int32_t>& values) {
    return {values.data(), values.size()};
  }
  static std::span<const std::int32_t> labels_of(const DeviceBatch& batch) { return span_of(batch.labels); }

  void wait() { wait(context_.stream()); }
  void wait(cudaStream_t stream) {
    if (device_)
      device_->wait(stream);
    else
      TOPKNOT_CUDA(cudaStreamSynchronize(stream));
  }
  // A step that stats() was not asked for.
  struct Pending {
    std::int64_t step = 0;  // of the run
    ExchangeStats exchange;
    std::vector<DeviceTimes::Mark> marks;
    std::vector<ExchangeSpan> spans;  // of a staged exchange, on the host
  };
  // What the host gets of a step: a StepReport and the clock of its marks. Steps are counted from this start on.
  std::byte* slot(std::size_t step) const {
    return results_.data() + step % kStepsAhead * (sizeof(StepReport) + clock_bytes_);
  }
  StepStats outcome(const Pending& step, const std::byte* from) {
    StepReport report;
    std::memcpy(&report, from, sizeof report);
    StepStats stats;
    stats.loss = report.loss;
    stats.committed = report.status.bad == 0;
    stats.bad_rank = report.status.bad_rank;
    stats.selected = report.status.selected;
    stats.threshold = report.status.threshold;
    stats.bytes_sent = step.exchange.bytes_sent;
    stats.bytes_received = step.exchange.bytes_received;
    stats.times.encode_s = step.exchange.encode;
    stats.times.communicate_s = step.exchange.communicate;
    stats.times.decode_s = step.exchange.decode;
    stats.times.exposed_s = step.exchange.exposed;
    StepTimes times(exchange_->times(), step.marks,
                    reinterpret_cast<const std::uint64_t*>(from + sizeof(StepReport)));
    if (!times.pieces.empty()) times.add_to(stats.times);
    times.spans.insert(times.spans.end(), step.spans.begin(), step.spans.end());
    trace_.add_step(step.step, times.pieces, times.spans);
    return stats;
  }
  // Bytes of the clock.
  std::size_t start_clock() {
    if (!config_.train.step_times && config_.train.profile_steps == 0) return 0;
    DeviceTimes& times = exchange_->times();
    times.turn_on(exchange_->most_marks() + 2 * static_cast<std::size_t>(parts_) + 3);
    return times.clock().size_bytes();
  }
  void in_phase(Phase phase, const Work& work) override {
    const char* name = phase == Phase::forward    ? "forward"
                       : phase == Phase::backward ? "backward"
                       : phase == Phase::clip     ? "clip"
                       : phase == Phase::update   ? "update"
                                                  : nullptr;  // data comes in begin_step(), metrics later
    if (!name) return work();
    exchange_->times().around({name}, context_.stream(), work);
  }

  void begin_step(const StepRequest& request) override {
    step_ = request.step;
    exchange_->times().clear();
    exchange_->times().around({"data"}, context_.stream(), [&] {
      for (int part = 0; part < parts_; ++part)
        TOPKNOT_CHECK(train_.next(part), "an epoch has fewer batches than its steps");
    });
    count_up(context_.stream(), dropout_steps_.data(), static_cast<std::uint32_t>(request.step * parts_),
             static_cast<std::uint32_t>(parts_));
  }

  struct MarkedGraph {
    Graph graph;
    std::vector<DeviceTimes::Mark> marks;
  };
  // Records the work where that was not done yet.
  void replay(MarkedGraph& marked, const Work& work) {
    DeviceTimes& times = exchange_->times();
    if (marked.graph) {
      times.append(marked.marks);
    } else {
      const std::size_t before = times.marks().size();
      marked.graph = Graph(context_.stream(), graph_memory_, work);
      marked.marks = times.since(before);
    }
    marked.graph.launch(context_.stream());
  }

  // Eagerly at first, so that algorithms are chosen and memory is there, then as graphs.
  void run(const Work& forward_and_backward, const Work& communicate, const Work& finish) override {
    using Capture = Exchange::Capture;
    const Capture capture =
        config_.train.graphs && !records() && !varies() ? exchange_->capture() : Capture::none;
    const Work first = [&] {
      const NvtxRange range("forward and backward");
      forward_and_backward();
    };
    const Work last = [&] {
      const NvtxRange range("decode and update");
      finish();
      write_result(context_.stream(), exchange_->step_state().status, loss_.data(), result_.data());
    };
    StepGraphs* graphs = capture == Capture::none ? nullptr : &graphs_[exchange_->capture_key()];
    if (!graphs || !graphs->warm) {
      first(), communicate(), last();
      if (graphs) graphs->warm = true;
      return;
    }
    if (capture == Capture::whole) {
      replay(graphs->first, [&] { first(), communicate(), last(); });
      if (device_) device_->launched(context_.stream());  // the graph's collectives have a deadline too
      return;
    }
    replay(graphs->first, first);
    communicate();
    replay(graphs->second, last);
  }

  Variable forward(int part, ForwardContext& context) override {
    context.gpu_step = dropout_steps_.data() + part;
    const DeviceBatch& batch = train_.batch(part);
    context.frames = span_of(batch.frames);
    return batch_loss(model_->module->forward(Variable(batch.images), context), batch,
                      config_.train.label_smoothing);
  }

  void record(const StepResult& result) override {
    TOPKNOT_CHECK(pending_.size() < kStepsAhead, "stats() comes at least every steps_ahead() steps");
    std::byte* const to = slot(steps_);
    TOPKNOT_CUDA(
        cudaMemcpyAsync(to, result_.data(), sizeof(StepReport), cudaMemcpyDeviceToHost, context_.stream()));
    const DeviceTimes& times = exchange_->times();
    if (clock_bytes_ > 0)
      TOPKNOT_CUDA(cudaMemcpyAsync(to + sizeof(StepReport), times.clock().data(), clock_bytes_,
                                   cudaMemcpyDeviceToHost, context_.stream()));
    there_[steps_ % kStepsAhead].record(context_.stream());
    ++steps_;
    pending_.push_back({step_, result.stats, times.marks(), exchange_->spans()});
  }

  // Within the GPU now; to the host, over a bus that is much slower, later, on a stream of its own. Where the GPU has no
  // memory for the copy, at once.
  std::function<void()> copy_to_host(const std::vector<HostCopy>& copies) override {
    std::size_t floats = 0;
    for (const HostCopy& copy : copies) floats += copy.from.size();
    try {
      if (snapshot_.size() < floats) snapshot_ = DeviceArray<float>(floats);
    } catch (const OutOfMemory&) {
      for (const HostCopy& copy : copies)
        backend(context_.device()).to_host(static_cast<float*>(copy.to), copy.from.data(), copy.from.size());
      return {};
    }
    std::vector<HostCopy> kept = copies;
    float* at = snapshot_.data();
    for (HostCopy& copy : kept) {
      backend(context_.device()).copy(copy.from.data(), at, copy.from.size());
      copy.from = {at, copy.from.size()};
      at += copy.from.size();
    }
    snapshot_there_.record(context_.stream());
    return [this, kept = std::move(kept)] {
      TOPKNOT_CUDA(cudaSetDevice(context_.options().device));
      snapshot_there_.wait(copies_.get());
      for (const HostCopy& copy : kept)
        TOPKNOT_CUDA(cudaMemcpyAsync(copy.to, copy.from.data(), copy.from.size_bytes(),
                                     cudaMemcpyDeviceToHost, copies_.get()));
      TOPKNOT_CUDA(cudaStreamSynchronize(copies_.get()));
    };
  }

  EvaluationSums evaluation_sums(Split split, const EvaluationHook& hook) override {
    if (split == Split::test) return evaluation_sums(test_, hook);
    CudaInputs held_out(config_, *held_out_data_, *model_->module, false, communicator_.rank(),
                        communicator_.size(), 1);
    return evaluation_sums(held_out, hook);
  }
  EvaluationSums evaluation_sums(CudaInputs& inputs, const EvaluationHook& hook) {
    const cudaStream_t stream = context_.stream();
    DeviceArray<double> device(3);  // losses, correct, in the top five
    TOPKNOT_CUDA(cudaMemsetAsync(device.data(), 0, device.bytes(), stream));
    ForwardContext context;
    context.training = false;
    EvaluationSums sums;
    inputs.start_epoch(0);
    // The host may be some batches ahead of the GPU.
    for (std::int64_t done = 0; hook(done, inputs.loader().steps_per_epoch()) && inputs.next(0); ++done) {
      const DeviceBatch& batch = inputs.batch(0);
      const auto losses = static_cast<double>(batch.losses);
      context.frames = span_of(batch.frames);
      const Variable output = model_->module->forward(Variable(batch.images), context);
      const Variable loss = batch_loss(output, batch);
      add_scaled(stream, device.data(), loss.value().data(), losses);
      if (inputs.loader().dataset().task() == Task::classification)
        count_correct(output.value(), labels_of(batch), 1, device.data() + 1);
      if (counts_top5(inputs.loader().dataset()))
        count_correct(output.value(), labels_of(batch), 5, device.data() + 2);
      if (!batch.host.frames.empty())
        add_transcript_errors(*model_->module, output.value(), batch.host, sums);  // waits for the GPU
      sums.samples += losses;
    }
    std::array<double, 3> host{};
    TOPKNOT_CUDA(cudaMemcpyAsync(host.data(), device.data(), device.bytes(), cudaMemcpyDeviceToHost, stream));
    wait();
    sums.loss = host[0], sums.correct = host[1], sums.top5 = host[2];
    return sums;
  }

  struct StepGraphs {
    bool warm = false;          // has run once without a graph
    MarkedGraph first, second;  // second: after the collectives, where these are not in a graph
  };

  std::unique_ptr<DeviceCommunicator> device_;  // null: collectives are the host's
  std::unique_ptr<DeviceExchange> exchange_;
  CudaInputs train_, test_;
  const Dataset* held_out_data_;              // null where the run has none
  DeviceArray<std::uint32_t> dropout_steps_;  // one per part
  DeviceArray<StepReport> result_;
  const std::size_t clock_bytes_;
  PinnedMemory results_;                  // of the last steps, a ring
  std::array<Event, kStepsAhead> there_;  // when they are in results_
  Stream reading_;                        // waits for these
  std::size_t steps_ = 0;                 // made since the start
  std::int64_t step_ = 0;                 // of the run, under way
  std::vector<Pending> pending_;
  DeviceArray<float> snapshot_;  // of copy_to_host()
  Event snapshot_there_;
  Stream copies_;
  Recorder recorder_;
  StepTrace trace_;
  GraphMemory graph_memory_{context_.pool()};
  std::map<std::uint64_t, StepGraphs> graphs_;  // of density_
  double density_ = 0;
};

}  // namespace
}  // namespace cuda

std::unique_ptr<Engine> make_cuda_engine(const RunInputs& inputs, Communicator& communicator) {
  return std::make_unique<cuda::CudaEngine>(inputs, communicator);
}

}  // namespace topknot

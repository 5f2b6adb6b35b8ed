// Steps on a GPU: put on a stream, after the first ones as graphs; their outcome is read some steps later.
#include <fmt/format.h>
#include <nvtx3/nvToolsExt.h>

#include <algorithm>
#include <array>
#include <map>
#include <utility>

#include "dist/comm/cuda/device_communicator.h"
#include "dist/exchange/cuda/device_exchange.h"
#include "dist/exchange/cuda/step_kernels.h"
#include "nn/base/algorithm_cache.h"
#include "nn/base/check.h"
#include "nn/base/log.h"
#include "nn/core/cuda/context.h"
#include "nn/core/cuda/pool.h"
#include "nn/core/cuda/trial.h"
#include "nn/ops/cuda/filters.h"
#include "train/cuda/batches.h"
#include "train/cuda/step_times.h"
#include "train/metrics/metrics.h"
#include "train/runner.h"
#include "train/setup.h"

namespace topknot {
namespace cuda {
namespace {

using Work = std::function<void()>;

// A named range in the timeline of Nsight Systems, to the end of the scope; nothing if no profiler listens.
class NvtxRange {
 public:
  explicit NvtxRange(const char* name) { nvtxRangePushA(name); }
  ~NvtxRange() { nvtxRangePop(); }
  NvtxRange(const NvtxRange&) = delete;
  NvtxRange& operator=(const NvtxRange&) = delete;
};

constexpr std::size_t kStepsAhead = 32;

// Marks (DeviceTimes) of a run of graphs: in its first steps, and then in every kMarkedEvery-th.
constexpr std::int64_t kFirstMarked = 2 * kWarmUpSteps, kMarkedEvery = 50;

Precision precision_of(const std::string& name) {
  return name == "bf16" ? Precision::bf16 : name == "tf32" ? Precision::tf32 : Precision::fp32;
}

ContextOptions context_options(const RunInputs& inputs, const Communicator& communicator) {
  const auto& train = inputs.config.train;
  const bool both = train.unproven == "both", early_launch = both || train.unproven == "early_launch";
  return {inputs.gpu,
          communicator.rank(),
          precision_of(train.precision),
          train.deterministic,
          communicator.size() > 1,
          algorithm_cache_folder(train.algorithm_cache),
          early_launch,
          both || train.unproven == "conv_plans"};
}

// Early launches as a step has them: after kernels, a fill and another stream, eager and in a graph. A driver
// was reported to refuse them while it recorded a graph (sglang#18596); such a run goes on without, and so does one
// whose kernels begin before what they wait for.
void try_early_launches(Context& context) {
  if (!context.early_launches()) return;
  constexpr std::uint64_t kHeldNs = 20'000;  // many of the clock's steps
  const cudaStream_t main = context.stream(), other = context.communication();
  std::string why;
  try {
    const DeviceArray<std::uint64_t> times(4);
    const DeviceArray<std::byte> filled(16);
    Event fork, join;
    const Work work = [&] {
      write_time(main, times.data()), hold(main, kHeldNs);
      write_time(main, times.data() + 1);
      TOPKNOT_CUDA(cudaMemsetAsync(filled.data(), 0, filled.bytes(), main));
      hold(main, kHeldNs);
      fork.record(main), fork.wait(other);
      write_time(other, times.data() + 2), hold(other, kHeldNs);
      join.record(other), join.wait(main);
      write_time(main, times.data() + 3);
    };
    const auto look = [&](const char* where) {
      std::array<std::uint64_t, 4> found{};
      TOPKNOT_CUDA(cudaMemcpyAsync(found.data(), times.data(), times.bytes(), cudaMemcpyDeviceToHost, main));
      context.synchronize();
      if (!times_apart(found, kHeldNs / 2))
        why = fmt::format("{} a kernel began before what it waits for had ended", where);
    };
    work();
    look("outside of a graph");
    GraphMemory memory(context.pool());
    const Graph graph(main, memory, work);
    graph.launch(main);
    if (why.empty()) look("in a graph");
    context.synchronize();
  } catch (const CudaError& error) {
    why = error.what();
  }
  if (why.empty()) return;
  context.end_early_launches();
  log_warning("no kernel begins early (train.unproven=early_launch): " + why);
}

void refuse_what_needs_the_cpu(const Config& config) {
  if (config.train.distribution_every > 0)
    throw UserError("train.distribution_every is for train.device=cpu; set it to 0, or train on the CPU");
}

// Collective. How many ranks work on this process's GPU.
int ranks_of_gpu(Communicator& communicator, int gpu) {
  const std::string place = gpu_place(gpu);
  const std::vector<std::string> places = gather_texts(communicator, place);
  return static_cast<int>(std::count(places.begin(), places.end(), place));
}

class CudaRunner final : public Runner {
 public:
  CudaRunner(const RunInputs& inputs, Communicator& communicator)
      : config_(inputs.config),
        folder_(inputs.folder),
        communicator_(communicator),
        context_((refuse_what_needs_the_cpu(inputs.config), context_options(inputs, communicator))),
        use_(context_),
        neighbours_(ranks_of_gpu(communicator, inputs.gpu)),
        gpu_steps_(static_cast<std::size_t>(config_.train.accumulate)),
        outcomes_(kStepsAhead * sizeof(StepOutcome)) {
    Trial::force(config_.train.trial);
    try_early_launches(context_);
    cudaDeviceProp properties{};
    TOPKNOT_CUDA(cudaGetDeviceProperties(&properties, context_.options().device));
    traits_ = {context_.device(), std::string(properties.name) + ", " + config_.train.precision,
               records() ? 1 : std::int64_t{kStepsAhead}, gpu_steps_.data()};
  }

  std::unique_ptr<Exchange> make_exchange(ParameterArena& arena, CollectiveQueue& queue,
                                          const ExchangeOptions& options) override {
    if (config_.dist.backend != "gloo") {
      collectives_ = make_device_communicator(communicator_, config_.dist.timeout_s);
      if (config_.train.graphs != "false") collectives_->try_graphs(config_.train.graphs == "true");
    }
    filters_.emplace(arena.all_weights());
    auto exchange = make_device_exchange(arena, queue, collectives_.get(), options);
    exchange_ = exchange.get();
    return exchange;
  }
  std::unique_ptr<Batches> make_batches(const Dataset& dataset, const Module& model, bool train) override {
    auto batches = make_device_batches(config_, dataset, model, train, communicator_.rank(),
                                       communicator_.size(), neighbours_);
    if (train) train_ = batches.get();
    return batches;
  }
  void begin_run(std::int64_t total_steps) override {
    if (config_.train.step_times || asks_for_steps(config_.train.profile_steps)) {
      times().turn_on(exchange_->most_marks() + 2 * gpu_steps_.size() + 3);
      clocks_ = std::make_unique<PinnedMemory>(kStepsAhead * times().clock().size_bytes());
    }
    trace_.emplace(config_.train.profile_steps, total_steps, folder_.path, exchange_->groups(),
                   communicator_.rank(), true);
  }

  void begin_step(const StepContext& context, int parts, double) override {
    nvtxRangePushA("step");
    // Another density has other buffers. NCCL may have registered the old ones for the graphs: these go
    // first, when the GPU is done with them. Their memory is for the step that then runs without a graph.
    if (std::exchange(density_, context.density) != context.density && !graphs_.empty()) {
      wait(context_.stream());
      graphs_.clear();
      graph_memory_.emplace(context_.pool());
    }
    step_ = context.step, parts_ = backwards_ = parts;
    if (pending_.empty()) write_time(context_.stream(), &outcome(step_).begin_ns);
    times().begin_step(marked(context.step));
    times().around({"data"}, context_.stream(), [&] { train_->begin_step(parts); });
    count_up(context_.stream(), gpu_steps_.data(), static_cast<std::uint32_t>(context.step) * micro_batches(),
             micro_batches());
  }

  // Eagerly at first, so that algorithms are chosen and memory is there, then as graphs.
  void run(const StepParts& parts) override {
    const Capture capture = this->capture();
    const Work first = [&] {
      const NvtxRange range("forward and backward");
      parts.compute();
    };
    const Work last = [&] {
      const NvtxRange range("decode and update");
      parts.apply();
      write_outcome(parts.loss);
    };
    StepGraphs* graphs = capture == Capture::none ? nullptr : &graphs_[{exchange_->capture_key(), parts_}];
    if (!graphs || !graphs->warm) {
      first(), parts.communicate(), last();
      if (graphs) graphs->warm = true;
      return;
    }
    // Those with marks and those without never run at once, and share their memory.
    auto& [before, behind] = times().marked() ? graphs->marked : graphs->plain;
    if (capture == Capture::whole) {
      replay(before, [&] { first(), parts.communicate(), last(); });
      if (collectives_)
        collectives_->launched(context_.stream());  // the graph's collectives have a deadline too
      return;
    }
    replay(before, first);
    parts.communicate();
    replay(behind, last);
  }

  void in_phase(Phase phase, const Work& work) override {
    const char* name = phase == Phase::forward    ? "forward"
                       : phase == Phase::backward ? "backward"
                       : phase == Phase::clip     ? "clip"
                       : phase == Phase::update   ? "update"
                                                  : nullptr;  // data comes in begin_step(), metrics later
    const Work timed = [&] {
      if (phase == Phase::forward && !fixed_) fixed_.emplace(*filters_);
      work();
      if (phase == Phase::backward && --backwards_ == 0) fixed_.reset();
    };
    if (name) return times().around({name}, context_.stream(), timed);
    if (phase != Phase::evaluate) return work();
    const NvtxRange range("evaluate");
    const Filters::Scope fixed(*filters_);
    work();
  }
  void end_step(const StepReport& report, const float* loss) override {
    TOPKNOT_CHECK(pending_.size() < kStepsAhead, "reports() comes at least every steps_ahead steps");
    if (makes_local_steps(config_)) write_outcome(loss);  // no run() did
    if (times().marked())
      TOPKNOT_CUDA(cudaMemcpyAsync(clock(step_), times().clock().data(), times().clock().size_bytes(),
                                   cudaMemcpyDeviceToHost, context_.stream()));
    there_[slot(step_)].record(context_.stream());
    pending_.push_back({step_, report, times().marks(), exchange_->spans(), pending_.empty()});
    nvtxRangePop();
  }

  std::vector<StepReport> reports(std::size_t count) override {
    TOPKNOT_CHECK(count > 0 && count <= pending_.size(), "reports of steps that were not made");
    // On a stream of its own, so that later steps need not be done.
    there_[slot(pending_[count - 1].step)].wait(reading_.get());
    wait(reading_.get());
    std::vector<StepReport> reports;
    for (std::size_t i = 0; i < count; ++i) reports.push_back(complete_report(pending_[i]));
    pending_.erase(pending_.begin(), pending_.begin() + static_cast<std::ptrdiff_t>(count));
    return reports;
  }

  // Within the GPU now; to the host later, on a stream of its own, or at once if the GPU has no memory left.
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

  void finish() override {
    wait(context_.stream());
    trace_->finish();
  }
  void release() noexcept override {
    graphs_.clear();
    trace_.reset();
  }

 private:
  // Recorded gradients are copied to the host in the hooks, which no graph can do. The same on all ranks.
  bool records() const { return asks_for_steps(config_.train.record_gradients); }
  // Recordings have lengths of their own, and a graph has one shape.
  bool varies() const { return train_->loader().dataset().task() == Task::transcription; }
  using Capture = Exchange::Capture;
  Capture capture() const {
    const bool graphs =
        config_.train.graphs != "false" && !makes_local_steps(config_) && !records() && !varies();
    return graphs ? exchange_->capture() : Capture::none;
  }

  // The same on all ranks.
  bool marked(std::int64_t step) const {
    const bool due = capture() == Capture::none || step < kFirstMarked || step % kMarkedEvery == 0;
    return (config_.train.step_times && due) || trace_->covers(step);
  }

  void wait(cudaStream_t stream) {
    if (collectives_)
      collectives_->wait(stream);
    else
      TOPKNOT_CUDA(cudaStreamSynchronize(stream));
  }
  DeviceTimes& times() { return exchange_->times(); }
  std::uint32_t micro_batches() const { return static_cast<std::uint32_t>(gpu_steps_.size()); }

  // A step that reports() was not asked for.
  struct Pending {
    std::int64_t step = 0;  // of the run
    StepReport report;      // of the exchange
    std::vector<DeviceTimes::Mark> marks;
    std::vector<ExchangeSpan> spans;  // of a staged exchange, on the host
    bool first = false;               // no other was pending
  };
  // The host's part of a step: its StepOutcome and, if it is marked, the clock.
  static std::size_t slot(std::int64_t step) { return static_cast<std::size_t>(step) % kStepsAhead; }
  StepOutcome* outcomes() const { return reinterpret_cast<StepOutcome*>(outcomes_.data()); }
  StepOutcome& outcome(std::int64_t step) const { return outcomes()[slot(step)]; }
  std::uint64_t* clock(std::int64_t step) const {
    return reinterpret_cast<std::uint64_t*>(clocks_->data() + slot(step) * clocks_->size() / kStepsAhead);
  }
  void write_outcome(const float* loss) {
    cuda::write_outcome(context_.stream(), exchange_->step_state().status, loss, gpu_steps_.data(),
                        micro_batches(), {outcomes(), kStepsAhead});
  }
  StepReport complete_report(const Pending& step) {
    const StepOutcome& on_gpu = outcome(step.step);
    StepReport report = step.report;
    report.loss = on_gpu.loss;
    const std::uint64_t begin_ns = step.first ? on_gpu.begin_ns : end_ns_;
    report.seconds = 1e-9 * static_cast<double>(on_gpu.end_ns - begin_ns);
    end_ns_ = on_gpu.end_ns;
    if (!makes_local_steps(config_)) report.status = on_gpu.status;
    StepTimes times(this->times(), step.marks, step.marks.empty() ? nullptr : clock(step.step));
    if (!times.pieces.empty())
      times.add_to(report.times);
    else  // the host has measured a staged exchange
      report.times = step.spans.empty() ? StepSeconds::unknown() : report.times.of_exchange();
    times.spans.insert(times.spans.end(), step.spans.begin(), step.spans.end());
    trace_->add_step(step.step, times.pieces, times.spans);
    return report;
  }

  struct MarkedGraph {
    Graph graph;
    std::vector<DeviceTimes::Mark> marks;
  };
  struct StepGraphs {
    bool warm = false;  // has run once without a graph
    // The whole step; or its parts before and after the collectives, where these are not in a graph.
    std::array<MarkedGraph, 2> plain, marked;
  };

  void replay(MarkedGraph& marked, const Work& work) {
    if (marked.graph) {
      times().append(marked.marks);
    } else {
      const std::size_t before = times().marks().size();
      marked.graph = Graph(context_.stream(), *graph_memory_, work);
      marked.marks = times().since(before);
      log_debug(fmt::format("step {}: a graph of {} nodes", step_ + 1, marked.graph.nodes()));
    }
    marked.graph.launch(context_.stream());
  }

  const Config& config_;
  const RunDirectory folder_;
  Communicator& communicator_;
  Context context_;
  Context::Use use_;
  // Filters of the weights that are exchanged. Local steps have other weights, whose filters are made singly.
  std::optional<Filters> filters_;
  std::optional<Filters::Scope> fixed_;  // from a step's first forward pass to its last backward pass
  int backwards_ = 0;                    // the backward passes to come
  const int neighbours_;                 // ranks of this GPU, this one included
  std::unique_ptr<DeviceCommunicator> collectives_;  // null: they are the host's
  DeviceExchange* exchange_ = nullptr;
  Batches* train_ = nullptr;
  DeviceArray<std::uint32_t> gpu_steps_;  // one per micro-batch
  PinnedMemory outcomes_;                 // of the last steps, a ring
  std::unique_ptr<PinnedMemory> clocks_;  // the same
  std::array<Event, kStepsAhead> there_;  // when they are there
  Stream reading_;                        // waits for these
  std::int64_t step_ = 0;                 // of the run, under way
  int parts_ = 0;                         // its micro-batches
  std::vector<Pending> pending_;
  std::uint64_t end_ns_ = 0;     // of the last step that was reported
  DeviceArray<float> snapshot_;  // of copy_to_host()
  Event snapshot_there_;
  Stream copies_;
  std::optional<StepTrace> trace_;
  std::optional<GraphMemory> graph_memory_{std::in_place, context_.pool()};
  std::map<std::pair<std::uint64_t, int>, StepGraphs> graphs_;  // of density_, by capture_key() and parts_
  double density_ = 0;
};

}  // namespace
}  // namespace cuda

std::unique_ptr<Runner> make_cuda_runner(const RunInputs& inputs, Communicator& communicator) {
  return std::make_unique<cuda::CudaRunner>(inputs, communicator);
}

}  // namespace topknot

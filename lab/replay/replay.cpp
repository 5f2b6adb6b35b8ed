#include "lab/replay/replay.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <latch>
#include <memory>
#include <optional>
#include <thread>

#include "dist/comm/collective_queue.h"
#include "dist/comm/communicator.h"
#include "nn/base/check.h"
#include "nn/base/log.h"
#include "train/checks.h"
#include "train/run_directory.h"
#include "train/trace.h"

namespace topknot {
namespace {

namespace fs = std::filesystem;

// Only the shape of its samples and the number of classes are used.
std::unique_ptr<Dataset> smallest_data(const Config& config) {
  DatasetOptions options = dataset_options(config);
  options.set("sequence_length", 1);
  options.test_size = 2;  // a text needs the word after the first
  return make_dataset(config.data.name, options, Split::test);
}

// A rank's, in the order of kReplayFigures.
using Figures = std::array<double, std::size(kReplayFigures)>;

OverRanks over_ranks(const std::vector<Figures>& all, std::size_t field) {
  OverRanks result{all[0][field], all[0][field], all[0][field], 0};
  for (const Figures& figures : all) {
    result.least = std::min(result.least, figures[field]);
    result.largest = std::max(result.largest, figures[field]);
    result.mean += figures[field] / static_cast<double>(all.size());
  }
  return result;
}

ReplayStep gathered(CollectiveQueue& queue, const Figures& mine) {
  std::vector<std::vector<std::byte>> blocks;
  queue.run([&](Communicator& c) { c.all_gather(std::as_bytes(std::span(mine)), blocks); });
  std::vector<Figures> all(blocks.size());
  for (std::size_t r = 0; r < blocks.size(); ++r) {
    TOPKNOT_CHECK(blocks[r].size() == sizeof(Figures), "a damaged block of figures");
    std::memcpy(all[r].data(), blocks[r].data(), sizeof(Figures));
  }
  ReplayStep step;
  for (std::size_t i = 0; i < std::size(kReplayFigures); ++i)
    step.*kReplayFigures[i].figure = over_ranks(all, i);
  return step;
}

void check_same_replay(const Config& config, const Recording& recording, const ReplayOptions& options,
                       Communicator& communicator) {
  check_same_configuration(communicator, config);
  check_same(communicator, "the replay",
             fmt::format("{} recorded steps, {} steps, compute {} s{}", recording.steps(), options.steps,
                         options.compute_s, options.meet ? ", meeting" : ""));
}

// Blocks a rank's queue until every rank has encoded all of its groups.
class Meeting {
 public:
  explicit Meeting(CollectiveQueue& queue) : queue_(queue) {
    ticket_ = queue.submit([encoded = encoded_](Communicator& c) {
      encoded->wait();
      c.barrier();
    });
  }
  // Also when an exception leaves the scope: the queue's thread must not wait for it.
  ~Meeting() {
    if (!held_) encoded_->count_down();
  }
  Meeting(const Meeting&) = delete;
  Meeting& operator=(const Meeting&) = delete;
  void hold() {
    held_ = true;
    encoded_->count_down();
    queue_.wait(ticket_);
  }

 private:
  CollectiveQueue& queue_;
  std::shared_ptr<std::latch> encoded_ = std::make_shared<std::latch>(1);
  CollectiveQueue::Ticket ticket_ = 0;
  bool held_ = false;
};

// Fires the hooks of a backward pass without computing one.
void ready_all(ParameterArena& arena, Exchange& exchange, double compute_s) {
  for (Parameter* parameter : arena.parameters()) {
    if (compute_s > 0)
      std::this_thread::sleep_for(std::chrono::duration<double>(
          compute_s * static_cast<double>(parameter->numel()) / static_cast<double>(arena.size())));
    exchange.ready(*parameter);
  }
}

}  // namespace

Recording::Recording(const std::string& folder) : folder_(folder) {
  std::error_code error;
  const std::string hint = "; 'bench --record DIR FILE.yaml' makes a folder that can be replayed";
  if (!fs::is_directory(folder, error)) throw UserError(folder + ": no such folder" + hint);
  const RunDirectory run{folder};
  const std::string yaml = folder + "/config.yaml", gradients = run.gradients_safetensors();
  if (!fs::exists(gradients, error)) run.check_gradients();
  for (const std::string& path : {yaml, gradients})
    if (!fs::exists(path, error)) throw UserError(path + " is missing" + hint);

  const LoadedConfig loaded = load_config(yaml, {});
  throw_problems(loaded.problems);
  config_ = loaded.config;
  throw_problems(check_config(config_));
  data_ = smallest_data(config_);

  reader_ = std::make_unique<GradientsReader>(gradients);
  const auto built = build_model(config_, *data_, {}, false);
  const ParameterArena& arena = built->store.arena();
  size_ = arena.size();
  for (const Parameter* parameter : arena.parameters()) offsets_[parameter->name()] = parameter->offset();
  if (reader_->size() != size_ || reader_->steps() == 0)
    throw UserError(
        fmt::format("{} holds [{}, {}], but {} parameters ({} of config.yaml beside it) need [steps, {}]{}",
                    gradients, reader_->steps(), reader_->size(), size_, config_.model.name, size_, hint));
  steps_ = static_cast<std::int64_t>(reader_->steps());
}

std::unique_ptr<BuiltModel> Recording::model(const Config& config) const {
  Config mine = config_;
  mine.compress = config.compress;
  mine.train.device = config.train.device;
  return build_model(mine, *data_, {}, false);
}

void Recording::fill(ParameterArena& arena, std::int64_t step, float scale) const {
  TOPKNOT_CHECK(step >= 0 && step < steps_, "a step that was not recorded");
  const std::size_t row = static_cast<std::size_t>(step) * size_;
  for (const Parameter* parameter : arena.parameters()) {
    const std::span<float> gradient(parameter->gradient(), parameter->numel());
    reader_->read(row + offsets_.at(parameter->name()), gradient);
    for (float& g : gradient) g *= scale;
  }
}

ReplayRow replay_row(std::int64_t step, int rank, int ranks, std::int64_t recorded) {
  const float place = (2.0f * static_cast<float>(rank) + 1.0f) / static_cast<float>(ranks);  // in (0, 2)
  return {(step * ranks + rank) % recorded, 0.5f + 0.5f * place};
}

ReplayResult replay_rank(const Recording& recording, const Config& config, const ReplayOptions& options,
                         Communicator& communicator, const ReplayObserver& observer) {
  const int rank = communicator.rank(), ranks = communicator.size();
  set_log_rank(rank, ranks);
  check_same_replay(config, recording, options, communicator);
  settle_threads(communicator, config);
  if (options.meet && !communicator.overlaps())
    throw UserError(
        "--meet needs dist.backend=gloo or dist.link.rate, whose collectives run beside the compute thread");
  if (options.meet && config.exchange.ranks_per_host > 1)
    throw UserError("--meet holds up the sums inside a host (exchange.ranks_per_host); leave it out");
  const auto model = recording.model(config);
  ParameterArena& arena = model->store.arena();
  CollectiveQueue queue(communicator);
  Exchange exchange(arena, queue, exchange_options(config, arena));

  ReplayResult result;
  result.groups = exchange.groups().size();
  result.parameters = arena.size();
  const double density = config.compress.name == "dense" ? 1.0 : config.compress.density;
  const std::int64_t total = options.steps + static_cast<std::int64_t>(kWarmUpSteps);
  StepTrace trace(options.trace_folder.empty() ? std::vector<int>() : config.train.profile_steps, total,
                  options.trace_folder, exchange.groups(), communicator.rank(), communicator.overlaps());
  for (std::int64_t step = 0; step < total; ++step) {
    const ReplayRow row = replay_row(step, rank, ranks, recording.steps());
    recording.fill(arena, row.row, row.scale);
    queue.run([](Communicator& c) { c.barrier(); });
    std::optional<Meeting> meeting;
    if (options.meet) meeting.emplace(queue);
    auto start = Clock::now();
    trace.begin_step(step);
    exchange.begin_step({.step = step, .density = density, .lr = config.optimizer.lr});
    {
      const StepTrace::Span span(trace, TraceRow::compute, "backward");
      ready_all(arena, exchange, options.compute_s);
    }
    double seconds = 0;
    if (meeting) {
      seconds = seconds_since(start);
      meeting->hold();
      start = Clock::now();
    }
    const StepReport done = exchange.finish(true);
    seconds += seconds_since(start);
    trace.end_step(exchange.spans());
    if (!done.committed())
      throw UserError(fmt::format(
          "gradients.safetensors holds a NaN or an infinity: step {} of the replay{}; record another run",
          step + 1,
          done.status.bad_rank < 0
              ? ""
              : fmt::format(", recorded step {} (from 0)",
                            replay_row(step, done.status.bad_rank, ranks, recording.steps()).row)));
    const StepSeconds& times = done.times;
    result.steps.push_back(
        gathered(queue, {seconds, times.encode_s, times.communicate_s, times.exposed_s, times.decode_s,
                         static_cast<double>(done.bytes_sent), static_cast<double>(done.bytes_received),
                         static_cast<double>(done.status.selected)}));
    result.steps.back().threshold = done.status.threshold;
    if (observer) observer(step, exchange, arena);
  }
  return result;
}

void check_replay(const Recording& recording, const Config& config) {
  if (config.compress.layer_density == "auto")
    throw UserError(
        "compress.layer_density=auto measures a backward pass, and a replay has none; give the "
        "layer_density.json of a run, or compress.layer_density=");
  const std::string& merge = config.exchange.merge;
  if (parse_merge(merge).planned() && config.exchange.groups.empty())
    throw UserError(
        "exchange.merge=" + merge +
        " is planned from times that a replay does not measure; give the plan as exchange.groups=, "
        "which the config.yaml of a run with that merge has");
  if (config.exchange.collective == "auto")
    throw UserError(
        "exchange.collective=auto is chosen by times that a replay does not measure; name the collective");
  const auto model = recording.model(config);
  const auto group = make_thread_group(1, config.dist.timeout_s);
  CollectiveQueue queue(*group[0]);
  ParameterArena& arena = model->store.arena();
  Config alone = config;
  alone.exchange.ranks_per_host = 0;  // of one rank
  const Exchange exchange(arena, queue, exchange_options(alone, arena));
}

void check_replay_keys(const std::vector<std::string>& overrides) {
  static const std::vector<std::string> useful{"compress.",
                                               "exchange.",
                                               "dist.",
                                               "seed",
                                               "train.threads",
                                               "train.profile_steps",
                                               "output.overwrite",
                                               "optimizer.lr",
                                               "optimizer.momentum",
                                               "optimizer.nesterov"};
  static const std::vector<std::string> useless{"compress.warmup", "compress.clip="};
  for (const std::string& text : overrides) {
    const auto begins = [&](const std::string& start) { return text.starts_with(start); };
    const std::string key = text.substr(0, text.find('='));
    if (key == "output.dir") throw UserError(text + ": a replay writes to --out DIR");
    if (std::none_of(useful.begin(), useful.end(), begins) ||
        std::any_of(useless.begin(), useless.end(), begins))
      throw UserError(
          text +
          " has no part in a replay, whose model, data and training are the recording's; "
          "what can be changed: compress.*, exchange.*, dist.*, seed, train.threads, train.profile_steps, "
          "optimizer.momentum, optimizer.nesterov and optimizer.lr");
  }
}

}  // namespace topknot

#include "train/local_steps.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>
#include <string>
#include <utility>

#include "dist/sparse/hierarchical.h"
#include "nn/base/checksum.h"
#include "train/step.h"

namespace topknot {
namespace {

// The same parameters in the same order, for sizes and places; what they hold is the caller's.
ParameterArena& lay_out_as(const ParameterStore& model, ParameterStore& store) {
  std::map<std::string, const Parameter*> by_name;
  for (const auto& parameter : model.parameters()) {
    by_name[parameter->name()] = parameter.get();
    store.add(parameter->name(), parameter->shape(), [](std::span<float>, const CounterRng&) {});
  }
  return store.build([&](const Parameter& p) { return by_name.at(p.name())->compressible(); }, 0,
                     [&](const Parameter& p) { return !by_name.at(p.name())->trained(); });
}

}  // namespace

OptimizerOptions outer_options(const Config::Outer& outer) {
  OptimizerOptions options;
  options.name = "sgd";
  options.lr = outer.lr;
  options.momentum = outer.momentum;
  options.nesterov = outer.name == "nesterov" && outer.momentum > 0;
  return options;
}

LocalSteps::LocalSteps(const Config& config, ParameterStore& model, int rank, bool alone)
    : rank_(rank),
      every_(config.exchange.every),
      fragments_(config.exchange.fragments),
      overlap_(config.exchange.overlap_steps),
      outer_lr_(config.outer.lr),
      clip_norm_(config.train.clip_global),
      alpha_(static_cast<float>(config.outer.alpha)),
      model_(model.arena()),
      outer_(model_.device()),
      arena_(lay_out_as(model, outer_)),
      backend_(backend(model_.device())),
      inner_(alone ? make_optimizer(config.optimizer, model_) : nullptr),
      outer_optimizer_(make_optimizer(outer_options(config.outer), arena_)),
      clip_(model_.device(), model_.size()),
      parameters_(Tensor::zeros({sizeof(StepParameters) / sizeof(float)}, Layout::plain, model_.device())),
      found_(Tensor::zeros({1}, Layout::plain, model_.device())) {
  backend_.copy(model_.all_weights().data(), arena_.all_weights().data(), arena_.all_weights().size());
  if (overlap_ > 0)
    changes_ = Tensor::zeros({static_cast<std::int64_t>(arena_.size())}, Layout::plain, model_.device());
}

bool LocalSteps::inner_step(const StepContext& context, float loss) {
  const std::span<float> gradient = model_.gradient(0, model_.size());
  clip_.sum_of_squares({&gradient, 1});
  if (!std::isfinite(loss) || !std::isfinite(value_on(backend_, clip_.sum()))) return false;
  const StepParameters step{.step = context.step, .lr = context.lr, .rank = rank_};
  backend_.to_device(parameters_.data(), reinterpret_cast<const float*>(&step), parameters_.numel());
  auto* const parameters = reinterpret_cast<StepParameters*>(parameters_.data());
  if (clip_norm_ > 0) clip_.set_gradient_scale(clip_norm_, parameters);
  inner_->update(0, gradient, StepState{parameters});
  return true;
}

namespace {

void add_to(StepReport& all, const StepReport& one) {
  all.bytes_sent += one.bytes_sent, all.bytes_received += one.bytes_received;
  all.times += one.times;
  all.status.selected += one.status.selected, all.status.over_capacity += one.status.over_capacity;
  all.status.threshold = one.status.threshold;
  if (one.committed() || !all.committed()) return;
  all.status.bad = one.status.bad, all.status.bad_rank = one.status.bad_rank;
}

}  // namespace

StepReport LocalSteps::exchange_after(Exchange& exchange, const StepContext& context) {
  const std::int64_t made = context.step + 1, sent = fragment_sent_after(made);
  const bool last = made == total_steps_;
  StepReport report;
  if (sync_) add_to(report, receive(exchange));
  if (sent >= 0) send(exchange, context, sent);
  if (sync_ && (overlap_ == 0 || last)) add_to(report, receive(exchange));
  for (std::int64_t fragment = 0; last && fragment < fragments_; ++fragment) {
    if (fragment == sent) continue;
    send(exchange, context, fragment);
    add_to(report, receive(exchange));
  }
  return report;
}

void LocalSteps::send(Exchange& exchange, const StepContext& context, std::int64_t fragment) {
  sync_ = {context.step, fragment, context.density, {context.weights.begin(), context.weights.end()}, {}};
  if (overlap_ > 0) sync_->before = exchange.state();
  for (const Group& group : exchange.groups()) {
    if (group.fragment != fragment) continue;
    const std::span<float> delta = arena_.gradient(group.begin, group.end);
    backend_.copy(arena_.weights().data() + group.begin, delta.data(), delta.size());
    backend_.add_scaled(delta.data(), model_.weights().data() + group.begin, delta.size(), -1.0f);
    if (overlap_ > 0) backend_.copy(delta.data(), changes_.data() + group.begin, delta.size());
  }
  start(exchange, *sync_);
}

void LocalSteps::start(Exchange& exchange, const Sync& sync) {
  exchange.begin_step({.step = sync.step, .density = sync.density, .weights = sync.weights, .lr = outer_lr_},
                      static_cast<int>(sync.fragment));
  std::vector<std::span<float>> gradients;
  for (const Group& group : exchange.groups_in_step())
    gradients.push_back(arena_.gradient(group.begin, group.end));
  clip_.sum_of_squares(gradients);
  for (const Group& group : exchange.groups_in_step())
    for (Parameter* parameter : group.parameters) exchange.ready(*parameter);
  // In place of a loss, for the ranks' agreement: a dense sum would not tell whose Delta is not finite.
  const double sum = value_on(backend_, clip_.sum());
  const float found = static_cast<float>(sum - sum);
  backend_.to_device(found_.data(), &found, 1);
  exchange.end_backward(found_.data());
  exchange.communicate();
}

StepReport LocalSteps::receive(Exchange& exchange) {
  sync_.reset();
  exchange.decode_and_commit();
  const StepStatus status = value_on(backend_, exchange.step_state().status);
  const bool committed = status.bad == 0;
  for (const Group& group : exchange.groups_in_step()) {
    if (committed)
      outer_optimizer_->update(group.begin, exchange.averaged(group), exchange.step_state(),
                               exchange.applied(group));
    const std::size_t size = group.numel();
    const float* theta = arena_.weights().data() + group.begin;
    float* x = model_.weights().data() + group.begin;
    if (alpha_ == 0 || !committed) {
      backend_.copy(theta, x, size);
      continue;
    }
    float* own = exchange.averaged(group).data();  // it is not needed any more
    backend_.copy(x, own, size);
    backend_.copy(theta, x, size);
    backend_.add_scaled(x, theta, size, -alpha_);
    backend_.add_scaled(x, own, size, alpha_);
  }
  StepReport report = exchange.end_step();
  report.status = status;  // which the host does not know of a GPU otherwise
  return report;
}

void LocalSteps::swap_weights() {
  const std::size_t size = arena_.size();
  float *mine = model_.weights().data(), *theta = arena_.weights().data();
  Tensor kept = Tensor::empty({static_cast<std::int64_t>(size)}, Layout::plain, model_.device());
  backend_.copy(mine, kept.data(), size);
  backend_.copy(theta, mine, size);
  backend_.copy(kept.data(), theta, size);
}

std::vector<std::span<float>> LocalSteps::inner_state() {
  std::vector<std::span<float>> state;
  if (inner_) state = inner_->state();
  state.insert(state.begin(), model_.weights());
  if (overlap_ > 0) state.push_back({changes_.data(), arena_.size()});
  return state;
}

std::vector<std::byte> LocalSteps::exchange_state(const Exchange& exchange,
                                                  std::vector<DeviceFloats>* later) const {
  if (overlap_ == 0) return exchange.state(later);
  StateWriter writer;
  writer.put<std::int64_t>(sync_ ? sync_->fragment : -1);
  writer.put<std::int64_t>(sync_ ? sync_->step : 0);
  writer.put<double>(sync_ ? sync_->density : 1);
  writer.put_list(sync_ ? sync_->weights : std::vector<float>());
  writer.put_list(sync_ ? sync_->before : exchange.state());
  return writer.take();
}

void LocalSteps::load_exchange_state(Exchange& exchange, std::span<const std::byte> bytes) {
  if (overlap_ == 0) return exchange.load_state(bytes);
  StateReader reader(bytes);
  Sync sync{};
  sync.fragment = reader.get<std::int64_t>();
  sync.step = reader.get<std::int64_t>();
  sync.density = reader.get<double>();
  sync.weights = reader.get_list<float>();
  sync.before = reader.get_list<std::byte>();
  reader.finish();
  exchange.load_state(sync.before);
  if (sync.fragment < 0) return;
  sync_ = std::move(sync);
  for (const Group& group : exchange.groups())
    if (group.fragment == sync_->fragment)
      backend_.copy(changes_.data() + group.begin, arena_.gradient(group.begin, group.end).data(),
                    group.numel());
  start(exchange, *sync_);
}

namespace {

// The ranks of a host, which step together by plain sums of their gradients.
class Island {
 public:
  // Collective over all ranks.
  Island(const Config& config, CollectiveQueue& all, Runner& runner, Replica& replica)
      : first_rank_(all.communicator().rank() / config.exchange.ranks_per_host *
                    config.exchange.ranks_per_host),
        inside_(split(all, config.exchange.ranks_per_host)),
        queue_(*inside_),
        step_(make_gradient_step(config, *inside_, runner, replica)) {
    ExchangeOptions sums;
    sums.merge = "buckets", sums.ordered_sum = true;
    exchange_ = runner.make_exchange(replica.arena(), queue_, sums);
  }

  void record_by(Recorder& recorder) { step_->exchange_by(*exchange_, recorder); }
  std::vector<std::span<float>> state() { return step_->shared_state(); }

  // Throws UserError if the ranks of a host do not have the same: earlier versions let each make steps of its own.
  void check_same(const std::vector<std::span<float>>& state) {
    Checksum checksum;
    for (const std::span<const float> part : state) checksum.update(std::as_bytes(part));
    const std::uint64_t own = checksum.value();
    std::vector<std::vector<std::byte>> all;
    queue_.run([&](Communicator& c) { c.all_gather(std::as_bytes(std::span(&own, 1)), all); });
    if (std::any_of(all.begin(), all.end(), [&](const auto& other) { return other != all[0]; }))
      throw UserError(
          "exchange.ranks_per_host: in the checkpoint the ranks of a host have steps of their own, as "
          "earlier versions made them with exchange.every; go on with the version that wrote it, or start "
          "anew from its weights (model.init_from)");
  }

  StepReport make(StepContext context) {
    if (!context.weights.empty()) {
      const auto size = static_cast<std::size_t>(inside_->size());
      const auto own = context.weights.subspan(static_cast<std::size_t>(first_rank_), size);
      const float sum = std::accumulate(own.begin(), own.end(), 0.0f);
      weights_.assign(own.begin(), own.end());
      for (float& weight : weights_) weight *= sum > 0 ? static_cast<float>(size) / sum : 0;
      context.weights = weights_;
    }
    context.rank = inside_->rank();
    StepReport report = step_->make(context);
    if (report.status.bad_rank >= 0) report.status.bad_rank += first_rank_;
    return report;
  }

 private:
  static std::unique_ptr<Communicator> split(CollectiveQueue& all, int ranks_per_host) {
    check_hosts(ranks_per_host, all.communicator().size());
    std::unique_ptr<Communicator> inside;
    all.run([&](Communicator& c) { inside = c.split(c.rank() / ranks_per_host); });
    return inside;
  }

  const int first_rank_;
  const std::unique_ptr<Communicator> inside_;
  CollectiveQueue queue_;
  const std::unique_ptr<StepRule> step_;
  std::unique_ptr<Exchange> exchange_;
  std::vector<float> weights_;  // of the host's ranks
};

// A step of this rank, or with exchange.ranks_per_host of its host, and what of a sync begins or ends after it.
class LocalStep final : public StepRule {
 public:
  LocalStep(const Config& config, Communicator& communicator, Runner& runner, Replica& replica,
            CollectiveQueue& queue)
      : rank_(communicator.rank()),
        runner_(runner),
        replica_(replica),
        queue_(queue),
        elastic_(config.elastic.min_ranks > 0),
        island_(config.exchange.ranks_per_host > 1 && communicator.size() > 1
                    ? std::make_unique<Island>(config, queue, runner, replica)
                    : nullptr),
        local_(config, replica.store(), rank_, !island_) {}

  ParameterArena& shared_weights() override { return local_.arena(); }
  void exchange_by(Exchange& exchange, Recorder& recorder) override {
    exchange_ = &exchange, recorder_ = &recorder;
    if (island_) island_->record_by(recorder);
  }
  void begin_run(std::int64_t total_steps) override { local_.begin_run(total_steps); }

  // A step that this rank leaves out is bad here, whatever the others found.
  StepReport make(const StepContext& context) override {
    const StepReport inside = island_ ? island_->make(context) : make_alone(context);
    const bool left_out = !inside.committed();
    StepReport report;
    exchange_->clear_spans();
    if (local_.exchanges_after(context.step)) {
      report = local_.exchange_after(*exchange_, context);
      // Not after what was only sent: it would wait for it.
      if (!local_.under_way()) bring_statistics_together();
    }
    report.times += inside.times;
    if (left_out && report.committed()) {
      report.status.bad = 1, report.status.bad_rank = inside.status.bad_rank;
      const ParameterArena& arena = replica_.arena();
      if (arena.device().kind == DeviceKind::cpu) report.bad_parameter = first_bad_parameter(arena);
    }
    return report;
  }

  std::vector<std::span<float>> shared_state() override { return local_.outer_state(); }
  std::vector<std::span<float>> own_state() override {
    std::vector<std::span<float>> state = local_.inner_state();
    if (!island_) return state;
    const std::vector<std::span<float>> buffers = island_->state();
    state.insert(state.begin() + 1, buffers.begin(), buffers.end());
    return state;
  }
  std::vector<std::byte> exchange_state(const Exchange& exchange,
                                        std::vector<DeviceFloats>* later) const override {
    return local_.exchange_state(exchange, later);
  }
  void load_exchange_state(Exchange& exchange, std::span<const std::byte> bytes) override {
    if (island_) island_->check_same(own_state());
    local_.load_exchange_state(exchange, bytes);
  }
  void swap_weights() override { local_.swap_weights(); }
  bool agrees_after(std::int64_t step) const override { return local_.exchanges_after(step); }

  // The ranks' report would wait for a sync that is under way, so that little of it would overlap.
  std::int64_t steps_per_report(std::int64_t ahead, std::int64_t in_patience) const override {
    return std::min(ahead, in_patience) * (local_.under_way() ? 4 : 1);
  }
  std::size_t reported_of(std::size_t made) const override { return made; }

 private:
  StepReport make_alone(const StepContext& context) {
    ParameterArena& arena = replica_.arena();
    replica_.forward_and_backward(context.step, {});
    arena.zero_unwritten_gradients();
    for (const Parameter* parameter : arena.parameters()) recorder_->take(*parameter);
    StepReport report;
    runner_.in_phase(Runner::Phase::update, [&] {
      if (!local_.inner_step(context, value_on(backend(arena.device()), replica_.loss())))
        report.status.bad = 1, report.status.bad_rank = rank_;
    });
    if (!report.committed()) replica_.restore_statistics_if_bad(nullptr);
    return report;
  }

  // The sync counts already: ranks that go on without another have the next one bring their statistics together.
  void bring_statistics_together() try {
    replica_.bring_statistics_together(queue_);
  } catch (const CollectiveError&) {
    if (!elastic_) throw;
  }

  const int rank_;
  Runner& runner_;
  Replica& replica_;
  CollectiveQueue& queue_;
  const bool elastic_;
  const std::unique_ptr<Island> island_;  // null: the rank steps alone
  LocalSteps local_;
  Exchange* exchange_ = nullptr;
  Recorder* recorder_ = nullptr;
};

}  // namespace

std::unique_ptr<StepRule> make_step_rule(const Config& config, Communicator& communicator, Runner& runner,
                                         Replica& replica, CollectiveQueue& queue) {
  if (!makes_local_steps(config)) return make_gradient_step(config, communicator, runner, replica);
  return std::make_unique<LocalStep>(config, communicator, runner, replica, queue);
}

}  // namespace topknot

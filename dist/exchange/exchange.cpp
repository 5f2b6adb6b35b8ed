#include "dist/exchange/exchange.h"

#include <fmt/format.h>

#include <cmath>
#include <limits>
#include <unordered_map>
#include <utility>

#include "compress/state.h"
#include "dist/exchange/host_pipeline.h"
#include "nn/core/base/check.h"

namespace topknot {

struct Exchange::State {
  struct Place {
    std::size_t group;
    bool ready;
  };
  // Of a group, in a step.
  struct Progress {
    std::size_t missing = 0;  // parameters that are not ready
    bool swaps = false;       // the average lies in the residual's memory
  };

  ParameterArena& arena;
  const std::vector<Group> groups;
  const std::unique_ptr<StepExecution> execution;
  std::vector<std::unique_ptr<GroupPipeline>> pipelines;
  std::vector<Progress> progress;
  std::unordered_map<const Parameter*, Place> places;
  std::vector<float> weights;
  std::size_t next_to_send = 0;
  bool in_step = false;
  StepResult result;  // of the step under way, or of the last one
  double density = 0;
  std::uint64_t densities = 0;  // how often the density has changed

  State(ParameterArena& arena_, std::vector<Group> groups_, std::unique_ptr<StepExecution> execution_)
      : arena(arena_),
        groups(std::move(groups_)),
        execution(std::move(execution_)),
        progress(groups.size()) {}

  Slice slice(std::size_t index) {
    const Group& group = groups[index];
    return {arena.gradient(group.begin, group.end), arena.residual(group.begin, group.end)};
  }

  // Groups are sent strictly in their order: one that is complete early waits for its predecessors.
  void encode_and_send(std::size_t index) {
    pipelines[index]->encode(slice(index));
    if (!execution->sends_early()) return;
    for (; next_to_send < pipelines.size() && progress[next_to_send].missing == 0; ++next_to_send)
      pipelines[next_to_send]->send();
  }

  ExchangeStats stats() const {
    ExchangeStats stats;
    for (const auto& pipeline : pipelines) pipeline->add_stats(stats);
    return stats;
  }

  std::size_t index_of(const Group& group) const {
    for (std::size_t index = 0; index < groups.size(); ++index)
      if (groups[index].begin == group.begin && groups[index].end == group.end) return index;
    throw Error("not a group of this exchange");
  }
};

bool ExchangeOptions::hierarchical(int ranks) const {
  if (ranks_per_host <= 1 || ranks == 1) return false;
  if (!compressing())
    throw UserError(
        "exchange.ranks_per_host: compress.name: dense needs no hierarchy, its sum takes each link once; "
        "leave it at 0");
  return true;
}

std::vector<Group> plan_groups(const ParameterArena& arena, const ExchangeOptions& options) {
  compressors().find(options.compress.name);  // a wrong name is an error even where everything stays dense
  return plan_groups(arena, options.compressing(), options.scope, options.merge, options.groups);
}

Exchange::Exchange(ParameterArena& arena, CollectiveQueue& queue, const ExchangeOptions& options)
    : Exchange(arena, plan_groups(arena, options), std::make_unique<HostExecution>(queue, options)) {}

Exchange::Exchange(ParameterArena& arena, std::vector<Group> groups, std::unique_ptr<StepExecution> execution)
    : state_(std::make_unique<State>(arena, std::move(groups), std::move(execution))) {
  State& s = *state_;
  for (std::size_t index = 0; index < s.groups.size(); ++index) {
    s.pipelines.push_back(s.execution->make_pipeline(s.groups[index], static_cast<int>(index)));
    for (const Parameter* parameter : s.groups[index].parameters) s.places[parameter] = {index, false};
  }
}

Exchange::~Exchange() {
  state_->execution->quiesce();
}

StepExecution& Exchange::execution() {
  return *state_->execution;
}

const std::vector<Group>& Exchange::groups() const {
  return state_->groups;
}

void Exchange::begin_step(std::int64_t step, double density, std::span<const float> weights, double lr) {
  State& s = *state_;
  TOPKNOT_CHECK(!s.in_step, "begin_step() before the end of the step before");
  TOPKNOT_CHECK(density > 0 && density <= 1, "density must be in (0, 1]");
  const std::size_t ranks = static_cast<std::size_t>(s.execution->ranks());
  TOPKNOT_CHECK(weights.empty() || weights.size() == ranks, "one aggregation weight per rank");
  if (weights.empty())
    s.weights.assign(ranks, 1.0f);
  else
    s.weights.assign(weights.begin(), weights.end());
  if (std::exchange(s.density, density) != density) ++s.densities;
  const StepInfo info{step, density, s.weights, s.execution->rank(), lr};
  for (const auto& pipeline : s.pipelines) pipeline->begin_step(info);
  s.execution->begin_step(info);
  for (std::size_t index = 0; index < s.groups.size(); ++index)
    s.progress[index].missing = s.groups[index].parameters.size();
  for (auto& [parameter, place] : s.places) place.ready = false;
  s.next_to_send = 0;
  // A replayed graph calls nothing up to end_step(); what it does not fill in is known here.
  s.result = {!s.execution->decides_on_host(), -1, s.stats()};
  s.in_step = true;
}

void Exchange::ready(Parameter& parameter) {
  State& s = *state_;
  const auto place = s.places.find(&parameter);
  TOPKNOT_CHECK(s.in_step && place != s.places.end(),
                fmt::format("ready('{}') outside a step", parameter.name()));
  TOPKNOT_CHECK(!std::exchange(place->second.ready, true),
                fmt::format("'{}' was ready before", parameter.name()));
  const std::size_t index = place->second.group;
  if (--s.progress[index].missing == 0) s.encode_and_send(index);
}

void Exchange::complete(const float* loss) {
  State& s = *state_;
  TOPKNOT_CHECK(s.in_step, "the end of a step without begin_step()");
  bool zeroed = false;
  for (std::size_t index = 0; index < s.groups.size(); ++index) {
    if (s.progress[index].missing == 0) continue;
    if (!std::exchange(zeroed, true)) s.arena.zero_unwritten_gradients();
    s.progress[index].missing = 0;
    s.encode_and_send(index);
  }
  s.execution->complete(loss);
}

void Exchange::communicate() {
  State& s = *state_;
  TOPKNOT_CHECK(s.in_step, "communicate() outside a step");
  s.execution->begin_collectives();
  if (!s.execution->sends_early())
    for (const auto& pipeline : s.pipelines) pipeline->send();
  for (const auto& pipeline : s.pipelines) pipeline->flush();
  s.execution->submit_agreement();
}

void Exchange::decode_and_commit() {
  State& s = *state_;
  TOPKNOT_CHECK(s.in_step, "decode_and_commit() outside a step");
  // Waits follow the order in which collectives were started, in which second rounds stand behind the agreement.
  std::vector<GroupPipeline*> more;
  for (const auto& pipeline : s.pipelines)
    if (pipeline->decode()) more.push_back(pipeline.get());
  s.execution->receive_agreement();
  while (!more.empty()) {
    std::vector<GroupPipeline*> still;
    for (GroupPipeline* pipeline : more)
      if (pipeline->decode()) still.push_back(pipeline);
    more = std::move(still);
  }
  const StepExecution::Agreed agreed = s.execution->agree(s.pipelines);
  for (std::size_t index = 0; index < s.pipelines.size(); ++index) {
    if (!agreed.commit) s.pipelines[index]->discard();
    s.progress[index].swaps = agreed.commit && s.pipelines[index]->commit();
  }
  s.result = {agreed.commit, agreed.bad_rank, s.stats()};
  s.execution->finish_step(s.result);
}

bool Exchange::committed() const {
  return state_->result.committed;
}

StepResult Exchange::end_step() {
  State& s = *state_;
  TOPKNOT_CHECK(s.in_step, "end_step() outside a step");
  for (std::size_t index = 0; index < s.groups.size(); ++index)
    if (s.progress[index].swaps)
      s.arena.swap_gradient_and_residual(s.groups[index].begin, s.groups[index].end);
  s.in_step = false;
  return s.result;
}

StepResult Exchange::finish(bool local_finite) {
  const float loss = local_finite ? 0.0f : std::numeric_limits<float>::quiet_NaN();
  complete(&loss);
  communicate();
  decode_and_commit();
  return end_step();
}

std::span<float> Exchange::averaged(const Group& group) {
  State& s = *state_;
  TOPKNOT_CHECK(s.result.committed, "there is an average only after a committed step");
  const bool in_residual = s.in_step && s.progress[s.index_of(group)].swaps;
  return in_residual ? s.arena.residual(group.begin, group.end) : s.arena.gradient(group.begin, group.end);
}

GradientForm Exchange::form(const Group& group) const {
  return state_->pipelines[state_->index_of(group)]->form();
}

Exchange::Capture Exchange::capture() const {
  return state_->execution->capture();
}

std::uint64_t Exchange::capture_key() const {
  // Every slice that swaps does so in every captured step, so one of them speaks for all.
  State& s = *state_;
  std::uint64_t side = 0;
  for (std::size_t index = 0; index < s.groups.size(); ++index)
    if (s.groups[index].compressed && s.groups[index].numel() > 0) {
      const Slice slice = s.slice(index);
      side = slice.gradient.data() < slice.spare.data();
      break;
    }
  return s.densities * 2 + side;
}

const std::vector<ExchangeSpan>& Exchange::spans() const {
  return state_->execution->spans();
}

void Exchange::observe(Observer observer) {
  state_->execution->observe(std::move(observer));
}

std::vector<std::byte> Exchange::state(std::vector<DeviceFloats>* later) const {
  StateWriter writer(later);
  writer.put<std::uint64_t>(state_->pipelines.size());
  for (const auto& pipeline : state_->pipelines) pipeline->save(writer);
  return writer.take();
}

void Exchange::load_state(std::span<const std::byte> bytes) {
  StateReader reader(bytes);
  const auto groups = reader.get<std::uint64_t>();
  if (groups != state_->pipelines.size())
    StateReader::fail(fmt::format("is of {} groups where there are {}", groups, state_->pipelines.size()));
  for (const auto& pipeline : state_->pipelines) pipeline->load(reader);
  reader.finish();
}

}  // namespace topknot

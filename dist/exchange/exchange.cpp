#include "dist/exchange/exchange.h"

#include <fmt/format.h>

#include <limits>
#include <utility>

#include "compress/state.h"
#include "dist/exchange/host_pipeline.h"
#include "nn/base/check.h"

namespace topknot {

bool ExchangeOptions::hierarchical(int ranks) const {
  if (ranks_per_host <= 1 || ranks == 1) return false;
  check_hierarchy(ranks_per_host, compressing());
  return true;
}

std::vector<Group> plan_groups(const ParameterArena& arena, const ExchangeOptions& options) {
  compressors().find(options.compress.name);  // a wrong name is an error even where everything stays dense
  return plan_groups(arena, options.compressing(), options.scope, options.merge, options.groups);
}

Exchange::Exchange(ParameterArena& arena, CollectiveQueue& queue, const ExchangeOptions& options)
    : Exchange(arena, plan_groups(arena, options), std::make_unique<HostExecution>(queue, options)) {}

Exchange::Exchange(ParameterArena& arena, std::vector<Group> groups, std::unique_ptr<StepExecution> execution)
    : arena_(arena), groups_(std::move(groups)), execution_(std::move(execution)), progress_(groups_.size()) {
  for (std::size_t index = 0; index < groups_.size(); ++index) {
    pipelines_.push_back(execution_->make_pipeline(groups_[index], static_cast<int>(index)));
    for (const Parameter* parameter : groups_[index].parameters) places_[parameter] = {index, false};
  }
}

Exchange::~Exchange() {
  execution_->quiesce();
}

StepState Exchange::step_state() {
  return execution_->step_state();
}

Slice Exchange::slice(std::size_t index) const {
  const Group& group = groups_[index];
  return {arena_.gradient(group.begin, group.end), arena_.residual(group.begin, group.end)};
}

// Groups are sent strictly in their order: one that is complete early waits for its predecessors.
void Exchange::encode_and_send(std::size_t index) {
  pipelines_[index]->encode(slice(index));
  if (!execution_->sends_early()) return;
  for (; next_to_send_ < pipelines_.size() && progress_[next_to_send_].missing == 0; ++next_to_send_)
    pipelines_[next_to_send_]->send();
}

ExchangeStats Exchange::stats() const {
  ExchangeStats stats;
  for (const auto& pipeline : pipelines_) pipeline->add_stats(stats);
  return stats;
}

std::size_t Exchange::index_of(const Group& group) const {
  for (std::size_t index = 0; index < groups_.size(); ++index)
    if (groups_[index].begin == group.begin && groups_[index].end == group.end) return index;
  throw Error("not a group of this exchange");
}

void Exchange::begin_step(std::int64_t step, double density, std::span<const float> weights, double lr) {
  TOPKNOT_CHECK(!in_step_, "begin_step() before the end of the step before");
  TOPKNOT_CHECK(density > 0 && density <= 1, "density must be in (0, 1]");
  const std::size_t ranks = static_cast<std::size_t>(execution_->ranks());
  TOPKNOT_CHECK(weights.empty() || weights.size() == ranks, "one aggregation weight per rank");
  if (weights.empty())
    weights_.assign(ranks, 1.0f);
  else
    weights_.assign(weights.begin(), weights.end());
  if (std::exchange(density_, density) != density) ++densities_;
  const StepContext info{step, density, weights_, execution_->rank(), lr};
  for (const auto& pipeline : pipelines_) pipeline->begin_step(info);
  execution_->begin_step(info);
  for (std::size_t index = 0; index < groups_.size(); ++index)
    progress_[index].missing = groups_[index].parameters.size();
  for (auto& [parameter, place] : places_) place.ready = false;
  next_to_send_ = 0;
  // A replayed graph calls nothing up to end_step(); what it does not fill in is known here.
  result_ = {!execution_->decides_on_host(), -1, stats()};
  in_step_ = true;
}

void Exchange::ready(Parameter& parameter) {
  const auto place = places_.find(&parameter);
  TOPKNOT_CHECK(in_step_ && place != places_.end(),
                fmt::format("ready('{}') outside a step", parameter.name()));
  TOPKNOT_CHECK(!std::exchange(place->second.ready, true),
                fmt::format("'{}' was ready before", parameter.name()));
  const std::size_t index = place->second.group;
  if (--progress_[index].missing == 0) encode_and_send(index);
}

void Exchange::complete(const float* loss) {
  TOPKNOT_CHECK(in_step_, "the end of a step without begin_step()");
  bool zeroed = false;
  for (std::size_t index = 0; index < groups_.size(); ++index) {
    if (progress_[index].missing == 0) continue;
    if (!std::exchange(zeroed, true)) arena_.zero_unwritten_gradients();
    progress_[index].missing = 0;
    encode_and_send(index);
  }
  execution_->complete(loss);
}

void Exchange::communicate() {
  TOPKNOT_CHECK(in_step_, "communicate() outside a step");
  execution_->begin_collectives();
  if (!execution_->sends_early())
    for (const auto& pipeline : pipelines_) pipeline->send();
  for (const auto& pipeline : pipelines_) pipeline->flush();
  execution_->submit_agreement();
}

void Exchange::decode_and_commit() {
  TOPKNOT_CHECK(in_step_, "decode_and_commit() outside a step");
  // Waits follow the order in which collectives were started, in which second rounds stand behind the agreement.
  std::vector<GroupPipeline*> more;
  for (const auto& pipeline : pipelines_)
    if (pipeline->decode()) more.push_back(pipeline.get());
  execution_->receive_agreement();
  while (!more.empty()) {
    std::vector<GroupPipeline*> still;
    for (GroupPipeline* pipeline : more)
      if (pipeline->decode()) still.push_back(pipeline);
    more = std::move(still);
  }
  const StepExecution::Agreed agreed = execution_->agree(pipelines_);
  for (std::size_t index = 0; index < pipelines_.size(); ++index) {
    if (!agreed.commit) pipelines_[index]->discard();
    progress_[index].swaps = agreed.commit && pipelines_[index]->commit();
  }
  result_ = {agreed.commit, agreed.bad_rank, stats()};
  execution_->finish_step(result_);
}

StepResult Exchange::end_step() {
  TOPKNOT_CHECK(in_step_, "end_step() outside a step");
  for (std::size_t index = 0; index < groups_.size(); ++index)
    if (progress_[index].swaps) arena_.swap_gradient_and_residual(groups_[index].begin, groups_[index].end);
  in_step_ = false;
  return result_;
}

StepResult Exchange::finish(bool local_finite) {
  const float loss = local_finite ? 0.0f : std::numeric_limits<float>::quiet_NaN();
  complete(&loss);
  communicate();
  decode_and_commit();
  return end_step();
}

std::span<float> Exchange::averaged(const Group& group) {
  TOPKNOT_CHECK(result_.committed, "there is an average only after a committed step");
  const bool in_residual = in_step_ && progress_[index_of(group)].swaps;
  return in_residual ? arena_.residual(group.begin, group.end) : arena_.gradient(group.begin, group.end);
}

GradientForm Exchange::form(const Group& group) const {
  return pipelines_[index_of(group)]->form();
}

Exchange::Capture Exchange::capture() const {
  return execution_->capture();
}

std::uint64_t Exchange::capture_key() const {
  // Every slice that swaps does so in every captured step, so one of them speaks for all.
  std::uint64_t side = 0;
  for (std::size_t index = 0; index < groups_.size(); ++index)
    if (groups_[index].compressed && groups_[index].numel() > 0) {
      const Slice slice = this->slice(index);
      side = slice.gradient.data() < slice.residual.data();
      break;
    }
  return densities_ * 2 + side;
}

const std::vector<ExchangeSpan>& Exchange::spans() const {
  return execution_->spans();
}

void Exchange::observe(Observer observer) {
  execution_->observe(std::move(observer));
}

std::vector<std::byte> Exchange::state(std::vector<DeviceFloats>* later) const {
  StateWriter writer(later);
  writer.put<std::uint64_t>(pipelines_.size());
  for (const auto& pipeline : pipelines_) pipeline->save(writer);
  return writer.take();
}

void Exchange::load_state(std::span<const std::byte> bytes) {
  StateReader reader(bytes);
  const auto groups = reader.get<std::uint64_t>();
  if (groups != pipelines_.size())
    StateReader::fail(fmt::format("is of {} groups where there are {}", groups, pipelines_.size()));
  for (const auto& pipeline : pipelines_) pipeline->load(reader);
  reader.finish();
}

}  // namespace topknot

#include "dist/exchange/exchange.h"

#include <algorithm>
#include <cmath>
#include <deque>
#include <unordered_map>

#include "compress/state.h"
#include "dist/comm/collective_queue.h"
#include "dist/comm/communicator.h"
#include "dist/exchange/group_pipeline.h"
#include "dist/sparse/hierarchical.h"
#include "nn/core/base/check.h"

namespace topknot {
namespace {

using Ticket = CollectiveQueue::Ticket;
using Kind = ExchangeSpan::Kind;

bool all_finite(std::span<const float> values) {
  // 0 times NaN or Inf is NaN, and stays in the sum.
  float sum = 0;
  for (float value : values) sum += value * 0.0f;
  return sum == 0.0f;
}

}  // namespace

struct Exchange::State {
  ParameterArena& arena;
  CollectiveQueue& queue;
  std::vector<Group> groups;
  std::deque<GroupPipeline> pipelines;  // one a group; addresses stay, the queue's jobs point here
  std::unordered_map<const Parameter*, std::pair<std::size_t, bool>>
      places;  // group, and whether it is ready
  SumOrder sum_order = SumOrder::ranks;
  PendingCollective agreement;
  std::vector<float> weights;
  StepInfo info;
  int ranks = 1;                         // that encode for themselves: all, or one a host
  std::unique_ptr<Hierarchy> hierarchy;  // null: every rank encodes for itself
  std::deque<PendingCollective> inside;  // with it: the sum inside the host, one a group
  Observer observer;
  std::vector<ExchangeSpan> spans;
  bool overlaps = false, in_step = false, committed = false;
  std::size_t next_to_send = 0;
  std::vector<Ticket> outstanding;
  ExchangeStats stats;

  State(ParameterArena& arena_, CollectiveQueue& queue_) : arena(arena_), queue(queue_) {}

  void encode(GroupPipeline& pipeline) {
    const auto begin = Clock::now();
    const Group& group = pipeline.group();
    pipeline.encode({arena.gradient(group.begin, group.end), arena.residual(group.begin, group.end)}, info);
    stats.encode += note(Kind::encode, pipeline.pending, begin, Clock::now());
    if (observer && group.compressed && !pipeline.compressor().accumulated().empty())
      observer(group, pipeline.compressor().accumulated());
  }

  // Returns the seconds.
  double note(Kind kind, const PendingCollective& pending, Clock::time_point begin, Clock::time_point end) {
    spans.push_back({kind, pending.group, pending.round, begin, end});
    return std::chrono::duration<double>(end - begin).count();
  }

  // Of a group that is complete. Alone, a rank encodes it at once; a host sums it first.
  void take(GroupPipeline& pipeline) {
    if (!hierarchy) encode(pipeline);
    send_complete_groups();
  }

  // Queues groups strictly in their order: one that is complete early waits for its predecessors.
  void send_complete_groups() {
    for (; next_to_send < pipelines.size() && pipelines[next_to_send].is_complete(); ++next_to_send) {
      if (!hierarchy) {
        submit(pipelines[next_to_send].pending);
        continue;
      }
      // While a host sums one group, the message of the one before is made: sum 0, sum 1, message 0, sum 2, ...
      submit_sum(next_to_send);
      if (next_to_send > 0) send_summed(next_to_send - 1);
    }
  }

  void submit_sum(std::size_t index) {
    const Group& group = groups[index];
    submit(inside[index], [this, gradient = arena.gradient(group.begin, group.end)](Communicator&) {
      hierarchy->average(gradient);
    });
  }

  void send_summed(std::size_t index) {
    wait(inside[index]);
    encode(pipelines[index]);
    submit(pipelines[index].pending);
  }

  void submit(PendingCollective& pending) {
    Communicator* const hosts = hierarchy && &pending != &agreement ? &hierarchy->hosts() : nullptr;
    submit(pending, [&pending, hosts, order = sum_order](Communicator& communicator) {
      pending.run(hosts ? *hosts : communicator, order);
    });
  }

  void submit(PendingCollective& pending, CollectiveQueue::Job job) {
    pending.ticket = queue.submit(std::move(job));
    outstanding.push_back(pending.ticket);
  }

  void wait(const PendingCollective& pending) {
    const auto begin = Clock::now();
    const CollectiveQueue::Times times = queue.wait(pending.ticket);
    outstanding.erase(std::find(outstanding.begin(), outstanding.end(), pending.ticket));
    if (overlaps) note(Kind::wait, pending, begin, Clock::now());
    stats.communicate += note(Kind::communicate, pending, times.begin, times.end);
    stats.exposed += times.waited;
  }

  // Every rank sends one small number; the result is by rank.
  void submit_agreement(std::uint8_t mine) {
    agreement.message = Message{};
    agreement.message.block.assign(1, std::byte{mine});
    submit(agreement);
  }

  std::vector<std::uint8_t> agreed() {
    wait(agreement);
    std::vector<std::uint8_t> result;
    for (const auto& block : agreement.blocks) {
      TOPKNOT_CHECK(block.size() == 1, "a damaged agreement block");
      result.push_back(static_cast<std::uint8_t>(block[0]));
    }
    return result;
  }

  // True where the group asks for one more round, which is then queued.
  bool decode(GroupPipeline& pipeline) {
    wait(pipeline.pending);
    if (!hierarchy || hierarchy->leads()) {
      stats.bytes_sent += pipeline.pending.bytes_sent();
      stats.bytes_received += pipeline.pending.bytes_received(info.rank, ranks);
    }
    const int round = pipeline.pending.round;
    const auto begin = Clock::now();
    const bool more = pipeline.decode();
    stats.decode += note(Kind::decode, pipeline.pending, begin, Clock::now());
    spans.back().round = round;
    if (more) submit(pipeline.pending);
    return more;
  }

  GroupPipeline& pipeline_of(const Group& group) {
    for (GroupPipeline& pipeline : pipelines)
      if (pipeline.group().begin == group.begin && pipeline.group().end == group.end) return pipeline;
    throw Error("not a group of this exchange");
  }

  // Whether the memory that encode worked on holds a NaN or Inf, where it still holds this rank's own values.
  bool own_gradients_finite() {
    for (const Group& group : groups)
      if (group.compressed && !all_finite(arena.gradient(group.begin, group.end))) return false;
    return true;
  }
};

Exchange::Exchange(ParameterArena& arena, CollectiveQueue& queue, const ExchangeOptions& options)
    : state_(std::make_unique<State>(arena, queue)) {
  State& s = *state_;
  compressors().find(options.compress.name);  // a wrong name is an error even where everything stays dense
  const bool compressing = options.compress.name != "dense";
  s.groups = plan_groups(arena, compressing, options.scope, options.merge, options.groups);
  s.sum_order = compressing || options.ordered_sum ? SumOrder::ranks : SumOrder::library;
  s.info.rank = queue.communicator().rank();
  s.ranks = queue.communicator().size();
  if (options.ranks_per_host > 1 && s.ranks > 1) {
    if (!compressing)
      throw UserError(
          "exchange.ranks_per_host: compress.name: dense needs no hierarchy, its sum takes each link once; "
          "leave it at 0");
    s.hierarchy = std::make_unique<Hierarchy>(queue, options.ranks_per_host);
    s.info.rank = s.hierarchy->hosts().rank();
    s.ranks = s.hierarchy->hosts().size();
  }
  s.overlaps = queue.communicator().overlaps();
  for (std::size_t index = 0; index < s.groups.size(); ++index) {
    const Group& group = s.groups[index];
    s.pipelines.emplace_back(group, static_cast<int>(index), compressing, options, s.ranks);
    PendingCollective& inside = s.inside.emplace_back();
    inside.group = static_cast<int>(index);
    inside.round = ExchangeSpan::kInsideHost;
    for (const Parameter* parameter : group.parameters) s.places[parameter] = {index, false};
  }
}

Exchange::~Exchange() {
  // After an error the queue's thread may still work on our memory.
  for (const Ticket ticket : state_->outstanding) try {
      state_->queue.wait(ticket);
    } catch (...) {  // the first error is on its way already
    }
}

const std::vector<Group>& Exchange::groups() const {
  return state_->groups;
}

std::uint64_t Exchange::planned_bytes(double density) const {
  std::uint64_t bytes = 0;
  for (const GroupPipeline& pipeline : state_->pipelines) bytes += pipeline.planned_bytes(density);
  return bytes;
}

void Exchange::begin_step(std::int64_t step, double density, std::span<const float> weights, double lr) {
  State& s = *state_;
  TOPKNOT_CHECK(!s.in_step, "begin_step() before finish() of the step before");
  TOPKNOT_CHECK(density > 0 && density <= 1, "density must be in (0, 1]");
  const std::size_t ranks = static_cast<std::size_t>(s.queue.communicator().size());
  TOPKNOT_CHECK(weights.empty() || weights.size() == ranks, "one aggregation weight a rank");
  if (weights.empty())
    s.weights.assign(ranks, 1.0f);
  else
    s.weights.assign(weights.begin(), weights.end());
  if (s.hierarchy) s.weights = s.hierarchy->begin_step(s.weights);
  s.info = StepInfo{step, density, s.weights, s.info.rank, lr};
  for (GroupPipeline& pipeline : s.pipelines) pipeline.begin_step();
  s.spans.clear();
  for (auto& [parameter, place] : s.places) place.second = false;
  s.next_to_send = 0;
  s.stats = {};
  s.committed = false;
  s.in_step = true;
}

void Exchange::ready(Parameter& parameter) {
  State& s = *state_;
  const auto place = s.places.find(&parameter);
  TOPKNOT_CHECK(s.in_step && place != s.places.end(), "ready('" + parameter.name() + "') outside a step");
  TOPKNOT_CHECK(!place->second.second, "'" + parameter.name() + "' was ready before");
  place->second.second = true;
  GroupPipeline& pipeline = s.pipelines[place->second.first];
  if (pipeline.ready()) s.take(pipeline);
}

StepResult Exchange::finish(bool local_finite) {
  State& s = *state_;
  TOPKNOT_CHECK(s.in_step, "finish() without begin_step()");
  bool zeroed = false;
  for (GroupPipeline& pipeline : s.pipelines) {
    if (pipeline.is_complete()) continue;
    if (!zeroed) s.arena.zero_unwritten_gradients();
    zeroed = true;
    pipeline.complete();
    s.take(pipeline);
  }
  if (s.hierarchy && !s.pipelines.empty()) s.send_summed(s.pipelines.size() - 1);
  // A rank whose loss is not finite may have finite gradients, so the groups cannot tell. Queued before
  // anything is decoded, the byte travels while the compute thread decodes.
  s.submit_agreement(local_finite ? 1 : 0);

  // Waits follow the order of the queue, in which second rounds stand behind the agreement.
  std::vector<GroupPipeline*> more;
  for (GroupPipeline& pipeline : s.pipelines)
    if (s.decode(pipeline)) more.push_back(&pipeline);
  std::vector<std::uint8_t> finite_losses = s.agreed();
  while (!more.empty()) {
    std::vector<GroupPipeline*> still;
    for (GroupPipeline* pipeline : more)
      if (s.decode(*pipeline)) still.push_back(pipeline);
    more = std::move(still);
  }

  // Both halves are the same on all ranks: the losses by the agreement, finite() by the blocks and sums that
  // all have.
  bool groups_finite = true;
  for (const GroupPipeline& pipeline : s.pipelines)
    groups_finite = groups_finite && pipeline.compressor().finite();
  StepResult result;
  result.committed = groups_finite;
  for (std::size_t rank = finite_losses.size(); rank-- > 0;)
    if (finite_losses[rank] == 0) result.committed = false, result.bad_rank = static_cast<int>(rank);
  if (!groups_finite && result.bad_rank < 0 && finite_losses.size() == 1) result.bad_rank = 0;
  if (!groups_finite && result.bad_rank < 0) {
    s.submit_agreement(s.own_gradients_finite() ? 1 : 0);
    const std::vector<std::uint8_t> finite_gradients = s.agreed();
    for (std::size_t rank = finite_gradients.size(); rank-- > 0;)
      if (finite_gradients[rank] == 0) result.bad_rank = static_cast<int>(rank);
  }

  const auto begin = Clock::now();
  for (GroupPipeline& pipeline : s.pipelines) {
    if (!result.committed) {
      pipeline.discard();
      continue;
    }
    const Group& group = pipeline.group();
    if (pipeline.commit().data() == s.arena.residual(group.begin, group.end).data())
      s.arena.swap_gradient_and_residual(group.begin, group.end);
  }
  s.stats.decode += s.note(Kind::commit, PendingCollective{}, begin, Clock::now());
  for (const GroupPipeline& pipeline : s.pipelines)
    if (pipeline.group().compressed) {
      s.stats.selected += pipeline.compressor().selected();
      s.stats.over_capacity += pipeline.compressor().over_capacity();
      s.stats.threshold = pipeline.compressor().threshold();
    }
  s.in_step = false;
  s.committed = result.committed;
  result.stats = s.stats;
  return result;
}

std::span<float> Exchange::averaged(const Group& group) {
  TOPKNOT_CHECK(state_->committed && !state_->in_step, "there is an average only after a committed step");
  return state_->pipeline_of(group).average;
}

GradientForm Exchange::form(const Group& group) const {
  return state_->pipeline_of(group).compressor().form();
}

const std::vector<ExchangeSpan>& Exchange::spans() const {
  return state_->spans;
}

void Exchange::observe(Observer observer) {
  state_->observer = std::move(observer);
}

std::vector<std::byte> Exchange::state() const {
  StateWriter writer;
  writer.put<std::uint64_t>(state_->pipelines.size());
  for (const GroupPipeline& pipeline : state_->pipelines) pipeline.save(writer);
  return writer.take();
}

void Exchange::load_state(std::span<const std::byte> bytes) {
  StateReader reader(bytes);
  const auto groups = reader.get<std::uint64_t>();
  if (groups != state_->pipelines.size())
    StateReader::fail("is of " + std::to_string(groups) + " groups where there are " +
                      std::to_string(state_->pipelines.size()));
  for (GroupPipeline& pipeline : state_->pipelines) pipeline.load(reader);
  reader.finish();
}

}  // namespace topknot

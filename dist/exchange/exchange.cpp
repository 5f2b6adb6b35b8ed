#include "dist/exchange/exchange.h"

#include <algorithm>
#include <cmath>
#include <deque>
#include <unordered_map>

#include "compress/state.h"
#include "dist/comm/collective_queue.h"
#include "dist/comm/communicator.h"
#include "dist/exchange/lane.h"
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
  std::deque<Lane> lanes;  // one a group; addresses stay, the queue's jobs point here
  std::unordered_map<const Parameter*, std::pair<std::size_t, bool>>
      places;  // group, and whether it is ready
  SumOrder sum_order = SumOrder::ranks;
  Flight agreement;
  std::vector<float> weights;
  StepInfo info;
  int ranks = 1;                         // that encode for themselves: all, or one a host
  std::unique_ptr<Hierarchy> hierarchy;  // null: every rank encodes for itself
  std::deque<Flight> inside;             // with it: the sum inside the host, one a group
  Observer observer;
  std::vector<ExchangeSpan> spans;
  bool overlaps = false, in_step = false, committed = false;
  std::size_t next_to_send = 0;
  std::vector<Ticket> outstanding;
  ExchangeStats stats;

  State(ParameterArena& arena_, CollectiveQueue& queue_) : arena(arena_), queue(queue_) {}

  void encode(Lane& lane) {
    const auto begin = Clock::now();
    const Group& group = lane.group();
    lane.encode({arena.gradient(group.begin, group.end), arena.residual(group.begin, group.end)}, info);
    stats.encode += note(Kind::encode, lane.flight, begin, Clock::now());
    if (observer && group.compressed && !lane.compressor().accumulated().empty())
      observer(group, lane.compressor().accumulated());
  }

  // Returns the seconds.
  double note(Kind kind, const Flight& flight, Clock::time_point begin, Clock::time_point end) {
    spans.push_back({kind, flight.group, flight.round, begin, end});
    return std::chrono::duration<double>(end - begin).count();
  }

  // Of a group that is complete. Alone, a rank encodes it at once; a host sums it first.
  void take(Lane& lane) {
    if (!hierarchy) encode(lane);
    send_complete_groups();
  }

  // Queues groups strictly in their order: one that is complete early waits for its predecessors.
  void send_complete_groups() {
    for (; next_to_send < lanes.size() && lanes[next_to_send].is_complete(); ++next_to_send) {
      if (!hierarchy) {
        submit(lanes[next_to_send].flight);
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
    encode(lanes[index]);
    submit(lanes[index].flight);
  }

  void submit(Flight& flight) {
    Communicator* const hosts = hierarchy && &flight != &agreement ? &hierarchy->hosts() : nullptr;
    submit(flight, [&flight, hosts, order = sum_order](Communicator& communicator) {
      flight.fly(hosts ? *hosts : communicator, order);
    });
  }

  void submit(Flight& flight, CollectiveQueue::Job job) {
    flight.ticket = queue.submit(std::move(job));
    outstanding.push_back(flight.ticket);
  }

  void wait(const Flight& flight) {
    const auto begin = Clock::now();
    const CollectiveQueue::Times times = queue.wait(flight.ticket);
    outstanding.erase(std::find(outstanding.begin(), outstanding.end(), flight.ticket));
    if (overlaps) note(Kind::wait, flight, begin, Clock::now());
    stats.communicate += note(Kind::communicate, flight, times.begin, times.end);
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
  bool decode(Lane& lane) {
    wait(lane.flight);
    if (!hierarchy || hierarchy->leads()) {
      stats.bytes_sent += lane.flight.bytes_sent();
      stats.bytes_received += lane.flight.bytes_received(info.rank, ranks);
    }
    const int round = lane.flight.round;
    const auto begin = Clock::now();
    const bool more = lane.decode();
    stats.decode += note(Kind::decode, lane.flight, begin, Clock::now());
    spans.back().round = round;
    if (more) submit(lane.flight);
    return more;
  }

  Lane& lane_of(const Group& group) {
    for (Lane& lane : lanes)
      if (lane.group().begin == group.begin && lane.group().end == group.end) return lane;
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
    s.lanes.emplace_back(group, static_cast<int>(index), compressing, options, s.ranks);
    Flight& inside = s.inside.emplace_back();
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
  for (const Lane& lane : state_->lanes) bytes += lane.planned_bytes(density);
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
  for (Lane& lane : s.lanes) lane.begin_step();
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
  Lane& lane = s.lanes[place->second.first];
  if (lane.ready()) s.take(lane);
}

StepResult Exchange::finish(bool local_finite) {
  State& s = *state_;
  TOPKNOT_CHECK(s.in_step, "finish() without begin_step()");
  bool zeroed = false;
  for (Lane& lane : s.lanes) {
    if (lane.is_complete()) continue;
    if (!zeroed) s.arena.zero_unwritten_gradients();
    zeroed = true;
    lane.complete();
    s.take(lane);
  }
  if (s.hierarchy && !s.lanes.empty()) s.send_summed(s.lanes.size() - 1);
  // A rank whose loss is not finite may have finite gradients, so the groups cannot tell. Queued before
  // anything is decoded, the byte travels while the compute thread decodes.
  s.submit_agreement(local_finite ? 1 : 0);

  // Waits follow the order of the queue, in which second rounds stand behind the agreement.
  std::vector<Lane*> more;
  for (Lane& lane : s.lanes)
    if (s.decode(lane)) more.push_back(&lane);
  std::vector<std::uint8_t> finite_losses = s.agreed();
  while (!more.empty()) {
    std::vector<Lane*> still;
    for (Lane* lane : more)
      if (s.decode(*lane)) still.push_back(lane);
    more = std::move(still);
  }

  // Both halves are the same on all ranks: the losses by the agreement, finite() by the blocks and sums that
  // all have.
  bool groups_finite = true;
  for (const Lane& lane : s.lanes) groups_finite = groups_finite && lane.compressor().finite();
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
  for (Lane& lane : s.lanes) {
    if (!result.committed) {
      lane.discard();
      continue;
    }
    const Group& group = lane.group();
    if (lane.commit().data() == s.arena.residual(group.begin, group.end).data())
      s.arena.swap_gradient_and_residual(group.begin, group.end);
  }
  s.stats.decode += s.note(Kind::commit, Flight{}, begin, Clock::now());
  for (const Lane& lane : s.lanes)
    if (lane.group().compressed) {
      s.stats.selected += lane.compressor().selected();
      s.stats.over_capacity += lane.compressor().over_capacity();
      s.stats.threshold = lane.compressor().threshold();
    }
  s.in_step = false;
  s.committed = result.committed;
  result.stats = s.stats;
  return result;
}

std::span<float> Exchange::averaged(const Group& group) {
  TOPKNOT_CHECK(state_->committed && !state_->in_step, "there is an average only after a committed step");
  return state_->lane_of(group).average;
}

GradientForm Exchange::form(const Group& group) const {
  return state_->lane_of(group).compressor().form();
}

const std::vector<ExchangeSpan>& Exchange::spans() const {
  return state_->spans;
}

void Exchange::observe(Observer observer) {
  state_->observer = std::move(observer);
}

std::vector<std::byte> Exchange::state() const {
  StateWriter writer;
  writer.put<std::uint64_t>(state_->lanes.size());
  for (const Lane& lane : state_->lanes) lane.save(writer);
  return writer.take();
}

void Exchange::load_state(std::span<const std::byte> bytes) {
  StateReader reader(bytes);
  const auto groups = reader.get<std::uint64_t>();
  if (groups != state_->lanes.size())
    StateReader::fail("is of " + std::to_string(groups) + " groups where there are " +
                      std::to_string(state_->lanes.size()));
  for (Lane& lane : state_->lanes) lane.load(reader);
  reader.finish();
}

}  // namespace topknot

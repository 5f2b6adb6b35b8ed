#include "dist/exchange/exchange.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <utility>

#include "dist/exchange/transport.h"
#include "nn/base/check.h"

namespace topknot {

using Leg = Transport::Leg;

bool ExchangeOptions::hierarchical(int ranks) const {
  if (ranks_per_host <= 1 || ranks == 1) return false;
  check_hierarchy(ranks_per_host, compressing() || same_inside);
  return true;
}

std::vector<Group> plan_groups(const ParameterArena& arena, const ExchangeOptions& options) {
  compressors().find(options.compress.name);  // a wrong name is an error even where everything stays dense
  return in_fragments(cut_groups(arena, options.compressing(), options.scope, options.merge,
                                 {options.groups.begin(), options.groups.end()}),
                      options.fragments);
}

Exchange::Exchange(ParameterArena& arena, CollectiveQueue& queue, const ExchangeOptions& options)
    : Exchange(arena, plan_groups(arena, options), std::make_unique<HostTransport>(queue, options), options) {
}

Exchange::Exchange(ParameterArena& arena, std::vector<Group> groups, std::unique_ptr<Transport> transport,
                   const ExchangeOptions& options, std::vector<std::unique_ptr<Compressor>> compressors)
    : arena_(arena), groups_(std::move(groups)), transport_(std::move(transport)) {
  buckets_.reserve(groups_.size());  // they stay where they are: jobs of a queue work on them
  for (std::size_t index = 0; index < groups_.size(); ++index) {
    const Group& group = groups_[index];
    const Transport::Traits& traits = transport_->traits();
    const ElementRange own = slice_of(group.numel(), traits.parts, traits.part);
    buckets_.emplace_back(group, own, static_cast<int>(index), options,
                          compressors.empty() ? make_group_compressor(group, own, options, traits.encoders)
                                              : std::move(compressors[index]));
    for (const Parameter* parameter : group.parameters) places_[parameter] = {index, false};
  }
  active_ = buckets_;
}

Exchange::~Exchange() = default;

StepState Exchange::step_state() {
  return transport_->step_state();
}

const Bucket& Exchange::bucket_of(const Group& group) const {
  for (const Bucket& bucket : buckets_)
    if (bucket.group.begin == group.begin && bucket.group.end == group.end) return bucket;
  throw Error("not a group of this exchange");
}

StepReport Exchange::report() const {
  StepReport report;
  for (const Bucket& bucket : active_) {
    bucket.add_to(report.status);
    if (!transport_->traits().counts_bytes) continue;
    report.bytes_sent += bucket.bytes_sent;
    report.bytes_received += bucket.bytes_received;
  }
  return report;
}

std::span<const Group> Exchange::groups_in_step() const {
  if (active_.empty()) return {};
  return std::span(groups_).subspan(static_cast<std::size_t>(active_.front().index), active_.size());
}

void Exchange::begin_step(const StepContext& step, int fragment) {
  TOPKNOT_CHECK(!in_step_, "begin_step() before the end of the step before");
  TOPKNOT_CHECK(step.density > 0 && step.density <= 1, "density must be in (0, 1]");
  const Transport::Traits& traits = transport_->traits();
  const std::size_t ranks = static_cast<std::size_t>(traits.ranks);
  TOPKNOT_CHECK(step.weights.empty() || step.weights.size() == ranks, "one aggregation weight per rank");
  if (step.weights.empty())
    weights_.assign(ranks, 1.0f);
  else
    weights_.assign(step.weights.begin(), step.weights.end());
  if (std::exchange(density_, step.density) != step.density) ++densities_;
  active_ = std::ranges::equal_range(buckets_, fragment, {},
                                     [](const Bucket& bucket) { return bucket.group.fragment; });
  for (Bucket& bucket : active_) {
    bucket.missing = bucket.group.parameters.size();
    bucket.bytes_sent = bucket.bytes_received = 0;
  }
  context_ = transport_->begin({step.step, step.density, weights_, traits.rank, step.lr}, active_);
  for (auto& [parameter, place] : places_) place.ready = false;
  next_to_start_ = 0;
  // A replayed graph calls nothing up to end_step(); what it does not fill in is known here.
  report_ = report();
  committed_ = !traits.decides_on_host;
  in_step_ = true;
}

void Exchange::ready(Parameter& parameter) {
  const auto place = places_.find(&parameter);
  TOPKNOT_CHECK(in_step_ && place != places_.end(),
                fmt::format("ready('{}') outside a step", parameter.name()));
  TOPKNOT_CHECK(!std::exchange(place->second.ready, true),
                fmt::format("'{}' was ready before", parameter.name()));
  Bucket& bucket = buckets_[place->second.group];
  TOPKNOT_CHECK(&bucket >= active_.data() && &bucket < active_.data() + active_.size(),
                fmt::format("'{}' is of another fragment", parameter.name()));
  if (--bucket.missing == 0) gradient_ready(bucket);
}

// Groups are sent strictly in their order: one that is complete early waits for its predecessors.
void Exchange::gradient_ready(Bucket& bucket) {
  if (when_complete_) when_complete_(bucket.group);
  bucket.slice = transport_->take(bucket, slice(bucket.group));
  if (transport_->traits().encodes_early) encode(bucket);
  if (!transport_->traits().sends_early) return;
  for (; next_to_start_ < active_.size() && active_[next_to_start_].missing == 0; ++next_to_start_)
    start(active_[next_to_start_]);
}

void Exchange::start(Bucket& bucket) {
  if (transport_->hierarchical()) {
    transport_->start(Leg::sum, bucket);
    if (Bucket* const before = std::exchange(deferred_, &bucket)) encode_host_sum(*before);
    return;
  }
  if (!transport_->traits().encodes_early) encode(bucket);
  transport_->start(Leg::message, bucket);
}

void Exchange::encode_host_sum(Bucket& bucket) {
  transport_->wait(Leg::sum, bucket);
  encode(bucket);
  transport_->start(Leg::message, bucket);
}

void Exchange::encode(Bucket& bucket) {
  bucket.round = 0;
  transport_->around(ExchangeSpan::Kind::encode, bucket, [&] { bucket.encode(context_); });
  if (!observer_ || !bucket.group.compressed) return;
  const std::span<const float> accumulated = bucket.compressor->diagnostics().accumulated;
  if (!accumulated.empty()) observer_(bucket.group, accumulated);
}

void Exchange::end_backward(const float* loss) {
  TOPKNOT_CHECK(in_step_, "the end of a step without begin_step()");
  bool zeroed = false;
  for (Bucket& bucket : active_) {
    if (bucket.missing == 0) continue;
    if (!std::exchange(zeroed, true)) arena_.zero_unwritten_gradients();
    bucket.missing = 0;
    gradient_ready(bucket);
  }
  transport_->take_loss(loss);
}

void Exchange::communicate() {
  TOPKNOT_CHECK(in_step_, "communicate() outside a step");
  if (!transport_->traits().sends_early)
    for (Bucket& bucket : active_) start(bucket);
  if (deferred_) encode_host_sum(*std::exchange(deferred_, nullptr));
  transport_->start_agreement();
}

// True if the bucket has one more round, which is then under way.
bool Exchange::decode(Bucket& bucket) {
  const Round round = transport_->wait(Leg::message, bucket);
  bool more = false;
  transport_->around(ExchangeSpan::Kind::decode, bucket, [&] { more = bucket.decode(round); });
  if (!more) return false;
  ++bucket.round;
  transport_->start(Leg::message, bucket);
  return true;
}

void Exchange::decode_and_commit() {
  TOPKNOT_CHECK(in_step_, "decode_and_commit() outside a step");
  std::vector<Bucket*> more;
  for (Bucket& bucket : active_)
    if (decode(bucket)) more.push_back(&bucket);
  while (!more.empty()) std::erase_if(more, [this](Bucket* bucket) { return !decode(*bucket); });
  const Transport::Agreed agreed = transport_->agree(active_);
  const bool in_parts = transport_->traits().parts > 1;
  for (Bucket& bucket : active_) {
    bucket.swaps = false;
    if (!agreed.commit) {
      bucket.discard();
      continue;
    }
    transport_->around(ExchangeSpan::Kind::commit, bucket, [&] { bucket.swaps = bucket.commit(); });
    if (in_parts)
      transport_->start(Leg::gather, bucket);
    else
      bucket.swaps = transport_->committed(bucket, bucket.swaps);
  }
  for (Bucket& bucket : active_) {
    if (!in_parts || !agreed.commit) break;
    transport_->wait(Leg::gather, bucket);
    bucket.swaps = transport_->committed(bucket, bucket.swaps);
  }
  committed_ = agreed.commit;
  report_ = report();
  report_.status.bad = !agreed.commit;
  report_.status.bad_rank = agreed.bad_rank;
  transport_->finish(report_);
}

StepReport Exchange::end_step() {
  TOPKNOT_CHECK(in_step_, "end_step() outside a step");
  for (const Bucket& bucket : active_)
    if (bucket.swaps) arena_.swap_gradient_and_residual(bucket.group.begin, bucket.group.end);
  in_step_ = false;
  return report_;
}

StepReport Exchange::finish(bool local_finite) {
  const float loss = local_finite ? 0.0f : std::numeric_limits<float>::quiet_NaN();
  end_backward(&loss);
  communicate();
  decode_and_commit();
  return end_step();
}

std::span<float> Exchange::averaged(const Group& group) {
  TOPKNOT_CHECK(committed_, "there is an average only after a committed step");
  // Until end_step() the arena still calls the average's memory the residual's.
  const bool in_residual = in_step_ && bucket_of(group).swaps;
  return in_residual ? arena_.residual(group.begin, group.end) : arena_.gradient(group.begin, group.end);
}

Applied Exchange::applied(const Group& group) const {
  return bucket_of(group).compressor->applied();
}

Exchange::Capture Exchange::capture() const {
  return transport_->traits().capture;
}

std::uint64_t Exchange::capture_key() const {
  // Every slice that swaps does so in every captured step, so one of them speaks for all.
  std::uint64_t side = 0;
  for (const Group& group : groups_)
    if (group.compressed && group.numel() > 0) {
      const Slice slice = this->slice(group);
      side = slice.gradient.data() < slice.residual.data();
      break;
    }
  return densities_ * 2 + side;
}

const std::vector<ExchangeSpan>& Exchange::spans() const {
  return transport_->spans();
}

void Exchange::clear_spans() {
  transport_->clear_spans();
}

void Exchange::when_agreement_fails(AgreementSource source) {
  transport_->recover_agreement = std::move(source);
}

const Agreement& Exchange::last_agreement() const {
  return transport_->agreement;
}

bool Exchange::abandon() {
  if (!in_step_) return false;
  transport_->quiesce();
  for (Bucket& bucket : active_) {
    if (bucket.encoded) bucket.discard();
    bucket.swaps = false;
  }
  deferred_ = nullptr;
  in_step_ = committed_ = false;
  return true;
}

void Exchange::scale_memory(float factor) {
  for (Bucket& bucket : buckets_) bucket.scale_memory(factor, slice(bucket.group).residual);
}

std::vector<std::byte> Exchange::state(std::vector<DeviceFloats>* later) const {
  StateWriter writer(later);
  writer.put<std::uint64_t>(buckets_.size());
  for (const Bucket& bucket : buckets_) {
    transport_->copy_residual(bucket, true);
    bucket.save(writer);
  }
  return writer.take();
}

void Exchange::load_state(std::span<const std::byte> bytes) {
  StateReader reader(bytes);
  const auto groups = reader.get<std::uint64_t>();
  if (groups != buckets_.size())
    StateReader::fail(fmt::format("is of {} groups where there are {}", groups, buckets_.size()));
  for (Bucket& bucket : buckets_) {
    bucket.load(reader);
    transport_->copy_residual(bucket, false);
  }
  reader.finish();
}

}  // namespace topknot

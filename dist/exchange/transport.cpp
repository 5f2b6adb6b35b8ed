#include "dist/exchange/transport.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "compress/sparse.h"
#include "compress/state.h"
#include "nn/base/check.h"

namespace topknot {
namespace {

using Kind = ExchangeSpan::Kind;

// The first rank whose flag is 0, or -1.
int first_bad(std::span<const std::byte> flags) {
  const auto bad = std::find(flags.begin(), flags.end(), std::byte{0});
  return bad == flags.end() ? -1 : static_cast<int>(bad - flags.begin());
}

bool all_finite(std::span<const float> values) {
  // 0 times NaN or Inf is NaN, and stays in the sum.
  float sum = 0;
  for (float value : values) sum += value * 0.0f;
  return sum == 0.0f;
}

// How the dense groups of a compressed method are sent.
CompressOptions dense_options(const std::string& values) {
  CompressOptions options;
  if (values == "fp32") return options;
  options.name = "topk";
  options.codec = "auto";
  options.values = values;
  return options;
}

// How the positions of a sparse collective are sent.
const IndexCodec* index_codec_of(const CompressOptions& options) {
  if (!sparse_presets().contains(options.name))
    throw UserError("exchange.collective adds entries on their way, but compress.name: " + options.name +
                    " does not send entries; set exchange.collective to all_gather");
  const SparsePreset parts = resolve(sparse_presets().find(options.name), options);
  if (!value_codecs().find(parts.values).exact)
    throw UserError("exchange.collective adds entries on their way, and compress.values: " + parts.values +
                    " would round every sum anew; set compress.values to fp32, or exchange.collective to "
                    "all_gather");
  return &index_codecs().find(parts.codec);
}

bool sent_whole(const Group& group, const ExchangeOptions& options) {
  return !group.compressed && options.compressing() && options.dense_values != "fp32";
}

}  // namespace

// The dense groups of a compressed method have no options; those of method dense have them checked.
CompressOptions group_options(const Group& group, const ExchangeOptions& options) {
  if (!group.compressed && options.compressing()) return dense_options(options.dense_values);
  check_collective(options);
  check_parts(options);
  return options.compress;
}

std::unique_ptr<Compressor> make_group_compressor(const Group& group, ElementRange own,
                                                  const ExchangeOptions& options, int ranks) {
  const GroupSpec whole = group_spec(group, options.scope, ranks, options.layer_density);
  return make_compressor(group_options(group, options), part_of(whole, own.begin, own.end));
}

double group_density(const Group& group, const ExchangeOptions& options, double of_step) {
  return sent_whole(group, options) ? 1.0 : of_step;
}

void check_collective(const ExchangeOptions& options) {
  const CollectiveType& type = collectives().find(options.collective);
  const bool sums = compressors().find(options.compress.name).sums;
  if (type.of_sums && (!sums || (options.compress.name == "dense" && options.compressing())))
    throw UserError(fmt::format(
        "exchange.collective: {} codes sums of floats, but compress.{} sends blocks of its own; set "
        "exchange.collective to all_gather",
        options.collective, sums ? "values: " + options.compress.values : "name: " + options.compress.name));
  if (options.in_parts() && (type.make || type.of_sums))
    throw UserError(
        fmt::format("exchange.collective: {} is not for exchange.hierarchy: parts, whose messages are "
                    "gathered; use all_gather, or exchange.hierarchy=leader",
                    options.collective));
  if (!type.make) return;
  index_codec_of(options.compress);
  if (const auto pieces = pieces_of(options.compress); pieces && pieces->aggregate == "contributors")
    throw UserError(
        fmt::format("exchange.collective: {} adds entries on their way and does not know who sent them; use "
                    "all_gather, or compress.aggregate=ranks",
                    options.collective));
}

void check_parts(const ExchangeOptions& options) {
  if (!options.in_parts()) return;
  const auto pieces = pieces_of(options.compress);
  const std::string what = !pieces                       ? "compress.name: " + options.compress.name
                           : pieces->transform != "none" ? "compress.transform: " + pieces->transform
                                                         : "";
  if (!what.empty())
    throw UserError(
        fmt::format("exchange.hierarchy: parts is for methods that select entries, in any part of a group, "
                    "and {} needs whole ones; use exchange.hierarchy=leader",
                    what));
}

std::uint64_t planned_bytes(const ParameterArena& arena, const ExchangeOptions& options, int ranks,
                            double density) {
  std::uint64_t bytes = 0;
  const int parts = options.in_parts() ? options.ranks_per_host : 1;
  for (const Group& group : plan_groups(arena, options)) {
    const GroupSpec whole = group_spec(group, options.scope, ranks, options.layer_density);
    for (int part = 0; part < parts; ++part) {
      const ElementRange own = slice_of(group.numel(), parts, part);
      bytes += planned_message_bytes(group_options(group, options), part_of(whole, own.begin, own.end),
                                     group_density(group, options, density));
    }
  }
  return bytes;
}

Bucket::Bucket(const Group& group, ElementRange own, int index, const ExchangeOptions& options,
               std::unique_ptr<Compressor> compressor)
    : group(group), own(own), index(index), compressor(std::move(compressor)) {
  every_entry = sent_whole(group, options);
  const auto pieces = group.compressed ? pieces_of(options.compress) : std::nullopt;
  divides_by_ranks = !pieces || pieces->aggregate != "contributors";
  const CollectiveType& type = collectives().find(options.collective);
  if (!type.make || !group.compressed) return;
  index_codec = index_codec_of(options.compress);
  collective = type.make({group.numel(), index_codec});
}

void Bucket::encode(const StepContext& of_step) {
  StepContext context = of_step;
  if (every_entry) context.density = 1.0;
  message = compressor->encode({own_of(slice.gradient), own_of(slice.residual)}, context);
  encoded = true;
  adds_entries = collective != nullptr;
  if (!collective) return;
  entries = message.entries;
  TOPKNOT_CHECK(entries, "a sparse collective for a method that sends no entries");
  k = compressor->diagnostics().target;
  const float weight = context.weights[static_cast<std::size_t>(context.rank)];
  if (weight != 1.0f) {
    weighted = *entries;
    for (float& value : weighted.values) value *= weight;
    entries = &weighted;
  }
}

bool Bucket::decode(const Round& brought) {
  std::optional<Message> more = compressor->decode(brought);
  if (!more) return false;
  message = std::move(*more);
  adds_entries = false;
  return true;
}

bool Bucket::own_values_finite() const {
  return !group.compressed || all_finite(own_of(slice.gradient));
}

bool Bucket::commit() {
  std::span<const std::uint32_t> rejected;
  if (collective) {
    collective->commit();
    rejected = sum.rejected;
  }
  encoded = false;
  const std::span<float> average = compressor->commit(rejected);
  TOPKNOT_CHECK(average.size() == own.size(), "an average of another length than its group");
  return average.data() == own_of(slice.residual).data();
}

void Bucket::scale_memory(float factor, std::span<float> residual) {
  if (!divides_by_ranks || (!group.compressed && !every_entry)) return;
  for (float& value : residual) value *= factor;
  compressor->load_state(compressor->state(), factor);
}

void Bucket::add_to(StepStatus& status) const {
  if (!group.compressed) return;
  const Compressor::Diagnostics diagnostics = compressor->diagnostics();
  status.selected += diagnostics.selected;
  status.over_capacity += diagnostics.over_capacity;
  status.threshold = diagnostics.threshold;
}

void Bucket::save(StateWriter& writer) const {
  writer.put_nested([this](StateWriter& nested) { compressor->save(nested); });
  if (collective) collective->save(writer);
}

void Bucket::load(StateReader& reader) {
  compressor->load_state(reader.get_list<std::byte>());
  if (collective) collective->load(reader);
}

HostTransport::HostTransport(CollectiveQueue& queue, const ExchangeOptions& options)
    : queue_(queue),
      order_(options.compressing() || options.ordered_sum ? SumOrder::ranks : SumOrder::library),
      codes_sums_(codes_sums(options.collective)),
      same_inside_(options.same_inside) {
  step_state_ = {&parameters_, &status_};
  traits_.rank = queue.communicator().rank();
  traits_.encoders = traits_.ranks = queue.communicator().size();
  if (!options.hierarchical(traits_.ranks)) return;
  hierarchy_ = std::make_unique<Hierarchy>(queue, options.ranks_per_host, options.in_parts());
  traits_.encoders = hierarchy_->hosts().size();
  traits_.parts = hierarchy_->parts();
  traits_.part = hierarchy_->part();
  traits_.counts_bytes = hierarchy_->leads();
  traits_.encodes_early = false;
}

StepContext HostTransport::begin(const StepContext& context, std::span<Bucket> buckets) {
  if (!buckets.empty())
    collectives_.resize(std::max(collectives_.size(), static_cast<std::size_t>(buckets.back().index) + 1));
  parameters_ = parameters_of(context);
  status_ = {};
  number_ = context.step + 1;
  spans_.clear();
  times_ = {};
  const StepContext seen = hierarchy_ ? hierarchy_->begin_step(context) : context;
  rank_ = seen.rank;
  return seen;
}

// finish() notes the commits of all groups as one piece.
void HostTransport::around(Kind kind, const Bucket& bucket, const Work& work) {
  if (kind == Kind::commit) return work();
  const auto begin = Clock::now();
  work();
  double& total = kind == Kind::encode ? times_.encode_s : times_.decode_s;
  total += note(kind, bucket.index, bucket.round, begin, Clock::now());
}

void HostTransport::wait_for(Ticket ticket, int group, int round) {
  const auto begin = Clock::now();
  const CollectiveQueue::Times ran = queue_.wait(ticket);
  outstanding_.erase(std::find(outstanding_.begin(), outstanding_.end(), ticket));
  if (queue_.communicator().overlaps()) note(Kind::wait, group, round, begin, Clock::now());
  times_.communicate_s += note(Kind::communicate, group, round, ran.begin, ran.end);
  times_.exposed_s += ran.waited;
}

void HostTransport::start_inside(Leg leg, Bucket& bucket) {
  if (leg == Leg::sum && same_inside_) return;
  if (leg == Leg::gather)
    for (const std::span<float> values : bucket.not_own()) std::fill(values.begin(), values.end(), 0.0f);
  const auto begin = Clock::now();
  collectives_[bucket.index].inside = submit([this, leg, &bucket, step = number_](Communicator&) {
    hierarchy_->inside().set_place(step, bucket.index);
    if (leg == Leg::sum)
      hierarchy_->average(bucket.slice.gradient);
    else
      hierarchy_->gather(bucket.average());
  });
  if (leg == Leg::gather) gathering_ += Clock::now() - begin;
}

void HostTransport::start(Leg leg, Bucket& bucket) {
  if (leg != Leg::message) return start_inside(leg, bucket);
  collectives_[bucket.index].message = submit([this, &bucket, step = number_](Communicator& communicator) {
    const auto at = [&](int group) {
      hierarchy_ ? hierarchy_->set_place(step, group) : communicator.set_place(step, group);
    };
    at(bucket.index);
    run(bucket, hierarchy_ ? hierarchy_->hosts() : communicator);
    at(-1);
  });
}

void HostTransport::run(Bucket& bucket, Communicator& communicator) {
  const Message& message = bucket.message;
  Collective& collective = collectives_[bucket.index];
  if (bucket.adds_entries)
    bucket.collective->sum(communicator, *bucket.entries, bucket.k, bucket.sum);
  else if (message.pieces > 0)
    scatter(message, communicator, collective.blocks);
  else if (message.kind == Message::Kind::block)
    communicator.all_gather(message.block, collective.blocks);
  else if (codes_sums_)
    collective.coded = message.kind == Message::Kind::sum_bfloat16
                           ? coded_sum_.sum(communicator, message.sum_bfloat16)
                           : coded_sum_.sum(communicator, message.sum);
  else if (message.kind == Message::Kind::sum_bfloat16)
    communicator.all_reduce(message.sum_bfloat16, order_);
  else
    communicator.all_reduce(message.sum, order_);
}

// Rank r gets the ranks' r-th pieces.
void HostTransport::scatter(const Message& message, Communicator& communicator, Blocks& brought) {
  Blocks pieces;
  const auto size = static_cast<std::ptrdiff_t>(message.block.size() / message.pieces);
  for (auto at = message.block.begin(); at != message.block.end(); at += size)
    pieces.emplace_back(at, at + size);
  communicator.all_to_all(pieces, brought);
}

Round HostTransport::wait(Leg leg, Bucket& bucket) {
  if (leg != Leg::message) {
    if (leg == Leg::sum && same_inside_) return {};
    const auto begin = Clock::now();
    wait_for(collectives_[bucket.index].inside, bucket.index, ExchangeSpan::kInsideHost);
    if (leg == Leg::gather) gathering_ += Clock::now() - begin;
    return {};
  }
  wait_for(collectives_[bucket.index].message, bucket.index, bucket.round);
  if (bucket.adds_entries)
    bucket.bytes_sent += bucket.sum.bytes_sent;
  else if (codes_sums_ && bucket.message.kind != Message::Kind::block)
    bucket.bytes_sent += collectives_[bucket.index].coded.sent;
  else
    bucket.bytes_sent += bucket.message.bytes();
  if (traits_.encoders > 1) bucket.bytes_received += bytes_received(bucket);
  Round round;
  if (bucket.adds_entries)
    round.entries = &bucket.sum.sum;
  else if (bucket.message.kind == Message::Kind::block)
    round.blocks = collectives_[bucket.index].views = views_of(collectives_[bucket.index].blocks);
  round.sum = bucket.message.sum;
  round.sum_bfloat16 = bucket.message.sum_bfloat16;
  return round;
}

std::uint64_t HostTransport::bytes_received(const Bucket& bucket) const {
  if (bucket.adds_entries) return bucket.sum.bytes_received;
  if (bucket.message.kind != Message::Kind::block)
    return codes_sums_ ? collectives_[bucket.index].coded.received : bucket.message.bytes();
  const Blocks& blocks = collectives_[bucket.index].blocks;
  std::uint64_t bytes = 0;
  for (std::size_t r = 0; r < blocks.size(); ++r)
    if (static_cast<int>(r) != rank_) bytes += blocks[r].size();
  return bytes;
}

// A rank whose loss is not finite may have finite gradients, so the groups cannot tell. Queued before
// anything is decoded, the byte is sent while the compute thread decodes.
void HostTransport::submit_flag(bool mine) {
  flag_.assign(1, std::byte{mine});
  flag_ticket_ = submit([this, step = number_](Communicator& communicator) {
    communicator.set_place(step);
    communicator.all_gather(flag_, flags_);
  });
}

std::vector<std::byte> HostTransport::receive_flags() {
  wait_for(flag_ticket_, ExchangeSpan::kAgreement, 0);
  std::vector<std::byte> flags;
  for (const auto& block : flags_) {
    TOPKNOT_CHECK(block.size() == 1, "a damaged agreement block");
    flags.push_back(block[0]);
  }
  return flags;
}

// A rank with all bytes of a step proves that all ranks have its messages: the step counts if any has them.
std::vector<std::byte> HostTransport::receive_agreement() {
  std::vector<std::byte> flags;
  try {
    flags = receive_flags();
  } catch (const CollectiveError&) {
    if (recover_agreement) flags = recover_agreement(number_);
    if (flags.empty()) throw;
  }
  agreement = {number_, flags};
  return flags;
}

void HostTransport::join_hosts_statuses() {
  const Ticket ticket = submit([this, step = number_](Communicator&) {
    hierarchy_->inside().set_place(step);
    hierarchy_->inside().all_gather(std::as_bytes(std::span(&found_, 1)), flags_);
  });
  wait_for(ticket, ExchangeSpan::kAgreement, ExchangeSpan::kInsideHost);
  found_ = {};
  for (const auto& block : flags_) {
    StepStatus one;
    TOPKNOT_CHECK(block.size() == sizeof one, "a damaged agreement block");
    std::memcpy(&one, block.data(), sizeof one);
    join_status(found_, one);
  }
}

// All of it is the same on all ranks: the losses by the agreement, finite() by the blocks and sums that all
// have; of parts all ranks of an index, so that each host finds the same.
Transport::Agreed HostTransport::agree(std::span<const Bucket> buckets) {
  const std::vector<std::byte> finite_losses = receive_agreement();
  bool finite = std::all_of(buckets.begin(), buckets.end(),
                            [](const Bucket& bucket) { return bucket.compressor->finite(); });
  if (traits_.parts > 1) {
    found_ = {};
    for (const Bucket& bucket : buckets) bucket.add_to(found_);
    found_.bad = !finite;
    join_hosts_statuses();
    finite = found_.bad == 0;
  }
  Agreed agreed;
  agreed.bad_rank = first_bad(finite_losses);
  agreed.commit = finite && agreed.bad_rank < 0;
  if (!finite && agreed.bad_rank < 0) {
    if (traits_.ranks == 1) {
      agreed.bad_rank = 0;
    } else {
      submit_flag(std::all_of(buckets.begin(), buckets.end(),
                              [](const Bucket& bucket) { return bucket.own_values_finite(); }));
      try {
        agreed.bad_rank = first_bad(receive_flags());
      } catch (const CollectiveError&) {
        if (!recover_agreement) throw;
        // Every rank discards the step. Whose values were bad stays unknown.
      }
      // Which rank of a host found it in its part does not say whose it was.
      if (traits_.parts > 1 && agreed.bad_rank > 0) agreed.bad_rank -= agreed.bad_rank % traits_.parts;
    }
  }
  commit_begin_ = Clock::now(), gathering_ = {};
  return agreed;
}

void HostTransport::finish(StepReport& report) {
  if (traits_.parts > 1) {
    report.status.selected = found_.selected;
    report.status.over_capacity = found_.over_capacity;
    report.status.threshold = found_.threshold;
  }
  status_ = report.status;
  times_.decode_s += note(Kind::commit, ExchangeSpan::kAgreement, 0, commit_begin_, Clock::now()) -
                     std::chrono::duration<double>(gathering_).count();
  report.times = times_;
}

void HostTransport::quiesce() noexcept {
  // After an error the queue's thread may still work on the buckets' memory.
  for (const Ticket ticket : outstanding_) try {
      queue_.wait(ticket);
    } catch (...) {  // the first error is being handled already
    }
  outstanding_.clear();
}

}  // namespace topknot

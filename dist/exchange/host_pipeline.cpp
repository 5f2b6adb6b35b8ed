#include "dist/exchange/host_pipeline.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "compress/sparse.h"
#include "compress/state.h"
#include "nn/base/check.h"

namespace topknot {
namespace {

using Kind = ExchangeSpan::Kind;

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

// The dense groups of a compressed method have no options; those of method dense have them checked.
CompressOptions options_of(const Group& group, const ExchangeOptions& options) {
  if (!group.compressed && options.compressing()) return dense_options(options.dense_values);
  check_collective(options);
  return options.compress;
}

// A dense group in a value codec is sent whole.
bool every_entry(const Group& group, const ExchangeOptions& options) {
  return !group.compressed && options.compressing() && options.dense_values != "fp32";
}

// The first rank whose flag is 0, or -1.
int first_bad(std::span<const std::byte> flags) {
  const auto bad = std::find(flags.begin(), flags.end(), std::byte{0});
  return bad == flags.end() ? -1 : static_cast<int>(bad - flags.begin());
}

}  // namespace

GroupCompressor make_group_compressor(const Group& group, const ExchangeOptions& options, int ranks) {
  return {make_compressor(options_of(group, options),
                          group_spec(group, options.scope, ranks, options.layer_density)),
          every_entry(group, options)};
}

void check_collective(const ExchangeOptions& options) {
  if (collectives().find(options.collective).make) index_codec_of(options.compress);
}

std::uint64_t planned_bytes(const ParameterArena& arena, const ExchangeOptions& options, int ranks,
                            double density) {
  std::uint64_t bytes = 0;
  for (const Group& group : plan_groups(arena, options))
    bytes += planned_bytes(options_of(group, options),
                           group_spec(group, options.scope, ranks, options.layer_density),
                           every_entry(group, options) ? 1.0 : density);
  return bytes;
}

void PendingCollective::run(Communicator& communicator, SumOrder order) {
  if (collective)
    collective->sum(communicator, *entries, k, sum);
  else if (message.kind == Message::Kind::block)
    communicator.all_gather(message.block, blocks);
  else if (message.kind == Message::Kind::sum_bfloat16)
    communicator.all_reduce(message.sum_bfloat16, order);
  else
    communicator.all_reduce(message.sum, order);
}

std::uint64_t PendingCollective::bytes_sent() const {
  return collective ? sum.bytes_sent : message.bytes();
}

std::uint64_t PendingCollective::bytes_received(int rank) const {
  if (collective) return sum.bytes_received;
  if (message.kind != Message::Kind::block) return message.bytes();
  std::uint64_t bytes = 0;
  for (std::size_t r = 0; r < blocks.size(); ++r)
    if (static_cast<int>(r) != rank) bytes += blocks[r].size();
  return bytes;
}

Round PendingCollective::returned() const {
  Round result;
  if (collective)
    result.entries = &sum.sum;
  else if (message.kind == Message::Kind::sum)
    result.sum = message.sum;
  else if (message.kind == Message::Kind::sum_bfloat16)
    result.sum_bfloat16 = message.sum_bfloat16;
  else
    result.blocks = blocks;
  return result;
}

void HostStep::submit(PendingCollective& pending, CollectiveQueue::Job job) {
  pending.ticket = queue.submit(std::move(job));
  outstanding.push_back(pending.ticket);
}

void HostStep::wait(const PendingCollective& pending) {
  const auto begin = Clock::now();
  const CollectiveQueue::Times ran = queue.wait(pending.ticket);
  outstanding.erase(std::find(outstanding.begin(), outstanding.end(), pending.ticket));
  if (queue.communicator().overlaps()) note(Kind::wait, pending.group, pending.round, begin, Clock::now());
  times.communicate += note(Kind::communicate, pending.group, pending.round, ran.begin, ran.end);
  times.exposed += ran.waited;
}

double HostStep::note(Kind kind, int group, int round, Clock::time_point begin, Clock::time_point end) {
  spans.push_back({kind, group, round, begin, end});
  return std::chrono::duration<double>(end - begin).count();
}

HostPipeline::HostPipeline(const Group& group, int index, const ExchangeOptions& options, int ranks,
                           HostStep& step)
    : group_(group), step_(step), method_(make_group_compressor(group, options, ranks)) {
  pending_.group = index;
  const CollectiveType& type = collectives().find(options.collective);
  if (!type.make || !group.compressed) return;
  index_codec_ = index_codec_of(options.compress);
  collective_ = type.make({group.numel(), index_codec_});
}

void HostPipeline::begin_step(const StepContext& info) {
  info_ = info;
  info_.density = method_.density(info.density);
  bytes_sent_ = bytes_received_ = 0;
}

void HostPipeline::encode(Slice slice) {
  const auto begin = Clock::now();
  slice_ = slice;
  pending_.message = method_.compressor->encode(slice, info_);
  pending_.round = 0;
  pending_.collective = collective_.get();
  if (collective_) {
    const std::optional<EntryMessage> entries = method_.compressor->entries();
    TOPKNOT_CHECK(entries.has_value(), "a sparse collective for a method that sends no entries");
    pending_.entries = entries->entries;
    pending_.k = entries->k;
    const float weight = info_.weights[static_cast<std::size_t>(info_.rank)];
    if (weight != 1.0f) {
      pending_.weighted = *entries->entries;
      for (float& value : pending_.weighted.values) value *= weight;
      pending_.entries = &pending_.weighted;
    }
  }
  step_.times.encode += step_.note(Kind::encode, pending_.group, 0, begin, Clock::now());
  if (step_.observer && group_.compressed && !method_.compressor->accumulated().empty())
    step_.observer(group_, method_.compressor->accumulated());
}

void HostPipeline::send() {
  step_.submit(pending_, [this, step = step_.number](Communicator& communicator) {
    Communicator& carrier = step_.hosts ? *step_.hosts : communicator;
    carrier.set_place(step, pending_.group);
    pending_.run(carrier, step_.order);
    carrier.set_place(step);
  });
}

bool HostPipeline::decode() {
  step_.wait(pending_);
  bytes_sent_ += pending_.bytes_sent();
  if (info_.weights.size() > 1) bytes_received_ += pending_.bytes_received(info_.rank);
  const auto begin = Clock::now();
  std::optional<Message> more = method_.compressor->decode(pending_.returned());
  step_.times.decode += step_.note(Kind::decode, pending_.group, pending_.round, begin, Clock::now());
  if (!more) return false;
  pending_.message = std::move(*more);
  pending_.collective = nullptr;
  ++pending_.round;
  send();
  return true;
}

bool HostPipeline::own_values_finite() const {
  return !group_.compressed || all_finite(slice_.gradient);
}

bool HostPipeline::commit() {
  Outcome outcome;
  if (collective_) {
    collective_->commit();
    outcome.rejected = pending_.sum.rejected;
  }
  const std::span<float> average = method_.compressor->commit(outcome);
  TOPKNOT_CHECK(average.size() == group_.numel(), "an average of another length than its group");
  return average.data() == slice_.residual.data();
}

void HostPipeline::discard() {
  if (collective_) collective_->discard();
  method_.compressor->discard();
}

void HostPipeline::add_stats(ExchangeStats& stats) const {
  stats.bytes_sent += bytes_sent_;
  stats.bytes_received += bytes_received_;
  if (!group_.compressed) return;
  stats.selected += method_.compressor->selected();
  stats.over_capacity += method_.compressor->over_capacity();
  stats.threshold = method_.compressor->threshold();
}

void HostPipeline::save(StateWriter& writer) const {
  writer.put_list(method_.compressor->state());
  if (collective_) collective_->save(writer);
}

void HostPipeline::load(StateReader& reader) {
  method_.compressor->load_state(reader.get_list<std::byte>());
  if (collective_) collective_->load(reader);
}

// The sum inside the host as a job of the rank's queue.
class QueuedHostSum final : public HostSum {
 public:
  QueuedHostSum(std::unique_ptr<GroupPipeline> inner, int index, Hierarchy& hierarchy, HostStep& step,
                HostSum*& held)
      : HostSum(std::move(inner), hierarchy, held), step_(step) {
    sum_.group = index;
    sum_.round = ExchangeSpan::kInsideHost;
  }

 private:
  void start(std::span<float> gradient) override {
    step_.submit(sum_, [this, gradient, step = step_.number](Communicator&) {
      hierarchy_.inside().set_place(step, sum_.group);
      hierarchy_.average(gradient);
    });
  }
  void wait() override { step_.wait(sum_); }

  HostStep& step_;
  PendingCollective sum_;
};

HostExecution::HostExecution(CollectiveQueue& queue, const ExchangeOptions& options)
    : options_(options), step_{queue} {
  step_.order = options.compressing() || options.ordered_sum ? SumOrder::ranks : SumOrder::library;
  if (!options.hierarchical(ranks())) return;
  hierarchy_ = std::make_unique<Hierarchy>(queue, options.ranks_per_host);
  step_.hosts = &hierarchy_->hosts();
}

std::unique_ptr<GroupPipeline> HostExecution::make_pipeline(const Group& group, int index) {
  const int encoding = hierarchy_ ? hierarchy_->hosts().size() : ranks();
  auto pipeline = std::make_unique<HostPipeline>(group, index, options_, encoding, step_);
  if (!hierarchy_) return pipeline;
  return std::make_unique<QueuedHostSum>(std::move(pipeline), index, *hierarchy_, step_, held_);
}

void HostExecution::begin_step(const StepContext& info) {
  parameters_ = {.step = info.step, .lr = info.lr, .density = info.density, .rank = info.rank};
  status_ = {};
  step_.number = info.step + 1;
  step_.spans.clear();
  step_.times = {};
}

void HostExecution::complete(const float* loss) {
  loss_finite_ = !loss || std::isfinite(*loss);
}

// A rank whose loss is not finite may have finite gradients, so the groups cannot tell. Queued before anything is
// decoded, the byte is sent while the compute thread decodes.
void HostExecution::submit_flag(bool mine) {
  agreement_.message.block.assign(1, std::byte{mine});
  step_.submit(agreement_, [this, step = step_.number](Communicator& communicator) {
    communicator.set_place(step);
    agreement_.run(communicator, step_.order);
  });
}

std::vector<std::byte> HostExecution::receive_flags() {
  step_.wait(agreement_);
  std::vector<std::byte> flags;
  for (const auto& block : agreement_.blocks) {
    TOPKNOT_CHECK(block.size() == 1, "a damaged agreement block");
    flags.push_back(block[0]);
  }
  return flags;
}

// All of it is the same on all ranks: the losses by the agreement, finite() by the blocks and sums that all have.
StepExecution::Agreed HostExecution::agree(std::span<const std::unique_ptr<GroupPipeline>> pipelines) {
  const bool finite = std::all_of(pipelines.begin(), pipelines.end(),
                                  [](const auto& pipeline) { return pipeline->finite(); });
  Agreed agreed;
  agreed.bad_rank = first_bad(finite_losses_);
  agreed.commit = finite && agreed.bad_rank < 0;
  if (!finite && agreed.bad_rank < 0) {
    if (ranks() == 1) {
      agreed.bad_rank = 0;
    } else {
      submit_flag(std::all_of(pipelines.begin(), pipelines.end(),
                              [](const auto& pipeline) { return pipeline->own_values_finite(); }));
      agreed.bad_rank = first_bad(receive_flags());
    }
  }
  commit_begin_ = Clock::now();
  return agreed;
}

void HostExecution::finish_step(StepResult& result) {
  status_.bad = !result.committed;
  status_.bad_rank = result.bad_rank;
  status_.selected = result.stats.selected;
  status_.over_capacity = result.stats.over_capacity;
  status_.threshold = result.stats.threshold;
  step_.times.decode += step_.note(Kind::commit, ExchangeSpan::kAgreement, 0, commit_begin_, Clock::now());
  result.stats.encode = step_.times.encode;
  result.stats.communicate = step_.times.communicate;
  result.stats.decode = step_.times.decode;
  result.stats.exposed = step_.times.exposed;
}

void HostExecution::quiesce() noexcept {
  // After an error the queue's thread may still work on the pipelines' memory.
  for (const CollectiveQueue::Ticket ticket : step_.outstanding) try {
      step_.queue.wait(ticket);
    } catch (...) {  // the first error is being handled already
    }
}

}  // namespace topknot

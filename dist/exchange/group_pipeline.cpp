#include "dist/exchange/group_pipeline.h"

#include "compress/sparse_step.h"
#include "dist/exchange/exchange.h"
#include "nn/core/base/check.h"

namespace topknot {
namespace {

// How the dense groups of a compressed method travel.
CompressOptions dense_options(const std::string& values) {
  CompressOptions options;
  if (values == "fp32") return options;
  options.name = "topk";
  options.codec = "auto";
  options.values = values;
  return options;
}

std::unique_ptr<IndexCodec> index_codec_of(const CompressOptions& options) {
  if (!sparse_presets().contains(options.name))
    throw UserError("exchange.collective adds entries on their way, but compress.name: " + options.name +
                    " does not send entries; set exchange.collective to all_gather");
  const SparsePreset parts = resolve(sparse_presets().find(options.name), options);
  if (!value_codecs().find(parts.values)(options)->exact())
    throw UserError("exchange.collective adds entries on their way, and compress.values: " + parts.values +
                    " would round every sum anew; set compress.values to fp32, or exchange.collective to "
                    "all_gather");
  return index_codecs().find(parts.codec)(options);
}

}  // namespace

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

std::uint64_t PendingCollective::bytes_received(int rank, int ranks) const {
  if (collective) return sum.bytes_received;
  if (ranks == 1) return 0;
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

GroupPipeline::GroupPipeline(const Group& group, int index, bool compressing, const ExchangeOptions& options,
                             int ranks)
    : group_(&group) {
  // The dense groups of a compressed method have no options; those of method dense have them checked.
  const bool as_configured = group.compressed || !compressing;
  every_entry_ = !as_configured && options.dense_values != "fp32";
  compressor_ = make_compressor(as_configured ? options.compress : dense_options(options.dense_values),
                                group_spec(group, options.scope, ranks, options.layer_density));
  pending.group = index;
  const CollectiveType& type = collectives().find(options.collective);
  if (!type.make) return;                              // the blocks are gathered
  if (!compressing) index_codec_of(options.compress);  // refuses
  if (!group.compressed) return;
  index_codec_ = index_codec_of(options.compress);
  collective_ = type.make({group.numel(), index_codec_.get()});
}

void GroupPipeline::begin_step() {
  pending_ = group_->parameters.size();
}

void GroupPipeline::encode(Slice slice, StepInfo info) {
  if (every_entry_) info.density = 1.0;
  pending.message = compressor_->encode(slice, info);
  pending.round = 0;
  pending.collective = collective_.get();
  if (!collective_) return;
  const std::optional<EntryMessage> entries = compressor_->entries();
  TOPKNOT_CHECK(entries.has_value(), "a sparse collective for a method that sends no entries");
  pending.entries = entries->entries;
  pending.k = entries->k;
  const float weight = info.weights.empty() ? 1.0f : info.weights[static_cast<std::size_t>(info.rank)];
  if (weight == 1.0f) return;
  pending.weighted = *entries->entries;
  for (float& value : pending.weighted.values) value *= weight;
  pending.entries = &pending.weighted;
}

bool GroupPipeline::decode() {
  std::optional<Message> more = compressor_->decode(pending.returned());
  if (!more) return false;
  pending.message = std::move(*more);
  pending.collective = nullptr;
  ++pending.round;
  return true;
}

std::span<float> GroupPipeline::commit() {
  Outcome outcome;
  if (collective_) {
    collective_->commit();
    outcome.rejected = pending.sum.rejected;
  }
  average = compressor_->commit(outcome);
  TOPKNOT_CHECK(average.size() == group_->numel(), "an average of another length than its group");
  return average;
}

void GroupPipeline::discard() {
  if (collective_) collective_->discard();
  compressor_->discard();
}

std::size_t GroupPipeline::planned_bytes(double density) const {
  return compressor_->planned_bytes(every_entry_ ? 1.0 : density);
}

void GroupPipeline::save(StateWriter& writer) const {
  writer.put_list(compressor_->state());
  if (collective_) collective_->save(writer);
}

void GroupPipeline::load(StateReader& reader) {
  compressor_->load_state(reader.get_list<std::byte>());
  if (collective_) collective_->load(reader);
}

}  // namespace topknot

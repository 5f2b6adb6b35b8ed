#include "dist/exchange/bucket.h"

#include <utility>

#include "compress/sparse.h"
#include "compress/state.h"
#include "nn/base/check.h"

namespace topknot {
namespace {

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
  return options.compress;
}

double group_density(const Group& group, const ExchangeOptions& options, double of_step) {
  return sent_whole(group, options) ? 1.0 : of_step;
}

void check_collective(const ExchangeOptions& options) {
  if (collectives().find(options.collective).make) index_codec_of(options.compress);
}

std::uint64_t planned_bytes(const ParameterArena& arena, const ExchangeOptions& options, int ranks,
                            double density) {
  std::uint64_t bytes = 0;
  for (const Group& group : plan_groups(arena, options))
    bytes += planned_message_bytes(group_options(group, options),
                                   group_spec(group, options.scope, ranks, options.layer_density),
                                   group_density(group, options, density));
  return bytes;
}

Bucket::Bucket(const Group& group, int index, std::unique_ptr<Compressor> compressor)
    : group(group), index(index), compressor(std::move(compressor)) {}

Bucket::Bucket(const Group& group, int index, const ExchangeOptions& options, int ranks)
    : Bucket(group, index,
             make_compressor(group_options(group, options),
                             group_spec(group, options.scope, ranks, options.layer_density))) {
  every_entry = sent_whole(group, options);
  const CollectiveType& type = collectives().find(options.collective);
  if (!type.make || !group.compressed) return;
  index_codec = index_codec_of(options.compress);
  collective = type.make({group.numel(), index_codec});
}

void Bucket::encode(const StepContext& of_step) {
  StepContext context = of_step;
  if (every_entry) context.density = 1.0;
  message = compressor->encode(slice, context);
  adds_entries = collective != nullptr;
  if (!collective) return;
  entries = compressor->entries();
  TOPKNOT_CHECK(entries, "a sparse collective for a method that sends no entries");
  k = compressor->target();
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
  return !group.compressed || all_finite(slice.gradient);
}

bool Bucket::commit() {
  std::span<const std::uint32_t> rejected;
  if (collective) {
    collective->commit();
    rejected = sum.rejected;
  }
  const std::span<float> average = compressor->commit(rejected);
  TOPKNOT_CHECK(average.size() == group.numel(), "an average of another length than its group");
  return average.data() == slice.residual.data();
}

void Bucket::discard() {
  if (collective) collective->discard();
  compressor->discard();
}

void Bucket::add_to(StepStatus& status) const {
  if (!group.compressed) return;
  status.selected += compressor->selected();
  status.over_capacity += compressor->over_capacity();
  status.threshold = compressor->threshold();
}

void Bucket::save(StateWriter& writer) const {
  writer.put_nested([this](StateWriter& nested) { compressor->save(nested); });
  if (collective) collective->save(writer);
}

void Bucket::load(StateReader& reader) {
  compressor->load_state(reader.get_list<std::byte>());
  if (collective) collective->load(reader);
}

}  // namespace topknot

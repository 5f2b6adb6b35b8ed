#include "compress/compressor.h"

#include <algorithm>
#include <limits>

#include "compress/memory/memory.h"
#include "compress/select/passes/keys.h"
#include "compress/select/selector.h"
#include "compress/state.h"
#include "nn/base/text.h"

namespace topknot {

Registry<CompressorType>& compressors() {
  static Registry<CompressorType> registry("compressor (compress.name)");
  return registry;
}

Registry<SelectorFactory>& selectors() {
  static Registry<SelectorFactory> registry("selection (compress.select)");
  return registry;
}

Registry<MemoryFactory>& memories() {
  static Registry<MemoryFactory> registry("memory (compress.memory)");
  return registry;
}

const std::vector<Option>& shared_options() {
  static const std::vector<Option> options = {
      {"density", 0.001, "share of a gradient's entries that is sent", 0, 1, true},
      {"select", "", "which entries are sent, in place of the method's own choice"},
      {"memory", "", "what happens to the rest, in place of the method's own"},
      {"codec", "", "how positions are written, in place of the method's own"},
      {"values", "", "how values are written, in place of the method's own"},
      {.name = "transform",
       .standard = "auto",
       .help = "block: a matrix's blocks of 64 x 64, one after the other, in place of its rows, for "
               "chunk_topk; dct: cosine coefficients of these blocks; auto: none but for demo",
       .choices = {"auto", "none", "block", "dct"}},
      {.name = "aggregate",
       .standard = "auto",
       .help = "each entry becomes its mean over all ranks, or over those that sent it; auto: ranks but for "
               "sparseloco and demo",
       .choices = {"auto", "ranks", "contributors"}},
      {"feedback_decay", 1.0,
       "memory residual: factor of what was kept back, in the next step; auto: 1 but for sparseloco, demo", 0,
       1},
      {"capacity", 0.0, "most entries that may be sent, as a multiple of k; none: no limit", 1, 1e9},
      {"dense_1d", true, "1-D parameters (biases, norms) are sent dense"},
      {"min_numel", 0, "parameters with fewer elements are sent dense", 0, 1e12},
      {"lr_inside", false, "accumulate learning rate times gradient (LAGS-SGD); without momentum"},
  };
  return options;
}

const Option& shared_option(const std::string& name) {
  const std::vector<Option>& all = shared_options();
  const auto found = std::find_if(all.begin(), all.end(), [&](const Option& o) { return o.name == name; });
  TOPKNOT_CHECK(found != all.end(), "no shared key is called " + name);
  return *found;
}

std::vector<std::byte> Compressor::state() const {
  StateWriter writer;
  save(writer);
  return writer.take();
}

void Compressor::load_state(std::span<const std::byte> bytes, float velocity_factor) {
  StateReader reader(bytes);
  reader.velocity_factor = velocity_factor;
  load(reader);
  reader.finish();
}

std::vector<std::span<const std::byte>> views_of(const Blocks& blocks) {
  return {blocks.begin(), blocks.end()};
}

HostCompressor::HostCompressor(const GroupSpec& group, bool has_residual)
    : numel_(group.numel), ranks_(static_cast<std::size_t>(group.ranks)), has_residual_(has_residual) {}

void HostCompressor::check_encode(Slice slice, const StepContext& context) {
  TOPKNOT_CHECK(phase_ == Phase::idle, "encode before the last step was committed or discarded");
  TOPKNOT_CHECK(slice.gradient.size() == numel_, "a slice of another length than the group's");
  TOPKNOT_CHECK(!has_residual_ || slice.residual.size() == numel_,
                "error feedback needs a residual as long as the gradient");
  TOPKNOT_CHECK(context.weights.empty() || context.weights.size() == ranks_, "one weight per rank");
  TOPKNOT_CHECK(context.rank >= 0 && static_cast<std::size_t>(context.rank) < ranks_,
                "rank outside the group");
  slice_ = slice;
  rank_ = static_cast<std::size_t>(context.rank);
  weights_.assign(context.weights.begin(), context.weights.end());
  weights_.resize(ranks_, 1.0f);
}

namespace {

void check_size(const GroupSpec& group) {
  if (group.numel > std::numeric_limits<std::int32_t>::max())
    throw UserError("exchange.merge: a group has " + std::to_string(group.numel) +
                    " elements, and positions are sent as 32-bit integers, up to 2^31 - 1; choose smaller "
                    "groups (exchange.merge=buckets, and compress.scope=group or tensor)");
}

}  // namespace

std::unique_ptr<Compressor> make_compressor(const CompressOptions& options, const GroupSpec& group) {
  TOPKNOT_CHECK(group.ranks >= 1, "a group of no ranks");
  check_size(group);
  std::size_t covered = 0;
  for (const auto& [begin, end] : group.segments) {
    TOPKNOT_CHECK(begin == covered && end > begin, "segments must be ascending, without gaps, and not empty");
    covered = end;
  }
  TOPKNOT_CHECK(covered == group.numel, "segments must cover the group");
  return compressors().find(options.name).make(options, group);
}

std::size_t planned_message_bytes(const CompressOptions& options, const GroupSpec& group, double density) {
  check_size(group);
  const CompressorType& type = compressors().find(options.name);
  return type.message_bytes ? type.message_bytes(options, group, density) : 0;
}

void refuse_key(const CompressOptions& options, const std::string& key, const std::string& value,
                const std::string& reason) {
  throw UserError("compress." + key + ": " + value + " makes no sense with compress.name: " + options.name +
                  ", " + reason);
}

void reject_sparse_options(const CompressOptions& options, const std::string& sends, bool sums) {
  const std::string reason = "which sends " + sends + "; remove the key or choose another compressor";
  if (!options.select.empty()) refuse_key(options, "select", options.select, reason);
  if (!options.codec.empty()) refuse_key(options, "codec", options.codec, reason);
  if (!options.values.empty() && !(sums && options.values == "fp32"))
    refuse_key(options, "values", options.values, reason);
  if (options.capacity != 0) refuse_key(options, "capacity", short_text(options.capacity), reason);
  if (!options.memory.empty() && options.memory != "residual" && options.memory != "none")
    refuse_key(options, "memory", options.memory,
               "which has plain error feedback or none; use residual or none");
  if (options.lr_inside)
    refuse_key(options, "lr_inside", "true",
               "which accumulates gradients as its paper does; remove the key or choose a sparse method");
}

std::size_t target_count(double density, std::size_t d) {
  TOPKNOT_CHECK(density > 0, "density must be above 0");
  return density_count(density, d);
}

}  // namespace topknot

#include "compress/compressor.h"

#include <limits>

#include "compress/memory/memory.h"
#include "compress/select/passes/keys.h"
#include "compress/select/selector.h"
#include "compress/state.h"
#include "nn/base/check.h"
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

std::vector<std::byte> Compressor::state() const {
  StateWriter writer;
  save(writer);
  return writer.take();
}

void Compressor::load_state(std::span<const std::byte> bytes) {
  StateReader reader(bytes);
  load(reader);
  reader.finish();
}

namespace {

void check_size(const GroupSpec& group) {
  if (group.numel > std::numeric_limits<std::int32_t>::max())
    throw UserError(
        "exchange.merge: a group has " + std::to_string(group.numel) +
        " elements, and positions are sent as 32-bit integers, up to 2^31 - 1; choose smaller groups "
        "(exchange.merge=buckets, and compress.scope=group or tensor)");
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

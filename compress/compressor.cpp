#include "compress/compressor.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "compress/memory/memory.h"
#include "compress/select/selector.h"
#include "compress/state.h"
#include "nn/core/base/check.h"

namespace topknot {

Registry<CompressorFactory>& compressors() {
  static Registry<CompressorFactory> registry("compressor (compress.name)");
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

std::unique_ptr<Compressor> make_compressor(const CompressOptions& options, const GroupSpec& group) {
  TOPKNOT_CHECK(group.ranks >= 1, "a group of no ranks");
  TOPKNOT_CHECK(group.numel <= std::numeric_limits<std::int32_t>::max(),
                "positions travel as 32-bit integers; a group has at most 2^31 - 1 elements");
  std::size_t covered = 0;
  for (const auto& [begin, end] : group.segments) {
    TOPKNOT_CHECK(begin == covered && end > begin, "segments must be ascending, without gaps, and not empty");
    covered = end;
  }
  TOPKNOT_CHECK(covered == group.numel, "segments must cover the group");
  return compressors().find(options.name)(options, group);
}

std::size_t target_count(double density, std::size_t d) {
  TOPKNOT_CHECK(density > 0, "density must be above 0");
  if (density >= 1) return d;
  return std::min(d, static_cast<std::size_t>(std::max(1.0, std::floor(density * static_cast<double>(d)))));
}

}  // namespace topknot

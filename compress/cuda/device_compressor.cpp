#include "compress/cuda/device_compressor.h"

#include "compress/cuda/device_sparse.h"
#include "compress/sparse_step.h"

namespace topknot::cuda {

std::unique_ptr<DeviceCompressor> make_device_compressor(const CompressOptions& options,
                                                         const GroupSpec& group) {
  // Refuses what the CPU refuses, in the same parameters.
  make_compressor(options, group);
  if (!sparse_presets().contains(options.name)) return nullptr;
  const SparsePreset parts = resolve(sparse_presets().find(options.name), options);
  std::unique_ptr<DeviceCodec> code = make_device_codec(parts.codec, parts.values, group.numel, group.ranks);
  if (!code) return nullptr;
  std::vector<std::unique_ptr<DeviceSelector>> selectors;
  for (const auto& [begin, end] : group.segments) {
    selectors.push_back(make_device_selector(parts.select, options, end - begin, group.offset + begin));
    if (!selectors.back()) return nullptr;
  }
  std::unique_ptr<DeviceMemory> memory = make_device_memory(parts.memory, options, group.numel);
  if (!memory) return nullptr;
  return std::make_unique<DeviceSparseCompressor>(std::move(selectors), std::move(memory), std::move(code),
                                                  options.lr_inside, group);
}

}  // namespace topknot::cuda

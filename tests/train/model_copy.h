#pragma once
// A model's weights and statistics as they stand, for comparison; and tensors as a file in memory.

#include "train/checkpoint/model_file.h"
#include "train/evaluate.h"

namespace topknot {

inline bool operator==(const ModelCopy& a, const ModelCopy& b) {
  return a.weights == b.weights && a.statistics == b.statistics;
}

inline ModelCopy copy_model(ParameterStore& store) {
  ModelCopy copy;
  copy.weights = store.arena().host_weights();
  store.statistics_to_host();
  copy_statistics(store, copy.statistics);
  return copy;
}

inline std::string safetensors_text(std::span<const TensorView> tensors, const Metadata& metadata = {}) {
  std::string text;
  write_safetensors(
      [&](std::span<const std::byte> part) {
        text.append(reinterpret_cast<const char*>(part.data()), part.size());
      },
      tensors, metadata);
  return text;
}

inline SafetensorsFile as_file(std::span<const TensorView> tensors, const char* name = "m.safetensors") {
  const std::string text = safetensors_text(tensors);
  const auto bytes = std::as_bytes(std::span(text));
  return SafetensorsFile::parse({bytes.begin(), bytes.end()}, name);
}

}  // namespace topknot

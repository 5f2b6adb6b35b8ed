#pragma once
// Compressors of libtopknot by its C interface alone, and rounds of several of them in one process.
#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "compress/memory/memory.h"
#include "compress/select/selector.h"
#include "compress/sparse.h"
#include "include/topknot.h"
#include "tests/compress/every_method.h"
#include "tests/support/catch.h"

namespace topknot::testing {

struct Shape {
  std::string name;
  std::vector<std::int64_t> lengths;
  std::size_t numel() const {
    std::size_t n = 1;
    for (const std::int64_t length : lengths) n *= static_cast<std::size_t>(length);
    return n;
  }
};
inline const std::vector<Shape> kShapes = {
    {"conv.weight", {8, 3, 3, 3}}, {"norm.bias", {64}}, {"up.weight", {96, 40}}, {"down.weight", {64, 64}}};

struct Destroy {
  void operator()(topknot_compressor* compressor) const { topknot_destroy(compressor); }
};
using Handle = std::unique_ptr<topknot_compressor, Destroy>;

inline Handle make(const std::string& method, const std::vector<std::string>& keys, int rank, int ranks,
                   const std::vector<Shape>& shapes = kShapes) {
  std::vector<const char*> texts;
  for (const std::string& key : keys) texts.push_back(key.c_str());
  std::vector<topknot_tensor> tensors;
  for (const Shape& shape : shapes)
    tensors.push_back({shape.name.c_str(), shape.lengths.data(), shape.lengths.size()});
  topknot_compressor* made = nullptr;
  const topknot_result result = topknot_create(method.c_str(), texts.data(), texts.size(), tensors.data(),
                                               tensors.size(), rank, ranks, &made);
  if (result != TOPKNOT_OK) throw UserError(topknot_error());
  return Handle(made);
}

inline std::string refusal(const std::string& method, const std::vector<std::string>& keys,
                           const std::vector<Shape>& shapes = kShapes) {
  try {
    make(method, keys, 0, 1, shapes);
  } catch (const UserError& error) {
    return error.what();
  }
  return "";
}

using Vectors = std::vector<std::vector<float>>;  // by tensor

struct Outcome {
  topknot_result state = TOPKNOT_OK;
  std::vector<Vectors> averages;  // by rank
};

// Ranks of one process, in one round of the tensors `which`. Sums are made in rank order.
inline Outcome exchange(std::vector<Handle>& ranks, const std::vector<std::int32_t>& which,
                        std::int64_t number, double density, const std::vector<Vectors>& gradients,
                        bool commit = true) {
  const topknot_step step{number, density, 0.1};
  std::vector<topknot_round*> rounds(ranks.size());
  for (std::size_t r = 0; r < ranks.size(); ++r) {
    std::vector<const void*> from;
    for (const std::int32_t t : which) from.push_back(gradients[r][static_cast<std::size_t>(t)].data());
    REQUIRE(topknot_encode(ranks[r].get(), &step, which.data(), which.size(), from.data(), TOPKNOT_FLOAT32, 1,
                           &rounds[r]) == TOPKNOT_OK);
  }
  Outcome outcome;
  do {
    std::vector<topknot_message> messages(ranks.size());
    for (std::size_t r = 0; r < ranks.size(); ++r)
      REQUIRE(topknot_message_of(rounds[r], &messages[r]) == TOPKNOT_OK);
    std::vector<std::vector<char>> copies;
    std::vector<const void*> blocks;
    std::vector<std::size_t> sizes;
    if (messages[0].sum) {
      REQUIRE(messages[0].sum_type == TOPKNOT_FLOAT32);
      auto* sum = static_cast<float*>(messages[0].sum);
      for (std::size_t r = 1; r < ranks.size(); ++r)
        for (std::size_t i = 0; i < messages[0].sum_count; ++i)
          sum[i] += static_cast<const float*>(messages[r].sum)[i];
      for (std::size_t r = 1; r < ranks.size(); ++r)
        std::memcpy(messages[r].sum, sum, messages[0].sum_count * sizeof(float));
    } else {
      for (const topknot_message& message : messages) {
        const auto* begin = static_cast<const char*>(message.block);
        copies.emplace_back(begin, begin + message.block_bytes);
      }
      for (const auto& copy : copies) blocks.push_back(copy.data()), sizes.push_back(copy.size());
    }
    for (std::size_t r = 0; r < ranks.size(); ++r) {
      const topknot_result state = topknot_decode(rounds[r], blocks.data(), sizes.data());
      if (state == TOPKNOT_INVALID) FAIL(topknot_error());
      REQUIRE((r == 0 || state == outcome.state));
      outcome.state = state;
    }
  } while (outcome.state == TOPKNOT_MORE);
  for (std::size_t r = 0; r < ranks.size(); ++r) {
    Vectors averages(kShapes.size());
    std::vector<void*> to;
    for (const std::int32_t t : which) {
      averages[static_cast<std::size_t>(t)].resize(gradients[r][static_cast<std::size_t>(t)].size());
      to.push_back(averages[static_cast<std::size_t>(t)].data());
    }
    if (commit && outcome.state == TOPKNOT_DONE)
      REQUIRE(topknot_commit(rounds[r], to.data(), TOPKNOT_FLOAT32, 1) == TOPKNOT_OK);
    else
      topknot_discard(rounds[r]);
    outcome.averages.push_back(averages);
  }
  return outcome;
}

inline Vectors gradients_of(std::int64_t step, std::size_t rank, const std::vector<Shape>& shapes = kShapes) {
  Vectors all;
  for (std::size_t t = 0; t < shapes.size(); ++t)
    all.push_back(gradient_of(step, rank + 10 * t % 3, shapes[t].numel()));
  return all;
}

inline std::vector<Vectors> all_gradients(std::int64_t step, std::size_t ranks) {
  std::vector<Vectors> all;
  for (std::size_t r = 0; r < ranks; ++r) all.push_back(gradients_of(step, r));
  return all;
}

inline bool declares(const std::string& method, const std::string& option) {
  const std::optional<SparsePreset> parts = pieces_of(options_for(method));
  const auto has = [&](const RegisteredNames& registry, const std::string& name) {
    return std::any_of(registry.options(name).begin(), registry.options(name).end(),
                       [&](const Option& o) { return o.name == option; });
  };
  return has(compressors(), method) ||
         (parts && (has(selectors(), parts->select) || has(memories(), parts->memory)));
}

// Of options_for().
inline std::vector<std::string> keys_for(const std::string& method) {
  std::vector<std::string> keys = {"seed=7"};
  const std::optional<SparsePreset> parts = pieces_of(options_for(method));
  if (parts && memories().find(parts->memory).traits.owns_momentum) keys.push_back("momentum=0.9");
  if (parts) keys.insert(keys.end(), {"dense_1d=true", "transform=auto"});
  if (declares(method, "threshold")) keys.push_back("threshold=0.5");
  if (declares(method, "min_compression")) keys.push_back("min_compression=1.0");
  return keys;
}

inline std::vector<char> state_of(topknot_compressor* compressor) {
  std::size_t bytes = 0;
  REQUIRE(topknot_save(compressor, nullptr, 0, &bytes) == TOPKNOT_OK);
  std::vector<char> state(bytes);
  REQUIRE(topknot_save(compressor, state.data(), state.size(), &bytes) == TOPKNOT_OK);
  return state;
}

inline const std::vector<std::int32_t> kAll = {0, 1, 2, 3};

}  // namespace topknot::testing

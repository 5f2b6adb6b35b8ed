#pragma once
// Compressors of libtopknot by its C interface alone, and rounds of several of them in one process.

#include "compress/memory/memory.h"
#include "compress/select/selector.h"
#include "compress/sparse.h"
#include "include/topknot.h"
#include "tests/compress/every_method.h"

namespace topknot::testing {

struct NamedShape {
  std::string name;
  std::vector<std::int64_t> lengths;
  std::size_t numel() const {
    std::size_t n = 1;
    for (const std::int64_t length : lengths) n *= static_cast<std::size_t>(length);
    return n;
  }
};
inline const std::vector<NamedShape> kShapes = {
    {"conv.weight", {8, 3, 3, 3}}, {"norm.bias", {64}}, {"up.weight", {96, 40}}, {"down.weight", {64, 64}}};

struct Destroy {
  void operator()(topknot_compressor* compressor) const { topknot_destroy(compressor); }
};
using Handle = std::unique_ptr<topknot_compressor, Destroy>;

inline Handle make(const std::string& method, const std::vector<std::string>& keys, int rank, int ranks,
                   const std::vector<NamedShape>& shapes = kShapes) {
  std::vector<const char*> texts;
  for (const std::string& key : keys) texts.push_back(key.c_str());
  std::vector<topknot_tensor> tensors;
  for (const NamedShape& shape : shapes)
    tensors.push_back({shape.name.c_str(), shape.lengths.data(), shape.lengths.size()});
  topknot_compressor* made = nullptr;
  const topknot_result result = topknot_create(method.c_str(), texts.data(), texts.size(), tensors.data(),
                                               tensors.size(), rank, ranks, &made);
  if (result != TOPKNOT_OK) throw UserError(topknot_error());
  return Handle(made);
}

inline std::string refusal(const std::string& method, const std::vector<std::string>& keys,
                           const std::vector<NamedShape>& shapes = kShapes) {
  return error_text<UserError>([&] { make(method, keys, 0, 1, shapes); });
}

inline std::vector<Handle> make_ranks(const std::string& method, const std::vector<std::string>& keys,
                                      int ranks, const std::vector<NamedShape>& shapes = kShapes) {
  std::vector<Handle> made;
  for (int rank = 0; rank < ranks; ++rank) made.push_back(make(method, keys, rank, ranks, shapes));
  return made;
}

inline topknot_round* encoded(const Handle& rank, const topknot_step& step,
                              const std::vector<std::int32_t>& which, const std::vector<const void*>& from,
                              topknot_type type = TOPKNOT_FLOAT32, double scale = 1) {
  topknot_round* round = nullptr;
  if (topknot_encode(rank.get(), &step, which.data(), which.size(), from.data(), type, scale, &round) !=
      TOPKNOT_OK)
    FAIL(topknot_error());
  return round;
}

inline topknot_message message_of(topknot_round* round) {
  topknot_message message;
  REQUIRE(topknot_message_of(round, &message) == TOPKNOT_OK);
  return message;
}

// Decodes the round of an only rank.
inline topknot_result decode_alone(topknot_round* round) {
  const topknot_message message = message_of(round);
  return topknot_decode(round, &message.block, &message.block_bytes);
}

using Bytes = std::vector<std::byte>;
using Vectors = std::vector<std::vector<float>>;  // by tensor

template <class Values>
Bytes bytes_of(const Values& values) {
  const auto bytes = std::as_bytes(std::span(values));
  return Bytes(bytes.begin(), bytes.end());
}
template <class T>
std::vector<T> values_of(const Bytes& bytes) {
  std::vector<T> values(bytes.size() / sizeof(T));
  std::memcpy(values.data(), bytes.data(), bytes.size());
  return values;
}

// A program's own memory; tests/cuda/library_test.cpp has one of the GPU.
class HostMemory {
 public:
  explicit HostMemory(const Bytes& bytes) : bytes_(bytes) {}
  void* data() { return bytes_.data(); }
  const Bytes& bytes() const { return bytes_; }
  static Bytes read(const void* data, std::size_t bytes) {
    const auto* from = static_cast<const std::byte*>(data);
    return Bytes(from, from + bytes);
  }
  static void write(void* data, const Bytes& bytes) { std::memcpy(data, bytes.data(), bytes.size()); }

 private:
  Bytes bytes_;
};

struct RoundSettings {
  double density = 0;
  topknot_type type = TOPKNOT_FLOAT32;
  double scale = 1;
  bool commit = true;
  bool together = false;  // blocks lie one after the other, as an all-gather leaves them
};

struct Outcome {
  topknot_result state = TOPKNOT_OK;
  std::vector<std::vector<Bytes>> averages;  // by rank, by tensor
  std::vector<float> average(std::size_t rank, std::size_t tensor) const {
    return values_of<float>(averages[rank][tensor]);
  }
};

// Ranks of one process, in one round of the tensors `which`. Gradients are given by rank and tensor; sums are made
// in rank order.
template <class Memory = HostMemory>
Outcome exchange(const std::vector<Handle>& ranks, const std::vector<std::int32_t>& which,
                 std::int64_t number, const RoundSettings& settings,
                 const std::vector<std::vector<Bytes>>& gradients) {
  const auto addresses = [](std::vector<Memory>& all) {
    std::vector<void*> made;
    for (Memory& one : all) made.push_back(one.data());
    return made;
  };
  std::vector<topknot_round*> rounds;
  for (std::size_t r = 0; r < ranks.size(); ++r) {
    std::vector<Memory> own;
    for (const std::int32_t t : which) own.emplace_back(gradients[r][t]);
    const std::vector<void*> from = addresses(own);
    rounds.push_back(encoded(ranks[r], {number, settings.density, 0.1}, which, {from.begin(), from.end()},
                             settings.type, settings.scale));
  }
  Outcome outcome;
  do {
    std::vector<topknot_message> messages;
    for (topknot_round* const round : rounds) messages.push_back(message_of(round));
    std::vector<Memory> copies;
    std::vector<const void*> blocks;
    std::vector<std::size_t> sizes;
    if (messages[0].sum) {
      REQUIRE(messages[0].sum_type == TOPKNOT_FLOAT32);
      std::vector<float> sum;
      for (const topknot_message& message : messages) {
        const auto own = values_of<float>(Memory::read(message.sum, message.sum_count * sizeof(float)));
        REQUIRE((sum.empty() || sum.size() == own.size()));
        for (std::size_t i = 0; i < sum.size(); ++i) sum[i] += own[i];
        if (sum.empty()) sum = own;
      }
      for (const topknot_message& message : messages) Memory::write(message.sum, bytes_of(sum));
    } else {
      std::vector<Bytes> all(settings.together ? 1 : 0);
      for (const topknot_message& message : messages) {
        const Bytes block = Memory::read(message.block, message.block_bytes);
        if (!settings.together) all.emplace_back();
        all.back().insert(all.back().end(), block.begin(), block.end());
        sizes.push_back(block.size());
      }
      for (const Bytes& bytes : all) copies.emplace_back(bytes);
      for (std::size_t r = 0; r < ranks.size(); ++r)
        blocks.push_back(!settings.together ? copies[r].data()
                         : r == 0           ? copies[0].data()
                                            : static_cast<const std::byte*>(blocks.back()) + sizes[r - 1]);
    }
    for (std::size_t r = 0; r < ranks.size(); ++r) {
      const topknot_result state = topknot_decode(rounds[r], blocks.data(), sizes.data());
      if (state == TOPKNOT_INVALID || state == TOPKNOT_FAILED) FAIL(topknot_error());
      REQUIRE((r == 0 || state == outcome.state));
      outcome.state = state;
    }
  } while (outcome.state == TOPKNOT_MORE);  // its memory is the program's again
  for (std::size_t r = 0; r < ranks.size(); ++r) {
    std::vector<Memory> own;
    for (const std::int32_t t : which) own.emplace_back(Bytes(gradients[r][t].size()));
    const bool commit = settings.commit && outcome.state == TOPKNOT_DONE;
    if (!commit)
      topknot_discard(rounds[r]);
    else if (topknot_commit(rounds[r], addresses(own).data(), settings.type, settings.scale) != TOPKNOT_OK)
      FAIL(topknot_error());
    outcome.averages.emplace_back(gradients[r].size());
    for (std::size_t i = 0; i < which.size(); ++i) outcome.averages[r][which[i]] = own[i].bytes();
  }
  return outcome;
}

inline Outcome exchange(const std::vector<Handle>& ranks, const std::vector<std::int32_t>& which,
                        std::int64_t number, double density, const std::vector<Vectors>& gradients,
                        bool commit = true) {
  std::vector<std::vector<Bytes>> all;
  for (const Vectors& one : gradients) {
    all.emplace_back();
    for (const std::vector<float>& gradient : one) all.back().push_back(bytes_of(gradient));
  }
  return exchange(ranks, which, number, {.density = density, .commit = commit}, all);
}

inline Vectors gradients_of(std::int64_t step, std::size_t rank,
                            const std::vector<NamedShape>& shapes = kShapes) {
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

#pragma once
// Ranks that add their entries by a sparse collective, step after step.

#include "compress/state.h"
#include "dist/sparse/sparse_collective.h"
#include "nn/core/rng.h"
#include "tests/dist/ranks.h"

namespace topknot::testing {

struct Fleet {
  const IndexCodec* code;
  std::vector<std::unique_ptr<SparseCollective>> collectives;
  std::string backend = "threads";

  Fleet(const std::string& name, int ranks, std::size_t numel, const std::string& code_name = "raw")
      : code(&index_codecs().find(code_name)) {
    for (int rank = 0; rank < ranks; ++rank)
      collectives.push_back(topknot::collectives().find(name).make({numel, code}));
  }
  // By rank. Neither committed nor discarded.
  std::vector<SparseSum> sum(const std::vector<SparseVector>& entries, std::size_t k) {
    std::vector<SparseSum> result(collectives.size());
    topknot::run_ranks(backend, static_cast<int>(collectives.size()), [&](Communicator& communicator) {
      const auto rank = static_cast<std::size_t>(communicator.rank());
      collectives[rank]->sum(communicator, entries[rank], k, result[rank]);
    });
    return result;
  }
  void commit() {
    for (auto& collective : collectives) collective->commit();
  }
  std::vector<SparseSum> sum_and_commit(const std::vector<SparseVector>& entries, std::size_t k) {
    auto sums = sum(entries, k);
    commit();
    return sums;
  }
  void discard() {
    for (auto& collective : collectives) collective->discard();
  }
  std::vector<std::byte> state(std::size_t rank) const {
    StateWriter writer;
    collectives[rank]->save(writer);
    return writer.take();
  }
  void load(std::size_t rank, const std::vector<std::byte>& bytes) {
    StateReader reader(bytes);
    collectives[rank]->load(reader);
    reader.finish();
  }
};

// Positions drawn with the given probability, whole numbers in [-bound, bound]: their sums are exact in any
// order.
inline SparseVector whole_numbers(std::uint32_t seed, std::size_t numel, double probability, int bound) {
  const CounterRng rng(seed, RngUse::test, 0);
  SparseVector entries;
  for (std::size_t i = 0; i < numel; ++i) {
    if (rng.uniform(2 * i) >= probability) continue;
    const double value = static_cast<double>(rng.uniform(2 * i + 1)) * (2 * bound + 1);
    entries.indices.push_back(static_cast<std::uint32_t>(i));
    entries.values.push_back(static_cast<float>(static_cast<int>(value) - bound));
  }
  return entries;
}

}  // namespace topknot::testing

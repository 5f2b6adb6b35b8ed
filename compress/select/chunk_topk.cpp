// The k largest magnitudes of each chunk of compress.chunk neighbours, exactly; ties go to the lower index. The last chunk
// of a range may be shorter, and each sends k = max(1, round(density * length)) of its entries, halves to even. SparseLoCo
// (Sarfi et al., arXiv 2508.15706) takes 64 of 4,096; its released code cuts matrices into blocks of 64 x 64
// (compress.transform: block), which for a matrix of 64 columns are these chunks, and leaves ties open.
//
// A chunk is selected from while it is in the cache: one pass over memory. Nothing is carried.

#include <algorithm>
#include <cmath>
#include <vector>

#include "compress/parallel.h"
#include "compress/select/passes/keys.h"
#include "compress/select/selector.h"
#include "compress/sparse.h"

namespace topknot {
namespace {

const Option kChunkSize{"chunk", 4096, "neighbouring entries of which k are sent", 1, 1e9};

std::size_t chunk_size(const CompressOptions& options) {
  return static_cast<std::size_t>(options.get<int>(kChunkSize));
}

std::size_t entries_of(std::size_t length, double density) {
  const double k = std::nearbyint(density * static_cast<double>(length));  // halves to even
  return std::clamp<std::size_t>(static_cast<std::size_t>(k), 1, length);
}

// The same for all chunks of d entries together.
std::size_t entries_of_chunks(double density, std::size_t d, std::size_t chunk) {
  const std::size_t rest = d % chunk;
  return d / chunk * entries_of(chunk, density) + (rest > 0 ? entries_of(rest, density) : 0);
}

class ChunkTopKSelector final : public Selector {
 public:
  explicit ChunkTopKSelector(const CompressOptions& options) : chunk_(chunk_size(options)) {}

  void select(std::span<float> u, const FeedbackInput& input, const SelectStep& step,
              Selection& selected) override {
    selected = {};
    const std::size_t chunks = (u.size() + chunk_ - 1) / chunk_, full = entries_of(chunk_, step.density);
    selected.indices.resize(entries_of_chunks(step.density, u.size(), chunk_));
    selected.values.resize(selected.indices.size());
    const std::size_t parts = std::min(part_count(u.size()), chunks);
    parts_.resize(std::max(parts_.size(), parts));
    for (std::size_t part = 0; part < parts; ++part) parts_[part].keys.resize(std::min(chunk_, u.size()));
#pragma omp parallel for num_threads(static_cast <int>(parts)) schedule(static, 1) if (parts > 1)
    for (std::size_t part = 0; part < parts; ++part) {
      Part& own = parts_[part];
      own.least = kLargestFinite;
      own.largest = 0;
      for (std::size_t c = chunks * part / parts; c < chunks * (part + 1) / parts; ++c) {
        const std::size_t begin = c * chunk_, n = std::min(chunk_, u.size() - begin);
        input.part(begin, n).add_to(u.subspan(begin, n));
        take_largest(u.data() + begin, begin, n, n == chunk_ ? full : entries_of(n, step.density), own,
                     selected.indices.data() + c * full, selected.values.data() + c * full);
      }
    }
    MagnitudeKey least = kLargestFinite, largest = 0;
    for (std::size_t part = 0; part < parts; ++part)
      least = std::min(least, parts_[part].least), largest = std::max(largest, parts_[part].largest);
    selected.finite = largest <= kLargestFinite;
    selected.threshold = static_cast<double>(magnitude_of(least));
    if (!selected.finite) {
      selected = {};
      selected.finite = false;
    }
  }

 private:
  struct Part {
    std::vector<MagnitudeKey> keys;  // scratch
    MagnitudeKey least = 0, largest = 0;
  };

  static void take_largest(const float* u, std::size_t begin, std::size_t n, std::size_t k, Part& part,
                           std::uint32_t* index, float* value) {
    part.largest = std::max(part.largest, largest_key(u, n));
    if (part.largest > kLargestFinite) return;
    const auto keys = part.keys.begin(), end = keys + static_cast<std::ptrdiff_t>(n),
               kth = keys + static_cast<std::ptrdiff_t>(k) - 1;
    std::transform(u, u + n, keys, key_of);
    std::nth_element(keys, kth, end, std::greater<>());
    const MagnitudeKey bound = *kth;
    part.least = std::min(part.least, bound);
    std::size_t equal =
        k - static_cast<std::size_t>(std::count_if(keys, kth, [&](MagnitudeKey key) { return key > bound; }));
    for (std::size_t i = 0; i < n; ++i) {
      const MagnitudeKey key = key_of(u[i]);
      if (key < bound || (key == bound && equal == 0)) continue;
      if (key == bound) --equal;
      *index++ = static_cast<std::uint32_t>(begin + i);
      *value++ = u[i];
    }
  }

  const std::size_t chunk_;
  std::vector<Part> parts_;
};

const bool chunk_topk_registered[] = {
    add_selector<ChunkTopKSelector>("chunk_topk", "the k largest magnitudes of each chunk of neighbours",
                                    {.at_most_k = true,
                                     .target =
                                         [](double density, std::size_t d, const CompressOptions& options) {
                                           return entries_of_chunks(density, d, chunk_size(options));
                                         }},
                                    {kChunkSize}),
    add_sparse("chunk_topk", "the k largest entries of each chunk; error feedback keeps the rest",
               {.select = "chunk_topk", .codec = "auto"}),
    // SparseLoCo's compression of what local steps (exchange.every) have done to the weights: e <- beta e + Delta, the
    // largest of each chunk in two bits each, e <- e - what was sent. Its code averages each entry over the ranks that sent
    // it; compress.aggregate=ranks is the paper's mean over all of them.
    add_sparse("sparseloco",
               "SparseLoCo: chunk_topk, 2 bits a value, decayed error feedback; for exchange.every",
               {.select = "chunk_topk",
                .codec = "auto",
                .values = "centroid2",
                .aggregate = "contributors",
                .feedback_decay = 0.95,
                .settings = {{"compress.density", "0.015625"},
                             {"compress.transform", "block"},
                             {"compress.dense_1d", "false"},
                             {"exchange.merge", "none"},
                             {"exchange.outer.name", "sgd"},
                             {"exchange.outer.lr", "1"},
                             {"exchange.outer.momentum", "0"}}}),
    // DeMo (Peng et al., arXiv 2411.19870): momentum m <- beta m + lr g on each rank, of which the largest coefficients of
    // each block are sent and taken out; the steps are those of optimizer.name=sign. Here m is kept as coefficients.
    add_sparse("demo",
               "DeMo: the largest cosine coefficients of decoupled momentum; with optimizer.name=sign",
               {.select = "chunk_topk",
                .codec = "auto",
                .aggregate = "contributors",
                .feedback_decay = 0.999,
                .transform = "dct",
                .settings = {{"compress.density", "0.0078125"},
                             {"compress.dense_1d", "false"},
                             {"compress.lr_inside", "true"},
                             {"optimizer.name", "sign"},
                             {"optimizer.lr", "0.0004"},
                             {"optimizer.weight_decay", "0"}}})};

}  // namespace
}  // namespace topknot

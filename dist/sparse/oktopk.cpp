// Ok-Topk (Li, Hoefler, "Near-Optimal Sparse Allreduce for Distributed Deep Learning", PPoPP 2022, section 3,
// and the authors' code, VGG/allreducer.py): a sparse sum whose volume does not grow with the ranks.
//
//   Regions     each rank adds up one region of the positions. Every 64 steps each rank cuts its selected
//               positions into P runs of equal count, and the cuts are averaged over the ranks that have any;
//               before there are any, the cuts are even.
//   Split       each rank sends each region's entries to that region's rank, which adds them in rank order.
//   Threshold   every 32 steps it is the k-th largest of all reduced magnitudes (0 if there are fewer).
//               Between them it is carried: after a step in which more than 4k/3 entries passed it is multiplied
//               by 1.008, after one with fewer than 2k/3 divided by it.
//   Gather      all ranks get the reduced entries whose magnitude reaches the threshold. Regions ascend, so
//               the sum is their concatenation.
//
// A rank gets back its entries at positions that did not pass; the others are contained in the sum.
//
// Our choices and deviations: an entry equal to the threshold passes, so that an exact threshold keeps k (the
// reference keeps one fewer); ties all pass. For the exact threshold the ranks gather the k largest
// magnitudes of each region, which is enough, not the reduced entries. It is also found anew when k changes,
// as it does while the density warms up, and after a step whose threshold was 0. How many pass in between is
// not bounded, as there. The first selection is the method's own (compress.name), the reference's dense start
// is compress.warmup, and the reference's optional balancing before the last gather is left out: regions are
// balanced by what is selected, not by what passes. Positions are sent relative to their region.
//
// Collectives of a step: all_gather of the cuts (every 64), all_to_all, all_gather of magnitudes (every 32),
// all_gather. Whether they run follows from the committed state, which is the same on all ranks.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "compress/codec/codec.h"
#include "dist/sparse/sparse_collective.h"

namespace topknot {
namespace {

constexpr std::int64_t kCutsEvery = 64, kThresholdEvery = 32;
constexpr double kAdapt = 1.008;

// State carried from step to step; the same on all ranks.
struct Carried {
  std::int64_t steps = 0;           // committed
  double threshold = 0;             // of the next step
  std::uint64_t k = 0;              // of the last step
  std::vector<std::uint32_t> cuts;  // where regions 1, 2, ... begin; ascending, at most numel
};

template <class T>
std::vector<T> list_from(const std::vector<std::byte>& bytes) {
  if (bytes.size() % sizeof(T) != 0) throw Error("damaged message of the sparse collective: its length");
  std::vector<T> list(bytes.size() / sizeof(T));
  if (!bytes.empty()) std::memcpy(list.data(), bytes.data(), bytes.size());
  return list;
}

class OkTopK final : public SparseCollective {
 public:
  explicit OkTopK(const SparseCollectiveOptions& options)
      : numel_(options.numel), index_codec_(options.index_codec), values_(&value_codecs().find("fp32")) {}

  void sum(Communicator& communicator, const SparseVector& given, std::size_t k, SparseSum& result) override {
    const std::size_t ranks = static_cast<std::size_t>(communicator.size());
    result.bytes_sent = result.bytes_received = 0;
    next_ = carried_;
    SparseVector mine, reduced;
    take_finite(given, mine);
    if (carried_.steps % kCutsEvery == 0 || carried_.cuts.size() + 1 != ranks)
      place_cuts(communicator, mine.indices, result);
    bool finite = split_and_reduce(communicator, mine, reduced, result);
    if (carried_.steps % kThresholdEvery == 0 || carried_.k != k || carried_.threshold == 0)
      next_.threshold = exact_threshold(communicator, reduced, k, result);
    keep_passing(reduced);
    finite = gather(communicator, reduced, result) && finite;
    result.sum.finite = finite;
    result.rejected.clear();
    if (!finite) {
      result.sum.indices.clear();
      result.sum.values.clear();
      return;
    }
    std::set_difference(mine.indices.begin(), mine.indices.end(), result.sum.indices.begin(),
                        result.sum.indices.end(), std::back_inserter(result.rejected));
    const double total = static_cast<double>(result.sum.indices.size()), wanted = static_cast<double>(k);
    if (total > 4 * wanted / 3) next_.threshold *= kAdapt;
    if (total < 2 * wanted / 3) next_.threshold /= kAdapt;
    next_.k = k;
    ++next_.steps;
  }

  void commit() override { carried_ = next_; }

  void save(StateWriter& writer) const override {
    writer.put(carried_.steps);
    writer.put(carried_.threshold);
    writer.put(carried_.k);
    writer.put_list(carried_.cuts);
  }

  void load(StateReader& reader) override {
    Carried read;
    read.steps = reader.get<std::int64_t>();
    read.threshold = reader.get<double>();
    read.k = reader.get<std::uint64_t>();
    read.cuts = reader.get_list<std::uint32_t>();
    if (read.steps < 0 || !(read.threshold >= 0 && std::isfinite(read.threshold)) ||
        !std::is_sorted(read.cuts.begin(), read.cuts.end()) ||
        (!read.cuts.empty() && read.cuts.back() > numel_))
      StateReader::fail("of the sparse collective is damaged, or of another group");
    carried_ = std::move(read);
  }

 private:
  // [begin, end) of a rank's region.
  std::pair<std::uint32_t, std::uint32_t> region(std::size_t rank) const {
    const std::vector<std::uint32_t>& cuts = next_.cuts;
    return {rank == 0 ? 0 : cuts[rank - 1],
            rank == cuts.size() ? static_cast<std::uint32_t>(numel_) : cuts[rank]};
  }

  std::vector<std::byte> write(const SparseVector& entries, std::size_t rank) const {
    const auto [begin, end] = region(rank);
    SparseVector relative = entries;
    for (std::uint32_t& index : relative.indices) index -= begin;
    return write_block(relative, end - begin, *index_codec_, *values_);
  }

  void read(const std::vector<std::byte>& block, std::size_t rank, SparseVector& entries) const {
    const auto [begin, end] = region(rank);
    read_block(block, end - begin, *index_codec_, *values_, entries);
    for (std::uint32_t& index : entries.indices) index += begin;
  }

  static void all_gather(Communicator& communicator, std::span<const std::byte> mine,
                         std::vector<std::vector<std::byte>>& all, SparseSum& result) {
    communicator.all_gather(mine, all);
    result.bytes_sent += mine.size();
    for (std::size_t r = 0; r < all.size(); ++r)
      if (static_cast<int>(r) != communicator.rank()) result.bytes_received += all[r].size();
  }

  void place_cuts(Communicator& communicator, const std::vector<std::uint32_t>& positions,
                  SparseSum& result) {
    const std::size_t ranks = static_cast<std::size_t>(communicator.size());
    std::vector<std::uint32_t> own;
    for (std::size_t cut = 1; cut < ranks && !positions.empty(); ++cut)
      own.push_back(positions[cut * positions.size() / ranks]);
    std::vector<std::vector<std::byte>> all;
    all_gather(communicator, std::as_bytes(std::span(own)), all, result);
    std::vector<std::uint64_t> sums(ranks - 1);
    std::uint64_t voters = 0;
    for (const auto& block : all) {
      const auto cuts = list_from<std::uint32_t>(block);
      if (cuts.empty()) continue;
      if (cuts.size() != sums.size() || !std::is_sorted(cuts.begin(), cuts.end()) || cuts.back() >= numel_)
        throw Error("damaged message of the sparse collective: cuts");
      for (std::size_t cut = 0; cut < sums.size(); ++cut) sums[cut] += cuts[cut];
      ++voters;
    }
    if (voters == 0 && next_.cuts.size() == sums.size()) return;
    next_.cuts.resize(sums.size());
    // Averages of ascending cuts ascend.
    for (std::size_t cut = 0; cut < sums.size(); ++cut)
      next_.cuts[cut] =
          static_cast<std::uint32_t>(voters > 0 ? sums[cut] / voters : (cut + 1) * numel_ / ranks);
  }

  // False if a rank's entries were not finite, as all ranks then see.
  bool split_and_reduce(Communicator& communicator, const SparseVector& mine, SparseVector& reduced,
                        SparseSum& result) {
    const std::size_t ranks = static_cast<std::size_t>(communicator.size());
    const std::size_t rank = static_cast<std::size_t>(communicator.rank());
    std::vector<std::vector<std::byte>> blocks(ranks), theirs;
    SparseVector part, own, sum;
    std::size_t from = 0;
    for (std::size_t r = 0; r < ranks; ++r) {
      const auto first = mine.indices.begin() + static_cast<std::ptrdiff_t>(from);
      const std::size_t to = static_cast<std::size_t>(
          std::lower_bound(first, mine.indices.end(), region(r).second) - mine.indices.begin());
      part.finite = mine.finite;
      part.indices.assign(first, mine.indices.begin() + static_cast<std::ptrdiff_t>(to));
      part.values.assign(mine.values.begin() + static_cast<std::ptrdiff_t>(from),
                         mine.values.begin() + static_cast<std::ptrdiff_t>(to));
      from = to;
      if (r == rank)
        own = part;
      else
        result.bytes_sent += (blocks[r] = write(part, r)).size();
    }
    communicator.all_to_all(blocks, theirs);
    bool finite = true;
    reduced = {};
    for (std::size_t r = 0; r < ranks; ++r) {
      if (r != rank) {
        result.bytes_received += theirs[r].size();
        read(theirs[r], rank, part);
      }
      const SparseVector& next = r == rank ? own : part;
      finite = finite && next.finite;
      add_entries(reduced, next, sum);
      std::swap(reduced, sum);
    }
    return finite;
  }

  static double exact_threshold(Communicator& communicator, const SparseVector& reduced, std::size_t k,
                                SparseSum& result) {
    std::vector<float> magnitudes(reduced.values.size());
    std::transform(reduced.values.begin(), reduced.values.end(), magnitudes.begin(),
                   [](float value) { return std::fabs(value); });
    if (magnitudes.size() > k) {
      if (k > 0) kth_largest(magnitudes, k);  // moves the k largest to the front
      magnitudes.resize(k);
    }
    std::vector<std::vector<std::byte>> all;
    all_gather(communicator, std::as_bytes(std::span(magnitudes)), all, result);
    magnitudes.clear();
    for (const auto& block : all) {
      const auto theirs = list_from<float>(block);
      for (const float magnitude : theirs)
        if (!(magnitude >= 0)) throw Error("damaged message of the sparse collective: magnitudes");
      magnitudes.insert(magnitudes.end(), theirs.begin(), theirs.end());
    }
    return k == 0 ? std::numeric_limits<double>::infinity() : kth_largest(magnitudes, k);
  }

  void keep_passing(SparseVector& reduced) const {
    std::size_t kept = 0;
    for (std::size_t i = 0; i < reduced.indices.size(); ++i) {
      if (!(std::fabs(static_cast<double>(reduced.values[i])) >= next_.threshold)) continue;
      reduced.indices[kept] = reduced.indices[i];
      reduced.values[kept++] = reduced.values[i];
    }
    reduced.indices.resize(kept);
    reduced.values.resize(kept);
  }

  // False if a region's sum was not finite.
  bool gather(Communicator& communicator, const SparseVector& reduced, SparseSum& result) {
    std::vector<std::vector<std::byte>> all;
    all_gather(communicator, write(reduced, static_cast<std::size_t>(communicator.rank())), all, result);
    SparseVector part;
    bool finite = true;
    result.sum.indices.clear();
    result.sum.values.clear();
    for (std::size_t r = 0; r < all.size(); ++r) {
      read(all[r], r, part);
      finite = finite && part.finite;
      result.sum.indices.insert(result.sum.indices.end(), part.indices.begin(), part.indices.end());
      result.sum.values.insert(result.sum.values.end(), part.values.begin(), part.values.end());
    }
    return finite;
  }

  std::size_t numel_;
  const IndexCodec* index_codec_;
  const ValueCodec* values_;
  Carried carried_, next_;  // as committed, and of the step under way
};

// With balanced regions and k winners: k / P entries of b bytes to each of the others, then an all-gather of
// k / P winners each: 2 (alpha + (P-1) / P k b beta). Rounds that re-estimate thresholds and regions run once
// in tens of steps and are left out. (Li and Hoefler's bound, with entries of two words, is (2 P + 2 log2 P)
// alpha + 6 k (P-1) / P words: with an alpha for each message, and a split and a gather out of balance.)
double oktopk_cost(const Link& link, int ranks, double k, double bytes_per_entry) {
  return ranks < 2 ? 0 : 2 * all_gather_cost(link, ranks, k * bytes_per_entry / ranks);
}

const bool oktopk_registered =
    collectives().add("oktopk", "each rank adds one region, the largest are gathered (Ok-Topk)",
                      {make_as<SparseCollective, OkTopK>, oktopk_cost});

}  // namespace
}  // namespace topknot

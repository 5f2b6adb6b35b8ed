#include "train/plan/profile_at.h"

#include <algorithm>

#include "compress/sparse.h"
#include "dist/sparse/coded_sum.h"
#include "dist/sparse/sparse_collective.h"
#include "nn/base/check.h"
#include "train/plan/exchange_plan.h"

namespace topknot {
namespace {

using GroupCost = ExchangeProfile::Group;
using Fit = ExchangeProfile::Fit;

bool is_dense(const ExchangeProfile& profile) {
  return profile.method == "dense";
}

// The bytes of an all-reduce on a rank's link, per byte of data: each direction carries (P-1)/P of the data
// twice.
double reduce_share(int ranks) {
  return 2.0 * (ranks - 1) / ranks;
}

// The fraction of the bytes that a coded sum sends, by the width of its values.
double coded_share(const ExchangeProfile& profile) {
  const GroupCost& all = profile.groups.back();
  return all.bytes < 3 * all.elements ? kCodedBFloat16 : kCodedFloat;
}

// Seconds that a further message at the same time adds.
double overhead_of(const ExchangeProfile& profile) {
  return profile.ranks == 2 ? profile.gather.alpha : profile.link.overhead;
}

void scale_decoding(GroupCost& group, const ExchangeProfile& from, const ExchangeProfile& to, bool sums) {
  if (sums) return;  // one sum, however many ranks
  const double share = sends_entries(from) ? from.density : 1;
  const auto work = [&](const ExchangeProfile& profile) {
    const double messages = profile.collective == "all_gather" ? profile.ranks : 1;
    return kElementWeight + messages * share;
  };
  // Whatever the collective, the measured decoding was of one message from each rank.
  ExchangeProfile measured;
  measured.ranks = from.ranks;
  group.decode_s *= work(to) / work(measured);
}

Fit reduce_at(const ExchangeProfile& from, const ExchangeProfile& to, const PredictedNetwork& network) {
  Fit fit;
  fit.ranks = to.ranks;
  const bool coded = codes_sums(from.collective), ring = is_dense(from) && !coded;
  if (from.ranks < 2 || network.latency) {
    fit.alpha = ring ? 2 * (to.ranks - 1) * to.link.alpha
                     : 2 * (to.link.alpha + std::max(0, to.ranks - 2) * to.link.overhead);
  } else if (ring) {
    fit.alpha = from.reduce.alpha * (to.ranks - 1) / (from.ranks - 1);
  } else {
    fit.alpha = std::max(0.0, from.reduce.alpha + 2 * (to.ranks - from.ranks) * to.link.overhead);
  }
  if (coded) {  // each rank codes and decodes all, however many there are
    const double share = coded_share(from);
    const double coder =
        from.ranks < 2 ? kCoderSeconds
                       : std::max(0.0, from.reduce.beta - share * from.link.beta * reduce_share(from.ranks));
    const bool there = to.ranks == from.ranks && !network.bits_per_s;
    fit.beta = there ? from.reduce.beta : share * to.link.beta * reduce_share(to.ranks) + coder;
    return fit;
  }
  const double byte = network.bits_per_s ? to.link.beta : from.reduce.beta / reduce_share(from.ranks);
  fit.beta = byte * reduce_share(to.ranks);
  return fit;
}

}  // namespace

bool sends_entries(const ExchangeProfile& profile) {
  return !profile.sums && sparse_presets().contains(profile.method);
}

ExchangeProfile profile_at(const ExchangeProfile& profile, int ranks, const PredictedNetwork& network,
                           const std::string& collective) {
  TOPKNOT_CHECK(ranks >= 1, "at least one rank");
  if (profile.ranks < 2 && ranks > 1 && !(network.bits_per_s && network.latency))
    throw UserError(
        "the profile was measured with one rank, which knows no network; give --rate (not measured) and "
        "--latency, or profile a run of two ranks or more");
  ExchangeProfile at = profile;
  at.ranks = ranks;
  at.collective = collective;
  // Collectives run during the computation on a network that is given by its rate (dist.backend gloo).
  at.overlaps = profile.overlaps || network.bits_per_s.has_value();
  at.link.overhead = overhead_of(profile);
  if (network.latency) at.link.alpha = *network.latency;
  if (network.bits_per_s) at.link.beta = 8 / (*network.bits_per_s * network.efficiency);
  at.gather.ranks = ranks;
  at.gather.alpha = network.latency
                        ? at.link.alpha + std::max(0, ranks - 2) * at.link.overhead
                        : std::max(0.0, profile.gather.alpha + (ranks - profile.ranks) * at.link.overhead);
  at.gather.beta = (ranks - 1) * at.link.beta;
  at.reduce = reduce_at(profile, at, network);
  if (ranks == 1) at.gather = at.reduce = {0, 0, 1};
  if (collective == "auto") at.collective = sends_entries(at) ? quickest_collective(at) : "all_gather";
  if (codes_sums(collective) && !codes_sums(profile.collective))
    throw UserError("--collective " + collective +
                    ": the profile has plain sums; give a run that measured coded ones");
  if (!codes_sums(collective) && !sends_entries(at) && at.collective != "all_gather")
    throw UserError("--collective " + collective + ": method " + profile.method +
                    " sends no list of entries; leave it to all_gather or auto");
  for (GroupCost& group : at.groups) scale_decoding(group, profile, at, profile.sums);
  // The dense part is gathered or summed whatever the collective.
  ExchangeProfile dense_part = at, dense_from = profile;
  dense_part.collective = "all_gather", dense_part.method = dense_from.method = "dense";
  scale_decoding(at.dense, dense_from, dense_part, profile.dense_sums);
  return at;
}

ExchangeProfile dense_profile(const ExchangeProfile& profile) {
  if (is_dense(profile) && !codes_sums(profile.collective)) return profile;
  ExchangeProfile dense = profile;
  dense.method = "dense";
  dense.options.clear();
  dense.density = 1;
  dense.collective = "all_gather";
  dense.sums = dense.dense_sums = true;
  dense.dense = {};
  double all = 0, least = 1e300;
  for (auto& parameter : dense.parameters) {
    parameter.compressed = false;
    all += static_cast<double>(parameter.numel);
    least = std::min(least, static_cast<double>(parameter.numel));
  }
  dense.groups = {{all, 4 * all, 0, 0, 0}};
  if (least < all) dense.groups.insert(dense.groups.begin(), {least, 4 * least, 0, 0, 0});
  // The sums of a compressed method are small and in rank order: a ring of the link's messages instead. The
  // greater of the two figures a byte, as small sums may not have filled the link.
  if (profile.ranks > 1) {
    const double measured =
        codes_sums(profile.collective) ? 0 : profile.reduce.beta / reduce_share(profile.ranks);
    const double byte = std::max(profile.link.beta, measured);
    dense.reduce = {2 * (profile.ranks - 1) * profile.link.alpha, byte * reduce_share(profile.ranks),
                    profile.ranks};
  }
  return dense;
}

}  // namespace topknot

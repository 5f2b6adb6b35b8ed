#pragma once
// A measured profile (train/plan/exchange_profile.h) at another number of ranks and over another network.
// lab/predict.md has the model and its limits.

#include <optional>
#include <string>

#include "train/plan/exchange_profile.h"

namespace topknot {

// In the time of decoding, an element of the average that is written counts as this part of an entry that is
// received and added: it is written in order, entries are added out of order. An assumption, since a profile
// has one number of ranks only; profiles of 2 and 4 ranks on one CPU gave 0.03.
inline constexpr double kElementWeight = 0.05;

struct PredictedNetwork {
  std::string name = "measured";
  std::optional<double> bits_per_s;  // > 0, nominal, of one direction of a rank's link; none: as measured
  std::optional<double> latency;     // seconds per message, >= 0; none: as measured
  double efficiency = kTcpEfficiency;
};

// The same run at other `ranks` (>= 1) over another network.
// - A rank's link carries its messages to all others one after the other, at full rate both ways.
// - all_gather: alpha(P) = alpha + (P - P0) overhead, beta(P) = (P - 1) b. The overhead of one more message
//   is the link's; from a profile of 2 ranks, which shows none, the whole alpha.
// - dense sums: around the ring under method dense, in rank order with a compressed method; the cost per
//   message and per byte comes from the fit at P0 by the same formula.
// - coded sums: two rounds of direct messages, of bytes as coded (kCodedFloat), and the coder's time, which is what the
//   fit at P0 takes beyond the link's.
// - encoding as measured; decoding by the entries that arrive (kElementWeight).
// Throws UserError for a profile of one rank where rate or latency are to be the measured ones.
ExchangeProfile profile_at(const ExchangeProfile& profile, int ranks, const PredictedNetwork& network,
                           const std::string& collective);

// The same run under method dense, which no encoding delays; from a profile of another method its sums have
// the link's figures and decoding costs nothing.
ExchangeProfile dense_profile(const ExchangeProfile& profile);

// Whether sparse collectives can carry this method's messages.
bool sends_entries(const ExchangeProfile& profile);

}  // namespace topknot

#pragma once
// Scaling predicted from one profiled run (train/plan/exchange_profile.h): the iteration time, speed-up and
// efficiency at other numbers of ranks, bandwidths and latencies. After the scalability analysis of Lin et
// al., "Deep Gradient Compression", ICLR 2018, figure 6 (itself after Wen et al., TernGrad, NeurIPS 2017),
// with the schedule model of dist/plan/schedule.h in place of a sum of compute and communication.
//
// Every number made here is modelled, none is measured; docs/predict.md has the model and its limits.
// Seconds and bytes; each rank keeps its batch, so that speed-up = P T(1) / T(P), where T(1) is data +
// forward + backward + update: one rank neither compresses nor exchanges.

#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include "tools/common/page.h"
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

// As parse_rate() (dist/comm/link.h), or "measured". UserError for anything else.
PredictedNetwork parse_network_rate(const std::string& text);

// The same run at other `ranks` (>= 1) over another network.
// - A rank's link carries its messages to all others one after the other, at full rate both ways.
// - all_gather: alpha(P) = alpha + (P - P0) overhead, beta(P) = (P - 1) b. The overhead of one more message
//   is the link's; from a profile of 2 ranks, which shows none, the whole alpha.
// - dense sums: around the ring under method dense, in rank order beside a compressed method; the cost per
//   message and per byte comes from the fit at P0 by the same formula.
// - encoding as measured; decoding by the entries that arrive (kElementWeight).
// Throws UserError for a profile of one rank where rate or latency are to be the measured ones.
ExchangeProfile profile_at(const ExchangeProfile& profile, int ranks, const PredictedNetwork& network,
                           const std::string& collective);

// The same run under method dense, which no encoding delays; from a profile of another method its sums have
// the link's figures and decoding costs nothing.
ExchangeProfile dense_profile(const ExchangeProfile& profile);

// Whether sparse collectives can carry this method's messages.
bool sends_entries(const ExchangeProfile& profile);

// Parameters per group in arena order, by a rule of exchange.merge. UserError for anything else.
std::vector<std::size_t> groups_by(const std::string& merge, const ExchangeProfile& profile);

struct PredictSetting {
  int ranks = 1;
  PredictedNetwork network;
  std::string merge = "all";
  std::string collective = "all_gather";  // also gtopk, oktopk, auto
  std::vector<std::size_t> groups = {};   // in place of merge, as exchange.groups has them
  std::int64_t every = 0;                 // exchange.every
};

struct Prediction {
  std::string method, options, merge;  // options: as the profile has them
  std::string collective;              // the one in use: all_gather, gtopk, oktopk; of sums ring, ordered_sum
  std::string asked_collective;        // as in the setting, perhaps auto
  double density = 1;
  int ranks = 1;
  PredictedNetwork network;
  std::size_t groups = 0;
  std::int64_t every = 0;  // local steps: a sync behind so many steps, of which each has its share here
  double data = 0, forward = 0, backward = 0, encode = 0, decode = 0, update = 0;
  double communicate = 0;  // all collectives, the byte of the agreement included
  double exposed = 0;      // the part of it that the computation waits for
  double iteration = 0;    // the sum of all but communicate
  double speed_up = 1, efficiency = 1;
};

// Throws UserError as profile_at() and groups_by() do.
Prediction predict(const ExchangeProfile& profile, const PredictSetting& setting);

// RUN, a folder with exchange_profile.json or such a file. UserError, with how to make one.
ExchangeProfile read_predictable(const std::string& run);

// A finished run or a replay of `bench`, medians over its steps without the warm-up.
struct MeasuredRun {
  std::string path, method, merge, collective;
  std::optional<double> density;  // none: the method selects no entries
  int ranks = 1;
  std::int64_t every = 0;           // exchange.every; the figures are then means from a sync to the next
  std::vector<std::size_t> groups;  // exchange.groups, or empty
  bool replay = false;              // no forward pass and no update, `compute` seconds for the backward pass
  double compute = 0;
  double communicate = 0, exposed = 0, step = 0;
};
MeasuredRun read_measured(const std::string& folder);

// The prediction beside it, from the profile of the same method and density, or for a dense run from any.
// UserError if there is none.
struct Judgement {
  MeasuredRun measured;
  Prediction modelled;
};
Judgement judge(const MeasuredRun& run, const std::vector<ExchangeProfile>& profiles,
                const PredictedNetwork& network);

// Published settings, modelled from published constants, beside the claims of their papers: tables for a
// terminal. Every modelled figure says so, and every claim its source.
std::string papers_text();

// modelled / measured - 1; not a number where nothing was measured.
double relative_error(double modelled, double measured);

// The output of `predict`. Every figure of the model is labelled as modelled.
struct PredictReport {
  std::vector<std::string> sources;      // one line per profile
  std::vector<std::string> assumptions;  // sentences
  std::vector<Prediction> predictions;   // by network, method and plan, then by rising ranks
  std::vector<Judgement> judgements;
};

// Sentences for PredictReport::assumptions that hold for these profiles and networks.
std::vector<std::string> assumptions_of(const std::vector<ExchangeProfile>& profiles,
                                        const std::vector<PredictedNetwork>& networks);
std::string source_line(const std::string& path, const ExchangeProfile& profile);

std::string prediction_text(const PredictReport& report);  // for a terminal
std::string prediction_csv(const PredictReport& report);   // one row per prediction, seconds
std::string prediction_json(const PredictReport& report);
std::string prediction_html(const PredictReport& report);  // self-contained: no network, no script

// A method, collective and merge plan, with its predictions over one network, by rising ranks.
struct PredictedCurve {
  std::string name;  // unique in its network: "topk 0.001, all_gather, optimal"
  std::vector<const Prediction*> points;
};

std::vector<PredictedNetwork> networks_of(const PredictReport& report);
bool same_network(const PredictedNetwork& a, const PredictedNetwork& b);
std::string network_title(const PredictedNetwork& network);  // "rate 1gbit, latency 5e-05 s"
std::vector<PredictedCurve> curves_of(const PredictReport& report, const PredictedNetwork& network);

Table speed_up_table(const PredictReport& report, const PredictedNetwork& network);
Table iteration_table(const PredictReport& report, const PredictedNetwork& network);
Table judgement_table(const PredictReport& report);

}  // namespace topknot

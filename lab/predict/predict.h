#pragma once
// Scaling predicted from one profiled run (train/plan/profile.h): the iteration time, speed-up and
// efficiency at other numbers of ranks, bandwidths and latencies. After the scalability analysis of Lin et
// al., "Deep Gradient Compression", ICLR 2018, figure 6 (itself after Wen et al., TernGrad, NeurIPS 2017),
// with the schedule model of dist/plan/schedule.h in place of a sum of compute and communication.
//
// Every number made here is modelled (train/plan/profile.h), none is measured. Seconds and bytes; each rank keeps
// its batch, so that speed-up = P T(1) / T(P), where T(1) is data + forward + backward + update: one rank neither
// compresses nor exchanges.

#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include "lab/predict/page.h"
#include "train/plan/profile.h"

namespace topknot {

// Reads a rate as parse_rate() (dist/comm/link.h) does, or "measured". UserError for anything else.
PredictedNetwork parse_network_rate(const std::string& text);

// Parameters per group in arena order, by a rule of exchange.merge. UserError for anything else.
std::vector<std::size_t> groups_by(const std::string& merge, const ExchangeProfile& profile);

// The same run under method dense, which no encoding delays; from a profile of another method its sums have
// the link's figures and decoding costs nothing.
ExchangeProfile dense_profile(const ExchangeProfile& profile);

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
  std::int64_t every = 0;  // local steps: a sync after so many steps, of which each has its share here
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
  std::string path, method, values, merge, collective;
  std::optional<double> density;  // none: the method selects no entries
  int ranks = 1;
  std::int64_t every = 0;           // exchange.every; the figures are then means from a sync to the next
  std::vector<std::size_t> groups;  // exchange.groups, or empty
  bool replay = false;              // no forward pass and no update, `compute` seconds for the backward pass
  double compute = 0;
  double communicate = 0, exposed = 0, step = 0;
  bool plain() const { return sums_plainly(method, values); }
};
MeasuredRun read_measured(const std::string& folder);

// The prediction for it, from the profile of the same method and density, or for a dense run from any.
// UserError if there is none.
struct Judgement {
  MeasuredRun measured;
  Prediction modelled;
};
Judgement judge(const MeasuredRun& run, const std::vector<ExchangeProfile>& profiles,
                const PredictedNetwork& network);

// Published settings, modelled from published constants, next to the claims of their papers: tables for a
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

std::string in_milliseconds(double seconds);  // for a table's cell, without the unit
Table speed_up_table(const PredictReport& report, const PredictedNetwork& network);
Table iteration_table(const PredictReport& report, const PredictedNetwork& network);
Table judgement_table(const PredictReport& report);

}  // namespace topknot

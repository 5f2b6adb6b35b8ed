#pragma once
// The measured costs of a run's exchange, from which merge plans (train/plan/plan.h) and predictions are
// made, and how they are measured. A run's exchange_profile.json is ExchangeProfile, by its members' names.

#include <cstddef>
#include <functional>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "dist/comm/collective_queue.h"
#include "dist/comm/link.h"
#include "dist/plan/schedule.h"
#include "nn/core/parameter.h"
#include "train/setup.h"

namespace topknot {

// Numbers are rank 0's, measured while all ranks did the same; times are seconds of the wall clock, medians.
struct ExchangeProfile {
  struct Parameter {
    std::string name;
    std::size_t numel = 0;
    bool compressed = false;  // by the method; false under method dense
    // Since backward finished the parameter before; 0 if the loss does not reach it. All: the backward pass.
    double backward_s = 0;
    double ready_s = 0;  // from the start of the backward pass, the sum of backward_s up to this one
  };
  // One group of so many elements, at `density`.
  struct Group {
    double elements = 0;
    double bytes = 0;        // of one rank's message, header included
    double later_bytes = 0;  // of its further rounds (PowerSGD), after all groups have been decoded
    double encode_s = 0;
    double decode_s = 0;  // of `ranks` messages, the commit included, and what encodes further rounds
  };
  // Seconds of one collective of `ranks` ranks, by the bytes of one rank's message.
  struct Fit : LinearFit {
    int ranks = 1;
  };

  std::string model, dataset;             // model.name, data.name
  std::string method;                     // compress.name
  std::string options;                    // the other keys of section compress that bear on cost, if set
  double density = 1;                     // compress.density; 1 under dense
  std::string collective = "all_gather";  // the one in use, never auto once it is chosen
  int ranks = 1, threads = 1, batch = 1;  // threads and samples per rank; batch is data.batch_size
  std::string backend;                    // "threads", "gloo"
  bool overlaps = false;                  // whether collectives run during the backward pass
  bool sums = false;                      // the method's messages are summed, not gathered
  std::vector<Parameter> parameters;      // in arena order, the order of sending
  double data_s = 0, forward_s = 0;       // of one step; data_s as if no thread prepared it
  double backward_s = 0, update_s = 0;
  // Group sizes from the smallest parameter to all that the method handles, ascending, at least one.
  std::vector<Group> groups;
  // The dense part with a compressed method, as one group after the others; elements 0 if there is
  // none, and under method dense. `dense_sums`: it is summed (compress.dense_values: fp32), else gathered.
  Group dense;
  bool dense_sums = true;
  Link link;   // one message between two ranks; an estimate
  Fit gather;  // all_gather of a block of `bytes` per rank
  Fit reduce;  // all_reduce of `bytes` of floats, in the order that this run's dense sums have, or their coded sum

  bool is_dense() const { return method == "dense" && sums; }  // not coded
  const Fit& fit(bool summed) const { return summed ? reduce : gather; }
};

// JSON text and back. `path` is for the messages: UserError, naming exchange.profile, the path and the field,
// for what cannot be read, a missing field, one of another type, a negative or not finite number.
std::string exchange_profile_json(const ExchangeProfile& profile);
ExchangeProfile parse_exchange_profile(const std::string& text, const std::string& path);
ExchangeProfile read_exchange_profile(const std::string& path);

// Several methods of one run, as auto_profiles.json has them. One at least; UserError as above.
struct NamedProfile {
  std::string option;  // the name of what was measured
  ExchangeProfile profile;
};
std::string named_profiles_json(const std::vector<NamedProfile>& profiles);
std::vector<NamedProfile> parse_named_profiles(const std::string& text, const std::string& path);

// compress.* as ExchangeProfile::options has them: "rank=2 values=bf16"; "" if all have their default.
std::string profile_options(const Config& config);
// Throws UserError if the profile was not measured for this model, method, density and number of ranks,
// with the first difference. Threads, batch and backend may differ, though the numbers are then off: returns
// those differences in words, "" if there are none.
std::string check_exchange_profile(const ExchangeProfile& profile, const Config& config,
                                   const ParameterArena& arena, int ranks, const std::string& backend,
                                   const std::string& path);

// Measures a profile of each of `methods` when a run starts: configurations of one run whose methods differ.
// Collective; only rank 0's figures count. Takes about a second and a few training steps of a model of its own, so that
// nothing of the run changes:
// - backward, forward and update times as measure_layers(), all ranks at once; with clipping over the whole model
//   all parameters are ready when the backward pass is over;
// - encoding and decoding of the real compressors, on normally distributed gradients, for about five groups of
//   neighbouring parameters of `arena` from the smallest parameter to all of them, at compress.density, or at
//   `layer_density`;
// - all_gather and all_reduce from 64 bytes to the size of the largest message of any method, `least_bytes` at least,
//   about 0.4 s for each, fewer sizes where a network is slow, and fits as fit_network(). The sums are those of the
//   first method. Coded sums (dist/sparse/coded_sum.h) are measured in the same way: their fit is over the bytes before
//   coding and includes the coder's time;
// - the link: alpha is half a round trip of 8 bytes between ranks 0 and 1, beta a gathered byte of the
//   largest messages (up to 1 MiB at least) divided by P-1, the overhead what is left of the gather's alpha
//   for each further rank.
std::vector<ExchangeProfile> measure_exchange(const std::vector<Config>& methods, const Dataset& data,
                                              const ParameterArena& arena, CollectiveQueue& queue,
                                              double least_bytes,
                                              const std::map<std::string, double>& layer_density = {});

// How long the parts of a step take on this machine, as a profile without its exchange: one batch and all weights,
// medians over a few steps after warm-up. Measures a model of its own with this rank's data and as many threads as are
// set, made for this and thrown away, so that nothing of the run changes. `before_pass`, if given, runs before each
// pass: a barrier, so that ranks that share a machine are measured together. All ranks make the same number of passes.
ExchangeProfile measure_layers(const Config& config, const Dataset& data, int rank, int ranks,
                               const std::function<void()>& before_pass = {});
// Collective. On rank 0 the least of a few times of an all_gather of `bytes`, all longer on slower links.
double least_gather_seconds(CollectiveQueue& queue, std::size_t bytes);
// The line of least squared errors, each divided by its time, with no negative alpha or beta. Sizes span
// several decades: in plain least squares the largest alone would count, with relative errors the short
// messages, which buffers on the way make look fast, would bend the line. Needs as many sizes as seconds, at
// least one, all seconds above 0 (Error).
LinearFit fit_network(std::span<const double> bytes, std::span<const double> seconds);

// Interpolates a measured figure: linear between neighbours; of fewer elements than measured the
// first one's, of more in proportion to the last. 0 at 0 elements.
double at_size(const std::vector<ExchangeProfile::Group>& groups, double ExchangeProfile::Group::*figure,
               double elements);
// The layers that a merge rule groups: the compressed parameters, under method dense all of them, in order of
// sending. `backward` is the time from when the one before it was ready, whatever lay in between; 0 if it was
// ready earlier, since it then waits for the parameters before it.
std::vector<LayerCost> sent_layers(const ExchangeProfile& profile);
// Entries that a group of so many elements sends at the profile's density.
double entries_of(const ExchangeProfile& profile, double elements);
// exchange.collective: auto, resolved for the whole of what is compressed, as one message.
std::string quickest_collective(const ExchangeProfile& profile);
// Whether sparse collectives can carry this method's messages.
bool sends_entries(const ExchangeProfile& profile);

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

// The same run at other `ranks` (>= 1) over another network; lab/predict.md has the model and its limits.
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

}  // namespace topknot

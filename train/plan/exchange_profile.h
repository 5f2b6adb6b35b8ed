#pragma once
// The measured costs of a run's exchange, from which merge plans (train/plan/exchange_plan.h) and predictions
// are made. exchange_profile.json in the run directory is this structure; every field has its member's name.

#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include "dist/comm/collective_queue.h"
#include "dist/comm/link.h"
#include "nn/core/parameter.h"
#include "train/setup.h"

namespace topknot {

// Numbers are rank 0's, measured while all ranks did the same; times are seconds of the wall clock, medians.
struct ExchangeProfile {
  struct Parameter {
    std::string name;
    std::size_t numel = 0;
    bool compressed = false;  // by the method; false under method dense
    // From the parameter that backward finished before this one; of all parameters together, the backward
    // pass.
    double backward_s = 0;
    double ready_s = 0;  // from the start of the backward pass, the sum of backward_s up to this one
  };
  // One group of so many elements, at `density`.
  struct Group {
    double elements = 0;
    double bytes = 0;  // of one rank's message, header included
    double later_bytes =
        0;  // of its further rounds (PowerSGD), which follow when all groups have been decoded
    double encode_s = 0;
    double decode_s = 0;  // of `ranks` messages, the commit included, and what encodes further rounds
  };
  // seconds = alpha + beta * bytes of one rank's message, of one collective of `ranks` ranks.
  struct Fit {
    double alpha = 0, beta = 0;
    int ranks = 1;
    double seconds(double bytes) const { return alpha + beta * bytes; }
  };

  std::string model, dataset;             // model.name, data.name
  std::string method;                     // compress.name
  std::string options;                    // the other keys of section compress that bear on cost, if set
  double density = 1;                     // compress.density; 1 under dense
  std::string collective = "all_gather";  // the one in use, never auto
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
};

// JSON text and back. `path` is for the messages: UserError, naming exchange.profile, the path and the field,
// for what cannot be read, a missing field, one of another type, a negative or not finite number.
std::string exchange_profile_json(const ExchangeProfile& profile);
ExchangeProfile parse_exchange_profile(const std::string& text, const std::string& path);
ExchangeProfile read_exchange_profile(const std::string& path);

// Several methods of one run, as auto_profiles.json has them. At least one; UserError in the same cases, naming
// the path and the place.
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

// Measures a profile when a run starts: layers, encoding and network. Collective; the same on every rank.
// Takes about a second and a few training steps of a model of its own, so that nothing of the run changes:
// - backward, forward and update times as measure_layer_times() (train/plan/layer_density.h), all ranks at
//   once; with clipping over the whole model all parameters are ready when the backward pass is over;
// - encoding and decoding of the real compressor, on normally distributed gradients, for about five groups of
//   neighbouring parameters from the smallest parameter to all of them, at compress.density;
// - all_gather and all_reduce from 64 bytes to the size of the largest message, fewer sizes where a network
//   is slow, and fits as fit_network();
// - the link: alpha is half a round trip of 8 bytes between ranks 0 and 1, beta a gathered byte of the
//   largest messages (up to 1 MiB at least) divided by P-1, the overhead what is left of the gather's alpha
//   for each further rank.
// `options`: of the run's exchange; its merge, plan and collective are not looked at.
ExchangeProfile measure_exchange(const Config& config, const Dataset& data, const ParameterArena& arena,
                                 CollectiveQueue& queue, const ExchangeOptions& options);

// The same in parts, for several methods of one run. What no method changes: the run and its layers' times,
// with `options` of any method.
ExchangeProfile measure_layers(const Config& config, const Dataset& data, const ParameterArena& arena,
                               CollectiveQueue& queue);
// The method of `config` and the costs of its groups. The network's figures stay as they are.
void measure_method(const Config& config, const ParameterArena& arena, CollectiveQueue& queue,
                    const ExchangeOptions& options, ExchangeProfile& profile);

// Whether the run's sums are of bfloat16.
bool sums_bfloat16(const ExchangeOptions& options);

}  // namespace topknot

#pragma once
// Merge plans and modelled times from a measured profile: dist/plan/schedule.h with the profile's numbers.
// And the exchange's options with what only a run can measure: layer densities, merge plans, the collective.

#include <chrono>
#include <cstddef>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "dist/comm/collective_queue.h"
#include "dist/comm/communicator.h"
#include "dist/exchange/exchange.h"
#include "dist/plan/schedule.h"
#include "nn/core/parameter.h"
#include "train/config/config.h"
#include "train/plan/profile.h"
#include "train/run_directory.h"
#include "train/setup.h"

namespace topknot {

using LayerDensity = std::map<std::string, double>;  // by parameter name

// A JSON object {"parameter": density}, densities in (0, 1]; parameters that it does not name keep the step's
// density, those that are sent dense may be named and stay dense. Throws UserError, with the path: a file
// that cannot be read or is no such object, names that the model does not have, densities out of range.
LayerDensity read_layer_density(const std::string& path, const ParameterArena& arena);
std::string layer_density_json(const LayerDensity& densities);

// Shi et al., "Layer-wise Adaptive Gradient Sparsification for Distributed Deep Learning with Convergence
// Guarantees", ECAI 2020, arXiv 1911.08727: a layer may send as much as is sent while it is computed. The
// densities of the layers, as in the authors' code (predict_density_with_size_and_computation; there it is
// switched off by an early return):
//
//   t = t_comp - log2(P) * alpha                           time left once the messages have begun
//   rho = base if t <= 0, else t / (2 (P - 1) beta m)   a position and a value from each other rank
//   rho = 0.05 if rho > 1
//   rho = max(rho, base)
//
// `times`: seconds of each layer's backward pass, t_comp; `sizes`: elements, m; alpha: seconds that a message
// takes to begin with; beta: seconds that an element (4 bytes) takes, above 0; `base`: the least density, in
// (0, 1], 0.001 in their code. The result is in (0, 1]. Throws Error if the lists differ in length or a
// number is out of range.
//
// Properties: a layer whose whole gradient would be sent in time (rho > 1) gets 0.05, less than a layer for
// which it is just not so (rho = 0.9). t_comp is the layer's own time, though its message is sent during the
// layers that come after it; the paper bounds the communication of layer l by the computation of layer l - 1.
// The time of selecting is left out. With one rank the formula divides by zero; nothing is sent then, and
// every layer gets `base`.
std::vector<double> lags_densities(const std::vector<double>& times, const std::vector<std::size_t>& sizes,
                                   double alpha, double beta, int ranks, double base);

// From times measured now: the median over a few backward passes of a model of its own, made for this and
// thrown away, so that nothing of the run changes. By lags_densities(), for `ranks` ranks.
LayerDensity measure_layer_density(const Config& config, const Dataset& data, int ranks);

// The densities that the configuration asks for, the same on every rank. Collective. `auto` is measured on
// rank 0 while the others wait, and written to layer_density.json in the run directory, which another run may
// take as its file: the same bits in every run hold for given densities. Throws UserError as
// read_layer_density(), and where the ranks' files differ.
LayerDensity layer_density(const Config& config, const Dataset& data, const ParameterArena& arena,
                           CollectiveQueue& queue, const Communicator& communicator,
                           const RunDirectory& folder);

std::string milliseconds_text(double seconds);  // "12.3 ms"
// Rank 0's text, on every rank. Collective.
std::string shared_text(CollectiveQueue& queue, std::string text);

// A measured figure at a size in between: linear between neighbours; of fewer elements than measured the
// first one's, of more in proportion to the last. 0 at 0 elements.
double at_size(const std::vector<ExchangeProfile::Group>& groups, double ExchangeProfile::Group::*figure,
               double elements);

// The layers that a merge rule groups: the compressed parameters, under method dense all of them, in order of
// sending. `backward` is the time from when the one before it was ready, whatever lay in between; 0 if it was
// ready earlier, since it then waits for the parameters before it.
std::vector<LayerCost> sent_layers(const ExchangeProfile& profile);

// Encoding, and the first round of the collective, of one group of so many elements: the fit of the
// all-reduce or the all-gather, or a sparse collective's own cost model with the profile's link (UserError if
// it has none). The profile must outlive the model.
CostModel cost_model(const ExchangeProfile& profile);

// The plan of a rule that plans ("mgwfbp", "omgs", "optimal"), in the form of exchange.groups. The measured
// cost models replace the papers'; mgwfbp takes its start-up from the fit of the collective in use. Where
// nothing overlaps, `optimal` counts a collective as compute time; the papers' rules know only the
// overlapping case.
std::vector<std::size_t> planned_groups(const std::string& rule, const ExchangeProfile& profile);

// From the start of the backward pass to the end of the last group's first collective. `groups`: parameters
// per group in arena order, as Exchange::groups() has them; the parameters after them, the dense part, are
// one group more. Where nothing overlaps, every collective delays what comes after it. Throws Error for
// groups that do not fit the profile's parameters.
double modelled_makespan(const ExchangeProfile& profile, std::span<const std::size_t> groups);

// A step of `profile.ranks` ranks by the profile, in seconds; where only one is left, without an exchange.
// `every`: of local steps, whose exchange has nothing to hide behind; its parts are then those of one step.
struct StepModel {
  std::size_t groups = 0;
  double encode = 0, decode = 0;
  double communicate = 0;  // all collectives, the byte of the agreement included
  double exposed = 0;      // the part of it that the computation waits for
  double seconds = 0;      // the step
};
StepModel modelled_step(const ExchangeProfile& profile, std::span<const std::size_t> groups,
                        std::int64_t every = 0);

// The measured makespan of a step: from `backward_begin`, where the backward pass began whose hooks drove the
// exchange, to the end of the last group's first collective. The agreement and further rounds do not count;
// 0 if no group was sent.
double measured_makespan(std::span<const ExchangeSpan> spans,
                         std::chrono::steady_clock::time_point backward_begin);

// exchange.collective: auto, resolved for the whole of what is compressed, as one message.
std::string quickest_collective(const ExchangeProfile& profile);

// The measured profile of a run's start, and which options were chosen by it.
struct ExchangeChoice {
  // Measured, or of exchange.profile; none if neither was asked for.
  std::optional<ExchangeProfile> profile;
  bool planned = false;  // options.groups was planned here
  bool chosen = false;   // options.collective was chosen here
};

// Collective; call it before the Exchange is made. Measures if exchange.merge needs a plan and has none, or
// exchange.collective is auto, unless exchange.profile names a file, which rank 0 reads. Fills in
// options.groups and options.collective, the same on every rank; rank 0 writes what was measured to
// exchange_profile.json in the run directory and logs the plan. Throws UserError as read_exchange_profile()
// and check_exchange_profile() do.
ExchangeChoice choose_exchange(const Config& config, const Dataset& data, const ParameterArena& arena,
                               CollectiveQueue& queue, const RunDirectory& folder, ExchangeOptions& options);

struct ResolvedExchange {
  ExchangeOptions options;
  ExchangeChoice choice;

  // The configuration with the groups and the collective that were planned or chosen.
  Config effective(Config config) const;
  // The makespan by the run's profile, in seconds; 0 if there is none.
  double modelled_makespan(const std::vector<Group>& groups) const;
};

// Collective. Rank 0 writes what was measured to the run directory, and to its config.yaml.
ResolvedExchange settle_exchange(const RunInputs& inputs, ParameterArena& arena, CollectiveQueue& queue,
                                 const Communicator& communicator);

}  // namespace topknot

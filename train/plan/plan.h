#pragma once
// The exchange's options that only a run can measure, from its profile (train/plan/profile.h): layer densities, merge
// plans, the collective; and modelled times: dist/plan/schedule.h with the profile's numbers.

#include <chrono>
#include <cstddef>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "dist/comm/collective_queue.h"
#include "dist/exchange/exchange.h"
#include "nn/core/parameter.h"
#include "train/plan/profile.h"
#include "train/run_directory.h"
#include "train/setup.h"

namespace topknot {

std::string milliseconds_text(double seconds);  // "12.3 ms"
// Rank 0's text, on every rank. Collective.
std::string shared_text(CollectiveQueue& queue, std::string text);

// compress.layer_density: one density per tensor, from a file or from measured times (LAGS-SGD), by parameter name. It
// counts if it exceeds the step's density.
using LayerDensity = std::map<std::string, double>;

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
// (0, 1], 0.001 in their code. The result is in (0, 1]. Error if lengths differ or a number is out of range.
//
// Properties: a layer whose whole gradient would be sent in time (rho > 1) gets 0.05, less than a layer for
// which it is just not so (rho = 0.9). t_comp is the layer's own time, though its message is sent during the
// layers that come after it; the paper bounds the communication of layer l by the computation of layer l - 1.
// The time of selecting is left out. With one rank, where it divides by zero, every layer gets `base`.
std::vector<double> lags_densities(const std::vector<double>& times, const std::vector<std::size_t>& sizes,
                                   double alpha, double beta, int ranks, double base);

// The plan of a rule that plans ("mgwfbp", "omgs", "optimal"), in the form of exchange.groups. The measured
// cost models replace the papers'; mgwfbp takes its start-up from the fit of the collective in use. If
// nothing overlaps, `optimal` counts collectives as compute time; the papers' do not.
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
// exchange, to the end of the last group's first collective. Further rounds do not count; 0: none was sent.
double measured_makespan(std::span<const ExchangeSpan> spans,
                         std::chrono::steady_clock::time_point backward_begin);

// The options of a run's exchange, and what of them was measured when the run started.
struct ResolvedExchange {
  ExchangeOptions options;
  // Measured, or of exchange.profile; none if neither was asked for.
  std::optional<ExchangeProfile> profile = {};
  bool planned = false;  // options.groups was planned
  bool chosen = false;   // options.collective was chosen

  // The configuration with the groups and the collective that were planned or chosen.
  Config effective(Config config) const {
    if (planned) config.exchange.groups = options.groups;
    if (chosen) config.exchange.collective = options.collective;
    return config;
  }
  // The makespan by the run's profile, in seconds; 0 if there is none.
  double modelled_makespan(const std::vector<Group>& groups) const;
};

// Collective, before the Exchange is made; the same on every rank. Rank 0 writes what was measured to the run directory
// and its config.yaml, and logs it.
// - compress.layer_density=auto is measured on rank 0 while the others wait, and written to layer_density.json, which
//   another run may take as its file: the same bits in every run hold for given densities.
// - A profile is measured if exchange.merge needs a plan and has none, or exchange.collective is auto, unless
//   exchange.profile names a file, which rank 0 reads. It is written to exchange_profile.json.
// Throws UserError as the functions that read and check these, and if ranks' files of densities differ.
ResolvedExchange settle_exchange(const RunInputs& inputs, const ParameterArena& arena,
                                 CollectiveQueue& queue);

}  // namespace topknot

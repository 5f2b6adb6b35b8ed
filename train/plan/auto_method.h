#pragma once
// compress.name: auto. Before the first step the ranks measure what their layers, the messages of a few methods
// and the network take (train/plan/exchange_profile.h), model a step with each of them and its best merge plan
// (train/plan/exchange_plan.h), and take the quickest. Dense is always among them.

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "train/plan/exchange_plan.h"

namespace topknot {

// What auto may choose: keys, as the command line has them, beside those of the run.
struct AutoOption {
  std::string name;               // "topk 0.01, codec=auto"
  std::string accuracy;           // the least auto.accuracy that allows it
  std::vector<std::string> keys;  // "compress.name=topk"
  bool local_steps = false;       // only with auto.local_steps
};
// In the order in which equals are preferred; dense is the first.
const std::vector<AutoOption>& auto_options();
// Those that auto.accuracy and auto.local_steps allow and that do not contradict the run's other keys.
std::vector<AutoOption> auto_options_of(const Config& config);

// The run's configuration with an option. compress.dense_1d becomes false: a group of its own for vectors costs
// a collective more in each step.
Config with_option(const Config& config, const AutoOption& option);

// A step with an option by its profile: with the plan that makes it the shortest, among one group, one for each
// parameter, and the optimal plan.
struct ModelledOption {
  AutoOption option;
  ExchangeProfile profile;
  std::vector<std::size_t> groups;  // as exchange.groups
  StepModel step;
};
ModelledOption best_plan(const AutoOption& option, const ExchangeProfile& profile, std::int64_t every);

// Index of the quickest. Another option than dense, the first, is taken only if it saves kAutoGain of dense's
// step: models are not exact, and dense loses nothing.
inline constexpr double kAutoGain = 0.05;
std::size_t quickest(const std::vector<ModelledOption>& options);

// Why, in a paragraph: what was chosen, what it and dense should take, what was measured.
std::string choice_text(const std::vector<ModelledOption>& options, std::size_t chosen);

struct ChosenMethod {
  Config config;  // without "auto"
  std::map<std::string, Origin> origins;
};
// Collective; before the run's model is made, with one that is thrown away. Rank 0's figures decide; it writes
// exchange_profile.json of the choice and the configuration to the run directory, and logs why.
ChosenMethod choose_method(const RunInputs& inputs, Communicator& communicator);

}  // namespace topknot

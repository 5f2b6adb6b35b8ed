#pragma once
// compress.name: auto. Before the first step the ranks measure what their layers, the messages of a few methods
// and the network take (train/plan/exchange_profile.h), model a step with each of them and its best merge plan
// (train/plan/exchange_plan.h), and take the quickest. Dense is always among them.

#include <map>
#include <optional>
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

// Whether a run that chose should choose again, from its steps; of rank 0. Medians over kWatched steps; the first
// kSettling after a choice do not count.
class AutoWatch {
 public:
  static constexpr int kSettling = 5, kWatched = 10, kApart = 40;
  // A choice was made: what a step of it and of dense should take.
  void chosen(const std::string& name, double step_s, double dense_s);
  // A step has been made. `communicate_s`: inside the collectives.
  void add(double step_s, double communicate_s);
  // Why, in words: its collectives take twice or half of the time that they took behind the choice, and that is
  // a kLeastShare of a step or more (the link, or what it is shared with, has changed); or a step takes longer
  // than dense should. "" if there is no reason, or the last choice was less than kApart steps ago, or twice,
  // four times... that if such choices changed nothing.
  std::string why_again() const;
  // A step with the option of that name, if one was measured since the link was last seen to change: a choice
  // goes by it.
  std::optional<double> measured(const std::string& name) const;

 private:
  static constexpr double kLeastShare = 0.03;
  std::string name_;
  double dense_s_ = 0;
  int steps_ = 0, apart_ = kApart;              // since the last choice; how far the next one is at least
  std::vector<double> step_s_, communicate_s_;  // of the last steps
  double first_communicate_s_ = -1;             // the median behind the choice
  bool link_changed_ = false, slower_ = false;
  std::map<std::string, double> measured_;
};

// A run's choices.
class AutoMethod {
 public:
  // `given`: what the run was started with.
  explicit AutoMethod(Config given) : given_(std::move(given)) {}

  struct Choice {
    Config config;  // without "auto"
    std::map<std::string, Origin> origins;
  };
  // Collective, when `step` steps have been made, with a model that is thrown away. Rank 0's figures decide; it
  // writes exchange_profile.json of the choice and choices.json to the run directory, and logs why. Local steps can
  // be the first choice alone, which then stays. `origins`: of the run's keys.
  Choice choose(const Dataset& data, Communicator& communicator, const RunDirectory& folder,
                const std::map<std::string, Origin>& origins, std::int64_t step);
  // Whether the run looks for another choice: not with local steps, nor where gradients are recorded or traced.
  bool follows() const { return follows_; }
  AutoWatch& watch() { return watch_; }

 private:
  const Config given_;
  AutoWatch watch_;
  bool follows_ = false;
  std::vector<std::string> choices_;  // of choices.json, on rank 0
  bool first_ = true;
};

// Of a run that chose its method and goes on: the keys of the choice as the newest checkpoint has them, unless the
// command line does. A choice is made between checkpoints.
void keep_choice(const RunDirectory& folder, LoadedConfig& loaded);

}  // namespace topknot

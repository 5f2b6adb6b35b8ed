#pragma once
// compress.name: auto. Before the first step the ranks measure what their layers, the messages of a few methods
// and the network take (train/plan/profile.h) and model a step with each of them and its best merge plan
// (train/plan/plan.h). The run's first steps try those that may be the quickest, and the quickest is taken.

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "train/plan/plan.h"

namespace topknot {

// A choice of auto: keys in the command line's form, set in addition to the run's own.
struct AutoOption {
  std::string name;               // "topk, density 0.01"
  std::string accuracy;           // the least auto.accuracy that allows it
  std::vector<std::string> keys;  // "compress.name=topk"
  bool local_steps = false;       // only with auto.accuracy=local_steps
};
// In the order in which equals are preferred; dense is the first.
const std::vector<AutoOption>& auto_options();
// Those that auto.accuracy allows and that do not contradict the run's other keys.
std::vector<AutoOption> auto_options_of(const Config& config);

// The run's configuration with an option. Of section compress only `clip` stays, and exchange.collective is the
// option's: the methods are as they were shown, and what one has not sent can go on with the next. compress.dense_1d
// becomes false: a group of its own for vectors costs a collective more in each step.
Config with_option(const Config& config, const AutoOption& option);

// The profile of each of `options` on the run `given`, measured now. Collective; rank 0's have the network.
std::vector<NamedProfile> measure_options(const Config& given, const Dataset& data, CollectiveQueue& queue,
                                          const std::vector<AutoOption>& options);
// Reads the text of auto_profiles.json, which named_profiles_json() writes: profiles by the names of their options, dense
// first. UserError as parse_named_profiles(), for a name that auto_options() does not have, for a profile of another
// method, and if the first is not dense.
std::vector<NamedProfile> parse_auto_profiles(const std::string& text, const std::string& path);

// A step with an option, by its profile and one plan.
struct ModelledOption {
  AutoOption option;
  ExchangeProfile profile;
  std::vector<std::size_t> groups;  // as exchange.groups
  StepModel step;

  // Whether the option is plain dense: neither coded nor rounded.
  bool dense() const { return option.keys == std::vector<std::string>{"compress.name=dense"}; }
};
// Models an option with the plan that makes the step the shortest, among one group, one for each parameter,
// and the optimal plan. dense is also modelled with one group, if that is another plan: errors of a model of
// overlap, such as cores that the network takes from the computation, mostly do not apply there.
std::vector<ModelledOption> modelled_options(const NamedProfile& measured);

// Those that may be the quickest, kMostTried at most: within kTried times of the least modelled step, dense first.
// Only the quickest if that is local steps, which cannot be tried.
inline constexpr double kTried = 2;
inline constexpr std::size_t kMostTried = 4;
std::vector<ModelledOption> worth_trying(std::vector<ModelledOption> options);

// Index of the quickest, by step.seconds; another than dense only if it saves kAutoGain of dense's step.
inline constexpr double kAutoGain = 0.03;
std::size_t quickest(const std::vector<ModelledOption>& options);

// Watches a run's steps on rank 0: medians over kWatched of them, without the first kSettling.
class AutoWatch {
 public:
  static constexpr int kSettling = 3, kWatched = 8, kApart = 40;
  // The method has changed, or was confirmed; link_change() is silent for so many steps.
  void begin(int apart = kApart) {
    *this = {};
    apart_ = apart;
  }
  // The link is as it was: link_change() compares with what collectives take now, after as long a silence.
  void calm();
  // A step has been made. `communicate_s`: inside the collectives.
  void add(double step_s, double communicate_s);
  // The median of the steps so far, once there are enough.
  std::optional<double> step_s() const;
  // Describes a change of the link, or of its other users: the collectives of a step take kChange times or a
  // kChange-th of the time that they took after begin() or calm(), and that is kLeastShare of a step or more.
  std::string link_change() const;

 private:
  // Ranks that share cores wait for each other in the collectives, by more in some steps than in others.
  static constexpr double kChange = 3, kLeastShare = 0.1;
  int steps_ = 0, apart_ = kApart;
  std::vector<double> step_s_, communicate_s_;  // of the last steps
  double first_communicate_s_ = -1;             // the first median
};

// A run's configuration as one that chooses its method by itself.
Config choosing(Config config);

// A run's choices: a model says what may pay, some steps of the run itself with each of these decide.
class AutoMethod {
 public:
  // `given`: what the run was started with. On a GPU it keeps what it has.
  explicit AutoMethod(Config given);
  // For a run that resumes with its choice, `config`, and chooses anew. `choices`: as choices_of().
  static AutoMethod resumed(const Config& config, const std::string& choices);

  // Text: the options that a run would try, and the model's estimates. Collective; empty but on rank 0.
  std::string recommendation(const Dataset& data, Communicator& communicator);

  struct Choice {
    Config config;  // without "auto"
    std::map<std::string, Origin> origins;
  };
  // The first choice, or the next one, when `step` steps have been made; none where collectives took another time but
  // a message still takes about what it took: ranks that share cores wait for each other. Collective, between steps;
  // measures with a model that is thrown away. Rank 0's figures decide; it logs why, and writes choices.json, the
  // choice's exchange_profile.json and at the first one auto_profiles.json to the run directory. `origins`: of the
  // run's keys.
  std::optional<Choice> choose(const Dataset& data, Communicator& communicator, const RunDirectory& folder,
                               const std::map<std::string, Origin>& origins, std::int64_t step);
  // On rank 0, after each step; whether choose() is due: enough steps were made with what is tried, or the link may
  // have changed. Never with local steps, and where gradients are recorded or traced.
  void add(double step_s, double communicate_s) { watch_.add(step_s, communicate_s); }
  bool due() {
    if (!follows_) return false;
    if (tries()) return watch_.step_s().has_value();
    if (!again_) why_ = watch_.link_change();
    return again_ || !why_.empty();
  }

 private:
  bool tries() const { return tried_ < options_.size(); }
  std::string measure(const Dataset& data, CollectiveQueue& queue, const std::vector<AutoOption>& options,
                      const std::string& file = {});
  void report(std::int64_t step);
  bool link_is_as_it_was(CollectiveQueue& queue);

  const Config given_;
  bool first_ = true;  // local steps can be the first choice alone, which then stays
  bool follows_;
  // On rank 0.
  bool again_ = false;  // whatever the steps say
  AutoWatch watch_;
  std::vector<ModelledOption> options_;  // that are tried, or the one that was
  std::size_t tried_ = 0;                // of them so far; all: the choice has been made
  std::size_t current_ = 0;
  int apart_ = AutoWatch::kApart;     // doubled by each choice that changes nothing
  std::string why_, last_;            // of the choice under way; the name of the one before
  double dense_s_ = 0, mbit_s_ = 0;   // dense's modelled step, the link's rate
  std::vector<std::string> choices_;  // of choices.json
};

// The text of choices.json; empty if the run's method was given.
std::string choices_of(const RunDirectory& folder);
// For a run that chose its method and goes on: sets the keys of the choice as the newest checkpoint has them,
// unless the command line does. A choice is made between checkpoints.
void keep_choice(const RunDirectory& folder, LoadedConfig& loaded);

// Predicts what compress.name=auto would choose with another number of ranks and over another network, without trying:
// a run's profiles of its options through the model of profile_at().
struct ChoiceAt {
  struct Option {
    std::string name, method;  // compress.name
    std::size_t groups = 0;
    double step_s = 0;   // in its best plan
    bool tried = false;  // by auto, before it takes one
  };
  std::vector<Option> options;  // of the profiles, in their order: dense is the first
  std::size_t taken = 0;        // by the model

  const Option& choice() const { return options[taken]; }
  double gain() const { return options[0].step_s / choice().step_s; }  // dense's step over the choice's
};

// Throws UserError as profile_at().
ChoiceAt choice_at(const std::vector<NamedProfile>& profiles, int ranks, const PredictedNetwork& network);

}  // namespace topknot

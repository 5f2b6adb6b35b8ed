#pragma once
// Predicts what compress.name=auto would choose with other numbers of ranks and over other networks, without
// trying: a run's profiles of its options (auto_profiles.json) through the model of train/plan/profile_at.h.

#include <string>
#include <vector>

#include "train/plan/auto_method.h"
#include "train/plan/profile_at.h"

namespace topknot {

// JSON text and back, by the options' names. UserError as parse_named_profiles(), for an option that
// auto_options() does not have or whose method the profile is not of, and for no dense at the first place.
std::string auto_profiles_json(const std::vector<AutoProfile>& profiles);
std::vector<AutoProfile> parse_auto_profiles(const std::string& text, const std::string& path);
// Reads a run directory's profiles, or such a file. Throws UserError that says how to make one.
std::vector<AutoProfile> read_auto_profiles(const std::string& run);

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
ChoiceAt choice_at(const std::vector<AutoProfile>& profiles, int ranks, const PredictedNetwork& network);

}  // namespace topknot

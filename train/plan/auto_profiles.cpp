#include "train/plan/auto_profiles.h"

#include <algorithm>
#include <filesystem>

#include "nn/base/check.h"
#include "nn/base/file.h"

namespace topknot {
namespace {

// The method and exchange.every of an option.
Config config_with(const AutoOption& option) {
  return with_option(Config(), option);
}

}  // namespace

std::string auto_profiles_json(const std::vector<AutoProfile>& profiles) {
  std::vector<NamedProfile> named;
  for (const auto& [option, profile] : profiles) named.push_back({option.name, profile});
  return named_profiles_json(named);
}

std::vector<AutoProfile> parse_auto_profiles(const std::string& text, const std::string& path) {
  std::vector<AutoProfile> profiles;
  for (NamedProfile& named : parse_named_profiles(text, path)) {
    const auto& known = auto_options();
    const auto option = std::ranges::find(known, named.option, &AutoOption::name);
    if (option == known.end() || config_with(*option).compress.name != named.profile.method)
      throw UserError(path + ": '" + named.option + "' by " + named.profile.method +
                      " is no option of this version; give a run of this version that chose by "
                      "compress.name=auto");
    profiles.push_back({*option, std::move(named.profile)});
  }
  if (profiles[0].option.name != auto_options()[0].name)
    throw UserError(path +
                    ": the first option is not dense, with which all are compared; give a run that "
                    "chose by compress.name=auto");
  return profiles;
}

std::vector<AutoProfile> read_auto_profiles(const std::string& run) {
  constexpr std::size_t kMostBytes = 64 << 20;
  std::error_code error;
  if (!std::filesystem::exists(run, error)) throw UserError(run + ": no such run directory");
  const bool folder = std::filesystem::is_directory(run, error);
  const std::string file = folder ? RunDirectory{run}.auto_profiles_json() : run;
  if (!std::filesystem::exists(file, error))
    throw UserError(
        run +
        ": no auto_profiles.json in it. A run of two ranks or more that chooses its method measures "
        "one: train FILE.yaml compress.name=auto dist.ranks=4");
  return parse_auto_profiles(read_text_file(file, kMostBytes), file);
}

ChoiceAt choice_at(const std::vector<AutoProfile>& profiles, int ranks, const PredictedNetwork& network) {
  std::vector<ModelledOption> modelled;
  ChoiceAt at;
  for (const auto& [option, profile] : profiles) {
    const auto plans = modelled_options(option, profile_at(profile, ranks, network, profile.collective),
                                        config_with(option).exchange.every);
    at.options.push_back({option.name, profile.method, plans[0].step.groups, plans[0].step.seconds});
    modelled.insert(modelled.end(), plans.begin(), plans.end());
  }
  const std::vector<ModelledOption> tried = worth_trying(std::move(modelled));
  const ModelledOption& taken = tried[quickest(tried)];
  for (std::size_t i = 0; i < profiles.size(); ++i) {
    const auto same = [&](const ModelledOption& o) { return o.option.keys == profiles[i].option.keys; };
    at.options[i].tried = std::ranges::any_of(tried, same);
    if (same(taken)) at.taken = i;
  }
  return at;
}

}  // namespace topknot

#include "train/plan/auto_method.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <filesystem>
#include <iterator>
#include <set>
#include <sstream>

#include "nn/base/check.h"
#include "nn/base/clock.h"
#include "nn/base/log.h"
#include "nn/base/text.h"
#include "train/checkpoint/checkpoint.h"
#include "train/checks.h"
#include "train/metrics/metrics.h"
#include "train/metrics/output_file.h"

namespace topknot {
namespace {

constexpr std::array<const char*, 3> kClasses = {"exact", "safe", "aggressive"};

std::size_t class_of(const std::string& accuracy) {
  return static_cast<std::size_t>(std::find(kClasses.begin(), kClasses.end(), accuracy) - kClasses.begin());
}

void set(Config& config, const std::string& setting) {
  const auto equals = setting.find('=');
  const Key& key = *find_key(setting.substr(0, equals));
  const std::string wrong = set_key(key, parse_raw(setting.substr(equals + 1), is_list(key)).value(), config);
  TOPKNOT_CHECK(wrong.empty(), setting + " " + wrong);
}

// The greatest message of a rank.
double largest(const std::vector<ExchangeProfile>& profiles, bool sums) {
  double most = 0;
  for (const ExchangeProfile& profile : profiles) {
    if (profile.sums == sums) most = std::max(most, profile.groups.back().bytes);
    if (profile.dense_sums == sums) most = std::max(most, profile.dense.bytes);
  }
  return most;
}

}  // namespace

const std::vector<AutoOption>& auto_options() {
  // docs/results.md: topk at 0.01 ends within the spread of dense on ResNet-20, and local steps of these densities
  // on the GPT. The others save more, and are shown in part or with a warm-up of the density.
  static const std::vector<AutoOption> options = [] {
    const std::string topk = "compress.name=topk", group = "compress.scope=group";
    std::vector<AutoOption> all = {
        {"dense", "exact", {"compress.name=dense"}},
        {"topk, density 0.01", "safe", {topk, group, "compress.density=0.01"}},
        {"topk, density 0.01, short indices",
         "safe",
         {topk, group, "compress.density=0.01", "compress.codec=auto"}},
        {"topk, density 0.001", "aggressive", {topk, group, "compress.density=0.001"}},
        {"topk, density 0.001, short indices, 8 bits a value",
         "aggressive",
         {topk, group, "compress.density=0.001", "compress.codec=auto", "compress.values=int8"}},
    };
    all.push_back({"dense, sums of bfloat16", "aggressive", {"compress.name=dense", "compress.values=bf16"}});
    for (const auto& [every, density] :
         {std::pair{"5", "0.015625"}, {"10", "0.01171875"}, {"15", "0.0078125"}})
      all.push_back(
          {fmt::format("local steps, a sync every {}", every),
           "safe",
           {"compress.name=sparseloco", fmt::format("compress.density={}", density),
            "compress.values=centroid1", "compress.codec=ans", fmt::format("exchange.every={}", every),
            "exchange.outer.name=sgd", "exchange.outer.lr=1", "exchange.outer.momentum=0"},
           true});
    return all;
  }();
  return options;
}

Config with_option(const Config& config, const AutoOption& option) {
  Config with = config;
  with.compress.dense_1d = false;
  with.exchange.merge = "optimal";
  for (const std::string& setting : option.keys) set(with, setting);
  return with;
}

std::vector<AutoOption> auto_options_of(const Config& config) {
  std::vector<AutoOption> allowed;
  for (const AutoOption& option : auto_options())
    if (class_of(option.accuracy) <= class_of(config.automatic.accuracy) &&
        (!option.local_steps || config.automatic.local_steps) &&
        (allowed.empty() || check_config(with_option(config, option)).empty()))
      allowed.push_back(option);
  return allowed;
}

ModelledOption best_plan(const AutoOption& option, const ExchangeProfile& profile, std::int64_t every) {
  const std::size_t handled = sent_layers(profile).size();
  ModelledOption best{option, profile, {}, {}};
  const auto consider = [&](std::vector<std::size_t> groups) {
    const StepModel step = modelled_step(profile, groups, every);
    if (best.groups.empty() || step.seconds < best.step.seconds)
      best.groups = std::move(groups), best.step = step;
  };
  if (handled == 0) return best;
  consider({handled});
  if (every > 0) return best;  // nothing overlaps a sync
  consider(std::vector<std::size_t>(handled, 1));
  consider(planned_groups("optimal", profile));
  return best;
}

std::size_t quickest(const std::vector<ModelledOption>& options) {
  std::size_t best = 0;
  for (std::size_t i = 1; i < options.size(); ++i)
    if (options[i].step.seconds < options[best].step.seconds &&
        options[i].step.seconds < (1 - kAutoGain) * options[0].step.seconds)
      best = i;
  return best;
}

std::string choice_text(const std::vector<ModelledOption>& options, std::size_t chosen) {
  const ModelledOption &taken = options[chosen], &dense = options[0];
  const auto step = [](const ModelledOption& o) {
    return fmt::format("{}, of them {} in the exchange", milliseconds_text(o.step.seconds),
                       milliseconds_text(o.step.encode + o.step.exposed + o.step.decode));
  };
  std::string text =
      fmt::format("compress.name=auto takes {}: a step should take {}", taken.option.name, step(taken));
  if (chosen > 0) {
    text += fmt::format("; dense {}", step(dense));
  } else if (options.size() > 1) {
    const auto& other =
        *std::min_element(options.begin() + 1, options.end(),
                          [](const auto& a, const auto& b) { return a.step.seconds < b.step.seconds; });
    text += fmt::format("; {}, the quickest other one, {}, and to replace dense it must save {:.0f} %",
                        other.option.name, step(other), 100 * kAutoGain);
  }
  const Link& link = dense.profile.link;
  if (dense.profile.ranks > 1 && link.beta > 0)
    text += fmt::format("; a link has {:.3g} Mbit/s and takes {:.3g} us a message", 8e-6 / link.beta,
                        1e6 * link.alpha);
  return text;
}

void AutoWatch::chosen(const std::string& name, double step_s, double dense_s) {
  if (link_changed_) measured_.clear();
  apart_ = name == name_ ? 2 * apart_ : kApart;
  name_ = name, dense_s_ = name == auto_options()[0].name ? step_s : dense_s;
  steps_ = 0, first_communicate_s_ = -1;
  step_s_.clear(), communicate_s_.clear();
  link_changed_ = slower_ = false;
}

void AutoWatch::add(double step_s, double communicate_s) {
  if (++steps_ <= kSettling) return;
  for (auto [values, value] : {std::pair(&step_s_, step_s), std::pair(&communicate_s_, communicate_s)}) {
    values->push_back(value);
    if (values->size() > kWatched) values->erase(values->begin());
  }
  if (step_s_.size() < kWatched) return;
  const double step = quantile(step_s_, 0.5), communicate = quantile(communicate_s_, 0.5);
  if (first_communicate_s_ < 0) {
    first_communicate_s_ = communicate;
    measured_[name_] = step;
    slower_ = name_ != auto_options()[0].name && step > dense_s_;
  }
  link_changed_ = std::abs(communicate - first_communicate_s_) > kLeastShare * step &&
                  (communicate > 2 * first_communicate_s_ || communicate < first_communicate_s_ / 2);
}

std::optional<double> AutoWatch::measured(const std::string& name) const {
  const auto found = measured_.find(name);
  return link_changed_ || found == measured_.end() ? std::nullopt : std::optional(found->second);
}

std::string AutoWatch::why_again() const {
  if (link_changed_ && steps_ >= apart_)
    return fmt::format("its collectives take {} a step, and took {} at first",
                       milliseconds_text(quantile(communicate_s_, 0.5)),
                       milliseconds_text(first_communicate_s_));
  if (slower_ && (apart_ == kApart || steps_ >= apart_))
    return fmt::format("a step takes {}, and dense should take {}", milliseconds_text(measured_.at(name_)),
                       milliseconds_text(dense_s_));
  return "";
}

AutoMethod::Choice AutoMethod::choose(const Dataset& data, Communicator& communicator,
                                      const RunDirectory& folder,
                                      const std::map<std::string, Origin>& origins, std::int64_t step) {
  const auto begin = Clock::now();
  const Config& config = given_;
  const std::string why = watch_.why_again();
  const bool root = communicator.rank() == 0;
  std::vector<AutoOption> options = auto_options_of(config);
  if (communicator.size() == 1) options.resize(1);
  if (!std::exchange(first_, false))
    std::erase_if(options, [](const AutoOption& o) { return o.local_steps; });
  const Config dense = with_option(config, options[0]);
  const auto model = build_model(dense, data, {}, false, false);
  const ParameterArena& arena = model->store.arena();
  CollectiveQueue queue(communicator);

  const ExchangeProfile layers = measure_layers(dense, data, arena, queue);
  std::vector<ExchangeProfile> profiles;
  for (const AutoOption& option : options) {
    const Config with = with_option(config, option);
    profiles.push_back(layers);
    measure_method(with, arena, queue, exchange_options(with), profiles.back());
  }
  const NetworkTimes network = measure_network(queue, static_cast<std::size_t>(largest(profiles, false)),
                                               static_cast<std::size_t>(largest(profiles, true)),
                                               config.dist.ordered_sum ? SumOrder::ranks : SumOrder::library);

  std::vector<ModelledOption> modelled;
  std::string decided;
  if (root) {
    for (std::size_t i = 0; i < options.size(); ++i) {
      profiles[i].link = network.link, profiles[i].gather = network.gather,
      profiles[i].reduce = network.reduce;
      modelled.push_back(best_plan(options[i], profiles[i], with_option(config, options[i]).exchange.every));
      if (const auto measured = watch_.measured(options[i].name)) modelled[i].step.seconds = *measured;
    }
    const std::size_t chosen = quickest(modelled);
    watch_.chosen(options[chosen].name, modelled[chosen].step.seconds, modelled[0].step.seconds);
    decided = std::to_string(chosen);
    for (const std::size_t count : modelled[chosen].groups) decided += fmt::format(" {}", count);
  }
  queue.run([&](Communicator& c) { share(c, decided); });
  std::istringstream words(decided);
  std::size_t chosen = 0;
  words >> chosen;
  Choice choice{with_option(config, options[chosen]), origins};
  follows_ = options.size() > 1 && !options[chosen].local_steps && config.train.record_gradients == 0 &&
             config.train.distribution_every == 0 && config.train.profile_steps == 0;
  std::vector<int>& groups = choice.config.exchange.groups;
  groups.assign(std::istream_iterator<int>(words), {});
  if (groups.empty()) choice.config.exchange.merge = "all";
  for (const std::string& setting : options[chosen].keys)
    choice.origins[setting.substr(0, setting.find('='))] = Origin::chosen;
  for (const char* key : {"compress.dense_1d", "exchange.merge"}) choice.origins[key] = Origin::chosen;
  choice.origins["exchange.groups"] = Origin::measured;
  if (!root) return choice;
  for (const ModelledOption& option : modelled)
    log_debug(fmt::format("auto: {}: {} in {} groups; encode {}, exposed {}, decode {}", option.option.name,
                          milliseconds_text(option.step.seconds), option.groups.size(),
                          milliseconds_text(option.step.encode), milliseconds_text(option.step.exposed),
                          milliseconds_text(option.step.decode)));
  log_info(choice_text(modelled, chosen) + fmt::format("; measured in {:.2g} s", seconds_since(begin)));
  write_file(folder.exchange_profile_json(), exchange_profile_json(modelled[chosen].profile));
  choices_.push_back(fmt::format(
      R"({{"step": {}, "choice": "{}", "why": "{}", "step_s": {:.6g}, "dense_s": {:.6g}, "link_mbit_s": {:.6g}}})",
      step, options[chosen].name, why, modelled[chosen].step.seconds, modelled[0].step.seconds,
      network.link.beta > 0 ? 8e-6 / network.link.beta : 0));
  write_file(folder.choices_json(), fmt::format("[\n  {}\n]\n", fmt::join(choices_, ",\n  ")));
  return choice;
}

void keep_choice(const RunDirectory& folder, LoadedConfig& loaded) {
  std::error_code error;
  if (!std::filesystem::exists(folder.choices_json(), error)) return;
  std::set<std::string> keys{"compress.dense_1d", "exchange.merge", "exchange.groups"};
  for (const AutoOption& option : auto_options())
    for (const std::string& setting : option.keys) keys.insert(setting.substr(0, setting.find('=')));
  const CheckpointStore store(folder.checkpoints());
  std::vector<std::int64_t> steps = store.steps();
  for (; !steps.empty(); steps.pop_back()) try {
      const Manifest manifest = store.manifest(steps.back());
      for (const std::string& name : keys) {
        const Key& key = *find_key(name);
        const auto then = manifest.config.find(name);
        const auto origin = loaded.origins.find(name);
        if (then == manifest.config.end() || then->second == key_value(key, loaded.config) ||
            (origin != loaded.origins.end() && origin->second == Origin::command_line))
          continue;
        const RawValue value = then->second == kEmptyText ? RawValue{false, {""}}
                                                          : parse_raw(then->second, is_list(key)).value();
        const std::string wrong = set_key(key, value, loaded.config);
        if (!wrong.empty()) throw UserError(store.path(steps.back()) + ": " + name + " " + wrong);
      }
      return;
    } catch (const UserError&) {  // read_checkpoint() says what is wrong with it
    }
}

}  // namespace topknot

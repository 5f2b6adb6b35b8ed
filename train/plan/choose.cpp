#include "train/plan/choose.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <filesystem>
#include <iterator>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>

#include "nn/base/check.h"
#include "nn/base/clock.h"
#include "nn/base/file.h"
#include "nn/base/log.h"
#include "nn/base/text.h"
#include "train/checkpoint/checkpoint.h"
#include "train/checks.h"
#include "train/metrics/output_file.h"

namespace topknot {
namespace {

constexpr const char* kTrying = "trying";  // in choices.json: no choice, but what is tried
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

auto find_option(const std::string& name) {
  return std::ranges::find(auto_options(), name, &AutoOption::name);
}

}  // namespace

const std::vector<AutoOption>& auto_options() {
  // docs/auto.md has each one's accuracy; local steps have the densities within dense's spread on the GPT.
  static const std::vector<AutoOption> options = [] {
    const std::string coded_sum = "exchange.collective=coded_sum";
    const std::string topk = "compress.name=topk", group = "compress.scope=group";
    std::vector<AutoOption> all = {
        {"dense", "exact", {"compress.name=dense"}},
        {"dense, exponents coded", "exact", {"compress.name=dense", coded_sum}},
        {"dense, sums of 8 bits", "safe", {"compress.name=dense", "compress.values=int8"}},
        {"topk, density 0.01", "safe", {topk, group, "compress.density=0.01"}},
        {"topk, density 0.01, short indices",
         "safe",
         {topk, group, "compress.density=0.01", "compress.codec=auto"}},
        {"topk, density 0.001", "aggressive", {topk, group, "compress.density=0.001"}},
        {"topk, density 0.001, short indices, 8 bits a value",
         "aggressive",
         {topk, group, "compress.density=0.001", "compress.codec=auto", "compress.values=int8"}},
        {"dense, sums of bfloat16", "aggressive", {"compress.name=dense", "compress.values=bf16"}},
        {"dense, sums of bfloat16, exponents coded",
         "aggressive",
         {"compress.name=dense", "compress.values=bf16", coded_sum}},
    };
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
  with.compress = {};
  with.compress.clip = config.compress.clip;
  with.compress.dense_1d = false;
  with.exchange.merge = "optimal";
  with.exchange.collective = Config::Exchange().collective;
  for (const std::string& setting : option.keys) set(with, setting);
  return with;
}

std::vector<AutoOption> auto_options_of(const Config& config) {
  const std::string& accuracy = config.automatic.accuracy;
  const bool local = accuracy == "local_steps";
  std::vector<AutoOption> allowed;
  for (const AutoOption& option : auto_options())
    if ((option.local_steps ? local : class_of(option.accuracy) <= class_of(local ? "safe" : accuracy)) &&
        (allowed.empty() || check_config(with_option(config, option)).empty()))
      allowed.push_back(option);
  return allowed;
}

std::vector<NamedProfile> measure_options(const Config& given, const Dataset& data, CollectiveQueue& queue,
                                          const std::vector<AutoOption>& options) {
  std::vector<Config> methods;
  for (const AutoOption& option : options) methods.push_back(with_option(given, option));
  const auto model = build_model(methods[0], data, {}, false, false);
  auto measured = measure_exchange(methods, data, model->store.arena(), queue, 0);
  std::vector<NamedProfile> profiles;
  for (std::size_t i = 0; i < options.size(); ++i)
    profiles.push_back({options[i].name, std::move(measured[i])});
  return profiles;
}

std::vector<NamedProfile> parse_auto_profiles(const std::string& text, const std::string& path) {
  std::vector<NamedProfile> profiles = parse_named_profiles(text, path);
  for (const auto& [name, profile] : profiles) {
    const auto option = find_option(name);
    if (option == auto_options().end() || with_option(Config(), *option).compress.name != profile.method)
      throw UserError(
          path + ": '" + name + "' by " + profile.method +
          " is no option of this version; give a run of this version that chose by compress.name=auto");
  }
  if (profiles[0].option != auto_options()[0].name)
    throw UserError(path +
                    ": the first option is not dense, with which all are compared; give a run that chose by "
                    "compress.name=auto");
  return profiles;
}

std::vector<ModelledOption> modelled_options(const NamedProfile& measured) {
  const auto& [name, profile] = measured;
  const AutoOption& option = *find_option(name);
  const std::int64_t every = with_option(Config(), option).exchange.every;
  const std::size_t handled = sent_layers(profile).size();
  const auto modelled = [&](std::vector<std::size_t> groups) {
    const StepModel step = modelled_step(profile, groups, every);
    return ModelledOption{option, profile, std::move(groups), step};
  };
  if (handled == 0) return {modelled({})};
  const ModelledOption at_once = modelled({handled});
  std::vector<ModelledOption> best{at_once};
  if (every > 0) return best;  // nothing overlaps a sync
  for (const auto& groups : {std::vector<std::size_t>(handled, 1), planned_groups("optimal", profile)})
    if (ModelledOption other = modelled(groups); other.step.seconds < best[0].step.seconds)
      best[0] = std::move(other);
  if (!best[0].dense() || best[0].groups.size() == 1) return best;
  best.push_back(at_once);
  best[1].option.name += ", at once";
  return best;
}

std::vector<ModelledOption> worth_trying(std::vector<ModelledOption> options) {
  const auto quicker = [](const ModelledOption& a, const ModelledOption& b) {
    return a.step.seconds < b.step.seconds;
  };
  std::stable_sort(options.begin(), options.end(), quicker);
  const auto dense = std::find_if(options.begin(), options.end(), [](const auto& o) { return o.dense(); });
  if (options[0].option.local_steps && options[0].step.seconds < (1 - kAutoGain) * dense->step.seconds)
    return {options[0]};
  std::erase_if(options, [most = kTried * options[0].step.seconds](const ModelledOption& o) {
    return o.option.local_steps || o.step.seconds > most;
  });
  if (options.size() > kMostTried) options.resize(kMostTried);
  std::stable_partition(options.begin(), options.end(), [](const ModelledOption& o) { return o.dense(); });
  return options;
}

std::size_t quickest(const std::vector<ModelledOption>& options) {
  double dense = INFINITY;
  for (const ModelledOption& option : options)
    if (option.dense()) dense = std::min(dense, option.step.seconds);
  std::size_t best = 0;
  const auto seconds = [&](std::size_t i) {
    const double step = options[i].step.seconds;
    return options[i].dense() || step < (1 - kAutoGain) * dense ? step : INFINITY;
  };
  for (std::size_t i = 1; i < options.size(); ++i)
    if (seconds(i) < seconds(best)) best = i;
  return best;
}

void AutoWatch::calm() {
  const double now = quantile(communicate_s_, 0.5);
  begin(apart_);
  first_communicate_s_ = now;
}

void AutoWatch::add(double step_s, double communicate_s) {
  if (++steps_ <= kSettling) return;
  for (auto [values, value] : {std::pair(&step_s_, step_s), std::pair(&communicate_s_, communicate_s)}) {
    values->push_back(value);
    if (values->size() > kWatched) values->erase(values->begin());
  }
  if (first_communicate_s_ < 0 && communicate_s_.size() == kWatched)
    first_communicate_s_ = quantile(communicate_s_, 0.5);
}

std::optional<double> AutoWatch::step_s() const {
  return step_s_.size() < kWatched ? std::nullopt : std::optional(quantile(step_s_, 0.5));
}

std::string AutoWatch::link_change() const {
  if (steps_ < apart_ || step_s_.size() < kWatched) return "";
  const double now = quantile(communicate_s_, 0.5), first = first_communicate_s_;
  if (std::abs(now - first) <= kLeastShare * *step_s() || (now <= kChange * first && now >= first / kChange))
    return "";
  return fmt::format("its collectives take {} a step, and took {} at first", milliseconds_text(now),
                     milliseconds_text(first));
}

AutoMethod::AutoMethod(Config given)
    : given_(std::move(given)),
      follows_(given_.dist.ranks > 1 && !on_gpu(given_) && !asks_for_steps(given_.train.record_gradients) &&
               given_.train.distribution_every == 0 && !asks_for_steps(given_.train.profile_steps)) {}

// Collective. Whether an alarm is false, by messages that take about 15 ms.
bool AutoMethod::link_is_as_it_was(CollectiveQueue& queue) {
  constexpr double kMessage = 15e-3, kChanged = 2, kLeast = 1 << 10, kMost = 4 << 20;
  // The link's own figures: those of the gather are of the run's messages, which buffers on the way may hold.
  double alpha = 0, beta = 0;
  std::string bytes;
  if (queue.communicator().rank() == 0 && !tries() && !again_ && !options_.empty()) {
    const ExchangeProfile& measured = options_[current_].profile;
    alpha = measured.gather.alpha, beta = measured.link.beta * (queue.communicator().size() - 1);
    if (beta > 0) bytes = fmt::format("{:.0f}", std::clamp(kMessage / beta, kLeast, kMost));
  }
  bytes = shared_text(queue, bytes);
  if (bytes.empty()) return false;
  const double now = least_gather_seconds(queue, std::stoul(bytes)), then = alpha + beta * std::stod(bytes);
  if (queue.communicator().rank() == 0)
    log_debug(fmt::format("a message of {} bytes takes {}, and should take {}", bytes, milliseconds_text(now),
                          milliseconds_text(then)));
  return !shared_text(queue, now < kChanged * then && now > then / kChanged ? "so" : "").empty();
}

std::optional<AutoMethod::Choice> AutoMethod::choose(const Dataset& data, Communicator& communicator,
                                                     const RunDirectory& folder,
                                                     const std::map<std::string, Origin>& origins,
                                                     std::int64_t step) {
  const bool root = communicator.rank() == 0;
  std::vector<AutoOption> options = auto_options_of(given_);
  if (communicator.size() == 1) options.resize(1);
  // Later ones measure no local steps: the file keeps them.
  const std::string file = first_ && communicator.size() > 1 ? folder.auto_profiles_json() : "";
  if (!std::exchange(first_, false))
    std::erase_if(options, [](const AutoOption& o) { return o.local_steps; });

  CollectiveQueue queue(communicator);
  if (link_is_as_it_was(queue)) {
    if (!root) return std::nullopt;
    watch_.calm();
    log_debug(fmt::format("step {}: {}, but the link is as it was", step, why_));
    return std::nullopt;
  }
  std::string decided;  // the option's number among `options`, and its groups
  if (root && tries()) {
    options_[current_].step.seconds = watch_.step_s().value();
    ++tried_;
    current_ = tries() ? tried_ : quickest(options_);
    decided = "next";
  }
  if (shared_text(queue, decided).empty()) {
    again_ = false;
    const std::string measured = measure(data, queue, options, file);
    if (root && communicator.size() > 1)
      log_info(why_.empty() ? measured : fmt::format("step {}: {}; {}", step, why_, measured));
  }
  if (root) {
    const ModelledOption& now = options_[current_];
    const auto same = [&](const AutoOption& o) { return o.keys == now.option.keys; };
    decided = std::to_string(std::find_if(options.begin(), options.end(), same) - options.begin());
    for (const std::size_t count : now.groups) decided += fmt::format(" {}", count);
    if (!tries()) report(step);
    watch_.begin(apart_);
    std::vector<std::string> all = choices_;
    if (tries())
      all.push_back(nlohmann::ordered_json{{"step", step}, {kTrying, now.option.name}, {"why", why_}}.dump());
    write_file(folder.choices_json(), fmt::format("[\n  {}\n]\n", fmt::join(all, ",\n  ")));
    write_file(folder.exchange_profile_json(), exchange_profile_json(now.profile));
  }
  std::istringstream words(shared_text(queue, decided));
  std::size_t chosen = 0;
  words >> chosen;
  follows_ = follows_ && !options[chosen].local_steps;
  Choice choice{with_option(given_, options[chosen]), origins};
  std::vector<int>& groups = choice.config.exchange.groups;
  groups.assign(std::istream_iterator<int>(words), {});
  if (groups.empty()) choice.config.exchange.merge = "all";
  for (const std::string& setting : options[chosen].keys)
    choice.origins[setting.substr(0, setting.find('='))] = Origin::chosen;
  for (const char* key : {"compress.dense_1d", "exchange.merge"}) choice.origins[key] = Origin::chosen;
  choice.origins["exchange.groups"] = Origin::measured;
  return choice;
}

std::string AutoMethod::recommendation(const Dataset& data, Communicator& communicator) {
  CollectiveQueue queue(communicator);
  std::string text = measure(data, queue, auto_options_of(given_));
  if (!text.empty() && !tries())
    text += fmt::format("\nby the model {} takes {} a step, and dense {}", options_[0].option.name,
                        milliseconds_text(options_[0].step.seconds), milliseconds_text(dense_s_));
  return text;
}

// Collective. What was measured, also in `file`, and what is tried, in words, on rank 0.
std::string AutoMethod::measure(const Dataset& data, CollectiveQueue& queue,
                                const std::vector<AutoOption>& options, const std::string& file) {
  const auto begin = Clock::now();
  const std::vector<NamedProfile> profiles = measure_options(given_, data, queue, options);
  if (queue.communicator().rank() != 0) return "";
  if (!file.empty()) write_file(file, named_profiles_json(profiles));
  std::vector<ModelledOption> modelled;
  for (const NamedProfile& measured : profiles)
    for (ModelledOption& planned : modelled_options(measured)) modelled.push_back(std::move(planned));
  for (const ModelledOption& o : modelled)
    log_debug(fmt::format("auto: {}: {} in {} groups; encode {}, exposed {}, decode {}", o.option.name,
                          milliseconds_text(o.step.seconds), o.groups.size(),
                          milliseconds_text(o.step.encode), milliseconds_text(o.step.exposed),
                          milliseconds_text(o.step.decode)));
  dense_s_ = INFINITY;
  for (const ModelledOption& o : modelled)
    if (o.dense()) dense_s_ = std::min(dense_s_, o.step.seconds);
  options_ = worth_trying(std::move(modelled));
  if (!follows_) options_ = {options_[quickest(options_)]};
  current_ = tried_ = 0;
  if (options_.size() == 1) tried_ = 1;  // nothing to compare it with
  const Link& link = profiles[0].profile.link;
  mbit_s_ = link.beta > 0 ? 8e-6 / link.beta : 0;
  std::string text = "compress.name=auto";
  if (mbit_s_ > 0)
    text +=
        fmt::format(": a link has {:.3g} Mbit/s and takes {:.3g} us a message", mbit_s_, 1e6 * link.alpha);
  if (tries()) {
    // A report tells of the steps before it.
    text += fmt::format("; tries, for {} steps each,", AutoWatch::kSettling + AutoWatch::kWatched + 1);
    for (const ModelledOption& o : options_)
      text += fmt::format("{} {} (should take {} a step)", &o == &options_[0] ? "" : ";", o.option.name,
                          milliseconds_text(o.step.seconds));
  }
  return text + fmt::format("; measured in {:.2g} s", seconds_since(begin));
}

// The choice has been made: why, in a paragraph.
void AutoMethod::report(std::int64_t step) {
  const ModelledOption& chosen = options_[current_];
  apart_ = chosen.option.name == std::exchange(last_, chosen.option.name) ? 2 * apart_ : AutoWatch::kApart;
  const char* verb = options_.size() > 1 ? "took" : "should take";
  std::string text = fmt::format("compress.name=auto takes {}: a step {} {}", chosen.option.name, verb,
                                 milliseconds_text(chosen.step.seconds));
  for (const ModelledOption& o : options_)
    if (&o != &chosen) text += fmt::format(", with {} {}", o.option.name, milliseconds_text(o.step.seconds));
  if (options_.size() == 1 && !chosen.dense())
    text += fmt::format(", with dense {}", milliseconds_text(dense_s_));
  log_info(text);
  const nlohmann::ordered_json made{{"step", step},        {"choice", chosen.option.name},
                                    {"why", why_},         {"step_s", chosen.step.seconds},
                                    {"dense_s", dense_s_}, {"link_mbit_s", mbit_s_}};
  choices_.push_back(made.dump());
}

std::string choices_of(const RunDirectory& folder) {
  constexpr std::size_t kMostBytes = 1 << 20;
  std::error_code error;
  return std::filesystem::exists(folder.choices_json(), error)
             ? read_text_file(folder.choices_json(), kMostBytes)
             : "";
}

void keep_choice(const RunDirectory& folder, LoadedConfig& loaded) {
  if (choices_of(folder).empty()) return;
  std::set<std::string> keys{"compress.dense_1d", "exchange.merge", "exchange.groups"};
  for (const AutoOption& option : auto_options())
    for (const std::string& setting : option.keys) keys.insert(setting.substr(0, setting.find('=')));
  const CheckpointStore store(folder.checkpoints());
  std::vector<std::int64_t> steps = store.steps();
  for (; !steps.empty(); steps.pop_back()) try {
      const Manifest manifest = store.manifest(steps.back());
      Config config = loaded.config;
      for (const std::string& name : keys) {
        const Key& key = *find_key(name);
        const auto then = manifest.config.find(name);
        if (then == manifest.config.end() || then->second == key_value(key, config) ||
            loaded.origin(name) == Origin::command_line)
          continue;
        const auto value = then->second == kEmptyText ? std::optional(RawValue{false, {""}})
                                                      : parse_raw(then->second, is_list(key));
        if (!value || !set_key(key, *value, config).empty()) return;  // read_checkpoint() says what is wrong
      }
      loaded.config = std::move(config);
      return;
    } catch (const UserError&) {  // an older one counts, as in read_checkpoint()
    }
}

Config choosing(Config config) {
  const Config::Exchange defaults;
  config.compress.name = kAutoMethod;
  config.exchange.every = 0, config.exchange.groups.clear(), config.exchange.merge = defaults.merge;
  config.exchange.collective = defaults.collective;
  return config;
}

AutoMethod AutoMethod::resumed(const Config& config, const std::string& choices) {
  AutoMethod method(choosing(config));
  method.first_ = false, method.again_ = true, method.why_ = "resume.method=choose";
  if (makes_local_steps(config)) method.follows_ = false;
  const auto made = nlohmann::ordered_json::parse(choices, nullptr, false);
  if (!made.is_array()) return method;
  for (const auto& choice : made)
    if (!choice.contains(kTrying)) method.choices_.push_back(choice.dump());
  return method;
}

ChoiceAt choice_at(const std::vector<NamedProfile>& profiles, int ranks, const PredictedNetwork& network) {
  std::vector<ModelledOption> modelled;
  ChoiceAt at;
  for (const auto& [name, profile] : profiles) {
    auto plans = modelled_options({name, profile_at(profile, ranks, network, profile.collective)});
    at.options.push_back({name, profile.method, plans[0].step.groups, plans[0].step.seconds});
    std::ranges::move(plans, std::back_inserter(modelled));
  }
  const std::vector<ModelledOption> tried = worth_trying(std::move(modelled));
  const ModelledOption& taken = tried[quickest(tried)];
  for (std::size_t i = 0; i < profiles.size(); ++i) {
    const auto& keys = find_option(profiles[i].option)->keys;
    const auto same = [&](const ModelledOption& o) { return o.option.keys == keys; };
    at.options[i].tried = std::ranges::any_of(tried, same);
    if (same(taken)) at.taken = i;
  }
  return at;
}

}  // namespace topknot

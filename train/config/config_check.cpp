// Checks of several keys together, keys that follow from others, and keys that are given but change nothing.

#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <map>
#include <set>

#include "compress/memory/memory.h"
#include "compress/select/selector.h"
#include "compress/sparse.h"
#include "dist/comm/communicator.h"
#include "dist/comm/link.h"
#include "dist/launch/launch.h"
#include "dist/plan/merge_plan.h"
#include "dist/rendezvous/socket.h"
#include "dist/sparse/hierarchical.h"
#include "nn/base/check.h"
#include "nn/base/text.h"
#include "nn/core/device.h"
#include "train/config/config.h"

namespace topknot {
namespace {

// FNV-1a, 32 bits.
std::uint32_t hash_of(const std::string& text) {
  std::uint32_t hash = 2166136261u;
  for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 16777619u;
  return hash;
}

// The words of this configuration that Key::users is compared with.
std::set<std::string> users_in(const Config& config, bool resumed) {
  const auto& c = config.compress;
  std::set<std::string> words = {config.model.name, config.data.name, config.optimizer.name,
                                 config.schedule.name, config.dist.backend};
  if (const auto parts = pieces_of(compress_options(config))) {
    words.insert({parts->select, parts->memory, parts->codec, parts->values, kSelectingMethods});
    if (c.layer_density == "auto") words.insert("layer_density=auto");
  } else {
    words.insert(c.name);
  }
  if (chooses_method(config))
    words.insert(kAutoRuns);
  else if (compresses(config))
    words.insert(kCompressingMethods);
  if (config.dist.backend == "auto") words.insert({"gloo", "nccl"});
  if (on_gpu(config)) words.insert(kGpus);
  if (resumed) words.insert(kResume);
  for (const Key& key : config_keys())
    if (const std::string value = key_value(key, config); value != "0" && value != "\"\"" && value != "false")
      words.insert(key.name);
  return words;
}

// How a run does not use the key, "is for regtopk and changes nothing here"; "" if it does.
std::string not_used(const Key& key, const Config& config, const std::set<std::string>& users) {
  for (const std::string& name : {config.data.name, config.optimizer.name})
    if (std::find(key.ignored_by.begin(), key.ignored_by.end(), name) != key.ignored_by.end())
      return fmt::format("is not for {} and changes nothing here", name);
  if (key.name == "train.precision" && config.train.precision == "tf32" && !users.count(kGpus))
    return "tf32 is for GPUs; fp32 is used here";
  if (key.users.empty() ||
      std::any_of(key.users.begin(), key.users.end(), [&](const auto& user) { return users.count(user); }))
    return "";
  return fmt::format("is for {} and changes nothing here", fmt::join(key.users, " and "));
}

// The keys that decide whether this one is used.
std::vector<std::string> deciding_keys(const Key& key) {
  const auto gpus = std::find(key.users.begin(), key.users.end(), kGpus);
  if (gpus != key.users.end() || key.name == "train.precision") return {"train.device"};
  std::vector<std::string> names;
  for (const std::string& user : key.users)
    if (find_key(user)) names.push_back(user);
  const std::string section = section_of(key.name);
  for (const char* part : {".name", ".select", ".memory", ".backend"})
    if (find_key(section + part)) names.push_back(section + part);
  return names;
}

// The first reason why the ranks of such a run cannot go on without one of them, and its key.
std::pair<std::string, std::string> not_elastic(const Config& config, bool chooses) {
  const std::string min_ranks = fmt::format("elastic.min_ranks={}", config.elastic.min_ranks);
  if (config.dist.backend != "gloo")
    return {"dist.backend", min_ranks + " is for processes on CPUs; set dist.backend=gloo"};
  if (on_gpu(config)) return {"train.device", min_ranks + " is for CPUs so far; set train.device=cpu"};
  if (config.dist.ranks < 2) return {"elastic.min_ranks", "is for several ranks; set dist.ranks"};
  if (config.elastic.min_ranks > config.dist.ranks)
    return {"elastic.min_ranks", fmt::format("is more than dist.ranks={}; give fewer", config.dist.ranks)};
  if (chooses) return {"compress.name", min_ranks + " does not go with auto so far; name a method"};
  if (config.exchange.fragments > 1)
    return {"exchange.fragments", min_ranks + " is for whole models so far; leave it out"};
  if (config.exchange.overlap_steps > 0)
    return {"exchange.overlap_steps", min_ranks + " does not go with a sync under way; leave it out"};
  if (config.exchange.ranks_per_host > 1)
    return {"exchange.ranks_per_host", min_ranks + " does not go with hosts of several ranks; leave it out"};
  if (config.exchange.collective != "all_gather")
    return {"exchange.collective", min_ranks + " needs messages of one round; use all_gather"};
  if (config.elastic.batch.starts_with("rank_") && makes_local_steps(config))
    return {"elastic.batch", "scales the rate of an exchange in every step; set elastic.batch=rank"};
  if (config.data.shard != "even")
    return {"data.shard", min_ranks + " deals the samples that are left evenly; set data.shard=even"};
  const auto pieces = pieces_of(compress_options(config));
  if (!pieces && compresses(config))
    return {"compress.name", min_ranks + " is for dense sums in fp32 and methods that select entries so far"};
  if (pieces && selectors().find(pieces->select).traits.reads_average)
    return {"compress.select", fmt::format("{} does not go with the history of {}; choose another selection",
                                           min_ranks, pieces->select)};
  if (pieces && memories().find(pieces->memory).traits.sends_differences)
    return {"compress.memory",
            fmt::format("{} does not go with the estimates of {}; use residual", min_ranks, pieces->memory)};
  if (config.compress.layer_density == "auto")
    return {"compress.layer_density",
            min_ranks + " takes no measured densities; give a file, or leave it out"};
  for (const auto& [key, given] :
       {std::pair("train.record_gradients", asks_for_steps(config.train.record_gradients)),
        std::pair("train.distribution_every", config.train.distribution_every > 0),
        std::pair("train.profile_steps", asks_for_steps(config.train.profile_steps))})
    if (given) return {key, min_ranks + " does not go with it so far; leave it out"};
  return {};
}

}  // namespace

Config before_choice(Config config) {
  if (chooses_method(config)) config.compress.name = "dense";
  return config;
}

std::vector<Problem> check_config(const Config& given) {
  const Config config = before_choice(given);
  std::vector<Problem> problems;
  const auto need = [&](bool holds, const std::string& key, const std::string& text) {
    if (!holds) problems.push_back({key, key + ": " + text});
  };
  // For rules of the module that a key belongs to; `check` throws UserError.
  const auto attempt = [&](const std::string& key, const std::function<void()>& check) {
    try {
      check();
    } catch (const UserError& error) {
      problems.push_back({key, error.what()});
    }
  };

  Config copy = config;
  for (const Key& key : config_keys()) {
    if (key.registry.empty()) continue;
    const auto& lists = name_lists();
    const RegisteredNames& known = std::find_if(lists.begin(), lists.end(), [&](const NameList& l) {
                                     return l.kind == key.registry;
                                   })->registry;
    const auto& name = *std::get<std::string*>(key.ref(copy));
    if (name.empty() && key.may_be_empty) continue;
    std::vector<std::string> names = known.names();
    if (key.name == "compress.name") {
      names.push_back(kAutoMethod);
      for (const std::string& recipe : recipes().names()) names.push_back(recipe);
    }
    need(known.contains(name), key.name, unknown_name_message(key.registry, name, names));
  }

  // A misspelt method has no known pieces.
  std::optional<SparsePreset> pieces;
  if (problems.empty()) pieces = pieces_of(compress_options(config));

  need(config.train.epochs > 0 || config.train.max_steps > 0, "train.epochs",
       "with train.epochs and train.max_steps both 0 the run would never begin; set one of them");
  attempt("compress.scope", [&] { check_scope(config.compress.scope, config.exchange.merge); });
  const int per_host = config.exchange.ranks_per_host;
  if (!chooses_method(given))
    attempt("exchange.ranks_per_host",
            [&] { check_hierarchy(per_host, compresses(config) || makes_local_steps(config)); });
  // One rank stands for a number that only the launcher knows; the exchange refuses that one.
  if (per_host != 0 && config.dist.ranks != 1)
    attempt("exchange.ranks_per_host", [&] { check_hosts(per_host, config.dist.ranks, " of dist.ranks"); });
  if (per_host > 1 && config.exchange.hierarchy == "parts")
    need(config.train.distribution_every == 0, "train.distribution_every",
         "looks at whole accumulated gradients, and with exchange.hierarchy=parts a rank has a part; leave "
         "it out");
  attempt("optimizer.nesterov", [&] { check_optimizer(config.optimizer); });
  attempt("schedule.milestones", [&] { check_milestones(config.schedule); });
  attempt("schedule.min_lr", [&] { check_min_lr(config.schedule, config.optimizer.lr); });
  if (chooses_method(given)) {
    need(!on_gpu(config), "compress.name",
         "auto measures on CPUs so far, and the device is a GPU; name a method, or set train.device=cpu");
    need(config.exchange.ranks_per_host == 0, "exchange.ranks_per_host",
         "compress.name=auto has no model of hosts of several ranks; leave it at 0, or name a method");
    need(!makes_local_steps(config), "exchange.every",
         "is a choice of compress.name=auto, if auto.accuracy=local_steps allows it; leave it out");
    need(config.exchange.groups.empty() && config.exchange.profile.empty() &&
             config.exchange.collective == "all_gather",
         "compress.name",
         "auto makes its own plan from times of its own; leave exchange.groups, exchange.profile and "
         "exchange.collective out");
  }
  for (const auto& [key, value] : {std::pair("train.record_gradients", config.train.record_gradients),
                                   std::pair("train.profile_steps", config.train.profile_steps)})
    need(value.size() <= 2, key, "is a number of steps, or [STEPS, STEPS BEFORE THE FIRST]");
  need(config.model.reinit.empty() || !config.model.init_from.empty(), "model.reinit",
       "says what model.init_from leaves as it is; without a file everything is initialised by the seed");
  if (!config.compress.layer_density.empty())
    attempt("compress.layer_density", [&] { check_layer_density(config.compress.scope); });
  need(!pieces || !pieces->layerwise || config.compress.scope == "tensor", "compress.scope",
       fmt::format("{} selects in each layer by itself, so compress.scope must be 'tensor'; for one k over "
                   "all of them use compress.name={}",
                   config.compress.name, pieces ? pieces->select : ""));
  need(config.train.distribution_every == 0 || compresses(config), "train.distribution_every",
       "looks at the accumulated gradient, and dense accumulates none; choose another compress.name");
  if (makes_local_steps(config)) {
    const std::string every = fmt::format("exchange.every={}", config.exchange.every);
    need(!on_gpu(config) || config.exchange.fragments == 1, "exchange.fragments",
         "fragments are for train.device=cpu so far, and the device is a GPU");
    need(!on_gpu(config) || config.exchange.overlap_steps == 0, "exchange.overlap_steps",
         "steps and an exchange overlap on train.device=cpu so far, and the device is a GPU");
    need(!on_gpu(config) || per_host <= 1, "exchange.ranks_per_host",
         "local steps of hosts are for train.device=cpu so far, and the device is a GPU");
    for (const auto& [key, value] : {std::pair("compress.clip", config.compress.clip),
                                     std::pair("train.clip_local", config.train.clip_local)})
      need(value == 0, key,
           "clips a gradient before it is exchanged, and with " + every +
               " no gradient is; train.clip_global clips the gradient of each local step");
    const std::int64_t fragments = config.exchange.fragments, apart = config.exchange.every / fragments;
    need(fragments == 1 || config.train.distribution_every == 0, "train.distribution_every",
         "looks at all changes of a sync, and a fragment's are a part of them; set exchange.fragments=1");
    need(config.exchange.every % fragments == 0, "exchange.fragments",
         fmt::format(
             "{} fragments take turns of equal length, so exchange.every must be a multiple of them, not {}",
             fragments, config.exchange.every));
    need(apart == 0 || config.exchange.overlap_steps < apart, "exchange.overlap_steps",
         fmt::format("one exchange is under way at a time, and they are {} apart; give fewer",
                     count_text(apart, "step")));
    need(config.outer.name != "nesterov" || config.outer.momentum > 0, "exchange.outer.momentum",
         "Nesterov's momentum needs one above 0; exchange.outer.name=sgd has none");
  }
  need(config.compress.clip == 0 || config.train.clip_local == 0, "compress.clip",
       "train.clip_local clips a rank's gradient too; give one of the two");
  constexpr double kLeastTimeout =
      1e-3;  // seconds; the backends count milliseconds, and 0 of them would mean none
  need(
      config.dist.timeout_s == 0 || config.dist.timeout_s >= kLeastTimeout, "dist.timeout_s",
      fmt::format("must be 0 or at least {} s, not {}", kLeastTimeout, format_number(config.dist.timeout_s)));
  if (!config.dist.master.empty())
    attempt("dist.master", [&] { parse_host_port(config.dist.master, "dist.master"); });
  need(config.dist.master.empty() || config.dist.backend != "threads", "dist.master",
       "ranks that are threads have no master; use dist.backend=gloo for ranks on several hosts");
  attempt("dist.nccl", [&] { nccl_variables(config.dist.nccl); });
  need(config.dist.interface.empty() || config.dist.backend != "threads", "dist.interface",
       "ranks that are threads use no network; use dist.backend=gloo");
  if (!config.dist.link_rate.empty()) {
    need(config.dist.backend == "threads" || config.dist.backend == "auto", "dist.link.rate",
         "emulates a network between ranks that are threads; dist.backend=" + config.dist.backend +
             " has a network of its own (lab/netlab makes it slow)");
    attempt("dist.link.rate",
            [&] { make_emulated_link(config.dist.link_rate, config.dist.link_latency, 1); });
  }
  if (config.dist.backend == "nccl") {
    need(config.train.device != "cpu", "train.device",
         "dist.backend=nccl talks from GPU to GPU; set train.device=cuda, or dist.backend=gloo for CPUs");
    need(config.compress.capacity > 0 || !pieces || selectors().find(pieces->select).traits.at_most_k,
         "compress.capacity",
         "must be given with dist.backend=nccl, whose messages have one length: '" + config.compress.name +
             "' may select any number of entries; compress.capacity=2 lets twice as many are sent as "
             "compress.density says");
  }
  if (config.elastic.min_ranks > 0 && problems.empty())
    if (const auto [key, why] = not_elastic(config, chooses_method(given)); !key.empty())
      need(false, key, why);
  if (!config.data.root.empty()) {
    std::error_code error;
    need(std::filesystem::is_directory(config.data.root, error), "data.root",
         "no such folder: " + config.data.root +
             "; 'scripts/fetch-data NAME --to DIR' fetches a data set, data.root=DIR names it");
  }
  return problems;
}

std::vector<std::string> unused_keys(const LoadedConfig& loaded) {
  const std::set<std::string> users = users_in(loaded.config, loaded.resumed);
  std::vector<std::string> lines;
  for (const Key& key : config_keys()) {
    const Origin origin = loaded.origin(key.name);
    if (origin <= Origin::method || origin == Origin::weights) continue;
    const std::string how = not_used(key, loaded.config, users);
    const std::vector<std::string> deciding = deciding_keys(key);
    if (how.empty() || (!deciding.empty() && origin < loaded.origin(deciding.front()))) continue;
    std::string chosen;
    for (const std::string& name : deciding)
      if (const std::string value = key_value(*find_key(name), loaded.config); value != "\"\"")
        chosen += (chosen.empty() ? " (" : " ") + name + "=" + value;
    lines.push_back(key.name + " " + how + chosen + (chosen.empty() ? "" : ")"));
  }
  return lines;
}

std::set<std::string> keys_without_use(const Config& config) {
  const std::set<std::string> users = users_in(config, false);
  std::set<std::string> on_any_machine = users;
  if (config.train.device == "auto") on_any_machine.insert(kGpus);
  const Config defaults = method_defaults(config);
  std::set<std::string> names;
  for (const Key& key : config_keys()) {
    const bool given = key_value(key, config) != key_value(key, defaults);
    if (!not_used(key, config, given ? on_any_machine : users).empty()) names.insert(key.name);
  }
  return names;
}

bool on_gpu(const Config& config) {
  return config.train.device == "cuda" || (config.train.device == "auto" && cuda_available());
}

int compute_threads(const Config& config) {
  if (config.train.threads > 0) return config.train.threads;
  const int share = std::max(1, usable_cores() / local_ranks(config.dist.ranks, process_environment()));
  const char* given = std::getenv("OMP_NUM_THREADS");
  const int most = given ? std::atoi(given) : 0;  // "4,2" means 4, and 2 in nested regions
  return most > 0 ? std::min(share, most) : share;
}

double density_at_epoch(const Config& config, int epoch) {
  const auto& warmup = config.compress.warmup;
  const double density = config.compress.density;
  if (epoch < 0 || static_cast<std::size_t>(epoch) >= warmup.size()) return density;
  return std::max(density, warmup[static_cast<std::size_t>(epoch)]);
}

std::string run_directory_name(const Config& config) {
  if (!config.output.dir.empty()) return config.output.dir;
  std::set<std::string> named = {"seed", "model.name", "data.name", "compress.name", "dist.ranks"};
  std::string name = fmt::format("runs/{}-{}-{}", config.model.name, config.data.name, config.compress.name);
  if (config.compress.name != "dense" && !chooses_method(config)) {
    name += "-" + format_number(config.compress.density);
    named.insert("compress.density");
  }
  name += fmt::format("-r{}-s{}", config.dist.ranks, config.seed);

  std::map<std::string, int> sections;  // that have a key of that last part
  for (const Key& key : config_keys()) ++sections[last_part(key.name)];
  std::string tail;
  const Config defaults = method_defaults(config);
  for (const Key& key : config_keys()) {
    const std::string value = key_value(key, config);
    if (named.count(key.name) || key.scope != KeyScope::run || value == key_value(key, defaults)) continue;
    tail += fmt::format("-{}_{}", sections[last_part(key.name)] > 1 ? key.name : last_part(key.name), value);
  }
  constexpr std::size_t kLongestTail = 60;
  if (tail.size() > kLongestTail) return fmt::format("{}-{:08x}", name, hash_of(tail));
  std::string safe;
  for (const char c : tail)
    if (std::isalnum(static_cast<unsigned char>(c)) || std::strchr(".,_-", c))
      safe += c;
    else if (!std::strchr("[]\" ", c))
      safe += '_';
  return name + safe;
}

}  // namespace topknot

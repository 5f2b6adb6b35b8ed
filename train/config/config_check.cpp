// What no single key can show, and what follows from several keys.

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <thread>

#include "compress/sparse_step.h"
#include "dist/launch/socket.h"
#include "nn/core/base/check.h"
#include "nn/core/base/suggest.h"
#include "train/config/config.h"
#include "train/config/config_text.h"

namespace topknot {
namespace {

const std::vector<std::string>& known_names(const KnownNames& known, const std::string& registry) {
  if (registry == "model") return known.models;
  if (registry == "dataset") return known.datasets;
  if (registry == "compressor") return known.compressors;
  if (registry == "selection") return known.selectors;
  if (registry == "memory") return known.memories;
  if (registry == "index codec") return known.index_codecs;
  if (registry == "value codec") return known.value_codecs;
  if (registry == "optimizer") return known.optimizers;
  return known.schedules;
}

// Methods whose messages have a length that does not depend on the gradient.
bool selects_at_most_k(const Config& config) {
  if (!sparse_presets().contains(config.compress.name)) return true;
  CompressOptions options;
  options.select = config.compress.select;
  const std::string select = resolve(sparse_presets().find(config.compress.name), options).select;
  for (const char* bounded : {"topk", "regtopk", "randk", "mstopk", "dgc_sampled"})
    if (select == bounded) return true;
  return false;
}

}  // namespace

std::vector<Problem> check_config(const Config& config, const KnownNames& known) {
  std::vector<Problem> problems;
  const auto need = [&](bool holds, const std::string& key, const std::string& text) {
    if (!holds) problems.push_back({key, key + ": " + text});
  };

  Config copy = config;
  for (const Key& key : config_keys()) {
    if (key.registry.empty()) continue;
    const auto& names = known_names(known, key.registry);
    const auto& name = *std::get<std::string*>(key.ref(copy));
    if (!names.empty() && !(name.empty() && key.may_be_empty))
      need(std::find(names.begin(), names.end(), name) != names.end(), key.name,
           unknown_name_message(key.registry, name, names));
  }

  need(config.train.epochs > 0 || config.train.max_steps > 0, "train.epochs",
       "with train.epochs and train.max_steps both 0 the run would never begin; set one of them");
  need(config.compress.scope != "model" || config.exchange.merge == "all", "compress.scope",
       "'model' selects over the whole gradient at once, so exchange.merge must be 'all', not '" +
           config.exchange.merge + "'; use compress.scope=group to keep that merge");
  const int per_host = config.exchange.ranks_per_host;
  need(per_host == 0 || config.compress.name != "dense", "exchange.ranks_per_host",
       "compress.name: dense needs no hierarchy, its sum takes each link once; leave it at 0");
  // One rank stands for a number that only the launcher knows; the exchange refuses that one.
  need(per_host == 0 || config.dist.ranks == 1 || config.dist.ranks % per_host == 0,
       "exchange.ranks_per_host",
       std::to_string(per_host) + " does not divide the " + std::to_string(config.dist.ranks) +
           " ranks of dist.ranks into hosts of one size");
  need(!config.optimizer.nesterov || config.optimizer.momentum > 0, "optimizer.nesterov",
       "needs optimizer.momentum above 0");
  need(config.schedule.name != "multistep" || !config.schedule.milestones.empty(), "schedule.milestones",
       "schedule.name=multistep needs the epochs where the rate drops, such as [81, 122]");
  need(std::is_sorted(config.schedule.milestones.begin(), config.schedule.milestones.end()),
       "schedule.milestones", "must rise");
  need(config.schedule.min_lr <= config.optimizer.lr, "schedule.min_lr", "must not exceed optimizer.lr");
  need(config.compress.warmup.empty() || config.compress.warmup_epochs == 0, "compress.warmup_epochs",
       "compress.warmup lists the densities of the first epochs already; give one of the two");
  need(config.compress.layer_density.empty() || config.compress.scope == "tensor", "compress.layer_density",
       "gives each tensor a density of its own, so compress.scope must be 'tensor'");
  need(config.compress.name != "lags" || config.compress.scope == "tensor", "compress.scope",
       "lags selects in each layer by itself, so compress.scope must be 'tensor'; for one k over all of them "
       "use compress.name=topk");
  need(config.train.distribution_every == 0 || config.compress.name != "dense", "train.distribution_every",
       "looks at the accumulated gradient, and dense accumulates none; choose another compress.name");
  need(config.compress.clip == 0 || config.train.clip_local == 0, "compress.clip",
       "train.clip_local clips a rank's gradient too; give one of the two");
  need(config.compress.select != "threshold" || config.compress.threshold > 0, "compress.threshold",
       "compress.select=threshold needs the threshold, above 0");
  if (!config.dist.master.empty()) {
    try {
      parse_host_port(config.dist.master, "dist.master");
    } catch (const UserError& error) {
      problems.push_back({"dist.master", error.what()});
    }
  }
  need(config.dist.master.empty() || config.dist.backend != "threads", "dist.master",
       "ranks that are threads have no master; use dist.backend=gloo for ranks on several hosts");
  need(config.dist.interface.empty() || config.dist.backend != "threads", "dist.interface",
       "ranks that are threads use no network; use dist.backend=gloo");
  if (config.dist.backend == "nccl") {
    need(config.train.device != "cpu", "train.device",
         "dist.backend=nccl talks from GPU to GPU; set train.device=cuda, or dist.backend=gloo for CPUs");
    need(config.compress.capacity.has_value() || selects_at_most_k(config), "compress.capacity",
         "must be given with dist.backend=nccl, whose messages have one length: '" + config.compress.name +
             "' may select any number of entries; compress.capacity=2 lets twice as many travel as "
             "compress.density says");
  }
  if (!config.data.root.empty()) {
    std::error_code error;
    need(std::filesystem::is_directory(config.data.root, error), "data.root",
         "no such folder: " + config.data.root +
             "; 'scripts/fetch-data NAME --to DIR' fetches a data set, data.root=DIR names it");
  }
  return problems;
}

int compute_threads(const Config& config) {
  if (config.train.threads > 0) return config.train.threads;
  if (config.dist.ranks > 1) return 1;
  return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}

double density_at_epoch(const Config& config, int epoch) {
  const auto& warmup = config.compress.warmup;
  const double density = config.compress.density;
  const int epochs = config.compress.warmup_epochs;
  if (epoch >= 0 && epoch < epochs)
    return std::max(density, std::pow(density, (epoch + 1.0) / (epochs + 1.0)));
  if (epoch < 0 || static_cast<std::size_t>(epoch) >= warmup.size()) return density;
  return std::max(density, warmup[static_cast<std::size_t>(epoch)]);
}

std::string run_directory_name(const Config& config) {
  if (!config.output.dir.empty()) return config.output.dir;
  std::string name = "runs/" + config.model.name + "-" + config.data.name + "-" + config.compress.name;
  if (config.compress.name != "dense") name += "-" + format_number(config.compress.density);
  return name + "-r" + std::to_string(config.dist.ranks) + "-s" + std::to_string(config.seed);
}

}  // namespace topknot

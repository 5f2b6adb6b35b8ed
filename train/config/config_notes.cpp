// Keys that change nothing in a run: given, they are no mistake, but hardly what was meant.

#include <fmt/format.h>

#include <algorithm>

#include "compress/sparse.h"
#include "nn/core/device.h"
#include "train/config/config.h"
#include "train/config/config_text.h"

namespace topknot {
namespace {

// What uses keys in a run of this configuration: the words that Key::users is looked for in.
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
  if (c.name != "dense") words.insert(kCompressingMethods);
  if (config.dist.backend == "auto") words.insert({"gloo", "nccl"});
  if (on_gpu(config)) words.insert(kGpus);
  if (resumed) words.insert(kResume);
  for (const Key& key : config_keys())
    if (const std::string value = key_value(key, config); value != "0" && value != "\"\"" && value != "false")
      words.insert(key.name);
  return words;
}

// How a run does not use the key, "is for regtopk and changes nothing here"; "" where it does.
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

}  // namespace

bool on_gpu(const Config& config) {
  return config.train.device == "cuda" || (config.train.device == "auto" && cuda_available());
}

std::vector<std::string> unused_keys(const LoadedConfig& loaded) {
  const auto origin = [&](const std::string& key) {
    const auto found = loaded.origins.find(key);
    return found == loaded.origins.end() ? Origin::default_value : found->second;
  };
  const std::set<std::string> users = users_in(loaded.config, loaded.resumed);
  std::vector<std::string> lines;
  for (const Key& key : config_keys()) {
    if (origin(key.name) == Origin::default_value) continue;
    const std::string how = not_used(key, loaded.config, users);
    const std::vector<std::string> deciding = deciding_keys(key);
    if (how.empty() || (!deciding.empty() && origin(key.name) < origin(deciding.front()))) continue;
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
  const Config defaults;
  std::set<std::string> names;
  for (const Key& key : config_keys()) {
    const bool given = key_value(key, config) != key_value(key, defaults);
    if (!not_used(key, config, given ? on_any_machine : users).empty()) names.insert(key.name);
  }
  return names;
}

}  // namespace topknot

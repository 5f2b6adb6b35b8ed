// Keys that were given and change nothing: no mistake, but hardly what was meant.

#include <fmt/format.h>

#include <algorithm>
#include <set>

#include "compress/sparse_step.h"
#include "train/config/config.h"
#include "train/config/config_text.h"

namespace topknot {
namespace {

// The words that Key::users is looked for in.
std::set<std::string> choices(const Config& config) {
  const auto& c = config.compress;
  std::set<std::string> words = {config.model.name, config.schedule.name};
  if (const auto parts = pieces_of(compress_options(config))) {
    words.insert({parts->select, parts->memory, parts->codec, parts->values, kSelectingMethods});
    if (c.layer_density == "auto") words.insert("layer_density=auto");
  } else {
    words.insert(c.name);
  }
  return words;
}

}  // namespace

std::vector<std::string> unused_keys(const LoadedConfig& loaded) {
  const auto origin = [&](const std::string& key) {
    const auto found = loaded.origins.find(key);
    return found == loaded.origins.end() ? Origin::default_value : found->second;
  };
  const std::set<std::string> words = choices(loaded.config);
  std::vector<std::string> lines;
  for (const Key& key : config_keys()) {
    if (key.users.empty() || origin(key.name) == Origin::default_value) continue;
    if (std::any_of(key.users.begin(), key.users.end(), [&](const auto& user) { return words.count(user); }))
      continue;
    const std::string section = key.name.substr(0, key.name.find('.'));
    if (origin(key.name) < origin(section + ".name")) continue;
    std::string users, chosen;
    for (const std::string& user : key.users) users += (users.empty() ? "" : " and ") + user;
    for (const char* part : {".name", ".select", ".memory"})
      if (const Key* choice = find_key(section + part))
        if (const std::string value = key_value(*choice, loaded.config); value != "\"\"")
          chosen += (chosen.empty() ? "" : " ") + choice->name + "=" + value;
    lines.push_back(fmt::format("{} is for {} and changes nothing here ({})", key.name, users, chosen));
  }
  return lines;
}

}  // namespace topknot

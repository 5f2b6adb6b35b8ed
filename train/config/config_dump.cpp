// The configuration as text: the effective config, the help, the reference table. All of it from the table of
// keys.

#include <fmt/format.h>

#include <algorithm>

#include "compress/codec/codec.h"
#include "compress/sparse_step.h"
#include "train/config/config.h"

namespace topknot {
namespace {

std::string section_of(const Key& key) {
  const auto dot = key.name.find('.');
  return dot == std::string::npos ? "" : key.name.substr(0, dot);
}

const char* section_help(const std::string& section) {
  if (section == "model") return "what is trained";
  if (section == "data") return "what it is trained on";
  if (section == "optimizer") return "how the averaged gradient changes the weights";
  if (section == "schedule") return "how the learning rate changes";
  if (section == "compress") return "what of a gradient travels";
  if (section == "exchange") return "how gradients travel";
  if (section == "dist") return "the ranks that train together";
  if (section == "train") return "how long and how";
  if (section == "output") return "where the results go";
  return "";
}

std::string table_cell(const std::string& text) {
  std::string escaped;
  for (const char c : text) escaped += c == '|' ? std::string("\\|") : std::string(1, c);
  return escaped;
}

// Type and range in few words: "number, above 0", "threads | gloo".
std::string kind_text(const Key& key) {
  const std::string range = key_range(key);
  if (!key.choices.empty()) return range;
  if (!key.registry.empty()) return key.registry + " name";
  std::string type = key_type(key);
  for (const char* article : {"an ", "a "})
    if (type.rfind(article, 0) == 0) {
      type = type.substr(std::string(article).size());
      break;
    }
  return range.empty() ? type : type + ", " + range;
}

}  // namespace

std::string dump_yaml(const Config& config, bool only_non_default,
                      const std::map<std::string, Origin>& origins) {
  const Config defaults;
  std::string text, section;
  for (const Key& key : config_keys()) {
    const std::string value = key_value(key, config);
    if (only_non_default && value == key_value(key, defaults)) continue;
    const std::string own = section_of(key);
    if (own != section) text += "\n" + own + ":\n";
    section = own;
    text += own.empty() ? key.name : "  " + key.name.substr(own.size() + 1);
    text += ": " + value;
    if (const auto it = origins.find(key.name); it != origins.end() && it->second != Origin::default_value)
      text += std::string("  # ") + origin_name(it->second);
    text += "\n";
  }
  return text;
}

std::string key_help() {
  const Config defaults;
  std::string text, section;
  for (const Key& key : config_keys()) {
    const std::string own = section_of(key);
    if (own != section) text += fmt::format("\n{}: {}\n", own, section_help(own));
    section = own;
    text += fmt::format("{:<36}{}\n{:36}({})\n", fmt::format("  {}={}  ", key.name, key_value(key, defaults)),
                        key.help, "", kind_text(key));
  }
  return text;
}

std::string key_reference_markdown() {
  const Config defaults;
  std::string text, section = "-";
  for (const Key& key : config_keys()) {
    const std::string own = section_of(key);
    if (own != section) {
      if (!own.empty()) text += fmt::format("\n### `{}`: {}\n\n", own, section_help(own));
      text += "| key | default | values | meaning |\n|---|---|---|---|\n";
    }
    section = own;
    text += fmt::format("| `{}` | `{}` | {} | {} |\n", key.name, key_value(key, defaults),
                        table_cell(kind_text(key)), key.help);
  }
  return text;
}

std::string method_keys_markdown() {
  std::string text = "| of | key | default | values | meaning |\n|---|---|---|---|---|\n";
  for (const NameList& list : name_lists())
    for (const std::string& name : list.registry.names())
      for (const Option& option : list.registry.options(name)) {
        const Key& key = *find_key("compress." + option.name);
        text += fmt::format("| {} `{}` | `{}` | `{}` | {} | {} |\n", list.kind, name, key.name,
                            key_value(key, Config()), table_cell(kind_text(key)), option.help);
      }
  return text;
}

std::vector<std::string> list_names() {
  std::vector<std::string> names;
  for (const NameList& list : name_lists()) names.push_back(list.list);
  names.insert(names.end(), {"keys", "keys-markdown", "methods-markdown"});
  return names;
}

std::string list_text(const std::string& name) {
  if (name == "keys") return key_help();
  if (name == "keys-markdown") return key_reference_markdown();
  if (name == "methods-markdown") return method_keys_markdown();
  const auto& lists = name_lists();
  const auto& list =
      *std::find_if(lists.begin(), lists.end(), [&](const NameList& l) { return l.list == name; });
  std::string text;
  const auto line = [&](const std::string& entry, const std::string& help) {
    text += fmt::format("{:<20} {}\n", entry, help);
  };
  const auto option_lines = [&](const RegisteredNames& registry, const std::string& entry) {
    for (const Option& option : registry.options(entry)) {
      const Key& key = *find_key("compress." + option.name);
      text += fmt::format("{:20}   {}={}: {} ({})\n", "", key.name, key_value(key, Config()), option.help,
                          kind_text(key));
    }
  };
  for (const std::string& entry : list.registry.names()) {
    line(entry, list.registry.help(entry));
    option_lines(list.registry, entry);
    if (name != "compressors" || !sparse_presets().contains(entry)) continue;
    const SparsePreset& preset = sparse_presets().find(entry);
    option_lines(selectors(), preset.select);
    option_lines(memories(), preset.memory);
    option_lines(index_codecs(), preset.codec);
    option_lines(value_codecs(), preset.values);
  }
  return text;
}

}  // namespace topknot

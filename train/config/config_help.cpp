// The output of --help and --list, and the docs' reference tables, from the table of keys and registries.

#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <filesystem>
#include <fstream>

#include "compress/codec/codec.h"
#include "compress/sparse.h"
#include "nn/base/check.h"
#include "nn/base/terminal.h"
#include "nn/base/text.h"
#include "nn/models/model.h"
#include "train/config/config.h"

namespace topknot {
namespace {

namespace fs = std::filesystem;

const char* section_help(const std::string& section) {
  if (section == "model") return "what is trained";
  if (section == "data") return "what it is trained on";
  if (section == "optimizer") return "how the averaged gradient changes the weights";
  if (section == "schedule") return "how the learning rate changes";
  if (section == "compress") return "what of a gradient is sent";
  if (section == "auto") return "what compress.name=auto may choose";
  if (section == "exchange") return "how gradients are sent";
  if (section == "dist") return "the ranks that train together";
  if (section == "elastic") return "what happens when ranks die";
  if (section == "train") return "how long and how";
  if (section == "resume") return "how train --resume goes on";
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
  const std::string range = range_text(key);
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

// The parameters of a model for 32x32 colour pictures and ten classes; "-" if it does not take them.
std::string parameter_count(const std::string& model) {
  ParameterStore store;
  ModelOptions options;
  options.input = {3, 32, 32};
  options.outputs = 10;
  try {
    const ModulePtr module = make_model(model, store, options);
  } catch (const UserError&) {
    return "-";
  }
  std::size_t count = 0;
  for (const auto& parameter : store.parameters()) count += parameter->numel();
  return std::to_string(count);
}

// The shipped configurations lie next to the program, or above it if that is in a source tree's build folder.
std::vector<fs::path> config_places() {
  std::vector<fs::path> places;
  std::error_code error;
  if (const fs::path program = fs::read_symlink("/proc/self/exe", error); !error)
    for (const char* from : {"configs", "../configs", "../../configs", "../share/topknot/configs"})
      places.push_back((program.parent_path() / from).lexically_normal());
  places.push_back(fs::current_path(error) / "configs");
  return places;
}

// The first sentence of a file's opening comment: up to a full stop before a capital letter or a line's end.
std::string first_sentence(const fs::path& file) {
  std::string text;
  std::ifstream stream(file);
  for (std::string line; std::getline(stream, line) && line.rfind("# ", 0) == 0;) {
    text += (text.empty() ? "" : " ") + line.substr(2);
    for (auto stop = text.find(". "); stop != std::string::npos; stop = text.find(". ", stop + 1))
      if (stop + 2 < text.size() && std::isupper(static_cast<unsigned char>(text[stop + 2])))
        return text.substr(0, stop + 1);
    if (text.back() == '.') break;
  }
  return text;
}

std::string configs_text(int width) {
  std::string looked;
  for (const fs::path& place : config_places()) {
    std::vector<fs::path> files;
    std::error_code error;
    for (fs::recursive_directory_iterator entry(place, error), end; !error && entry != end;
         entry.increment(error))
      if (entry->path().extension() == ".yaml") files.push_back(entry->path());
    if (files.empty()) {
      looked += "\n  " + place.string();
      continue;
    }
    std::sort(files.begin(), files.end());
    std::string text = fmt::format("configurations in {}:\n\n", place.string());
    for (const fs::path& file : files)
      text +=
          fs::proximate(file, error).string() + "\n    " + wrapped(first_sentence(file), width, 4, 4) + "\n";
    return text;
  }
  throw UserError("--list configs: no .yaml file in any of these folders:" + looked +
                  "\nthe configurations are the folder configs/ of the source tree: copy it there, or start "
                  "train in the source tree");
}

// "compress.density=0.01, optimizer.lr=1"; "" if the name says nothing of other keys.
std::string settings_text(const std::string& method) {
  std::string text;
  for (const auto& [name, value] : settings_of(method))
    text += (text.empty() ? "" : ", ") + name + "=" + value;
  return text;
}

std::string names_text(const NameList& list, int width) {
  constexpr int kColumn = 22, kOptionIndent = 6;
  const bool models = list.list == "models";
  std::string text;
  if (models)
    text = wrapped(
               "Parameters are those for 32x32 colour pictures and 10 classes; 'train FILE --dry-run' counts "
               "those of a configuration.",
               width) +
           "\n\n";
  const auto option_lines = [&](const RegisteredNames& registry, const std::string& entry) {
    for (const Option& option : registry.options(entry)) {
      const Key& key = *find_key(list.section + "." + option.name);
      text += fmt::format("{:{}}", "", kOptionIndent) +
              wrapped(fmt::format("{}={}: {} ({})", key.name, key_value(key, Config()), option.help,
                                  kind_text(key)),
                      width, kOptionIndent + 2, kOptionIndent) +
              "\n";
    }
  };
  for (const std::string& entry : list.registry.names()) {
    const std::string name = models ? fmt::format("{:<10}{:>10}", entry, parameter_count(entry)) : entry;
    text += wrapped_row(name, list.registry.help(entry), kColumn, width);
    option_lines(list.registry, entry);
    if (const std::string settings =
            list.list == "compressors" || list.list == "recipes" ? settings_text(entry) : "";
        !settings.empty())
      text += fmt::format("{:{}}", "", kOptionIndent) +
              wrapped("unless given: " + settings, width, kOptionIndent + 2, kOptionIndent) + "\n";
    if (list.list != "compressors" || !sparse_presets().contains(entry)) continue;
    const SparsePreset& preset = sparse_presets().find(entry);
    option_lines(selectors(), preset.select);
    option_lines(memories(), preset.memory);
    option_lines(index_codecs(), preset.codec);
    option_lines(value_codecs(), preset.values);
  }
  return text;
}

}  // namespace

std::string key_help(int width, const std::string& section) {
  constexpr int kColumn = 36;
  if (!section.empty() && !is_config_section(section))
    throw UserError(unknown_name_message("section", section, config_sections()));
  const Config defaults;
  std::string text, last;
  for (const Key& key : config_keys()) {
    const std::string own = section_of(key.name);
    if (!section.empty() && !key.name.starts_with(section + ".")) continue;
    if (own != last) text += fmt::format("{}{}: {}\n", text.empty() ? "" : "\n", own, section_help(own));
    last = own;
    text += wrapped_row(fmt::format("  {}={}", key.name, key_value(key, defaults)),
                        fmt::format("{}\n({})", key.help, kind_text(key)), kColumn, width);
  }
  return text;
}

std::string key_help(int width, const Key& key) {
  const std::string section = section_of(key.name);
  const std::string file =
      section.empty() ? fmt::format("{}: VALUE", key.name)
                      : fmt::format("{}: VALUE under {}:", key.name.substr(section.size() + 1), section);
  std::string text = fmt::format("{}={}\n", key.name, key_value(key, Config()));
  const auto line = [&](const std::string& words) { text += "  " + wrapped(words, width, 2, 2) + "\n"; };
  line(key.help);
  line(kind_text(key));
  if (!key.users.empty()) line(fmt::format("used by: {}", fmt::join(key.users, ", ")));
  for (const NameList& list : name_lists())
    if (list.kind == key.registry)
      line(fmt::format("one of: {}; train --list {} explains them", fmt::join(list.registry.names(), ", "),
                       list.list));
  line(fmt::format("{}=VALUE on the command line, {} in a file", key.name, file));
  return text;
}

std::string key_reference_markdown() {
  const Config defaults;
  std::string text, section = "-";
  for (const Key& key : config_keys()) {
    const std::string own = section_of(key.name);
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
        if (list.section != "compress") continue;
        const Key& key = *find_key("compress." + option.name);
        text += fmt::format("| {} `{}` | `{}` | `{}` | {} | {} |\n", list.kind, name, key.name,
                            key_value(key, Config()), table_cell(kind_text(key)), option.help);
      }
  text += "\n| `compress.name` | fills, unless given |\n|---|---|\n";
  for (const RegisteredNames* registry :
       std::initializer_list<const RegisteredNames*>{&compressors(), &recipes()})
    for (const std::string& name : registry->names())
      if (const std::string settings = settings_text(name); !settings.empty())
        text += fmt::format("| `{}` | `{}` |\n", name, settings);
  return text;
}

std::vector<std::string> list_names() {
  std::vector<std::string> names;
  for (const NameList& list : name_lists()) names.push_back(list.list);
  names.insert(names.end(), {"configs", "keys", "keys-markdown", "methods-markdown"});
  return names;
}

std::string list_text(const std::string& name, const std::string& section, int width) {
  if (name == "keys") return key_help(width, section);
  if (name == "keys-markdown") return key_reference_markdown();
  if (name == "methods-markdown") return method_keys_markdown();
  if (name == "configs") return configs_text(width);
  for (const NameList& list : name_lists())
    if (list.list == name) return names_text(list, width);
  throw UserError(unknown_name_message("list", name, list_names()));
}

}  // namespace topknot

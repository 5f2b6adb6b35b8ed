#include "train/config/config.h"

#include <fmt/format.h>

#include <yaml-cpp/depthguard.h>
#include <yaml-cpp/eventhandler.h>
#include <yaml-cpp/yaml.h>

#include <algorithm>
#include <sstream>

#include "compress/sparse.h"
#include "nn/base/check.h"
#include "nn/base/file.h"
#include "nn/base/text.h"

namespace topknot {
namespace {

constexpr std::size_t kMostBytes = 1 << 20;  // of a file; the largest configuration is a few kB
constexpr std::size_t kShownProblems = 20;

// Keys of earlier versions, by the names that they have now.
const std::map<std::string, std::string> kRenamedKeys = {{"compress.code", "compress.codec"}};

// The key that was probably meant: the same last part in another section, else the nearest spelling.
std::string suggestion(const std::string& name) {
  std::vector<std::string> names, homes;
  for (const Key& key : config_keys()) {
    names.push_back(key.name);
    if (last_part(key.name) == last_part(name)) homes.push_back(key.name);
  }
  if (homes.size() == 1) return homes[0];
  if (is_config_section(name)) {
    if (find_key(name + ".name")) return name + ".name";
    // Within another section there are few: the first shows how they are written.
    const auto first = std::find_if(names.begin(), names.end(),
                                    [&](const std::string& key) { return key.starts_with(name + "."); });
    return section_of(name).empty() ? "" : *first;
  }
  if (const auto nearest = nearest_name(name, names); !nearest.empty()) return nearest;
  // A misspelt last part in the right section is nearer than the whole name shows.
  std::vector<std::string> parts;
  for (const auto& known : names)
    if (section_of(known) == section_of(name)) parts.push_back(last_part(known));
  const auto part = nearest_name(last_part(name), parts);
  return part.empty() ? "" : section_of(name) + "." + part;
}

// Finds the begins of documents. Throws if the parser reads nothing from one to the next, as at a comma, for
// which YAML::LoadAll() does not end.
class DocumentStarts final : public YAML::EventHandler {
 public:
  std::optional<YAML::Mark> first, second;

  void OnDocumentStart(const YAML::Mark& mark) override {
    if (first && first->pos == mark.pos) throw YAML::ParserException(mark, "unexpected character");
    (first ? second : first) = mark;
  }
  void OnDocumentEnd() override {}
  void OnNull(const YAML::Mark&, YAML::anchor_t) override {}
  void OnAlias(const YAML::Mark&, YAML::anchor_t) override {}
  void OnScalar(const YAML::Mark&, const std::string&, YAML::anchor_t, const std::string&) override {}
  void OnSequenceStart(const YAML::Mark&, const std::string&, YAML::anchor_t,
                       YAML::EmitterStyle::value) override {}
  void OnSequenceEnd() override {}
  void OnMapStart(const YAML::Mark&, const std::string&, YAML::anchor_t, YAML::EmitterStyle::value) override {
  }
  void OnMapEnd() override {}
};

std::optional<YAML::Mark> second_document(const std::string& text) {
  std::istringstream stream(text);
  YAML::Parser parser(stream);
  DocumentStarts starts;
  while (!starts.second && parser.HandleNextDocument(starts)) {
  }
  return starts.second;
}

// Whether a tab stands before the first word of line `number`, from 0.
bool has_tab_indentation(const std::string& text, int number) {
  std::istringstream lines(text);
  std::string line;
  for (int i = 0; i <= number; ++i)
    if (!std::getline(lines, line)) return false;
  return line.find('\t') < line.find_first_not_of(" \t");
}

class ConfigReader {
 public:
  explicit ConfigReader(LoadedConfig& loaded) : loaded_(loaded) {}

  void file(const std::string& path) {
    file_ = path;
    std::string text;
    try {
      text = read_text_file(path, kMostBytes, "; configs/ holds examples");
    } catch (const UserError& error) {
      return problem("", error.what());
    }
    if (text.find('\0') != std::string::npos || text.rfind("\xff\xfe", 0) == 0 ||
        text.rfind("\xfe\xff", 0) == 0)
      return problem("", path + ": not a YAML file: binary, or not UTF-8 text; configs/ holds examples");
    try {
      if (const auto second = second_document(text))
        return problem(
            "", place(*second) + ": a second YAML document begins ('---'); a configuration is one document");
      const YAML::Node root = YAML::Load(text);
      if (root.IsNull())
        return problem(
            "", path + ": holds no keys; leave the file out for the defaults; configs/ holds examples");
      if (!root.IsMap())
        return problem(
            "", path + ":1:1: the file must hold sections such as 'model:', not a plain value or a list");
      map(root, "");
    } catch (const YAML::DeepRecursion& e) {
      problem("", place(e.mark) + ": lists or sections lie within each other hundreds of levels deep");
    } catch (const YAML::Exception& e) {
      problem("", place(e.mark) + (e.mark.line >= 0 && has_tab_indentation(text, e.mark.line)
                                       ? ": the line begins with a tab; YAML is indented with spaces"
                                       : ": not readable as YAML: " + e.msg));
    }
  }

  void override_with(const std::string& text) {
    const auto equals = text.find('=');
    const std::string where = "command line";
    if (equals == std::string::npos || equals == 0)
      return problem("", "'" + text + "' (command line) must read section.key=value");
    const std::string name = text.substr(0, equals);
    const Key* key = find_key(name);
    if (!key) return unknown(name, where);
    const auto value = parse_raw(text.substr(equals + 1), is_list(*key));
    if (!value)
      return problem(name,
                     name + " (command line) has a bracket without its partner; lists read [1,2] or 1,2");
    set(*key, *value, where, Origin::command_line);
  }

 private:
  // A file's names and values may hold anything, and be of any length.
  void problem(const std::string& key, const std::string& text) {
    constexpr std::size_t kLongest = 1000, kEnd = 300;
    const std::string message = one_line(text, std::string::npos);
    const std::size_t size = message.size();
    loaded_.problems.push_back(
        {key, size <= kLongest ? message
                               : message.substr(0, kLongest - kEnd) + " ... " + message.substr(size - kEnd)});
  }

  std::string place(const YAML::Mark& mark) const {
    return mark.is_null() ? file_ : fmt::format("{}:{}:{}", file_, mark.line + 1, mark.column + 1);
  }

  void unknown(const std::string& name, const std::string& where) {
    if (const auto renamed = kRenamedKeys.find(name); renamed != kRenamedKeys.end())
      return problem(name, "'" + name + "' (" + where + ") is now called '" + renamed->second + "'");
    // Looking for the nearest name takes longer than everything else that is done with a key.
    const std::string meant = loaded_.problems.size() < kShownProblems ? suggestion(name) : "";
    const std::string what =
        is_config_section(name) ? "'" + name + "' is a section, not a key" : "unknown key '" + name + "'";
    problem(name, what + " (" + where + ")" + (meant.empty() ? "" : "; did you mean '" + meant + "'?") +
                      "; 'train --list keys' shows all keys");
  }

  void set(const Key& key, const RawValue& value, const std::string& where, Origin origin) {
    if (const auto wrong = set_key(key, value, loaded_.config); wrong.empty()) {
      loaded_.origins[key.name] = origin;
    } else {
      problem(key.name, key.name + " (" + where + ") " + (key.secret ? "is no plain text" : wrong));
    }
  }

  void map(const YAML::Node& node, const std::string& prefix) {
    for (const auto& entry : node) {
      const std::string where = place(entry.first.Mark());
      if (!entry.first.IsScalar()) {
        problem("", where + ": a key must be a plain word");
        continue;
      }
      const std::string name = prefix + entry.first.Scalar();
      if (entry.first.Scalar() == "<<") {
        problem(name, "'<<' (" + where + "): merge keys are not read; write the keys out where they belong");
        continue;
      }
      if (!seen_.insert(name).second) {
        problem(name, "'" + name + "' (" + where + ") stands twice in the file; keep one of them");
        continue;
      }
      value(name, entry.second, where);
    }
  }

  void value(const std::string& name, const YAML::Node& node, const std::string& where) {
    const Key* key = find_key(name);
    if (!key && node.IsMap()) {
      if (is_config_section(name)) return map(node, name + ".");
      const std::string meant = nearest_name(name, config_sections());
      return problem(name, "unknown section '" + name + "' (" + where + ")" +
                               (meant.empty() ? "" : "; did you mean '" + meant + "'?"));
    }
    if (!key && node.IsNull() && is_config_section(name))
      return;  // a section whose keys are all commented out
    if (!key) return unknown(name, where);
    if (node.IsMap())
      return problem(name, name + " (" + where + ") needs " + key_type(*key) + ", not a section");
    if (node.IsNull() && node.Scalar().empty())
      return problem(name, name + " (" + where + ") has no value; give one or remove the line");
    RawValue raw;
    raw.list = node.IsSequence();
    if (!raw.list) raw.items = {node.Scalar()};
    if (raw.list)
      for (const auto& item : node) {
        if (!item.IsScalar()) return problem(name, name + " (" + where + ") must be a list of plain values");
        raw.items.push_back(item.Scalar());
      }
    // One value stands for a list of one in a file too, as on the command line.
    if (is_list(*key)) raw.list = true;
    set(*key, raw, where, Origin::file);
  }

  LoadedConfig& loaded_;
  std::string file_;
  std::set<std::string> seen_;  // full names: 'model.name' and name under 'model' are the same key
};

// Whether a method's setting has no place in a run of this configuration: it is of an optimizer that another one
// has replaced, or a rate of gradients where none are sent.
bool out_of_place(const std::string& key, const Settings& settings, const Config& config) {
  const std::string which = key.substr(0, key.rfind('.')) + ".name";
  const bool of_another = std::any_of(settings.begin(), settings.end(), [&](const auto& setting) {
    return setting.first == which && key != which && setting.second != key_value(*find_key(which), config);
  });
  return of_another || (key == "compress.lr_inside" && makes_local_steps(config));
}

// Sets the method's settings in `to`, but for keys that were given; adds what it has set to `origins`.
void apply_settings(const std::string& method, const Config& config, Config& to,
                    std::map<std::string, Origin>& origins) {
  for (const auto& [name, value] : settings_of(method)) {
    if (origins.contains(name) || out_of_place(name, settings_of(method), config)) continue;
    const Key& key = *find_key(name);
    const std::string wrong = set_key(key, parse_raw(value, is_list(key)).value(), to);
    TOPKNOT_CHECK(wrong.empty(), name + " of " + method + " " + wrong);
    origins[name] = Origin::method;
  }
}

}  // namespace

std::vector<std::string> config_sections() {
  std::vector<std::string> names;
  for (const Key& key : config_keys())
    if (const auto section = section_of(key.name);
        !section.empty() && (names.empty() || names.back() != section))
      names.push_back(section);
  return names;
}

bool is_config_section(const std::string& name) {
  return std::any_of(config_keys().begin(), config_keys().end(),
                     [&](const Key& key) { return key.name.starts_with(name + "."); });
}

std::string origin_name(Origin origin, const Config& config) {
  if (origin == Origin::method) return config.named;
  static constexpr const char* kNames[] = {
      "default", "", "file", "command line", "measured at the start", "auto", "model.init_from"};
  return kNames[static_cast<std::size_t>(origin)];
}

LoadedConfig load_config(const std::string& file, const std::vector<std::string>& overrides) {
  LoadedConfig loaded;
  ConfigReader reader(loaded);
  if (!file.empty()) reader.file(file);
  for (const auto& text : overrides) reader.override_with(text);
  Config& config = loaded.config;
  config.named = config.compress.name;
  if (recipes().contains(config.named)) config.compress.name = recipes().find(config.named).method;
  apply_settings(config.named, config, config, loaded.origins);
  return loaded;
}

Config method_defaults(const Config& config) {
  Config defaults;
  std::map<std::string, Origin> origins;
  apply_settings(config.compress.name, config, defaults, origins);
  return defaults;
}

void throw_problems(const std::vector<Problem>& problems) {
  if (problems.empty()) return;
  if (problems.size() == 1) throw UserError(problems[0].message);
  std::string text = fmt::format("{} problems in the configuration:", problems.size());
  for (std::size_t i = 0; i < std::min(problems.size(), kShownProblems); ++i)
    text += "\n  " + problems[i].message;
  if (problems.size() > kShownProblems)
    text += fmt::format("\n  and {} more", problems.size() - kShownProblems);
  throw UserError(text);
}

}  // namespace topknot

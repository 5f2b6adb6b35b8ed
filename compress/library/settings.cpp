// The keys of topknot_create(), and topknot_methods().
#include <algorithm>
#include <charconv>
#include <limits>
#include <map>
#include <optional>
#include <set>
#include <system_error>

#include "compress/codec/codec.h"
#include "compress/library/handle.h"
#include "compress/memory/memory.h"
#include "compress/select/selector.h"
#include "compress/sparse.h"
#include "nn/base/check.h"
#include "nn/base/text.h"

namespace topknot {
namespace {

// The keys that no single method owns: train's, and those of a library.
std::vector<Option> library_options() {
  std::vector<Option> options = shared_options();
  for (Option& option : options) {
    if (option.name == "feedback_decay") option.standard = "auto";  // or a number
    if (option.name == "capacity") option.least = 0;                // none
    if (option.name == "min_numel")
      option.greatest = std::numeric_limits<int>::max();  // a tensor has no more
  }
  const std::vector<Option> more = {
      {"momentum", 0.0, "of memories that own the optimizer's momentum (dgc)", 0, 0.9999},
      {"nesterov", false, "Nesterov's form of that momentum"},
      {"seed", 0, "of random methods; the same on all ranks", 0, 2147483647},
      {.name = "scope",
       .standard = "tensor",
       .help = "each tensor is compressed for itself, or all as one vector",
       .choices = {"tensor", "model"}},
      {"threads", 0, "threads of a call; 0: OpenMP's own number", 0, 1024},
      {"device", "cpu",
       "where gradients, messages and averages lie: cpu, cuda (the GPU that the thread works on), cuda:N"},
      {"undo", false, "keep what topknot_undo() needs"},
  };
  options.insert(options.end(), more.begin(), more.end());
  return options;
}

// Options that the method and its pieces declare.
std::vector<Option> own_options(const CompressOptions& options) {
  std::vector<Option> all;
  std::set<std::string> names;
  const auto take = [&](const RegisteredNames& registry, const std::string& name) {
    if (!registry.contains(name)) return;
    for (const Option& option : registry.options(name))
      if (names.insert(option.name).second) all.push_back(option);
  };
  take(compressors(), options.name);
  if (const std::optional<SparsePreset> parts = pieces_of(options)) {
    take(selectors(), parts->select);
    take(memories(), parts->memory);
    take(index_codecs(), parts->codec);
    take(value_codecs(), parts->values);
  } else {
    take(memories(), options.memory);
  }
  return all;
}

// The option's value from a text. Throws UserError where it is none of its type, or outside its range.
OptionValue parsed(const Option& option, const std::string& text) {
  const auto refuse = [&](const std::string& problem) {
    throw UserError("key '" + option.name + "' " + problem);
  };
  OptionValue value = option.standard;
  const char *begin = text.data(), *end = begin + text.size();
  const auto number = [&](auto& to, const char* kind) {
    const auto [stop, error] = std::from_chars(begin, end, to);
    if (error == std::errc::result_out_of_range && stop == end)
      refuse("must be " + range_text(option) + ", not " + text);
    if (error != std::errc{} || stop != end) refuse("must be " + std::string(kind) + ", not '" + text + "'");
  };
  if (bool* flag = std::get_if<bool>(&value)) {
    *flag = text == "true" || text == "1";
    if (!*flag && text != "false" && text != "0") refuse("must be true or false, not '" + text + "'");
  } else if (int* integer = std::get_if<int>(&value)) {
    number(*integer, "a whole number");
  } else if (std::int64_t* wide = std::get_if<std::int64_t>(&value)) {
    number(*wide, "a whole number");
  } else if (double* real = std::get_if<double>(&value)) {
    number(*real, "a number");
  } else if (auto* optional = std::get_if<std::optional<double>>(&value)) {
    if (text != "auto") number(optional->emplace(), "a number or auto");
  } else {
    value = text;
  }
  if (const std::string problem = option_problem(option, value); !problem.empty()) refuse(problem);
  return value;
}

std::string quoted(const std::string& text) {
  std::string json = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') json += '\\';
    json += c;
  }
  return json + '"';
}

std::string list_of(const auto& items, const auto& json_of) {
  std::string json;
  for (const auto& item : items) json += (json.empty() ? "[" : ",") + json_of(item);
  return json.empty() ? "[]" : json + "]";
}

using Fields = std::vector<std::pair<std::string, std::string>>;  // names, JSON

std::string object_of(const Fields& fields) {
  std::string json;
  for (const auto& [name, value] : fields) json += (json.empty() ? "{" : ",") + quoted(name) + ":" + value;
  return json.empty() ? "{}" : json + "}";
}

std::string names_of(const RegisteredNames& registry) {
  return list_of(registry.names(), quoted);
}

std::string option_json(const Option& option) {
  std::string value;
  if (const bool* flag = std::get_if<bool>(&option.standard)) value = *flag ? "true" : "false";
  if (const int* integer = std::get_if<int>(&option.standard)) value = std::to_string(*integer);
  if (const auto* wide = std::get_if<std::int64_t>(&option.standard)) value = std::to_string(*wide);
  if (const double* real = std::get_if<double>(&option.standard)) value = format_number(*real);
  if (const auto* text = std::get_if<std::string>(&option.standard)) value = quoted(*text);
  if (const auto* optional = std::get_if<std::optional<double>>(&option.standard))
    value = *optional ? format_number(**optional) : "\"auto\"";
  Fields fields = {{"name", quoted(option.name)}, {"default", value}, {"help", quoted(option.help)}};
  if (option.least > -1e299) fields.emplace_back("least", format_number(option.least));
  if (option.greatest < 1e299) fields.emplace_back("greatest", format_number(option.greatest));
  if (!option.choices.empty()) fields.emplace_back("choices", list_of(option.choices, quoted));
  return object_of(fields);
}

std::string settings_json(const std::string& name) {
  Fields fields;
  for (const auto& [key, value] : settings_of(name)) fields.emplace_back(key, quoted(value));
  return object_of(fields);
}

}  // namespace

LibrarySettings library_settings(const std::string& method, std::span<const std::string> keys) {
  const std::vector<Option> shared = library_options();
  std::map<std::string, std::string> texts;
  for (const std::string& key : keys) {
    const std::size_t equals = key.find('=');
    if (equals == std::string::npos)
      throw UserError("'" + key + "' is no key: write name=value, as in density=0.001");
    if (!texts.emplace(key.substr(0, equals), key.substr(equals + 1)).second)
      throw UserError("key '" + key.substr(0, equals) + "' is given twice");
  }
  LibrarySettings settings;
  const auto carry = [&](const std::string& name, const std::string& value) {
    static const std::set<std::string> free = {"density", "threads", "undo", "device", "capacity", "codec"};
    if (free.count(name) == 0) settings.carried += (settings.carried.empty() ? "" : " ") + name + "=" + value;
  };
  std::map<std::string, OptionValue> given;
  for (const Option& option : shared) {
    const auto text = texts.find(option.name);
    given[option.name] = text == texts.end() ? option.standard : parsed(option, text->second);
  }
  // lr_inside is the caller's, who gives the rate.
  for (const auto& [name, value] : settings_of(method))
    for (const Option& option : shared) {
      if (name != "compress." + option.name || option.name == "lr_inside" || texts.count(option.name))
        continue;
      OptionValue& filled = given[option.name] = parsed(option, value);
      if (filled != option.standard) carry(option.name, value);
    }
  const auto text = [&](const char* name) { return std::get<std::string>(given.at(name)); };
  const auto number = [&](const char* name) { return std::get<double>(given.at(name)); };
  const auto whole = [&](const char* name) { return std::get<int>(given.at(name)); };
  const auto flag = [&](const char* name) { return std::get<bool>(given.at(name)); };

  CompressOptions& options = settings.options;
  options.name = method;
  compressors().find(method);  // says what there is, and what was meant
  options.select = text("select"), options.memory = text("memory");
  options.codec = text("codec"), options.values = text("values");
  options.transform = text("transform"), options.aggregate = text("aggregate");
  if (text("feedback_decay") != "auto")
    options.feedback_decay =
        std::get<double>(parsed(shared_option("feedback_decay"), text("feedback_decay")));
  options.capacity = number("capacity"), options.lr_inside = flag("lr_inside");
  options.momentum = number("momentum"), options.nesterov = flag("nesterov");
  options.seed = static_cast<std::uint64_t>(whole("seed"));
  settings.density = number("density"), settings.dense_1d = flag("dense_1d");
  settings.min_numel = whole("min_numel"), settings.whole = text("scope") == "model";
  settings.threads = whole("threads"), settings.undo = flag("undo"), settings.device = text("device");

  const std::vector<Option> own = own_options(options);
  std::vector<std::string> known;
  for (const Option& option : shared) known.push_back(option.name);
  for (const Option& option : own) known.push_back(option.name);
  for (const auto& [name, value] : texts) {
    if (std::find(known.begin(), known.end(), name) == known.end())
      throw UserError(unknown_name_message("key of method '" + method + "'", name, known));
    for (const Option& option : own)
      if (option.name == name) options.set(name, parsed(option, value));
    carry(name, value);
  }
  const std::optional<SparsePreset> parts = pieces_of(options);
  if ((options.momentum > 0 || options.nesterov) &&
      !(parts && memories().find(parts->memory).traits.owns_momentum))
    throw UserError(std::string(options.momentum > 0 ? "key 'momentum'" : "key 'nesterov'") + ": method '" +
                    method + "' has no momentum of its own; leave it to the optimizer");
  return settings;
}

std::string methods_json() {
  Fields methods, made;
  for (const std::string& name : compressors().names()) {
    CompressOptions options;
    options.name = name;
    methods.emplace_back(name, object_of({{"help", quoted(compressors().help(name))},
                                          {"options", list_of(own_options(options), option_json)},
                                          {"settings", settings_json(name)}}));
  }
  for (const std::string& name : recipes().names())
    made.emplace_back(name, object_of({{"help", quoted(recipes().help(name))},
                                       {"method", quoted(recipes().find(name).method)},
                                       {"settings", settings_json(name)}}));
  const Fields pieces = {{"select", names_of(selectors())},
                         {"memory", names_of(memories())},
                         {"codec", names_of(index_codecs())},
                         {"values", names_of(value_codecs())}};
  return object_of({{"methods", object_of(methods)},
                    {"recipes", object_of(made)},
                    {"keys", list_of(library_options(), option_json)},
                    {"pieces", object_of(pieces)}});
}

}  // namespace topknot

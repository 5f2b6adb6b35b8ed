#include "train/config/config.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <iterator>
#include <limits>
#include <type_traits>

#include "nn/base/text.h"

namespace topknot {
namespace {

template <class T>
std::optional<T> parse_number(const std::string& text) {
  T value{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc{} || end != text.data() + text.size()) return std::nullopt;
  if constexpr (std::is_floating_point_v<T>)
    if (!std::isfinite(value)) return std::nullopt;
  return value;
}

std::string trim(const std::string& text) {
  const auto first = text.find_first_not_of(" \t");
  return first == std::string::npos ? "" : text.substr(first, text.find_last_not_of(" \t") - first + 1);
}

// A number as such, but beyond what T holds: the range that it may have; "" for anything else.
template <class T>
std::string overflow(const Key& key, const std::string& text) {
  T value{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc::result_out_of_range || end != text.data() + text.size()) return "";
  if constexpr (std::is_integral_v<T>) {
    // The limits are printed as integers: the greatest are no doubles.
    if (key.greatest > static_cast<double>(std::numeric_limits<T>::max()))
      return "must be " +
             format_number(std::max(key.least, static_cast<double>(std::numeric_limits<T>::min()))) + " to " +
             std::to_string(std::numeric_limits<T>::max()) + ", not " + text;
  }
  return "must be " + range_text(key) + ", not " + text;
}

// Training computes in float32, whose least normal number this is: what is nearer to 0 would vanish.
bool vanishes(double value) {
  return value != 0 && std::fabs(value) < static_cast<double>(std::numeric_limits<float>::min());
}

template <class T>
std::string set_number(const Key& key, const std::string& text, T& target) {
  const auto value = parse_number<T>(text);
  if (std::is_floating_point_v<T> && value && vanishes(static_cast<double>(*value)))
    return "is too close to 0: " + text + "; give " + (key.above || key.least > 0 ? "" : "0, or ") +
           "at least 1.2e-38";
  if (!value) {
    if (auto wrong = overflow<T>(key, text); !wrong.empty()) return wrong;
    const auto real = parse_number<double>(text);
    if (real && *real < key.least) return number_problem(key, *real);
    return "needs " + key_type(key) + ", not '" + text + "'";
  }
  if (const auto wrong = number_problem(key, static_cast<double>(*value)); !wrong.empty()) return wrong;
  target = *value;
  return "";
}

// "", or why a text could not stand in a YAML file.
std::string check_characters(const std::string& text) {
  if (printable(text, text.size()) == text && text.find_first_of("\r\v\f") == std::string::npos) return "";
  return "holds characters that are no text: '" + printable(text, 200) + "'";
}

std::string set_text(const Key& key, const std::string& text, std::string& target) {
  if (auto wrong = check_characters(text); !wrong.empty()) return wrong;
  bool suffixed = false;  // as "size:BYTES"
  for (const auto& choice : key.choices) {
    const auto colon = choice.find(':');
    if (colon == std::string::npos || text.compare(0, colon + 1, choice, 0, colon + 1) != 0) continue;
    const auto suffix = parse_number<double>(text.substr(colon + 1));
    if (!suffix || *suffix <= 0 || vanishes(*suffix))
      return "needs a number > 0 for " + choice.substr(colon + 1) + " in " + choice + ", not '" + text + "'";
    suffixed = true;
  }
  if (!suffixed)
    if (auto wrong = choice_problem(key, text); !wrong.empty()) return wrong;
  target = text;
  return "";
}

template <class T>
std::string set_value(const Key& key, const RawValue& value, T& target) {
  if constexpr (std::is_same_v<T, bool>) {
    const std::string& text = value.items[0];
    if (text != "true" && text != "false") return "needs true or false, not '" + text + "'";
    target = text == "true";
  } else if constexpr (std::is_same_v<T, std::string>) {
    return set_text(key, value.items[0], target);
  } else if constexpr (std::is_same_v<T, std::vector<std::string>>) {
    for (const std::string& item : value.items)
      if (auto wrong = check_characters(item); !wrong.empty()) return wrong;
    target = value.items;
  } else if constexpr (requires { target.size(); }) {
    T entries;
    for (const auto& item : value.items) {
      typename T::value_type entry{};
      if (!parse_number<typename T::value_type>(item))
        return "needs " + key_type(key) + ", such as [1, 2]; '" + item + "' does not fit";
      if (auto wrong = set_number(key, item, entry); !wrong.empty()) return "every entry " + wrong;
      entries.push_back(entry);
    }
    target = std::move(entries);
  } else if constexpr (std::is_integral_v<T>) {
    return set_number(key, value.items[0], target);
  } else if (!key.none_word.empty() && value.items[0] == key.none_word) {
    target = T();
  } else {
    double number = 0;
    if (auto wrong = set_number(key, value.items[0], number); !wrong.empty()) return wrong;
    target = number;
  }
  return "";
}

template <class T>
std::string value_text(const Key& key, const T& value) {
  if constexpr (std::is_same_v<T, bool>) {
    return value ? "true" : "false";
  } else if constexpr (std::is_same_v<T, std::string>) {
    return yaml_string(value);
  } else if constexpr (std::is_same_v<T, std::optional<double>>) {
    return value ? format_number(*value) : key.none_word;
  } else if constexpr (std::is_same_v<T, double>) {
    return value == 0 && !key.none_word.empty() ? key.none_word : format_number(value);
  } else if constexpr (requires { value.size(); }) {
    std::string text;
    for (const auto& entry : value) {
      if (!text.empty()) text += ", ";
      if constexpr (std::is_same_v<T, std::vector<std::string>>)
        text += yaml_string(entry);
      else
        text += format_number(static_cast<double>(entry));
    }
    return "[" + text + "]";
  } else {
    return std::to_string(value);
  }
}

}  // namespace

std::string RawValue::shown() const {
  std::string text;
  for (std::size_t i = 0; i < items.size(); ++i) text += (i ? ", " : "") + items[i];
  return list ? "[" + text + "]" : text;
}

std::optional<RawValue> parse_raw(const std::string& text, bool list_key) {
  RawValue value;
  std::string inside = trim(text);
  const bool opens = !inside.empty() && inside.front() == '[';
  const bool closes = !inside.empty() && inside.back() == ']';
  if (opens && closes) {
    inside = inside.substr(1, inside.size() - 2);
    value.list = true;
  } else if (list_key && (opens || closes)) {
    return std::nullopt;
  }
  if (!value.list && !list_key) {
    value.items = {text};
    return value;
  }
  value.list = true;
  if (trim(inside).empty()) return value;
  for (std::size_t begin = 0; begin <= inside.size();) {
    const auto comma = std::min(inside.find(',', begin), inside.size());
    value.items.push_back(trim(inside.substr(begin, comma - begin)));
    begin = comma + 1;
  }
  return value;
}

bool is_list(const Key& key) {
  return key_type(key).starts_with("a list");
}

std::string set_key(const Key& key, const RawValue& value, Config& config) {
  if (value.list && !is_list(key)) return "needs " + key_type(key) + ", not the list " + value.shown();
  if (!value.list && value.items.size() != 1) return "has no value";
  return std::visit([&](auto* target) { return set_value(key, value, *target); }, key.ref(config));
}

std::string yaml_string(const std::string& text) {
  const bool plain = !text.empty() &&
                     text.find_first_not_of(
                         "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
                         "0123456789_./-") == std::string::npos &&
                     text[0] != '-' && text != "~" && text != "null";
  if (plain) return text;
  std::string quoted = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') quoted += '\\';
    quoted += c == '\n' ? "\\n" : c == '\t' ? "\\t" : std::string(1, c);
  }
  return quoted + "\"";
}

std::string key_type(const Key& key) {
  static constexpr const char* kTypes[] = {
      "true or false", "an integer", "an integer",         "an integer",        "a number",
      "text",          "a number",   "a list of integers", "a list of numbers", "a list of texts"};
  static_assert(std::size(kTypes) == std::variant_size_v<KeyRef>);
  Config config;
  const std::string type = kTypes[key.ref(config).index()];
  if (type == "text" && !key.choices.empty()) return "choice";
  return type == "a number" && !key.none_word.empty() ? "a number or '" + key.none_word + "'" : type;
}

std::string key_value(const Key& key, const Config& config) {
  // KeyRef points into a Config that may be written; a copy keeps this one const.
  Config copy = config;
  const std::string value = std::visit([&](auto* of) { return value_text(key, *of); }, key.ref(copy));
  return key.secret && value != kEmptyText ? "given" : value;
}

std::string without_secret(const std::string& word) {
  const std::size_t begin = word.find_first_not_of('-'), equals = word.find('=');
  if (begin == std::string::npos || equals == std::string::npos || equals < begin) return word;
  const Key* key = find_key(word.substr(begin, equals - begin));
  return key && key->secret ? word.substr(0, equals + 1) + "(not shown)" : word;
}

std::string dump_yaml(const Config& config, bool only_non_default,
                      const std::map<std::string, Origin>& origins, const std::set<std::string>& without) {
  const Config defaults = method_defaults(config);
  std::string text, section;
  for (const Key& key : config_keys()) {
    const std::string value = key_value(key, config);
    if ((only_non_default && value == key_value(key, defaults)) || without.count(key.name)) continue;
    const std::string own = section_of(key.name);
    if (own != section) text += "\n" + own + ":\n";
    section = own;
    text += own.empty() ? key.name : "  " + key.name.substr(own.size() + 1);
    const bool hidden = key.secret && value != kEmptyText;
    text += ": " + (hidden ? kEmptyText : value);
    if (const auto it = origins.find(key.name); it != origins.end() && it->second != Origin::default_value)
      text +=
          "  # " + origin_name(it->second, config) +
          (key.name == "compress.name" && config.named != config.compress.name ? ": " + config.named : "") +
          (hidden ? "; the value is not written, give it again where the ranks need it" : "");
    text += "\n";
  }
  return text;
}

}  // namespace topknot

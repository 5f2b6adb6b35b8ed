#pragma once
// Names to factories, and the options that whatever is registered declares for itself. A file registers what
// it defines with one static object; registries are filled before main and only read afterwards.

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "nn/base/check.h"
#include "nn/base/text.h"

namespace topknot {

// An option's name, type, default, range and help stand in the file of what has it. Configuration keys,
// --help, validation and the tables of docs/ are made from these declarations (Registry::options()); values
// reach a factory as OptionValues. Keys that nothing registered owns are declared alike, in
// train/config/config_keys.cpp. An optional number that is not given is written "auto". Compressors, which a
// library makes from texts, have no lists.
using OptionValue = std::variant<bool, int, std::int64_t, double, std::string, std::optional<double>,
                                 std::vector<int>, std::vector<double>>;

struct Option {
  std::string name;           // "mu"; as a key, after the section of its registry: "compress.mu"
  OptionValue standard = {};  // the default; its alternative is the option's type
  std::string help;           // one line
  double least = -1e300, greatest = 1e300;  // of numbers, those of a list too
  bool above = false;                       // least itself is excluded
  std::vector<std::string> choices = {};    // of text; empty: any text

  bool operator==(const Option&) const = default;
};

// "" if `value` fits, else what is wrong: "must be above 0, at most 100, not -1". An int fits any number, and a number
// an optional one.
std::string option_problem(const Option& option, const OptionValue& value);
// The same of a number (NaN fits nowhere), and of a text.
std::string number_problem(const Option& option, double number);
std::string choice_problem(const Option& option, const std::string& text);

// "above 0, at most 100", "1 to 1,000,000", "A | B"; "" if everything fits.
std::string range_text(const Option& option);

// The values given for the options of one section; the others have their defaults.
class OptionValues {
 public:
  explicit OptionValues(std::string section) : section_(std::move(section)) {}

  void set(const std::string& name, OptionValue value) { given_[name] = std::move(value); }
  // T is the type of option.standard. Throws UserError if the given value does not fit.
  template <class T>
  T get(const Option& option) const {
    return std::get<T>(checked(option));
  }
  // The value given for this name, in the type it was given in. Throws if none was.
  template <class T>
  T given(const std::string& name) const {
    return std::get<T>(given_.at(name));
  }
  // The value, to be read or written in place; it is the default if none was given.
  OptionValue& at(const Option& option) { return given_.emplace(option.name, option.standard).first->second; }

 private:
  OptionValue checked(const Option& option) const;

  std::string section_;
  std::map<std::string, OptionValue> given_;
};

// A factory: makes an Implementation of the arguments.
template <class Interface, class Implementation, class... Arguments>
std::unique_ptr<Interface> make_as(Arguments... arguments) {
  return std::make_unique<Implementation>(arguments...);
}

// The part of a registry that does not depend on what it makes.
class RegisteredNames {
 public:
  // `kind` names what is registered in messages: "model", "compressor".
  explicit RegisteredNames(std::string kind) : kind_(std::move(kind)) {}

  bool contains(const std::string& name) const { return descriptions_.count(name) != 0; }
  std::vector<std::string> names() const {  // sorted
    std::vector<std::string> result;
    for (const auto& [name, description] : descriptions_) result.push_back(name);
    return result;
  }
  const std::string& help(const std::string& name) const { return descriptions_.at(name).help; }
  // Options that the entry declares for itself.
  const std::vector<Option>& options(const std::string& name) const { return descriptions_.at(name).options; }

 protected:
  struct Description {
    std::string help;
    std::vector<Option> options;
  };
  std::string kind_;
  std::map<std::string, Description> descriptions_;
};

template <class Factory>
class Registry : public RegisteredNames {
 public:
  using RegisteredNames::RegisteredNames;

  // Returns true, for the static object.
  bool add(const std::string& name, const std::string& help, Factory factory,
           std::vector<Option> options = {}) {
    TOPKNOT_CHECK(factories_.emplace(name, std::move(factory)).second,
                  kind_ + " '" + name + "' is registered twice");
    descriptions_[name] = {help, std::move(options)};
    return true;
  }
  // Throws UserError with a suggestion if the name is unknown.
  const Factory& find(const std::string& name) const {
    const auto it = factories_.find(name);
    if (it == factories_.end()) throw UserError(unknown_name_message(kind_, name, names()));
    return it->second;
  }

 private:
  std::map<std::string, Factory> factories_;
};

}  // namespace topknot

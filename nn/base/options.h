#pragma once
// Options that whatever is registered declares for itself: name, type, default, range and help stand in its own
// file. Configuration keys, --help, validation and the tables of docs/ are made from these declarations
// (Registry::options()); values reach a factory as OptionValues. Keys that no single method owns are declared alike, in
// train/config/config_keys.cpp.

#include <map>
#include <string>
#include <variant>
#include <vector>

#include "nn/base/check.h"

namespace topknot {

using OptionValue = std::variant<bool, int, double, std::string>;

struct Option {
  std::string name;           // "mu"; as a key, behind the section of its registry: "compress.mu"
  OptionValue standard = {};  // the default; its alternative is the option's type
  std::string help;           // one line
  double least = -1e300, greatest = 1e300;  // of numbers
  bool above = false;                       // least itself is excluded
  std::vector<std::string> choices = {};    // of text; empty: any text

  bool operator==(const Option&) const = default;
};

// "" where `value` fits, else what is wrong: "must be above 0, at most 1e9, not -1". An int fits a number.
std::string option_problem(const Option& option, const OptionValue& value);
// The same of a number (NaN fits nowhere), and of a text.
std::string number_problem(const Option& option, double number);
std::string choice_problem(const Option& option, const std::string& text);

// "above 0, at most 1e9", "1 to 100", "A | B"; "" where everything fits.
std::string range_text(const Option& option);

// The values given for the options of one section; the others have their defaults.
class OptionValues {
 public:
  explicit OptionValues(std::string section) : section_(std::move(section)) {}

  void set(const std::string& name, OptionValue value) { given_[name] = std::move(value); }
  // T is the type of option.standard. Throws UserError where the given value does not fit.
  template <class T>
  T get(const Option& option) const {
    return std::get<T>(checked(option));
  }
  // What was given for this name, in the type it was given in. Throws where nothing was.
  template <class T>
  T given(const std::string& name) const {
    return std::get<T>(given_.at(name));
  }
  // The value, to be read or written in place; it is the default where none was given.
  OptionValue& at(const Option& option) { return given_.emplace(option.name, option.standard).first->second; }

 private:
  OptionValue checked(const Option& option) const;

  std::string section_;
  std::map<std::string, OptionValue> given_;
};

}  // namespace topknot

#include "nn/base/options.h"

#include <algorithm>

#include "nn/base/text.h"

namespace topknot {
namespace {

// The value in the option's own type, or a value of the wrong type as it is.
OptionValue converted(const Option& option, const OptionValue& value) {
  const int* integer = std::get_if<int>(&value);
  if (integer && std::holds_alternative<double>(option.standard)) return static_cast<double>(*integer);
  return value;
}

}  // namespace

std::string range_text(double least, double greatest, bool above, const std::vector<std::string>& choices) {
  std::string text;
  for (const std::string& choice : choices) text += (text.empty() ? "" : " | ") + choice;
  if (!choices.empty()) return text;
  constexpr double kOpen = 1e299;
  const bool low = least > -kOpen, high = greatest < kOpen;
  if (low && high)
    return (above ? "above " : "") + format_number(least) + (above ? ", at most " : " to ") +
           format_number(greatest);
  if (low) return (above ? "above " : "at least ") + format_number(least);
  return high ? "at most " + format_number(greatest) : "";
}

std::string option_problem(const Option& option, const OptionValue& given) {
  const OptionValue value = converted(option, given);
  if (value.index() != option.standard.index()) return "has a value of another type";
  const std::string must =
      "must be " + range_text(option.least, option.greatest, option.above, option.choices);
  if (const auto* text = std::get_if<std::string>(&value)) {
    const auto& choices = option.choices;
    if (choices.empty() || std::find(choices.begin(), choices.end(), *text) != choices.end()) return "";
    const std::string meant = nearest_name(*text, choices);
    return must + ", not '" + *text + "'" + (meant.empty() ? "" : "; did you mean '" + meant + "'?");
  }
  if (std::holds_alternative<bool>(value)) return "";
  const int* integer = std::get_if<int>(&value);
  const double number = integer ? static_cast<double>(*integer) : std::get<double>(value);
  // NaN fits nowhere.
  const bool fits =
      number <= option.greatest && (option.above ? number > option.least : number >= option.least);
  return fits ? "" : must + ", not " + format_number(number);
}

OptionValue OptionValues::checked(const Option& option) const {
  const auto found = given_.find(option.name);
  if (found == given_.end()) return option.standard;
  if (const std::string problem = option_problem(option, found->second); !problem.empty())
    throw UserError(section_ + "." + option.name + " " + problem);
  return converted(option, found->second);
}

}  // namespace topknot

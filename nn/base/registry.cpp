#include "nn/base/registry.h"

#include <algorithm>
#include <cmath>
#include <type_traits>

namespace topknot {
namespace {

// The value in the option's own type, or a value of the wrong type as it is.
OptionValue converted(const Option& option, const OptionValue& value) {
  const int* integer = std::get_if<int>(&value);
  if (integer && std::holds_alternative<std::int64_t>(option.standard)) return std::int64_t{*integer};
  const bool optional = std::holds_alternative<std::optional<double>>(option.standard);
  if (integer && (optional || std::holds_alternative<double>(option.standard)))
    return converted(option, static_cast<double>(*integer));
  const double* number = std::get_if<double>(&value);
  if (number && optional) return std::optional(*number);
  return value;
}

// The shortest text, but for a whole number of six to sixteen digits all of them in groups: 1,000,000 in place of 1e6.
std::string readable(double value) {
  if (std::abs(value) < 1e5 || std::abs(value) >= 1e16 || value != std::floor(value))
    return format_number(value);
  std::string text = std::to_string(static_cast<long long>(value));
  for (int at = static_cast<int>(text.size()) - 3; at > (value < 0 ? 1 : 0); at -= 3)
    text.insert(static_cast<std::size_t>(at), ",");
  return text;
}

}  // namespace

std::string range_text(const Option& option) {
  std::string text;
  for (const std::string& choice : option.choices) text += (text.empty() ? "" : " | ") + choice;
  if (!option.choices.empty()) return text;
  constexpr double kOpen = 1e299;
  const bool low = option.least > -kOpen, high = option.greatest < kOpen;
  const std::string least = readable(option.least), greatest = readable(option.greatest);
  if (low && high)
    return option.above ? "above " + least + ", at most " + greatest : least + " to " + greatest;
  if (low) return (option.above ? "above " : "at least ") + least;
  return high ? "at most " + greatest : "";
}

std::string number_problem(const Option& option, double number) {
  const bool fits =
      number <= option.greatest && (option.above ? number > option.least : number >= option.least);
  return fits ? "" : "must be " + range_text(option) + ", not " + readable(number);
}

std::string choice_problem(const Option& option, const std::string& text) {
  const auto& choices = option.choices;
  if (choices.empty() || std::find(choices.begin(), choices.end(), text) != choices.end()) return "";
  const std::string meant = nearest_name(text, choices);
  return "must be " + range_text(option) + ", not '" + text + "'" +
         (meant.empty() ? "" : "; did you mean '" + meant + "'?");
}

std::string option_problem(const Option& option, const OptionValue& given) {
  const OptionValue value = converted(option, given);
  if (value.index() != option.standard.index()) return "has a value of another type";
  return std::visit(
      [&]<class T>(const T& it) -> std::string {
        if constexpr (std::is_same_v<T, std::string>) {
          return choice_problem(option, it);
        } else if constexpr (std::is_same_v<T, std::optional<double>>) {
          return it ? number_problem(option, *it) : "";
        } else if constexpr (std::is_arithmetic_v<T>) {
          return std::is_same_v<T, bool> ? "" : number_problem(option, static_cast<double>(it));
        } else {
          for (const auto entry : it)
            if (const std::string problem = number_problem(option, entry); !problem.empty())
              return "every entry " + problem;
          return "";
        }
      },
      value);
}

OptionValue OptionValues::checked(const Option& option) const {
  const auto found = given_.find(option.name);
  if (found == given_.end()) return option.standard;
  if (const std::string problem = option_problem(option, found->second); !problem.empty())
    throw UserError(section_ + "." + option.name + " " + problem);
  return converted(option, found->second);
}

}  // namespace topknot

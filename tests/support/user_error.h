#pragma once
// Checks on a user's error messages, the same under Catch2 2 and 3.

#include <initializer_list>
#include <string>

#include "nn/core/base/check.h"
#include "tests/support/catch.h"

namespace topknot {

// What the UserError says that `call` throws; "" where it throws none.
template <class Call>
std::string user_error_message(Call call) {
  try {
    call();
  } catch (const UserError& error) {
    return error.what();
  }
  return "";
}

// True where `call` throws a UserError whose text holds every one of `parts`.
template <class Call>
bool user_error(Call call, std::initializer_list<std::string> parts) {
  const std::string text = user_error_message(call);
  UNSCOPED_INFO("message: " << (text.empty() ? "no error" : text));
  for (const auto& part : parts)
    if (text.find(part) == std::string::npos) return false;
  return !text.empty();
}

}  // namespace topknot

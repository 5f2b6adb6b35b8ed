#pragma once
// Checks on a user's error messages, the same under Catch2 2 and 3.

#include <initializer_list>
#include <string>

#include "nn/core/check.h"
#include "tests/support/catch.h"

namespace topknot {

// True where `call` throws a UserError whose text holds every one of `parts`.
template <class Call>
bool user_error(Call call, std::initializer_list<std::string> parts) {
  try {
    call();
  } catch (const UserError& error) {
    const std::string text = error.what();
    UNSCOPED_INFO("message: " << text);
    for (const auto& part : parts)
      if (text.find(part) == std::string::npos) return false;
    return true;
  }
  UNSCOPED_INFO("no error");
  return false;
}

}  // namespace topknot

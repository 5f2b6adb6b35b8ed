#pragma once
// Checks on errors' messages, the same under Catch2 2 and 3.

#include <exception>
#include <initializer_list>

#include "nn/base/check.h"
#include "tests/support/catch.h"

namespace topknot {

// What `call` throws, of class Kind, says; "" where it throws nothing.
template <class Kind = std::exception, class Call>
std::string error_text(Call call) {
  try {
    call();
  } catch (const Kind& error) {
    return error.what();
  }
  return "";
}

// True where the text is there and holds every one of `parts`.
inline bool says(const std::string& text, std::initializer_list<std::string> parts) {
  UNSCOPED_INFO("message: " << (text.empty() ? "no error" : text));
  for (const auto& part : parts)
    if (text.find(part) == std::string::npos) {
      UNSCOPED_INFO("without: " << part);
      return false;
    }
  return !text.empty();
}

// True where `call` throws a UserError whose text holds every one of `parts`.
template <class Call>
bool user_error(Call call, std::initializer_list<std::string> parts) {
  return says(error_text<UserError>(call), parts);
}

}  // namespace topknot

// Checks that a statement throws an exception, or a UserError, whose text holds every one of these parts.
#define CHECK_ERROR(statement, ...) CHECK(says(error_text([&] { statement; }), {__VA_ARGS__}))
#define CHECK_USER_ERROR(statement, ...) CHECK(user_error([&] { statement; }, {__VA_ARGS__}))

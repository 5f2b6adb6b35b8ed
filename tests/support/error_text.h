#pragma once
// Checks on any error's message, the same under Catch2 2 and 3.

#include <exception>
#include <initializer_list>
#include <string>

#include "tests/support/catch.h"

namespace topknot {

// What `call` throws says; "" where it throws nothing.
template <class Call>
std::string error_text(Call call) {
  try {
    call();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

// True where the text is there and holds every one of `parts`.
inline bool says(const std::string& text, std::initializer_list<std::string> parts) {
  UNSCOPED_INFO("message: " << (text.empty() ? "no error" : text));
  for (const auto& part : parts)
    if (text.find(part) == std::string::npos) return false;
  return !text.empty();
}

}  // namespace topknot

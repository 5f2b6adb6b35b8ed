#pragma once
// Errors and checks. Library code throws; only a program's main turns an exception into an exit code.
//
// UserError: bad input (a key, a file, a flag). Its text is one complete message for the user: what, where,
// what to do. Error: a broken invariant of ours or of a library, with the condition and source line.

#include <stdexcept>
#include <string>

namespace topknot {

class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

class UserError : public Error {
 public:
  using Error::Error;
};

// A call of a GPU's libraries failed, or its memory is used up.
class DeviceError : public Error {
 public:
  using Error::Error;
};

[[noreturn]] inline void fail_check(const char* condition, const std::string& message, const char* file,
                                    int line) {
  throw Error(message + " [failed: " + condition + " at " + file + ":" + std::to_string(line) + "]");
}

}  // namespace topknot

// The message is built only when the condition is false.
#define TOPKNOT_CHECK(condition, message) \
  (static_cast<bool>(condition) ? void(0) : ::topknot::fail_check(#condition, (message), __FILE__, __LINE__))

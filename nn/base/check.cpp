#include "nn/base/check.h"

#include <fmt/format.h>

namespace topknot {

void fail_check(const char* condition, const std::string& message, const char* file, int line) {
  throw Error(fmt::format("{} [failed: {} at {}:{}]", message, condition, file, line));
}

}  // namespace topknot

#include "nn/core/base/check.h"

namespace topknot {

void fail_check(const char* condition, const std::string& message, const char* file, int line) {
  throw Error(message + " [failed: " + condition + " at " + file + ":" + std::to_string(line) + "]");
}

}  // namespace topknot

#include "nn/core/base/text.h"

#include <cstdio>

namespace topknot {

std::string short_text(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%g", value);
  return text;
}

}  // namespace topknot

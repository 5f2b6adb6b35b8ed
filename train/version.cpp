#include "train/version.h"

namespace topknot {

std::string program_version() {
  return std::string("topknot ") + program_number() + " (" + program_revision() + ")";
}

}  // namespace topknot

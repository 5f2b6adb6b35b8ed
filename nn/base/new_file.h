#pragma once
// Files that are written beside what they will replace.

#include <string>

#include "nn/base/fd.h"

namespace topknot {

struct NewFile {
  Fd fd;  // invalid, with errno, where the file cannot be made
  std::string path;
};

// Makes "TARGET.part-NUMBER", open for writing. The number is random, and what has the name already, such as a link to
// another file, is neither opened nor followed.
NewFile create_part_file(const std::string& target);

}  // namespace topknot

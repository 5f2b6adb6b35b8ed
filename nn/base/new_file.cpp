#include "nn/base/new_file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/random.h>

#include <cerrno>
#include <cstdint>

namespace topknot {

NewFile create_part_file(const std::string& target) {
  NewFile file;
  for (int attempt = 0; attempt < 100; ++attempt) {
    std::uint32_t number = 0;
    if (getrandom(&number, sizeof number, 0) != sizeof number) break;
    file.path = fmt::format("{}.part-{}", target, number);
    file.fd.reset(open(file.path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0666));
    if (file.fd.valid() || errno != EEXIST) break;
  }
  return file;
}

}  // namespace topknot

#pragma once
// What is written to standard error while the object lives.

#include <cstdio>
#include <string>

#include <unistd.h>

namespace topknot::testing {

class StandardError {
 public:
  StandardError() : before_(dup(STDERR_FILENO)), file_(std::tmpfile()) { dup2(fileno(file_), STDERR_FILENO); }
  ~StandardError() {
    dup2(before_, STDERR_FILENO);
    close(before_);
    std::fclose(file_);
  }
  StandardError(const StandardError&) = delete;

  std::string text() const {
    std::string text(static_cast<std::size_t>(lseek(fileno(file_), 0, SEEK_END)), 0);
    text.resize(pread(fileno(file_), text.data(), text.size(), 0));
    return text;
  }

 private:
  int before_;
  std::FILE* file_;
};

}  // namespace topknot::testing

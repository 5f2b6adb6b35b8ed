#include "nn/base/algorithm_cache.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <sstream>

#include "nn/base/check.h"
#include "nn/base/file.h"
#include "nn/base/log.h"
#include "nn/base/text.h"

namespace topknot {
namespace {

constexpr std::size_t kMostBytes = std::size_t{16} << 20;  // of the file: more is neither written nor read

std::optional<std::string> choice_of(const std::string& text) {
  if (text.find(';') + 1 != text.size() || text.empty() || text.find(" = ") != std::string::npos) return {};
  return text.substr(0, text.size() - 1);
}

}  // namespace

AlgorithmCache::AlgorithmCache(std::string file) : file_(std::move(file)) {
  read();
}

void AlgorithmCache::read() {
  std::error_code ignored;
  if (!std::filesystem::exists(file_, ignored)) return;
  try {
    std::istringstream in(read_text_file(file_, kMostBytes));
    for (std::string line; std::getline(in, line);)
      if (const auto equals = line.find(" = "); equals != std::string::npos)
        if (auto choice = choice_of(line.substr(equals + 3)))
          choices_.emplace(line.substr(0, equals), std::move(*choice));
  } catch (const UserError& error) {
    give_up(error.what());
  }
}

std::optional<std::string> AlgorithmCache::find(const std::string& key) {
  if (!choices_.contains(key)) read();
  const auto found = choices_.find(key);
  return found == choices_.end() ? std::nullopt : std::optional(found->second);
}

void AlgorithmCache::keep(const std::string& key, const std::string& choice) {
  if (file_.empty() || !choices_.emplace(key, choice).second) return;
  const std::string line = fmt::format("{} = {};\n", key, choice);
  std::error_code failed;
  std::filesystem::create_directories(std::filesystem::path(file_).parent_path(), failed);
  errno = 0;
  // Neither a link's target nor a pipe or device is written.
  const Fd file(
      open(file_.c_str(), O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, 0666));
  struct stat status {};
  bool written = file.valid() && fstat(file.get(), &status) == 0 && S_ISREG(status.st_mode);
  if (written && static_cast<std::size_t>(lseek(file.get(), 0, SEEK_END)) + line.size() <= kMostBytes)
    written = write(file.get(), line.data(), line.size()) == static_cast<ssize_t>(line.size());
  const std::string why = failed ? failed.message() : errno_text();
  if (!written) give_up(file_ + ": cannot be written: " + why);
}

void AlgorithmCache::give_up(const std::string& why) {
  file_.clear();
  log_info("timed algorithms are not kept for later runs: " + why);
}

std::string algorithm_cache_folder(const std::string& setting) {
  if (setting != "auto") return setting == "none" ? "" : setting;
  const auto absolute = [](const char* name) {
    const char* value = std::getenv(name);
    return std::string(value && *value == '/' ? value : "");
  };
  if (const std::string cache = absolute("XDG_CACHE_HOME"); !cache.empty()) return cache + "/topknot";
  const std::string home = absolute("HOME");
  return home.empty() ? "" : home + "/.cache/topknot";
}

}  // namespace topknot

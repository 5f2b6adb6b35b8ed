#include "nn/core/base/log.h"

#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>

namespace topknot {
namespace {

spdlog::logger& logger() {
  static auto* instance = [] {
    auto* created = new spdlog::logger("topknot", std::make_shared<spdlog::sinks::stderr_sink_mt>());
    created->set_pattern("%v");
    return created;
  }();
  return *instance;
}

thread_local int this_rank = 0;
thread_local int rank_count = 1;

void write(spdlog::level::level_enum level, const char* prefix, const std::string& text) {
  if (rank_count > 1)
    logger().log(level, "[rank {}] {}{}", this_rank, prefix, text);
  else
    logger().log(level, "{}{}", prefix, text);
}

}  // namespace

void set_log_level(LogLevel level) {
  switch (level) {
    case LogLevel::quiet:
      return logger().set_level(spdlog::level::err);
    case LogLevel::warning:
      return logger().set_level(spdlog::level::warn);
    case LogLevel::info:
      return logger().set_level(spdlog::level::info);
    case LogLevel::debug:
      return logger().set_level(spdlog::level::debug);
  }
}

void set_log_rank(int rank, int ranks) {
  this_rank = rank;
  rank_count = ranks;
}

void log_debug(const std::string& text) {
  write(spdlog::level::debug, "", text);
}
void log_info(const std::string& text) {
  if (this_rank == 0) logger().info("{}", text);
}
void log_warning(const std::string& text) {
  write(spdlog::level::warn, "warning: ", text);
}
void log_error(const std::string& text) {
  write(spdlog::level::err, "error: ", text);
}

}  // namespace topknot

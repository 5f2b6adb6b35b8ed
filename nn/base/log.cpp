#include "nn/base/log.h"

#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>
#include <unistd.h>

#include <cstdio>
#include <mutex>

#include "nn/base/terminal.h"
#include "nn/base/text.h"

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

std::mutex status_mutex;  // guards the status line, and that it stays below what is logged
std::string status_line;

void clear_status() {
  if (!status_line.empty()) std::fputs("\r\033[K", stderr);
}
void draw_status() {
  if (!status_line.empty()) std::fputs(status_line.c_str(), stderr), std::fflush(stderr);
}

// Any text may hold names and words of files, other ranks or the environment.
void write(spdlog::level::level_enum level, const std::string& prefix, const std::string& text) {
  if (!logger().should_log(level)) return;
  const std::lock_guard lock(status_mutex);
  clear_status();
  logger().log(level, "{}{}", prefix, printable(text, std::string::npos));
  draw_status();
}

std::string rank_prefix() {
  return rank_count > 1 ? fmt::format("[rank {}] ", this_rank) : "";
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

void set_status_line(const std::string& line) {
  const std::lock_guard lock(status_mutex);
  clear_status();
  status_line = is_terminal(STDERR_FILENO) ? line : "";
  draw_status();
  std::fflush(stderr);
}

void log_debug(const std::string& text) {
  write(spdlog::level::debug, rank_prefix(), text);
}
void log_info(const std::string& text) {
  if (this_rank == 0) write(spdlog::level::info, "", text);
}
void log_warning(const std::string& text) {
  write(spdlog::level::warn, rank_prefix() + coloured("warning: ", Colour::yellow, STDERR_FILENO), text);
}
void log_error(const std::string& text) {
  write(spdlog::level::err, rank_prefix() + coloured("error: ", Colour::red, STDERR_FILENO), text);
}

}  // namespace topknot

#pragma once
// Log lines on standard error, "[rank r] " first if there are several ranks. Info lines are rank 0's only;
// warnings pass from any rank. The rank belongs to the calling thread and is set at the start of run_rank().
// On a terminal "warning:" and "error:" have a colour (nn/base/terminal.h).

#include <string>

namespace topknot {

enum class LogLevel { quiet, warning, info, debug };

void set_log_level(LogLevel level);
void set_log_rank(int rank, int ranks);  // for the calling thread; (0, 1) at first

// Progress on a terminal: a line below what is logged, which the next call replaces; "" removes it. It must
// fit the terminal's width. Does nothing if standard error is no terminal.
void set_status_line(const std::string& line);

void log_debug(const std::string& text);
void log_info(const std::string& text);
void log_warning(const std::string& text);
void log_error(const std::string& text);

}  // namespace topknot

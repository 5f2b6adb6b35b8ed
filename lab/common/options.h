#pragma once
// The command line of a tool, by CLI11.

#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <string>

#include "nn/base/check.h"
#include "nn/base/terminal.h"

namespace topknot {

// Throws UserError: `what`, and that --help shows how the program is used.
[[noreturn]] inline void misuse(const std::string& program, const std::string& what) {
  throw UserError(what + "; '" + program + " --help' shows how it is used");
}

// Parses into what `app`'s options refer to; its description is the program's name. Prints `text`, as wide as
// the terminal, and returns false for -h and --help, and if `needs_arguments` is set and there are none.
// Throws UserError for what CLI11 refuses.
inline bool parse_options(CLI::App& app, const char* text, int argc, char** argv,
                          bool needs_arguments = true) {
  bool help = needs_arguments && argc == 1;
  app.set_help_flag();
  app.add_flag("-h,--help", help);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    misuse(app.get_description(), error.what());
  }
  if (help) std::fputs(reflowed(text, terminal_columns(STDOUT_FILENO)).c_str(), stdout);
  return !help;
}

}  // namespace topknot

#pragma once
// The command line of a tool, by CLI11.

#include <CLI/CLI.hpp>

namespace topknot {

// Parses into what `app`'s options refer to; its description is the program's name. Prints `text`, as wide as the terminal, and returns false
// for -h and --help, and where `needs_arguments` is set and there are none. Throws UserError for what CLI11 refuses.
bool parse_options(CLI::App& app, const char* text, int argc, char** argv, bool needs_arguments = true);
// Throws UserError: `what`, and that --help shows how the program is used.
[[noreturn]] void misuse(const std::string& program, const std::string& what);

}  // namespace topknot

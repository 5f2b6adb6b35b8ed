#pragma once
// The command line of `train`: [FILE.yaml] [section.key=value ...] and a few flags.

#include <string>
#include <vector>

namespace topknot {

struct CommandLine {
  std::string file;                    // "" where none is given
  std::vector<std::string> overrides;  // "a.b=c", in order
  std::string resume;                  // --resume: the run directory, or ""
  bool validate = false;
  bool dry_run = false;
  bool dump_config = false;
  bool check_network = false;
  bool quiet = false, brief = false;
  bool verbose = false;
  // Not empty: print it on standard output and leave with 0 (--help, --list, --version, or no argument at all).
  std::string text;
};

// Throws UserError for an unknown flag or an argument that is neither a file nor a.b=c.
CommandLine parse_command_line(int argc, const char* const* argv);

std::string teaching_text();  // what `train` alone prints: what it is, three examples, where to go on
// --help: examples, flags, exit codes, every key by section, in lines of `width` columns.
std::string help_text(int width = 80);

}  // namespace topknot

#include "tools/common/options.h"

#include <unistd.h>

#include <cstdio>

#include "nn/base/check.h"
#include "nn/base/terminal.h"

namespace topknot {

bool parse_options(CLI::App& app, const char* text, int argc, char** argv, bool needs_arguments) {
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

void misuse(const std::string& program, const std::string& what) {
  throw UserError(what + "; '" + program + " --help' shows how it is used");
}

}  // namespace topknot

// study NAME [key=value ...]: small experiments. Exit codes: 0, 1 for an error, 2 for bad input.
#include <algorithm>
#include <cstdio>
#include <exception>
#include <string>
#include <vector>

#include "nn/core/base/check.h"
#include "tools/study/study.h"

namespace {

bool asks_for_help(const std::string& argument) {
  return argument == "--help" || argument == "-h";
}

int run(std::vector<std::string> arguments) {
  using namespace topknot;
  if (arguments.empty() || asks_for_help(arguments[0])) {
    std::fputs(studies_help().c_str(), stdout);
    return 0;
  }
  const std::string name = arguments[0];
  if (name.starts_with("-"))
    throw UserError("unknown flag '" + name + "'; 'study --help' shows how it is used");
  const Study& study = studies().find(name);
  arguments.erase(arguments.begin());
  if (std::any_of(arguments.begin(), arguments.end(), asks_for_help)) {
    std::fputs(study_help(name).c_str(), stdout);
    return 0;
  }
  study.run(StudyArguments(name, study.keys, arguments));
  return std::fflush(stdout) == 0 ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run({argv + 1, argv + argc});
  } catch (const topknot::UserError& e) {
    std::fprintf(stderr, "study: %s\n", e.what());
    return 2;
  } catch (const std::exception& e) {
    std::fprintf(stderr, "study: unexpected error: %s\n", e.what());
    return 1;
  }
}

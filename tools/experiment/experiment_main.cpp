// experiment NAME [key=value ...]: small experiments. Exit codes: 0, 1 for an error, 2 for bad input.
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <string>
#include <vector>

#include "nn/base/program.h"
#include "nn/base/terminal.h"
#include "tools/experiment/experiment.h"

using namespace topknot;

namespace {

bool asks_for_help(const std::string& argument) {
  return argument == "--help" || argument == "-h";
}

int run(int argc, char** argv) {
  std::vector<std::string> arguments(argv + 1, argv + argc);
  if (arguments.empty() || asks_for_help(arguments[0])) {
    std::fputs(reflowed(experiments_help(), terminal_columns(STDOUT_FILENO)).c_str(), stdout);
    return 0;
  }
  const std::string name = arguments[0];
  if (name.starts_with("-"))
    throw UserError("unknown flag '" + name + "'; 'experiment --help' shows how it is used");
  const Experiment& experiment = experiments().find(name);
  arguments.erase(arguments.begin());
  if (std::any_of(arguments.begin(), arguments.end(), asks_for_help)) {
    std::fputs(reflowed(experiment_help(name), terminal_columns(STDOUT_FILENO)).c_str(), stdout);
    return 0;
  }
  experiment.run(ExperimentArguments(name, experiment.keys, arguments));
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  return run_program("experiment", run, argc, argv);
}

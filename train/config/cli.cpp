#include "train/config/cli.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>

#include "nn/core/base/check.h"
#include "nn/core/base/suggest.h"
#include "train/config/config.h"
#include "train/run_directory.h"

namespace topknot {
namespace {

const std::vector<std::string> kFlags = {"--help",    "--validate",     "--dry-run", "--dump-config",
                                         "--list",    "--resume",       "--quiet",   "--verbose",
                                         "--version", "--check-network"};

constexpr const char* kExamples =
    "Examples:\n"
    "  train configs/demo_dense.yaml                       a small run, nothing to download\n"
    "  train configs/demo_topk.yaml compress.density=0.01  the same with Top-k and one key changed\n"
    "  train configs/cifar10_resnet20_gaussiank.yaml data.root=DIR dist.backend=gloo dist.ranks=4\n"
    "  compare runs/*                                      a table and report.html of several runs\n"
    "  train status runs/NAME                              how far a run is, while it goes on or "
    "afterwards\n"
    "  train export runs/NAME --to FILE.safetensors        the weights of a run's newest checkpoint\n";

constexpr const char* kFlagHelp =  // with a place for the names of the lists
    "Flags:\n"
    "  --validate          check the whole configuration, show every problem, and leave\n"
    "  --dry-run           also build the model: parameters, groups, bytes per step; trains nothing\n"
    "  --dump-config       print the effective configuration as YAML, with where each value came from\n"
    "  --resume RUN        go on with the run in directory RUN from its newest checkpoint\n"
    "  --check-network     start the ranks, have them talk, show who took part and how fast; trains nothing\n"
    "  --list WHAT         names, help and keys of what is registered; WHAT is one of\n{}"
    "  --quiet, --verbose  only warnings and errors; more detail\n"
    "  --version, --help\n";

std::string joined_lists() {
  return fmt::format("{}", fmt::join(list_names(), ", "));
}

std::string flag_help() {
  constexpr std::size_t kIndent = 22, kWidth = 100;
  std::string lines, line;
  for (const std::string& name : list_names()) {
    if (!line.empty() && kIndent + line.size() + name.size() > kWidth) {
      lines += fmt::format("{:{}}{}\n", "", kIndent, line);
      line.clear();
    }
    line += (line.empty() ? "" : " ") + name;
  }
  return fmt::format(fmt::runtime(kFlagHelp), lines + fmt::format("{:{}}{}\n", "", kIndent, line));
}

}  // namespace

std::string teaching_text() {
  return std::string(
             "train: trains a model on several ranks that exchange compressed gradients.\n"
             "One YAML file a run; any key can be changed on the command line.\n\n"
             "  train [FILE.yaml] [section.key=value ...] [--validate | --dry-run | --list WHAT | ...]\n\n") +
         kExamples +
         "\nGo on with:\n"
         "  train --help               all flags and keys\n"
         "  train --list compressors   what can be compared; also models, datasets, optimizers, schedules\n"
         "  train FILE --dry-run       what a run would do, without running it\n";
}

std::string help_text() {
  return std::string("train [FILE.yaml] [section.key=value ...] [flags]\n\n") + kExamples + "\n" +
         flag_help() +
         "\nKeys, with their defaults. Later wins: default, file, command line. Lists read [1,2] or 1,2.\n" +
         key_help();
}

CommandLine parse_command_line(int argc, const char* const* argv) {
  CommandLine line;
  if (argc <= 1) {
    line.text = teaching_text();
    return line;
  }
  bool help = false, version = false;
  std::vector<std::string> words;
  CLI::App app("train");
  app.set_help_flag();
  app.add_flag("-h,--help", help);
  app.add_flag("--version", version);
  app.add_flag("--validate", line.validate);
  app.add_flag("--dry-run", line.dry_run);
  app.add_flag("--dump-config", line.dump_config);
  app.add_flag("--check-network", line.check_network);
  app.add_flag("-q,--quiet", line.quiet);
  app.add_flag("-v,--verbose", line.verbose);
  app.add_option("--list", line.list);
  app.add_option("--resume", line.resume);
  app.allow_extras();
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError&) {
    throw UserError("--list needs one word after it: " + joined_lists() + "; --resume needs a run directory");
  }
  for (const auto& word : app.remaining()) {
    if (word == "--") continue;
    if (word.empty())
      throw UserError(
          "an empty argument (\"\"), perhaps a variable of the shell that is not set; give a YAML file or "
          "section.key=value, or leave it out");
    if (word.size() > 1 && word[0] == '-') {
      const auto meant = nearest_name(word, kFlags);
      throw UserError("unknown flag '" + word + "'" +
                      (meant.empty() ? "" : "; did you mean '" + meant + "'?") +
                      "; 'train --help' shows all flags");
    }
    if (const auto equals = word.find('='); equals != std::string::npos && word.find('/') > equals) {
      line.overrides.push_back(word);
    } else if (line.file.empty()) {
      line.file = word;
    } else {
      throw UserError("two files given: '" + line.file + "' and '" + word +
                      "'; give one YAML file, and keys as section.key=value");
    }
  }
  if (!line.resume.empty() && !line.file.empty())
    throw UserError("--resume reads the configuration of " + line.resume + "; leave '" + line.file + "' out");
  const auto lists = list_names();
  if (app.count("--list") > 0 && std::find(lists.begin(), lists.end(), line.list) == lists.end())
    throw UserError(unknown_name_message("list", line.list, lists));
  if (help) line.text = help_text();
  if (version) line.text = program_version() + "\n";
  return line;
}

}  // namespace topknot

#include "train/config/config.h"

#include <fmt/format.h>

#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <utility>

#include "nn/base/check.h"
#include "nn/base/program.h"
#include "nn/base/terminal.h"
#include "nn/base/text.h"

namespace topknot {
namespace {

const std::vector<std::string> kFlags = {"--help",    "--validate", "--dry-run",       "--dump-config",
                                         "--list",    "--resume",   "--quiet",         "--brief",
                                         "--verbose", "--version",  "--check-network", "--coordinate"};

constexpr const char* kExamples =
    "Examples:\n"
    "  train configs/demo_dense.yaml                       a small run, no download\n"
    "  train configs/demo_topk.yaml compress.density=0.01  Top-k, one key changed\n"
    "  train configs/cifar10_resnet20_gaussiank.yaml data.root=DIR dist.ranks=4\n"
    "  compare runs/A runs/B                               a table and a page of both\n"
    "  train status runs/NAME                              how far a run is\n"
    "  train export runs/NAME --to FILE.safetensors        its newest weights\n"
    "  train sample runs/NAME --prompt TEXT                its model continues TEXT\n";

constexpr std::pair<const char*, const char*> kExitCodes[] = {
    {"0", "done"},
    {"1", "an error of a rank or of the program"},
    {"2", "bad input: a key, a file, a flag; the message says what to change"},
    {"3", "the training diverged: a loss or too many steps were not finite"},
    {"128+N", "ended by signal N: 130 by Ctrl-C, 143 by SIGTERM, after a checkpoint"},
};

std::string joined_lists() {
  return fmt::format("{}", fmt::join(list_names(), ", "));
}

std::string flag_help(int width) {
  constexpr int kColumn = 22;
  const std::pair<const char*, std::string> flags[] = {
      {"--validate", "check the whole configuration, show every problem, and leave"},
      {"--dry-run",
       "also build the model: parameters, groups; bytes, memory and operations per step; with "
       "compress.name=auto, which it measures for about a second, the choice by the model"},
      {"--dump-config", "print the effective configuration as YAML, with where each value came from"},
      {"--resume RUN", "go on with the run in directory RUN from its newest checkpoint"},
      {"--check-network", "start the ranks, have them talk, show who took part and how fast; trains nothing"},
      {"--coordinate HOST:PORT",
       "look after the ranks of an elastic run on several hosts, which come with dist.master=HOST:PORT"},
      {"--list WHAT", "what there is, with help: " + joined_lists() + "; or --list keys SECTION"},
      {"-q, --quiet", "of a run only warnings, errors and its result"},
      {"--brief", "the same, and progress on one line of a terminal"},
      {"-v, --verbose", "more detail"},
      {"--help KEY", "one key, or the keys of a section; --help alone: all of this"},
      {"--version", "version and revision of this program"}};
  std::string text = "Flags:\n";
  for (const auto& [name, help] : flags) text += wrapped_row("  " + std::string(name), help, kColumn, width);
  text +=
      "\n" +
      wrapped(
          "The result of a run goes to standard output; progress and log go to standard error. Exit codes:",
          width) +
      "\n";
  for (const auto& [code, help] : kExitCodes)
    text += wrapped_row("  " + std::string(code), help, kColumn, width);
  return text;
}

bool is_file_name(const std::string& word) {
  return word.find('/') != std::string::npos || word.ends_with(".yaml") || word.ends_with(".yml");
}

// Help for a word of --help: a key with or without its sections and a value, or a section.
std::string topic_help(const std::string& word, int width) {
  const std::string name = word.substr(0, word.find('='));
  if (const Key* key = find_key(name)) return key_help(width, *key);
  if (is_config_section(name)) return key_help(width, name);
  std::string of_that_name;  // "lr": of every section that has one
  for (const Key& key : config_keys())
    if (key.name.ends_with("." + name)) of_that_name += key_help(width, key);
  if (!of_that_name.empty()) return of_that_name;
  std::vector<std::string> known = config_sections();
  for (const Key& key : config_keys()) known.push_back(key.name);
  const std::string meant = nearest_name(name, known);
  throw UserError("--help: '" + name + "' is neither a key nor a section" +
                  (meant.empty() ? "" : "; did you mean '" + meant + "'?") +
                  "; 'train --list keys' shows all");
}

// "compress.denisty", without a value: reported with the other problems of the configuration.
bool is_misspelt_key(const std::string& word) {
  return word.find('.') != std::string::npos && is_config_section(word.substr(0, word.find('.'))) &&
         !is_file_name(word) && !find_key(word);
}

// A word that should have been section.key=value, or "" if it may be a file.
std::string missing_value(const std::string& word, const std::string& next) {
  const Key* key = find_key(word);
  if (!key) return "";
  return fmt::format(
      "{0} is a key and stands without a value: write {0}={1} (now {2}); 'train --help {0}' explains it",
      word,
      key->secret || next.empty() || next[0] == '-' || next.find('=') != std::string::npos ? "VALUE" : next,
      key_value(*key, Config()));
}

}  // namespace

std::string teaching_text() {
  return std::string(
             "train: trains a model on several ranks that exchange compressed gradients.\n"
             "One YAML file per run; any key can be changed on the command line.\n\n"
             "  train [FILE.yaml] [section.key=value ...] [--validate | --dry-run | ...]\n\n") +
         kExamples +
         "\nGo on with:\n"
         "  train --help               all flags and keys; train --help KEY: one of them\n"
         "  train --list compressors   what can be compared; also models, datasets, configs\n"
         "  train FILE --dry-run       what a run would do, without running it\n";
}

std::string help_text(int width) {
  return std::string("train [FILE.yaml] [section.key=value ...] [flags]\n\n") + kExamples + "\n" +
         flag_help(width) + "\n" +
         wrapped(
             "Keys, with their defaults. Later wins: default, file, command line. Lists read [1,2] or 1,2.",
             width) +
         "\n" + key_help(width);
}

CommandLine parse_command_line(int argc, const char* const* argv) {
  CommandLine line;
  if (argc <= 1) {
    line.text = teaching_text();
    return line;
  }
  bool help = false, version = false;
  std::string list;
  CLI::App app("train");
  app.set_help_flag();
  app.add_flag("-h,--help", help);
  app.add_flag("--version", version);
  app.add_flag("--validate", line.validate);
  app.add_flag("--dry-run", line.dry_run);
  app.add_flag("--dump-config", line.dump_config);
  app.add_flag("--check-network", line.check_network);
  app.add_flag("-q,--quiet", line.quiet);
  app.add_flag("--brief", line.brief);
  app.add_flag("-v,--verbose", line.verbose);
  app.add_option("--list", list);
  app.add_option("--resume", line.resume);
  app.add_option("--coordinate", line.coordinate);
  app.allow_extras();
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    const std::string text = error.what();
    throw UserError(text.starts_with("--list")     ? text + "; one word of: " + joined_lists()
                    : text.starts_with("--resume") ? text + "; --resume takes one run directory"
                                                   : text + "; --coordinate takes HOST:PORT");
  }
  const int width = terminal_columns(STDOUT_FILENO);
  const std::vector<std::string> words = app.remaining();
  if (app.count("--list") > 0) {
    if (words.size() > (list == "keys" ? 1u : 0u))
      throw UserError("--list takes one word, and for keys a section: '" + words.back() + "' is too much");
    line.text = list_text(list, words.empty() ? "" : words[0], width);
    return line;
  }
  if (help) {
    for (const std::string& word : words)
      if (!is_file_name(word)) line.text += topic_help(word, width);
    if (line.text.empty()) line.text = help_text(width);
    return line;
  }
  for (std::size_t i = 0; i < words.size(); ++i) {
    const std::string& word = words[i];
    if (word == "--") continue;
    if (word.empty())
      throw UserError(
          "an empty argument (\"\"), perhaps a variable of the shell that is not set; give a YAML file or "
          "section.key=value, or leave it out");
    if (word.size() > 1 && word[0] == '-') {
      const std::string name = word.substr(std::min(word.find_first_not_of('-'), word.size()));
      if (find_key(name.substr(0, name.find('='))))
        throw UserError(fmt::format("keys stand without dashes: write {}{}, not {}", without_secret(name),
                                    name.find('=') == std::string::npos ? "=VALUE" : "",
                                    without_secret(word)));
      const auto meant = nearest_name(word, kFlags);
      throw UserError("unknown flag '" + word + "'" +
                      (meant.empty() ? "" : "; did you mean '" + meant + "'?") +
                      "; 'train --help' shows all flags");
    }
    const auto equals = word.find('=');
    if ((equals != std::string::npos && word.find('/') > equals) || is_misspelt_key(word)) {
      line.overrides.push_back(word);
    } else if (const std::string missing = missing_value(word, i + 1 < words.size() ? words[i + 1] : "");
               !missing.empty()) {
      throw UserError(missing);
    } else if (line.file.empty()) {
      line.file = word;
    } else {
      throw UserError("two files given: '" + line.file + "' and '" + word +
                      "'; give one YAML file, and keys as section.key=value");
    }
  }
  if (!line.resume.empty() && !line.file.empty())
    throw UserError("--resume reads the configuration of " + line.resume + "; leave '" + line.file + "' out");
  if (version) line.text = program_version() + "\n";
  return line;
}

}  // namespace topknot

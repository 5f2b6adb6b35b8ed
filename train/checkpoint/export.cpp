#include "train/checkpoint/export.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <set>
#include <string_view>

#include "nn/base/check.h"
#include "nn/base/terminal.h"
#include "nn/base/text.h"
#include "train/checkpoint/checkpoint.h"
#include "train/metrics/output_check.h"
#include "train/metrics/output_file.h"

namespace topknot {
namespace {

namespace fs = std::filesystem;

constexpr const char* kUsage = "train export RUN --to FILE.safetensors [--step N] [--overwrite]";

// Of the configuration what says which model it is and what it reads; where files lie and how the run was made stay behind.
bool describes_model(const std::string& key) {
  static const std::set<std::string> of_data = {"data.name",           "data.classes", "data.image_size",
                                                "data.resize",         "data.mean",    "data.std",
                                                "data.sequence_length"};
  return of_data.count(key) > 0 ||
         (key.starts_with("model.") && key != "model.init_from" && key != "model.reinit");
}

// As a file that `train` reads.
std::string config_yaml(const Manifest& manifest) {
  std::string text;
  for (const auto& [key, value] : manifest.config)
    if (describes_model(key)) text += fmt::format("{}: {}\n", key, value);
  return text;
}

}  // namespace

std::string export_model(const std::string& run, const std::string& to, std::optional<std::int64_t> step,
                         bool overwrite) {
  check_output(to, overwrite ? Replace::all : Replace::nothing,
               "choose another name, or --overwrite to replace it");
  fs::path directory = fs::path(run) / "checkpoints";
  std::error_code error;
  if (fs::exists(fs::path(run) / "manifest.json", error)) {  // one checkpoint's directory
    const fs::path one = fs::canonical(run);
    directory = one.parent_path();
    const CheckpointStore store(directory.string());
    std::optional<std::int64_t> named;
    for (const std::int64_t saved : store.steps())
      if (fs::path(store.path(saved)).filename() == one.filename()) named = saved;
    if (!named)
      throw UserError(
          fmt::format("{}: a checkpoint is exported under the name that the run gave it, such as {}", run,
                      fs::path(store.path(1200)).filename().string()));
    if (step && *step != *named)
      throw UserError(
          fmt::format("{}: is the checkpoint of step {}; leave --step {} out", run, *named, *step));
    step = named;
  }
  const CheckpointStore store(directory.string());
  const std::vector<std::int64_t> steps =
      fs::is_directory(directory, error) ? store.steps() : std::vector<std::int64_t>();
  if (steps.empty())
    throw UserError(fmt::format("{}: no checkpoint in {}; give the directory of a run that has saved one",
                                run, directory.string()));
  if (!step) step = steps.back();
  if (std::find(steps.begin(), steps.end(), *step) == steps.end())
    throw UserError(
        fmt::format("{}: no checkpoint of step {}; there are {}", run, *step, fmt::join(steps, ", ")));

  const Manifest manifest = store.manifest(*step);
  const std::string path = store.path(*step) + "/" + kModelFile;
  const SafetensorsFile model =
      SafetensorsFile::parse(store.read(*step, file_of(manifest, kModelFile)), path);
  const auto name = manifest.config.find("model.name");
  OutputFile file(to);
  write_safetensors(
      [&](std::span<const std::byte> part) {
        file.write({reinterpret_cast<const char*>(part.data()), part.size()});
      },
      model.tensors(),
      {{"format", "pt"},
       {"topknot", manifest.program},
       {"model", name == manifest.config.end() ? "" : name->second},
       {"step", fmt::format("{}", *step)},
       {"config", config_yaml(manifest)}});
  file.close();
  return fmt::format("{}: {} of step {} of {}", to,
                     count_text(static_cast<std::int64_t>(model.tensors().size()), "tensor"), *step, run);
}

int export_command(int argc, const char* const* argv) {
  CLI::App app("train export");
  app.set_help_flag();
  std::string run, to;
  std::int64_t step = 0;
  bool help = false, overwrite = false;
  app.add_flag("-h,--help", help);
  app.add_flag("--overwrite", overwrite);
  app.add_option("run", run);
  app.add_option("--to", to);
  app.add_option("--step", step);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& parse_error) {
    throw UserError(fmt::format("train export: {}; usage: {}", parse_error.what(), kUsage));
  }
  if (help) {
    const std::string text =
        std::string(kUsage) +
        "\n\nWrites weights and batch-norm statistics of the newest checkpoint, or of step N, with the names "
        "of the model's tensors. model.init_from takes the file, and scripts/convert-pth makes a .pth of "
        "it. A file that is there already is replaced with --overwrite only.\n";
    std::fputs(reflowed(text, terminal_columns(STDOUT_FILENO)).c_str(), stdout);
    return 0;
  }
  if (run.empty() || to.empty())
    throw UserError(
        fmt::format("train export: {} is missing; usage: {}", run.empty() ? "RUN" : "--to", kUsage));
  const std::string done =
      export_model(run, to, app.count("--step") ? std::optional(step) : std::nullopt, overwrite);
  std::printf("%s\n", done.c_str());
  return 0;
}

}  // namespace topknot

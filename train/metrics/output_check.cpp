#include "train/metrics/output_check.h"

#include <algorithm>
#include <array>
#include <filesystem>
#include <string_view>

#include "nn/base/check.h"

namespace topknot {
namespace {

namespace fs = std::filesystem;

bool is_run(const fs::path& folder) {
  std::error_code error;
  return fs::exists(folder / "environment.json", error) && fs::exists(folder / "config.yaml", error);
}

// RUN/checkpoints, or one checkpoint's folder, wherever that lies.
bool holds_checkpoints(const fs::path& folder) {
  std::error_code error;
  return (folder.filename().string().starts_with("step-") && fs::exists(folder / "manifest.json", error)) ||
         (folder.filename() == "checkpoints" && is_run(folder.parent_path()));
}

// `target` has no links left in it.
bool in_checkpoints(const fs::path& target) {
  for (fs::path folder = target.parent_path();; folder = folder.parent_path()) {
    if (holds_checkpoints(folder)) return true;
    if (folder == folder.parent_path()) return false;
  }
}

bool is_no_report(const fs::path& file) {
  constexpr std::array<std::string_view, 5> kEndings = {".safetensors", ".npy", ".npz", ".pth", ".pt"};
  constexpr std::array<std::string_view, 7> kOfRuns = {
      "config.yaml", "environment.json",   "metrics.jsonl",        "metrics.csv",
      "run.lock",    "layer_density.json", "exchange_profile.json"};
  const std::string ending = file.extension().string(), name = file.filename().string();
  std::error_code error;
  return std::ranges::count(kEndings, ending) > 0 ||
         (std::ranges::count(kOfRuns, name) > 0 && fs::exists(file.parent_path() / "config.yaml", error));
}

}  // namespace

void check_output(const std::string& path, Replace replace, const std::string& remedy) {
  if (path == "-") return;
  std::error_code error;
  const fs::path absolute = fs::absolute(path, error), target = fs::weakly_canonical(absolute, error),
                 folder = fs::weakly_canonical(absolute.parent_path(), error);
  if (in_checkpoints(target) || in_checkpoints(folder / absolute.filename()))
    throw UserError(path +
                    ": lies in the checkpoints of a run, which only the run writes; choose another place");
  if (replace == Replace::all || !fs::is_regular_file(path, error)) return;
  if (replace == Replace::nothing || is_no_report(target))
    throw UserError(path + ": exists already; " + remedy);
}

}  // namespace topknot

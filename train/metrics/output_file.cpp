#include "train/metrics/output_file.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <regex>
#include <utility>

#include "nn/base/check.h"
#include "nn/base/file.h"

namespace topknot {

namespace fs = std::filesystem;

namespace {

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

bool is_run_file(const fs::path& file) {
  constexpr std::array<std::string_view, 3> kInputs = {"run.lock", "layer_density.json",
                                                       "exchange_profile.json"};
  const std::string name = file.filename().string();
  std::error_code error;
  return (has_run_name(name) || std::ranges::count(kInputs, name) > 0) &&
         fs::exists(file.parent_path() / "config.yaml", error);
}

bool is_no_report(const fs::path& file) {
  constexpr std::array<std::string_view, 5> kEndings = {".safetensors", ".npy", ".npz", ".pth", ".pt"};
  return std::ranges::count(kEndings, file.extension().string()) > 0;
}

}  // namespace

OutputFile::OutputFile(const std::string& path) : path_(path), target_(path) {
  if (path_ == "-") {
    path_ = "standard output";
    file_ = stdout;
    return;
  }
  std::error_code error;
  if (fs::is_directory(path, error)) throw UserError(path + ": is a folder; give the name of a file");
  const bool exists = fs::exists(path, error);
  errno = 0;
  if (exists && !fs::is_regular_file(path, error)) {  // a pipe or device must stay what it is
    file_ = std::fopen(path.c_str(), "we");
  } else {
    // A name that is a link keeps its link.
    if (exists) target_ = fs::canonical(path, error).string();
    if (exists && !error && access(target_.c_str(), W_OK) != 0) fail(errno);
    NewFile part = create_part_file(target_);
    if (part.fd.valid()) {
      temporary_ = part.path;
      file_ = fdopen(part.fd.release(), "w");
    }
  }
  if (!file_) fail(errno);
}

OutputFile::~OutputFile() {
  if (file_ && file_ != stdout) std::fclose(file_);
  if (!temporary_.empty()) unlink(temporary_.c_str());
}

void OutputFile::fail(int error) {
  error_ = error ? error : EIO;
  throw UserError(path_ + ": cannot be written: " + std::strerror(error_) +
                  "; free space or choose another place");
}

void OutputFile::write(std::string_view text) {
  errno = 0;
  if (std::fwrite(text.data(), 1, text.size(), file_) != text.size()) fail(errno);
}

void OutputFile::rewrite_begin(std::string_view text) {
  errno = 0;
  if (std::fseek(file_, 0, SEEK_SET) != 0) fail(errno);
  write(text);
}

void OutputFile::close() {
  if (error_ != 0) fail(error_);
  errno = 0;
  if (std::fflush(file_) != 0) fail(errno);
  // Whole on the disk before it takes the place of an earlier one.
  if (!temporary_.empty() && fsync(fileno(file_)) != 0) fail(errno);
  if (file_ == stdout) {
    file_ = nullptr;
    return;
  }
  if (std::fclose(std::exchange(file_, nullptr)) != 0) fail(errno);
  if (temporary_.empty()) return;
  if (std::rename(temporary_.c_str(), target_.c_str()) != 0) fail(errno);
  temporary_.clear();
}

nlohmann::ordered_json json_number(double value) {
  if (!std::isfinite(value)) return nullptr;
  const bool whole =
      value == std::floor(value) && std::fabs(value) < 9e15 && !(value == 0 && std::signbit(value));
  return whole ? nlohmann::ordered_json(static_cast<std::int64_t>(value)) : nlohmann::ordered_json(value);
}

std::optional<std::int64_t> whole_number(const nlohmann::ordered_json& json) {
  const bool whole = json.is_number_unsigned() ? std::in_range<std::int64_t>(json.get<std::uint64_t>())
                                               : json.is_number_integer();
  return whole ? std::optional(json.get<std::int64_t>()) : std::nullopt;
}

void write_file(const std::string& path, std::string_view text) {
  OutputFile file(path);
  file.write(text);
  file.close();
}

bool has_run_name(const std::string& name) {
  static const std::regex names(
      "(config\\.yaml|(choices|auto_profiles)\\.json|environment\\.json|bench\\.json|metrics\\.(jsonl|csv)|"
      "gradients\\.(safetensors|npy)|trace_rank[0-9]+\\.json)(\\.part-[0-9]+)?|checkpoints|(layer_density|"
      "exchange_profile)\\.json\\.part-[0-9]+|events\\.out\\.tfevents\\..*");
  return std::regex_match(name, names);
}

void check_output(const std::string& path, Replace replace, const std::string& remedy) {
  if (path == "-") return;
  std::error_code error;
  const fs::path absolute = fs::absolute(path, error), target = fs::weakly_canonical(absolute, error),
                 folder = fs::weakly_canonical(absolute.parent_path(), error);
  if (in_checkpoints(target) || in_checkpoints(folder / absolute.filename()))
    throw UserError(path +
                    ": lies in the checkpoints of a run, which only the run writes; choose another place");
  if (!fs::is_regular_file(path, error)) return;
  if (is_run_file(target) || is_run_file(folder / absolute.filename()))
    throw UserError(path + ": is a configuration or a file of a run; choose another place");
  if (replace == Replace::all) return;
  if (replace == Replace::nothing || is_no_report(target))
    throw UserError(path + ": exists already; " + remedy);
}

}  // namespace topknot

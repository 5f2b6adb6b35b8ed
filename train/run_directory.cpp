#include "train/run_directory.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <omp.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <optional>
#include <regex>
#include <thread>

#include "nn/base/check.h"
#include "nn/base/clock.h"
#include "nn/base/log.h"
#include "nn/base/program.h"
#include "nn/base/text.h"
#include "train/metrics/output_file.h"

namespace topknot {
namespace {

namespace fs = std::filesystem;

std::string cpu_name() {
  std::ifstream info("/proc/cpuinfo");
  for (std::string line; std::getline(info, line);)
    if (line.rfind("model name", 0) == 0)
      if (const auto colon = line.find(": "); colon != std::string::npos) return line.substr(colon + 2);
  return "unknown";
}

std::string environment_json(const Config& config, const std::vector<std::string>& command_line,
                             const std::map<std::string, std::string>& libraries) {
  nlohmann::ordered_json json;
  utsname system{};
  uname(&system);
  json["host"] = host_name();
  json["cpu"] = cpu_name();
  json["cores"] = std::thread::hardware_concurrency();
  json["system"] = std::string(system.sysname) + " " + system.release + " " + system.machine;
  json["compiler"] = __VERSION__;
  json["topknot"] = program_number();
  json["revision"] = program_revision();
  json["libraries"] = libraries;
  json["backend"] = config.dist.backend;
  json["ranks"] = config.dist.ranks;
  json["threads_per_rank"] = std::min(compute_threads(config), omp_get_thread_limit());
  json["started"] = now_utc();
  json["command_line"] = nlohmann::ordered_json::array();
  for (const std::string& word : command_line) json["command_line"].push_back(without_secret(word));
  // Arguments need not be valid UTF-8.
  return json.dump(2, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + "\n";
}

constexpr const char* kEnvironmentFile = "environment.json";
constexpr const char* kConfigTitle = "# The effective configuration:";

// "" if the file is absent or none that a run writes.
std::string small_file(const std::string& path) {
  constexpr std::size_t kMostBytes = 16 << 20;
  try {
    return read_text_file(path, kMostBytes);
  } catch (const UserError&) {
    return "";
  }
}

// Whether a start that wrote no whole file has left what is in there.
bool is_half_start(const RunDirectory& folder) {
  const std::string half = std::string(kEnvironmentFile) + ".part-";
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(folder.path, error))
    if (const std::string name = entry.path().filename().string();
        name != RunLock::kName && !name.starts_with(half))
      return false;
  return !error;
}

// Whether the files in there are a run's, so that their names can be trusted. environment.json is the first
// file that a run writes and the last that is removed, so what a killed start left is a run too.
bool is_run(const RunDirectory& folder) {
  if (is_half_start(folder)) return true;
  using Json = nlohmann::json;
  const auto shallow = [](int depth, Json::parse_event_t, const Json&) { return depth < 8; };
  const Json environment = Json::parse(small_file(folder.path + "/" + kEnvironmentFile), shallow, false);
  if (!environment.is_object()) return false;
  for (const char* name : {"topknot", "started", "command_line"})
    if (!environment.contains(name)) return false;
  std::error_code error;
  const std::string config = folder.path + "/config.yaml";
  return !fs::exists(fs::symlink_status(config, error)) || small_file(config).rfind(kConfigTitle, 0) == 0;
}

// step-000001200, step-000001200.partial, step-000001200.passed-over-2, ...
bool is_checkpoint_name(const std::string& name) {
  static const std::regex names("step-[0-9]+(\\.partial|\\.removed\\.partial|\\.passed-over(-[0-9]+)?)?");
  return std::regex_match(name, names);
}

// Throws if what the folder holds is not to be replaced.
void check_free(const RunDirectory& folder, bool overwrite) {
  std::error_code error;
  if (!fs::exists(folder.path, error)) return;
  const auto refuse = [&](const std::string& why) { throw UserError("output.dir: " + folder.path + why); };
  if (!fs::is_directory(folder.path, error)) refuse(" is a file, not a folder; choose another name");
  bool empty = true;
  const bool of_a_run = is_run(folder);
  for (const auto& entry : fs::directory_iterator(folder.path, error)) {
    const std::string name = entry.path().filename().string();
    empty = empty && name == RunLock::kName;
    if (overwrite && !of_a_run && has_run_name(name))
      refuse(
          " holds " + name +
          ", but no run wrote it; output.overwrite replaces only an earlier run; choose another output.dir");
  }
  if (error) refuse(" cannot be read: " + error.message());
  if (!empty && !overwrite)
    refuse(
        fmt::format(" already holds {}, and a run is never overwritten silently; choose another output.dir, "
                    "or output.overwrite=true to replace the earlier run{}",
                    of_a_run ? "a run" : "something",
                    of_a_run && fs::exists(folder.checkpoints(), error)
                        ? "; train --resume " + folder.path + " goes on with it"
                        : ""));
}

// Throws if one of `removed` is or holds what the new run is started from.
void check_inputs(const Config& config, std::vector<std::string> inputs,
                  const std::vector<std::string>& removed) {
  for (const std::string& path :
       {config.model.init_from, config.exchange.profile, config.compress.layer_density})
    inputs.push_back(path);
  std::error_code error;
  for (const std::string& input : inputs) {
    const std::string file = fs::weakly_canonical(input, error).string();
    for (const std::string& path : removed)
      if (const std::string gone = fs::weakly_canonical(path, error).string();
          file == gone || file.starts_with(gone + "/"))
        throw UserError(
            fmt::format("output.overwrite: would remove {}, which this run begins with; copy it, or choose "
                        "another output.dir",
                        input));
  }
}

// output.overwrite and section resume belong to this start, not to the configuration: repeating the run must
// not delete anything, and residuals that were summed once are kept by the next start.
std::string effective_config(const RunDirectory& folder, const Config& config,
                             std::map<std::string, Origin> origins) {
  Config effective = config;
  effective.output.dir = folder.path;
  effective.output.overwrite = false;
  effective.resume = {};
  std::erase_if(origins, [](const auto& origin) {
    return origin.first == "output.overwrite" || origin.first.starts_with("resume.");
  });
  return std::string(kConfigTitle) + " 'train config.yaml output.dir=OTHER' repeats the run.\n" +
         dump_yaml(effective, false, origins, keys_without_use(effective));
}

// The content of the lock file, "PID HOST"; pid 0 if it is not yet written.
struct Holder {
  int pid = 0;
  std::string host;
  std::string text() const {
    return pid > 0 ? fmt::format("process {} on {}", pid, host) : std::string("another process");
  }
  // Also if nobody has waited for it yet (a zombie).
  bool has_died() const {
    if (pid <= 0 || host != host_name()) return false;
    std::string state;
    std::getline(std::ifstream(fmt::format("/proc/{}/stat", pid)), state);
    const auto name_end = state.rfind(") ");
    return name_end == std::string::npos ? kill(pid, 0) != 0 && errno == ESRCH : state[name_end + 2] == 'Z';
  }
};

constexpr std::size_t kMostHolderBytes = 300;

// Nothing if another program wrote it.
std::optional<Holder> read_holder(int file) {
  char text[kMostHolderBytes + 1] = "", host[256] = "";
  const ssize_t size = pread(file, text, kMostHolderBytes, 0);
  Holder holder;
  // Empty, or full of zeros if the machine lost its power: nobody holds it.
  if (size >= 0 && std::all_of(text, text + size, [](char c) { return c == 0; })) return holder;
  int end = 0;
  if (size < 0 || std::sscanf(text, "%d %255[^\n]%*1[\n]%n", &holder.pid, host, &end) != 2 || end != size)
    return {};
  holder.host = host;
  return holder;
}

std::string lock_path(const std::string& directory) {
  return directory + "/" + RunLock::kName;
}

// A link is not followed, and a named pipe not waited for.
Fd open_lock(const std::string& path, int flags) {
  errno = 0;
  return Fd(open(path.c_str(), flags | O_NOFOLLOW | O_NONBLOCK, 0666));
}

[[noreturn]] void refuse_lock(const std::string& path, const std::string& what) {
  throw UserError(fmt::format(
      "output.dir: {} {}; choose another output.dir, or remove that file if no run uses the folder", path,
      what));
}

// Throws for what is no run's lock: nothing is to be written into it.
void check_lock_file(const Fd& file, const std::string& path) {
  if (!file.valid() && errno != ELOOP && errno != EISDIR && errno != ENXIO)
    refuse_lock(path, "cannot be written: " + errno_text());
  struct stat status {};
  if (file.valid() && fstat(file.get(), &status) == 0 && S_ISREG(status.st_mode))
    if (const auto holder = read_holder(file.get()))
      if (holder->pid > 0 || status.st_nlink <= 1) return;  // a second name is as good as a link
  refuse_lock(path, "is no lock of a run, but a link or a file of another program");
}

}  // namespace

RunLock::RunLock(const std::string& directory) : path_(lock_path(directory)) {
  const auto start = Clock::now();
  // Not closed on exec: the ranks that a launcher starts hold the lock too.
  const auto open_file = [&] {
    file_ = open_lock(path_, O_RDWR | O_CREAT);
    check_lock_file(file_, path_);
  };
  open_file();
  while (true) {
    if (flock(file_.get(), LOCK_EX | LOCK_NB) == 0) {
      if (in_place()) break;
      open_file();  // removed meanwhile
    } else if (errno != EWOULDBLOCK && errno != EINTR) {
      log_warning(
          fmt::format("output.dir: {} cannot be locked ({}); a second run in there would not be noticed",
                      directory, errno_text()));
      break;
    }
    const Holder holder = read_holder(file_.get()).value_or(Holder());
    // running_process() holds the lock for a moment.
    const auto patience = std::chrono::milliseconds(holder.has_died() ? 10000 : 300);
    if (Clock::now() - start > patience)
      throw UserError(
          fmt::format("output.dir: {} is in use by {}; choose another output.dir, or wait for its end",
                      directory, holder.text()));
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  check_lock_file(file_, path_);
  const std::string text = fmt::format("{} {}\n", getpid(), host_name());
  if (ftruncate(file_.get(), 0) != 0 || pwrite(file_.get(), text.data(), text.size(), 0) < 0)
    refuse_lock(path_, "cannot be written: " + errno_text());
}

RunLock RunLock::of_parent(const std::string& directory) {
  RunLock lock(lock_path(directory), open_lock(lock_path(directory), O_RDONLY | O_CLOEXEC));
  const std::optional<Holder> holder = lock.file_.valid() ? read_holder(lock.file_.get()) : std::nullopt;
  if (!holder || holder->pid != getppid()) lock.file_.reset();
  lock.check();
  return lock;
}

RunLock RunLock::of_lost_rank(const std::string& directory) {
  const auto start = Clock::now();
  while (Clock::now() - start < std::chrono::seconds(1) && !running_process(directory).empty())
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  if (const std::string holder = running_process(directory); !holder.empty()) {
    log_warning(fmt::format("{} takes the lock of {}, which goes on no longer", directory, holder));
    unlink(lock_path(directory).c_str());
  }
  return RunLock(directory);
}

bool RunLock::in_place() const {
  struct stat held {
  }, there{};
  return fstat(file_.get(), &held) == 0 && lstat(path_.c_str(), &there) == 0 && held.st_dev == there.st_dev &&
         held.st_ino == there.st_ino;
}

void RunLock::check() const {
  if (!in_place())
    throw UserError(path_ +
                    ": the file is gone: deleted, moved or replaced while the run was holding it; another "
                    "run may write this directory now, so this one ends; what it has written is kept");
}

std::string running_process(const std::string& directory) {
  const Fd file = open_lock(lock_path(directory), O_RDONLY | O_CLOEXEC);
  const std::optional<Holder> holder = file.valid() ? read_holder(file.get()) : std::nullopt;
  if (!holder) return "";
  const bool held = flock(file.get(), LOCK_SH | LOCK_NB) != 0 && errno == EWOULDBLOCK;
  return held ? holder->text() : "";
}

std::string now_utc() {
  const std::time_t now = std::time(nullptr);
  std::tm parts{};
  gmtime_r(&now, &parts);
  char buffer[32];
  std::strftime(buffer, sizeof buffer, "%Y-%m-%dT%H:%M:%SZ", &parts);
  return buffer;
}

std::vector<std::string> run_files(const RunDirectory& folder) {
  std::vector<std::string> paths;
  std::error_code error;
  if (!is_run(folder)) return paths;
  for (const auto& entry : fs::directory_iterator(folder.path, error)) {
    const std::string name = entry.path().filename().string();
    // A user may keep files next to the checkpoints; the folder goes if nothing is left in it.
    if (name == "checkpoints" && fs::is_directory(entry.symlink_status()))
      for (const auto& inside : fs::directory_iterator(entry.path(), error))
        if (is_checkpoint_name(inside.path().filename().string())) paths.push_back(inside.path().string());
    if (has_run_name(name) && name != kEnvironmentFile) paths.push_back(entry.path().string());
  }
  paths.push_back(folder.path + "/" + kEnvironmentFile);
  return paths;
}

void rewrite_config(const RunDirectory& folder, const Config& config,
                    const std::map<std::string, Origin>& origins) {
  write_file(folder.path + "/config.yaml", effective_config(folder, config, origins));
}

void keep_config_effective(const RunDirectory& folder, const Config& config,
                           const std::map<std::string, Origin>& origins) {
  const LoadedConfig was = load_config(folder.path + "/config.yaml", {});
  const bool same = std::ranges::all_of(config_keys(), [&](const Key& key) {
    if (key.secret) return key_value(key, was.config) == key_value(key, Config());  // of an earlier version
    return key.name.starts_with("output.") || key.name.starts_with("resume.") ||
           key_value(key, was.config) == key_value(key, config);
  });
  if (!same) rewrite_config(folder, config, origins);
}

void RunDirectory::check_gradients() const {
  std::error_code error;
  if (const std::string old = path + "/gradients.npy"; fs::exists(old, error))
    throw UserError(old + ": Topknot 0.1 recorded these gradients, and this version records and reads " +
                    gradients_safetensors() + "; move the old file away, and record again");
}

RunDirectory open_run_directory(const std::string& path) {
  RunDirectory folder{path};
  folder.lock = std::make_shared<RunLock>(path);
  std::vector<fs::path> half;  // of a start that was killed
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(path, error))
    if (const std::string name = entry.path().filename().string();
        name.find(".part-") != name.npos && has_run_name(name))
      half.push_back(entry.path());
  for (const fs::path& file : half) fs::remove(file, error);
  return folder;
}

RunDirectory create_run_directory(const LoadedConfig& loaded, const std::vector<std::string>& command_line,
                                  const std::map<std::string, std::string>& libraries) {
  const Config& config = loaded.config;
  RunDirectory folder{run_directory_name(config)};
  std::error_code error;
  // Nothing is left behind in a folder that is refused.
  if (!fs::exists(folder.path + "/" + RunLock::kName, error)) {
    check_free(folder, config.output.overwrite);
    fs::create_directories(folder.path, error);
    if (error)
      throw UserError("output.dir: " + folder.path + " cannot be created: " + error.message() +
                      "; choose another folder");
  }
  folder.lock = std::make_shared<RunLock>(folder.path);
  check_free(folder, config.output.overwrite);
  check_inputs(config, command_line, run_files(folder));
  for (const std::string& path : run_files(folder)) {
    if (path != folder.checkpoints())
      fs::remove_all(path, error);
    else if (fs::remove(path, error); error == std::errc::directory_not_empty)
      continue;  // a user's files
    if (error) throw UserError("output.overwrite: " + path + " cannot be removed: " + error.message());
  }
  write_file(folder.path + "/" + kEnvironmentFile, environment_json(config, command_line, libraries));
  write_file(folder.path + "/config.yaml", effective_config(folder, config, loaded.origins));
  return folder;
}

}  // namespace topknot

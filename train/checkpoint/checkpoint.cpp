#include "train/checkpoint/checkpoint.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>
#include <string_view>
#include <type_traits>
#include <utility>

#include "nn/base/check.h"
#include "nn/base/checksum.h"
#include "nn/base/file.h"
#include "nn/base/log.h"
#include "nn/base/text.h"
#include "train/metrics/output_file.h"

namespace topknot {

using Json = nlohmann::ordered_json;

// [ranks, batches]; here nlohmann's Json finds it.
static void to_json(Json& json, const Dealt& dealt) {
  json = {dealt.ranks, dealt.batches};
}

namespace {

namespace fs = std::filesystem;

constexpr int kFormat = 1;
constexpr std::size_t kManifestLimit = 16 << 20;
constexpr const char* kManifestFile = "manifest.json";
constexpr const char* kPartial = ".partial";
constexpr const char* kPassedOver = ".passed-over";
constexpr const char* kPrefix = "step-";

[[noreturn]] void fail(const std::string& path, const std::string& what) {
  throw UserError(fmt::format("{}: {}: {}", path, what, errno_text()));
}

class File {
 public:
  // O_NONBLOCK: opening a named pipe must not wait for its other end.
  File(const std::string& path, int flags)
      : path_(path), fd_(open(path.c_str(), flags | O_CLOEXEC | O_NONBLOCK, 0666)) {
    if (!fd_.valid()) fail(path, "cannot be opened");
  }
  // A new one. What has its name (of a killed run, or a link) is removed and not followed.
  static File create(const std::string& path) {
    unlink(path.c_str());
    return {path, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW};
  }
  int fd() const { return fd_.get(); }
  void sync() const {
    if (fsync(fd()) != 0) fail(path_, "cannot be synced to the disk");
  }

 private:
  std::string path_;
  Fd fd_;
};

void sync_directory(const std::string& path) {
  File(path, O_RDONLY | O_DIRECTORY).sync();
}

// False if there is nothing to rename: of several processes that do the same at once one renames.
bool renamed(const std::string& from, const std::string& to) {
  if (std::rename(from.c_str(), to.c_str()) == 0) return true;
  if (errno != ENOENT) fail(to, "cannot be renamed from " + from);
  return false;
}

void rename_over(const std::string& from, const std::string& to) {
  if (!renamed(from, to)) fail(to, "cannot be renamed from " + from);
}

std::string hex(std::uint64_t value) {
  return fmt::format("{:016x}", value);
}

// Throws an Error that parse_manifest() turns into a message, as it does with nlohmann's exceptions.
void need(bool condition, const std::string& otherwise) {
  if (!condition) throw Error(otherwise);
}

template <class T>
void read_field(const Json& json, T& value) {
  if constexpr (std::is_integral_v<T> && !std::is_same_v<T, bool>) {
    const auto number = whole_number(json);
    need(number && std::in_range<T>(*number), "a number is out of range");
  }
  json.get_to(value);
}

void read_field(const Json& json, Dealt& dealt) {
  need(json.is_array() && json.size() == 2, "what was dealt is no pair");
  read_field(json[0], dealt.ranks), read_field(json[1], dealt.batches);
  need(dealt.ranks > 0 && dealt.batches >= 0, "what was dealt is out of range");
}

template <class T>
void read_field(const Json& json, std::vector<T>& values) {
  need(json.is_array(), "a list is no list");
  for (const Json& value : json) read_field(value, values.emplace_back());
}

std::uint64_t from_hex(const std::string& text) {
  std::uint64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value, 16);
  need(text.size() == 16 && error == std::errc() && end == text.data() + text.size(),
       text + " is no checksum");
  return value;
}

std::uint64_t checksum_of(std::string_view text) {
  Checksum checksum;
  checksum.update(std::as_bytes(std::span(text)));
  return checksum.value();
}

// Each field once, for writing and for reading.
void fields(auto& m, auto&& visit) {
  auto& p = m.position;
  visit("step", p.step), visit("skipped", p.skipped), visit("skips_in_a_row", p.skips_in_a_row);
  visit("epoch_loss", p.epoch_loss), visit("epoch_loss_steps", p.epoch_loss_steps);
  visit("evaluated", p.evaluated), visit("shift", p.shift), visit("dealt", p.dealt);
  visit("test_loss", p.evaluation.loss), visit("test_accuracy", p.evaluation.accuracy);
  visit("plateau_factor", p.plateau.factor), visit("plateau_best", p.plateau.best);
  visit("plateau_any", p.plateau.any), visit("plateau_waited", p.plateau.waited);
  visit("ranks", m.ranks), visit("global_batch", m.global_batch);
  visit("program", m.program), visit("metrics_bytes", m.metrics_bytes);
  visit("parameter_checksum", m.parameter_checksum), visit("config", m.config);
  visit("data", m.data), visit("threads", m.threads);
  visit("bytes_sent", m.totals.bytes.upload), visit("bytes_received", m.totals.bytes.download);
  visit("bytes_dense", m.totals.bytes.dense);
  visit("train_seconds", m.totals.train_seconds), visit("eval_seconds", m.totals.eval_seconds);
}

// Which earlier versions did not write.
bool is_later_field(std::string_view name) {
  constexpr std::array<std::string_view, 11> kLater = {
      "epoch_loss_steps", "data",         "threads", "bytes_sent", "bytes_received", "bytes_dense",
      "train_seconds",    "eval_seconds", "shift",   "dealt",      "global_batch"};
  return name.starts_with("plateau_") || std::ranges::count(kLater, name) > 0;
}

std::optional<std::int64_t> step_of(const std::string& name) {
  std::int64_t step = 0;
  const std::size_t prefix = std::strlen(kPrefix);
  if (name.rfind(kPrefix, 0) != 0) return {};
  const auto [end, error] = std::from_chars(name.data() + prefix, name.data() + name.size(), step);
  if (error != std::errc() || end != name.data() + name.size() || step < 0) return {};
  return step;
}

constexpr const char* kResidual = "residual.";
constexpr const char* kStatistics = "statistics.";
constexpr const char* kExchange = "exchange";
constexpr const char* kInner = "inner.{}.";

// Parameters, or those of them that are trained: all that optimizer and exchange know.
std::vector<const Parameter*> parameters_of(const ParameterStore& store, bool trained_only) {
  std::vector<const Parameter*> parameters;
  for (const auto& parameter : store.parameters())
    if (parameter->trained() || !trained_only) parameters.push_back(parameter.get());
  return parameters;
}

template <class V>
TensorView view(std::string name, std::string dtype, std::vector<std::int64_t> shape,
                std::span<const V> values) {
  return {std::move(name), std::move(dtype), std::move(shape), std::as_bytes(values)};
}

// One tensor per trained parameter of a buffer in arena order.
void add_arena(std::vector<TensorView>& tensors, const ParameterStore& store, const std::string& prefix,
               std::span<const float> values) {
  for (const Parameter* p : parameters_of(store, true))
    tensors.push_back(
        view(prefix + p->name(), "F32", dimensions(p->shape()), values.subspan(p->offset(), p->numel())));
}

void copy_tensor(const SafetensorsFile& file, const std::string& name, const std::vector<std::int64_t>& shape,
                 std::span<float> to) {
  const TensorView* tensor = file.find(name);
  if (!tensor) throw UserError(fmt::format("the checkpoint lacks '{}'; is it of another model?", name));
  if (tensor->dtype != "F32" || tensor->shape != shape)
    throw UserError(fmt::format("the checkpoint's '{}' is {} [{}], not F32 [{}]; is it of another model?",
                                name, tensor->dtype, fmt::join(tensor->shape, ", "), fmt::join(shape, ", ")));
  if (!to.empty()) std::memcpy(to.data(), tensor->data.data(), to.size_bytes());
}

std::vector<float> read_arena(const SafetensorsFile& file, const std::vector<const Parameter*>& parameters,
                              const std::string& prefix) {
  std::size_t total = 0;
  for (const Parameter* p : parameters) total += p->numel();
  std::vector<float> values(total);
  for (const Parameter* p : parameters)
    copy_tensor(file, prefix + p->name(), dimensions(p->shape()),
                std::span(values).subspan(p->offset(), p->numel()));
  return values;
}

// A model's file has no recurrent states: they are 0.
void read_statistics(const SafetensorsFile& file, const ParameterStore& store, const std::string& prefix,
                     bool with_states, std::vector<float>& statistics) {
  statistics.clear();
  for (const auto& buffer : store.buffers()) {
    const std::size_t begin = statistics.size(), size = buffer->values.size();
    statistics.resize(begin + size);
    if (buffer->recurrent && !with_states) continue;
    copy_tensor(file, prefix + buffer->name, {static_cast<std::int64_t>(size)},
                std::span(statistics).subspan(begin));
  }
}

}  // namespace

std::vector<TensorView> optimizer_tensors(const ParameterStore& store, const RunState& state) {
  std::vector<TensorView> tensors;
  for (std::size_t i = 0; i < state.optimizer.size(); ++i)
    add_arena(tensors, store, fmt::format("{}.", i), state.optimizer[i]);
  return tensors;
}

std::vector<TensorView> rank_tensors(const ParameterStore& store, const RunState& state) {
  std::vector<TensorView> tensors;
  if (!state.residual.empty()) add_arena(tensors, store, kResidual, state.residual);
  std::span<const float> statistics = state.model.statistics;
  for (const auto& buffer : store.buffers()) {
    const std::size_t size = buffer->values.size();
    tensors.push_back(
        view(kStatistics + buffer->name, "F32", {static_cast<std::int64_t>(size)}, statistics.first(size)));
    statistics = statistics.subspan(size);
  }
  for (std::size_t i = 0; i < state.inner.size(); ++i)
    add_arena(tensors, store, fmt::format(kInner, i), state.inner[i]);
  tensors.push_back(view(kExchange, "U8", {static_cast<std::int64_t>(state.exchange.size())},
                         std::span<const std::byte>(state.exchange)));
  return tensors;
}

void read_model(const ParameterStore& store, const SafetensorsFile& file, RunState& state) {
  state.model.weights = read_arena(file, parameters_of(store, false), "");
  read_statistics(file, store, "", false, state.model.statistics);
}

void read_optimizer(const ParameterStore& store, const SafetensorsFile& file, RunState& state) {
  const std::vector<const Parameter*> trained = parameters_of(store, true);
  const std::size_t buffers = file.tensors().size() / trained.size();
  state.optimizer.clear();
  for (std::size_t i = 0; i < buffers; ++i)
    state.optimizer.push_back(read_arena(file, trained, fmt::format("{}.", i)));
}

void read_rank(const ParameterStore& store, const SafetensorsFile& file, RunState& state) {
  state.residual.clear();
  const std::vector<const Parameter*> trained = parameters_of(store, true);
  if (file.find(kResidual + trained.front()->name())) state.residual = read_arena(file, trained, kResidual);
  state.inner.clear();
  for (std::string prefix = fmt::format(kInner, 0); file.find(prefix + trained.front()->name());
       prefix = fmt::format(kInner, state.inner.size()))
    state.inner.push_back(read_arena(file, trained, prefix));
  read_statistics(file, store, kStatistics, true, state.model.statistics);
  const TensorView* exchange = file.find(kExchange);
  if (!exchange) throw UserError(fmt::format("the checkpoint lacks '{}'", kExchange));
  state.exchange.assign(exchange->data.begin(), exchange->data.end());
}

std::string manifest_text(const Manifest& manifest) {
  Json body;
  body["format"] = kFormat;
  body["files"] = Json::array();
  fields(manifest, [&](const char* name, const auto& value) {
    if constexpr (std::is_same_v<std::decay_t<decltype(value)>, double>)
      body[name] = json_number(value);  // the loss of a skipped step may be NaN
    else
      body[name] = value;
  });
  for (const CheckpointFile& file : manifest.files)
    body["files"].push_back({{"name", file.name}, {"bytes", file.bytes}, {"checksum", hex(file.checksum)}});
  const std::string text = body.dump();
  return Json{{"checksum", hex(checksum_of(text))}, {"manifest", body}}.dump() + "\n";
}

Manifest parse_manifest(const std::string& text, const std::string& where) {
  Manifest manifest;
  try {
    // dump() calls itself: what is nested deeper than a manifest is dropped, and the checksum then differs.
    const Json json =
        Json::parse(text, [](int depth, Json::parse_event_t, const Json&) { return depth < 8; });
    const Json& body = json.at("manifest");
    int format = 0;
    read_field(body.at("format"), format);
    if (format != kFormat)
      throw UserError(fmt::format("{}: has format {}; this program reads {}", where, format, kFormat));
    need(json.at("checksum") == hex(checksum_of(body.dump())), "its checksum does not match");
    need(json.dump() + "\n" == text, "it was changed");
    fields(manifest, [&](const char* name, auto& value) {
      if (is_later_field(name) && !body.contains(name)) return;
      if constexpr (std::is_same_v<std::decay_t<decltype(value)>, double>)
        if (body.at(name).is_null()) {
          value = std::numeric_limits<double>::quiet_NaN();
          return;
        }
      read_field(body.at(name), value);
    });
    for (const Json& file : body.at("files")) {
      std::uint64_t bytes = 0;
      read_field(file.at("bytes"), bytes);
      manifest.files.push_back({file.at("name"), bytes, from_hex(file.at("checksum"))});
    }
    const TrainingPosition& position = manifest.position;
    need(position.step >= 0 && position.step + position.shift >= 0 && manifest.ranks > 0 &&
             manifest.global_batch >= 0,
         "a number is out of range");
  } catch (const UserError&) {
    throw;
  } catch (const std::exception& error) {
    throw UserError(fmt::format("{}: the manifest is damaged: {}", where, error.what()));
  }
  return manifest;
}

const CheckpointFile& file_of(const Manifest& manifest, const std::string& name) {
  for (const CheckpointFile& file : manifest.files)
    if (file.name == name) return file;
  throw UserError(fmt::format("the manifest of step {} lacks {}", manifest.position.step, name));
}

std::string rank_file(int rank) {
  return fmt::format("rank-{:04}.safetensors", rank);
}

void sync_file(const std::string& path) {
  File(path, O_RDONLY).sync();
}

CheckpointStore::CheckpointStore(std::string directory, Write write)
    : directory_(std::move(directory)), write_(write ? std::move(write) : Write(::write)) {}

std::string CheckpointStore::path(std::int64_t step) const {
  return fmt::format("{}/{}{:09}", directory_, kPrefix, step);
}

std::string CheckpointStore::partial(std::int64_t step) const {
  return path(step) + kPartial;
}

std::vector<std::int64_t> CheckpointStore::steps() const {
  std::vector<std::int64_t> steps;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(directory_, error))
    if (const auto step = step_of(entry.path().filename().string()))
      if (fs::exists(entry.path() / kManifestFile, error)) steps.push_back(*step);
  std::sort(steps.begin(), steps.end());
  return steps;
}

Manifest CheckpointStore::manifest(std::int64_t step) const {
  const std::string file = path(step) + "/" + kManifestFile;
  Manifest manifest = parse_manifest(read_text_file(file, kManifestLimit), file);
  if (manifest.position.step != step)
    throw UserError(
        fmt::format("{}: is of step {}; was the directory renamed?", file, manifest.position.step));
  return manifest;
}

std::vector<std::byte> CheckpointStore::read(std::int64_t step, const CheckpointFile& expected) const {
  const std::string file = path(step) + "/" + expected.name;
  std::error_code error;
  const std::uintmax_t size = fs::file_size(file, error);
  if (error) throw UserError(fmt::format("{}: cannot be read: {}", file, error.message()));
  if (size != expected.bytes)
    throw UserError(fmt::format("{}: has {} bytes, the manifest says {}; the file is damaged", file, size,
                                expected.bytes));
  std::vector<std::byte> bytes(size);
  std::ifstream in = open_stream(file);
  if (!in.read(reinterpret_cast<char*>(bytes.data()), static_cast<std::streamsize>(size)))
    fail(file, "cannot be read");
  Checksum checksum;
  checksum.update(bytes);
  if (checksum.value() != expected.checksum)
    throw UserError(fmt::format("{}: its checksum is {}, the manifest says {}; the file is damaged", file,
                                hex(checksum.value()), hex(expected.checksum)));
  return bytes;
}

CheckpointFile CheckpointStore::write_file(const std::string& directory, const std::string& name,
                                           const std::function<void(const ByteSink&)>& content) const {
  const std::string path = directory + "/" + name;
  const File file = File::create(path);
  CheckpointFile written{name, 0, 0};
  Checksum checksum;
  content([&](std::span<const std::byte> bytes) {
    checksum.update(bytes);
    written.bytes += bytes.size();
    while (!bytes.empty()) {
      errno = 0;
      const ssize_t count = write_(file.fd(), bytes.data(), bytes.size());
      if (count < 0 && errno == EINTR) continue;
      if (count <= 0) fail(path, "cannot be written");
      bytes = bytes.subspan(static_cast<std::size_t>(count));
    }
  });
  file.sync();
  written.checksum = checksum.value();
  return written;
}

CheckpointFile CheckpointStore::write(std::int64_t step, const std::string& name,
                                      std::span<const TensorView> tensors, const Metadata& metadata) const {
  std::error_code error;
  fs::create_directories(partial(step), error);
  if (error) throw UserError(fmt::format("{}: cannot be created: {}", partial(step), error.message()));
  if (fs::is_symlink(partial(step), error))
    throw UserError(fmt::format("{}: is a link; remove it, since no other folder is written", partial(step)));
  remove(step);  // a damaged one: a run does not save the step that it was resumed from
  return write_file(partial(step), name,
                    [&](const ByteSink& sink) { write_safetensors(sink, tensors, metadata); });
}

void CheckpointStore::publish(std::int64_t step, const Manifest& manifest) const {
  const std::string text = manifest_text(manifest);
  write_file(partial(step), kManifestFile,
             [&](const ByteSink& sink) { sink(std::as_bytes(std::span(text))); });
  sync_directory(partial(step));
  rename_over(partial(step), path(step));
  sync_directories();
}

void CheckpointStore::publish_rank_files(std::int64_t step) const {
  renamed(partial(step), path(step));
  sync_directory(path(step));
  sync_directories();
}

void CheckpointStore::sync_directories() const {
  sync_directory(directory_);
  sync_directory(directory_ + "/..");  // which has the entry of a new one
}

void CheckpointStore::set_aside_after(std::int64_t step) const {
  std::error_code error;
  std::vector<fs::path> newer;
  for (const auto& entry : fs::directory_iterator(directory_, error))
    if (step_of(entry.path().filename().string()).value_or(step) > step) newer.push_back(entry.path());
  for (const fs::path& from : newer) {
    std::string to = from.string() + kPassedOver;
    for (int start = 2; fs::exists(to, error); ++start)  // of an earlier start
      to = fmt::format("{}{}-{}", from.string(), kPassedOver, start);
    if (renamed(from.string(), to)) log_warning(fmt::format("resume: a newer checkpoint is kept as {}", to));
  }
}

void CheckpointStore::evaluated(std::int64_t step, const TrainingPosition& position,
                                std::uint64_t metrics_bytes) const {
  Manifest changed = manifest(step);
  changed.position = position, changed.metrics_bytes = metrics_bytes;
  const std::string text = manifest_text(changed), beside = std::string(kManifestFile) + kPartial;
  write_file(path(step), beside, [&](const ByteSink& sink) { sink(std::as_bytes(std::span(text))); });
  rename_over(path(step) + "/" + beside, path(step) + "/" + kManifestFile);
  sync_directory(path(step));
}

void CheckpointStore::remove(std::int64_t step) const {
  std::error_code error;
  // A directory is not removed at once: under this name no reader takes what is left for a checkpoint.
  const std::string superseded = path(step) + ".removed" + kPartial;
  fs::remove_all(superseded, error);  // an interrupted removal's
  if (renamed(path(step), superseded)) fs::remove_all(superseded, error);
}

void CheckpointStore::remove_partial() const {
  std::error_code error;
  std::vector<fs::path> left;
  for (const auto& entry : fs::directory_iterator(directory_, error))
    if (entry.path().extension() == kPartial && entry.path().filename().string().rfind(kPrefix, 0) == 0)
      left.push_back(entry.path());
  for (const fs::path& path : left) fs::remove_all(path, error);
}

FoundCheckpoint find_checkpoint(const std::string& run, std::optional<std::int64_t> step) {
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
      throw UserError(fmt::format("{}: a checkpoint is read under the name that the run gave it, such as {}",
                                  run, fs::path(store.path(1200)).filename().string()));
    if (step && *step != *named)
      throw UserError(
          fmt::format("{}: is the checkpoint of step {}; leave --step {} out", run, *named, *step));
    step = named;
  }
  CheckpointStore store(directory.string());
  const std::vector<std::int64_t> steps =
      fs::is_directory(directory, error) ? store.steps() : std::vector<std::int64_t>();
  if (steps.empty())
    throw UserError(fmt::format("{}: no checkpoint in {}; give the directory of a run that has saved one",
                                run, directory.string()));
  if (!step) step = steps.back();
  if (std::find(steps.begin(), steps.end(), *step) == steps.end())
    throw UserError(
        fmt::format("{}: no checkpoint of step {}; there are {}", run, *step, fmt::join(steps, ", ")));
  Manifest manifest = store.manifest(*step);
  return {std::move(store), *step, std::move(manifest)};
}

SafetensorsFile read_model_file(const FoundCheckpoint& checkpoint) {
  const auto& [store, step, manifest] = checkpoint;
  return SafetensorsFile::parse(store.read(step, file_of(manifest, kModelFile)),
                                store.path(step) + "/" + kModelFile);
}

}  // namespace topknot

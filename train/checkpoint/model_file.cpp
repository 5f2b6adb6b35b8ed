#include "train/checkpoint/model_file.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <fnmatch.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <regex>
#include <set>
#include <sstream>
#include <string_view>

#include "nn/base/check.h"
#include "nn/base/file.h"
#include "nn/base/terminal.h"
#include "nn/base/text.h"
#include "train/checkpoint/checkpoint.h"
#include "train/checkpoint/model_names.h"
#include "train/config/config.h"
#include "train/metrics/output_file.h"

namespace topknot {
namespace {

// Calls visit(name, shape, parameter, buffer); one of the two pointers is null.
void for_each_tensor(const ParameterStore& store, auto&& visit) {
  using Dimensions = std::vector<std::int64_t>;
  for (const auto& p : store.parameters())
    visit(p->name(), dimensions(p->shape()), p.get(), static_cast<Buffer*>(nullptr));
  for (const auto& b : store.buffers())
    if (!b->recurrent)
      visit(b->name, Dimensions{static_cast<std::int64_t>(b->values.size())},
            static_cast<const Parameter*>(nullptr), b.get());
}

std::vector<std::string> tensor_names(const ParameterStore& store) {
  std::vector<std::string> names;
  for_each_tensor(
      store, [&](const std::string& name, const auto&, const Parameter*, Buffer*) { names.push_back(name); });
  return names;
}

bool matches_name(const std::string& pattern, const std::string& name) {
  for (std::size_t end = name.find('.');; end = name.find('.', end + 1)) {
    if (fnmatch(pattern.c_str(), name.substr(0, end).c_str(), 0) == 0) return true;
    if (end == std::string::npos) return false;
  }
}

// A part of the message: a heading and its lines; "" if there are none.
std::string paragraph(const std::string& heading, const std::vector<std::string>& lines) {
  return lines.empty() ? "" : fmt::format("\n  {}:\n    {}", heading, fmt::join(lines, "\n    "));
}

// Explains a name such as "model-00001-of-00003.safetensors"; "" for any other.
std::string part_text(const std::string& path) {
  static const std::regex name(R"(-\d+-of-0*([1-9]\d*)\.safetensors$)");
  std::smatch parts;
  if (!std::regex_search(path, parts, name) || parts[1] == "1") return "";
  return fmt::format(
      "\n  it is one of {} files that hold the weights together; save them as one: in transformers "
      "save_pretrained(DIR, max_shard_size=\"1TB\")",
      parts[1].str());
}

namespace fs = std::filesystem;

constexpr const char* kUsage =
    "train export RUN --to FILE.safetensors [--step N] [--names topknot|huggingface] [--overwrite]";

// Whether the key says which model it is or what it reads, not where files lie or how the run was made.
bool describes_model(const std::string& key) {
  static const std::set<std::string> of_data = {
      "data.name", "data.classes",         "data.image_size", "data.resize",    "data.mean",
      "data.std",  "data.sequence_length", "data.tokens",     "data.vocabulary"};
  return of_data.count(key) > 0 ||
         (key.starts_with("model.") && key != "model.init_from" && key != "model.reinit");
}

// The configuration as YAML that `train` reads.
std::string config_yaml(const Manifest& manifest) {
  std::string text;
  for (const auto& [key, value] : manifest.config)
    if (describes_model(key)) text += fmt::format("{}: {}\n", key, value);
  return text;
}

}  // namespace

std::vector<std::int64_t> dimensions(const Shape& shape) {
  std::vector<std::int64_t> dims;
  for (int i = 0; i < shape.rank(); ++i) dims.push_back(shape[i]);
  return dims;
}

std::vector<TensorView> model_tensors(const ParameterStore& store, const ModelCopy& copy) {
  std::vector<TensorView> tensors;
  std::map<const Buffer*, std::span<const float>> statistics;
  std::size_t at = 0;
  for (const auto& buffer : store.buffers()) {
    statistics[buffer.get()] = std::span(copy.statistics).subspan(at, buffer->values.size());
    at += buffer->values.size();
  }
  for_each_tensor(store, [&](const std::string& name, std::vector<std::int64_t> shape,
                             const Parameter* parameter, Buffer* buffer) {
    const std::span<const float> values =
        parameter ? std::span(copy.weights).subspan(parameter->offset(), parameter->numel())
                  : statistics.at(buffer);
    tensors.push_back({name, "F32", std::move(shape), std::as_bytes(values)});
  });
  return tensors;
}

bool matches_any(const std::vector<std::string>& patterns, const std::string& name) {
  bool matches = false;
  for (const std::string& pattern : patterns)
    if (const bool except = pattern.starts_with('!'); matches_name(pattern.substr(except), name))
      matches = !except;
  return matches;
}

void check_patterns(const std::string& key, const std::vector<std::string>& patterns,
                    const std::vector<std::string>& names) {
  for (const std::string& pattern : patterns)
    if (std::none_of(names.begin(), names.end(), [&](const std::string& name) {
          return matches_name(pattern.substr(pattern.starts_with('!')), name);
        }))
      throw UserError(
          fmt::format("{}: '{}' matches nothing; there are {}", key, pattern, fmt::join(names, ", ")));
}

void load_model(ParameterStore& store, const SafetensorsFile& file, const std::vector<std::string>& reinit) {
  check_patterns("model.reinit", reinit, tensor_names(store));
  std::vector<std::string> known = tensor_names(store);
  std::sort(known.begin(), known.end());
  const NamedTensors named = from_hugging_face(without_wrappers(file.tensors(), known));
  std::map<std::string_view, const TensorView*> by_name;
  for (const TensorView& tensor : named.tensors) by_name[tensor.name] = &tensor;
  const auto find = [&](const std::string& name) {
    const auto at = by_name.find(name);
    return at == by_name.end() ? nullptr : at->second;
  };
  std::vector<std::string> missing, unexpected, other, non_finite;
  for_each_tensor(
      store, [&](const std::string& name, const std::vector<std::int64_t>& shape, const Parameter*, Buffer*) {
        if (matches_any(reinit, name)) return;
        const TensorView* tensor = find(name);
        if (!tensor)
          missing.push_back(fmt::format("{} {}", name, shape));
        else if (tensor->shape != shape || tensor->dtype != "F32")
          other.push_back(fmt::format("{}: {} {} in the file, {} F32 in the model", name, tensor->shape,
                                      tensor->dtype, shape));
        else if (std::string text = non_finite_text(*tensor); !text.empty())
          non_finite.push_back(fmt::format("{}: {}", name, text));
      });
  for (const TensorView& tensor : named.tensors)
    if (!std::binary_search(known.begin(), known.end(), tensor.name) && !matches_any(reinit, tensor.name))
      unexpected.push_back(fmt::format("{} {}", quoted_text(tensor.name), tensor.shape));
  if (!missing.empty() || !unexpected.empty() || !other.empty())
    throw UserError(fmt::format(
        "{}: its tensors are not those of the model{}{}{}{}\n  choose the model.name and the data that "
        "it was made for, or let model.reinit name what keeps its initialisation",
        file.where(), part_text(file.where()), paragraph("missing in the file", missing),
        paragraph("not in the model", unexpected), paragraph("of another shape or type", other)));
  if (!non_finite.empty())
    throw UserError(fmt::format(
        "{}: holds no weights that a run can begin with:\n    {}\n  the run that wrote it has diverged; give "
        "another file, or let model.reinit name what keeps its initialisation",
        file.where(), fmt::join(non_finite, "\n    ")));

  store.statistics_to_host();
  std::vector<float> values;  // a view may begin at any byte
  for_each_tensor(store,
                  [&](const std::string& name, const auto&, const Parameter* parameter, Buffer* buffer) {
                    if (matches_any(reinit, name)) return;
                    const TensorView& tensor = *find(name);
                    values.resize(tensor.data.size() / sizeof(float));
                    std::memcpy(values.data(), tensor.data.data(), tensor.data.size());
                    if (parameter)
                      backend(store.device()).to_device(parameter->value(), values.data(), values.size());
                    else
                      std::copy(values.begin(), values.end(), buffer->values.begin());
                  });
  store.statistics_to_device();
}

void adopt_architecture(LoadedConfig& loaded, const std::map<std::string, std::string>& stated,
                        const std::string& where) {
  static const std::set<std::string> shapes = {"model.name",         "model.hidden", "model.width",
                                               "model.layers",       "model.tied",   "model.context",
                                               "model.feed_forward", "model.bias"};
  static const std::set<std::string> in_no_shape = {"model.heads", "model.kv_heads", "model.norm_epsilon",
                                                    "model.gelu", "model.rope_base"};
  const auto given = [&](const std::string& key) { return loaded.origins.count(key) > 0; };
  Config weights = loaded.config;
  for (const auto& [name, value] : stated) {
    if (shapes.count(name) + in_no_shape.count(name) == 0) continue;
    const Key& key = *find_key(name);
    const auto raw = parse_raw(value, is_list(key));
    if (const std::string wrong = raw ? set_key(key, *raw, weights) : "has an open bracket"; !wrong.empty())
      loaded.problems.push_back({name, fmt::format("{}: {} {}", where, name, wrong)});
  }
  if (given("model.name") && loaded.config.model.name != weights.model.name) return;  // other tensors
  const auto length = stated.find("data.sequence_length");
  if (weights.model.get<int>(option::context) == 0 && length != stated.end())
    set_key(*find_key("model.context"), {.items = {length->second}}, weights);
  const std::string as_many = key_value(*find_key("model.heads"), weights);
  if (const Key& key = *find_key("model.kv_heads"); key_value(key, weights) == as_many)
    set_key(key, {.items = {"0"}}, weights);

  for (const auto& [name, value] : stated) {
    if (shapes.count(name) + in_no_shape.count(name) == 0) continue;
    const Key& key = *find_key(name);
    const std::string now = key_value(key, loaded.config), then = key_value(key, weights);
    if (now == then || (!key.users.empty() && std::ranges::count(key.users, weights.model.name) == 0))
      continue;
    if (!given(name)) {
      set_key(key, *parse_raw(then, is_list(key)), loaded.config);
      loaded.origins[name] = Origin::weights;
    } else if (in_no_shape.count(name) && !(name == "model.kv_heads" && then == "0" && now == as_many)) {
      loaded.problems.push_back(
          {name, fmt::format("{}: {} ({}), but {} has {} for these weights; leave the key out", name, now,
                             origin_name(loaded.origins[name], loaded.config), where, then)});
    }
  }
}

void adopt_architecture(LoadedConfig& loaded) {
  const std::string& file = loaded.config.model.init_from;
  if (file.empty()) return;
  const auto beside = [&](const char* name) { return (fs::path(file).parent_path() / name).string(); };
  constexpr std::size_t kMostBytes = 16 << 20;
  Metadata metadata;
  try {
    metadata = SafetensorsFile::read_metadata(file);
  } catch (const UserError&) {
    return;
  }
  const std::string& name = loaded.config.model.name;
  std::error_code error;
  try {
    if (metadata.count("config")) {
      std::map<std::string, std::string> stated;
      std::istringstream lines(metadata["config"]);
      for (std::string line; std::getline(lines, line);)
        if (const auto colon = line.find(": "); colon != line.npos)
          stated[line.substr(0, colon)] = line.substr(colon + 2);
      adopt_architecture(loaded, stated, file);
    } else if (const std::string manifest = beside("manifest.json");
               fs::path(file).filename() == kModelFile && metadata.count("parameter_checksum") &&
               fs::exists(manifest, error)) {
      adopt_architecture(loaded, parse_manifest(read_text_file(manifest, kMostBytes), manifest).config,
                         manifest);
    } else if (const std::string config = beside("config.json");
               fs::exists(config, error) &&
               (!loaded.origins.count("model.name") || name == "gpt" || name == "llama")) {
      adopt_architecture(loaded, keys_from_hugging_face(read_text_file(config, kMostBytes), config), config);
    }
  } catch (const UserError& wrong) {
    loaded.problems.push_back({"model.init_from", wrong.what()});
  }
}

std::string export_model(const std::string& run, const std::string& to, std::optional<std::int64_t> step,
                         bool overwrite, bool hugging_face) {
  check_output(to, overwrite ? Replace::all : Replace::nothing,
               "choose another name, or --overwrite to replace it");
  if (!to.ends_with(".safetensors"))
    throw UserError(fmt::format(
        "--to: {}: a safetensors file is written, and its name ends in .safetensors{}", to,
        to.ends_with(".pth") || to.ends_with(".pt") ? "; scripts/convert-pth makes a .pth of it" : ""));
  const FoundCheckpoint found = find_checkpoint(run, step);
  const Manifest& manifest = found.manifest;
  const SafetensorsFile model = read_model_file(found);
  const auto name = manifest.config.find("model.name");
  const NamedTensors renamed = hugging_face ? to_hugging_face(model.tensors()) : NamedTensors();
  const std::vector<TensorView>& tensors = hugging_face ? renamed.tensors : model.tensors();
  OutputFile file(to);
  write_safetensors(
      [&](std::span<const std::byte> part) {
        file.write({reinterpret_cast<const char*>(part.data()), part.size()});
      },
      tensors,
      {{"format", "pt"},
       {"topknot", manifest.program},
       {"model", name == manifest.config.end() ? "" : name->second},
       {"step", fmt::format("{}", found.step)},
       {"config", config_yaml(manifest)}});
  file.close();
  return fmt::format("{}: {} of step {} of {}", to,
                     count_text(static_cast<std::int64_t>(tensors.size()), "tensor"), found.step, run);
}

int export_command(int argc, const char* const* argv) {
  CLI::App app("train export");
  app.set_help_flag();
  std::string run, to, names = "topknot";
  std::int64_t step = 0;
  bool help = false, overwrite = false;
  app.add_flag("-h,--help", help);
  app.add_flag("--overwrite", overwrite);
  app.add_option("run", run);
  app.add_option("--to", to);
  app.add_option("--step", step);
  app.add_option("--names", names)->check(CLI::IsMember({"topknot", "huggingface"}));
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
        "it. --names huggingface: of gpt and llama, with the names and in the order of Hugging Face's files, "
        "which model.init_from takes too. A file that is there already is replaced with --overwrite only.\n";
    std::fputs(reflowed(text, terminal_columns(STDOUT_FILENO)).c_str(), stdout);
    return 0;
  }
  if (run.empty() || to.empty())
    throw UserError(
        fmt::format("train export: {} is missing; usage: {}", run.empty() ? "RUN" : "--to", kUsage));
  const std::string done = export_model(run, to, app.count("--step") ? std::optional(step) : std::nullopt,
                                        overwrite, names == "huggingface");
  std::printf("%s\n", done.c_str());
  return 0;
}

}  // namespace topknot

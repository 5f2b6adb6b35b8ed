#include "tools/sparsify/sparsify.h"

#include <fmt/format.h>

#include <charconv>
#include <cmath>
#include <limits>
#include <map>
#include <numeric>
#include <set>

#include "compress/memory/memory.h"
#include "compress/sparse.h"
#include "nn/base/check.h"
#include "nn/base/text.h"
#include "train/config/config.h"
#include "train/setup.h"

namespace topknot {
namespace {

const std::string kSection = "compress.";

// Keys beside those of section compress, by the short name.
const std::map<std::string, std::string>& short_names() {
  static const std::map<std::string, std::string> names = {{"seed", "seed"},
                                                           {"momentum", "optimizer.momentum"},
                                                           {"nesterov", "optimizer.nesterov"},
                                                           {"lr", "optimizer.lr"},
                                                           {"Q", "compress.q"}};  // as its paper writes it
  return names;
}

// Why a key of section compress has no meaning for a plain array; "" if it has.
std::string refusal(const std::string& key) {
  static const std::map<std::string, std::string> reasons = {
      {"compress.name", "is what --compressor names"},
      {"compress.warmup", "is by epochs, and an array has none; run once per density"},
      {"compress.warmup_epochs", "is by epochs, and an array has none; run once per density"},
      {"compress.dense_1d", "is about parameters by shape; leave the 1-D ones out of the array"},
      {"compress.min_numel", "is about parameters by size; leave the small ones out of the array"},
      {"compress.dense_values", "is about parameters that are sent dense, and here nothing does"},
      {"compress.layer_density", "is about parameters by name, and an array has none; run once per tensor"},
      {"compress.alpha_s", "is about times of training, and an array has none"},
      {"compress.beta_s_per_byte", "is about times of training, and an array has none"},
  };
  const auto found = reasons.find(key);
  return found == reasons.end() ? "" : key + " " + found->second;
}

// "mu" -> "compress.mu", "lr" -> "optimizer.lr"; full names as they are.
std::string full_name(const std::string& name) {
  if (const auto found = short_names().find(name); found != short_names().end()) return found->second;
  for (const auto& [shorter, longer] : short_names())
    if (name == longer) return longer;
  const std::string full = name.rfind(kSection, 0) == 0 ? name : kSection + name;
  if (find_key(full)) {
    if (const std::string why = refusal(full); !why.empty()) throw UserError(why);
    return full;
  }
  if (find_key(name))
    throw UserError("'" + name +
                    "' is a key of training and means nothing here; keys are those of section compress, and "
                    "seed, momentum, nesterov, lr");
  std::vector<std::string> known = {"tensors"};
  for (const auto& [shorter, longer] : short_names()) known.push_back(shorter);
  for (const Key& key : config_keys())
    if (key.name.rfind(kSection, 0) == 0 && refusal(key.name).empty())
      known.push_back(key.name.substr(kSection.size()));
  throw UserError(unknown_name_message("key", full.substr(kSection.size()), known));
}

std::vector<double> parse_weights(const std::string& text, std::size_t ranks) {
  if (text.empty()) return std::vector<double>(ranks, 1.0);
  std::vector<double> weights;
  double sum = 0;
  for (std::size_t at = 0; at <= text.size();) {
    const std::size_t comma = std::min(text.find(',', at), text.size());
    const std::string part = text.substr(at, comma - at);
    double weight = 0;
    const auto [end, error] = std::from_chars(part.data(), part.data() + part.size(), weight);
    if (error != std::errc{} || end != part.data() + part.size() || !(weight > 0) || !(weight <= 1e30))
      throw UserError("--weights: '" + part +
                      "' is no weight; write one number above 0 per rank, such as 1,2,1");
    weights.push_back(weight);
    sum += weight;
    at = comma + 1;
  }
  if (weights.size() != ranks)
    throw UserError(fmt::format("--weights gives {}, and the input has {}",
                                count_text(static_cast<std::int64_t>(weights.size()), "weight"),
                                count_text(static_cast<std::int64_t>(ranks), "rank")));
  for (double& weight : weights) weight = weight * static_cast<double>(ranks) / sum;
  return weights;
}

// Whether optimizer.momentum reaches this method. Unknown names are reported elsewhere.
bool owns_momentum(const CompressOptions& options) {
  const auto parts = pieces_of(options);
  return parts && memories().contains(parts->memory) && memories().find(parts->memory).traits.owns_momentum;
}

// "64x27,64,10x64x3x3": [rows, the other dimensions] each, one vector where there is one number. Throws
// UserError if the sizes do not add up to numel.
std::vector<TensorSpec> parse_tensors(const std::string& text, std::size_t numel) {
  std::vector<TensorSpec> tensors;
  const auto wrong = [&](const std::string& part) {
    throw UserError("--tensors: '" + part + "' is no shape; write them like 64x27,64,10x64");
  };
  std::size_t begin = 0;
  for (std::size_t at = 0; at <= text.size();) {
    const std::size_t comma = std::min(text.find(',', at), text.size());
    const std::string part = text.substr(at, comma - at);
    TensorSpec tensor;
    tensor.begin = begin;
    const char *from = part.data(), *last = part.data() + part.size();
    for (bool first = true; first || from < last; first = false) {
      if (!first && *from++ != 'x') wrong(part);
      std::size_t size = 0;
      const auto [end, error] = std::from_chars(from, last, size);
      if (error != std::errc{} || size == 0) wrong(part);
      std::size_t& product = first ? tensor.rows : tensor.cols;
      if (size > std::numeric_limits<std::int32_t>::max() / (first ? 1 : tensor.rows * tensor.cols))
        wrong(part);
      product = first ? size : product * size;
      from = end;
    }
    begin += tensor.rows * tensor.cols;
    tensors.push_back(tensor);
    at = comma + 1;
  }
  if (begin != numel)
    throw UserError(fmt::format("--tensors: the shapes have {} elements, and the input {}", begin, numel));
  return tensors;
}

}  // namespace

SparsifySetup sparsify_setup(const SparsifyOptions& options, std::size_t ranks, std::size_t numel) {
  SparsifySetup setup;

  std::vector<std::string> overrides = {"compress.name=" + options.compressor};
  std::string tensors;
  std::set<std::string> seen;
  for (const std::string& setting : options.settings) {
    const std::size_t equals = setting.find('=');
    if (equals == std::string::npos || equals == 0)
      throw UserError("'" + setting + "' must read key=value; the input is the first argument");
    const std::string name = setting.substr(0, equals);
    if (!seen.insert(name == "shape" || name == "tensors" ? "tensors" : full_name(name)).second)
      throw UserError("'" + name + "' is given twice; give it once");
    if (name == "tensors" || name == "shape")
      tensors = setting.substr(equals + 1);
    else
      overrides.push_back(full_name(name) + setting.substr(equals));
  }
  LoadedConfig loaded = load_config("", overrides);
  throw_problems(loaded.problems);
  throw_problems(check_config(loaded.config));
  setup.notes = unused_keys(loaded);
  const bool low_rank = options.compressor == "powersgd" || options.compressor == "acpsgd";
  if (low_rank && tensors.empty())
    setup.notes.push_back("without --tensors the input is one vector, and " + options.compressor +
                          " sends vectors as they are");
  setup.momentum_given = loaded.origins.count("optimizer.momentum") > 0;
  setup.lr_given = loaded.origins.count("optimizer.lr") > 0;

  setup.compress = exchange_options(loaded.config).compress;
  // The default momentum is for memories that own it; nothing else here applies it.
  if (!setup.momentum_given && !owns_momentum(setup.compress)) setup.compress.momentum = 0;
  setup.density = loaded.config.compress.density;
  setup.lr = setup.lr_given ? loaded.config.optimizer.lr : 1.0;
  setup.clip = loaded.config.compress.clip * std::sqrt(static_cast<double>(ranks));
  setup.weights = parse_weights(options.weights, ranks);

  GroupSpec& group = setup.group;
  group.numel = numel;
  group.ranks = static_cast<int>(ranks);
  if (!tensors.empty()) group.tensors = parse_tensors(tensors, numel);
  if (numel > 0 && loaded.config.compress.scope == "tensor" && !group.tensors.empty()) {
    for (const TensorSpec& tensor : group.tensors)
      group.segments.emplace_back(tensor.begin, tensor.begin + tensor.rows * tensor.cols);
  } else if (numel > 0) {
    group.segments.emplace_back(0, numel);
  }
  return setup;
}

}  // namespace topknot

#include "train/plan/exchange_profile.h"

#include <fmt/format.h>

#include <cmath>
#include <nlohmann/json.hpp>
#include <set>

#include "nn/base/check.h"
#include "nn/base/file.h"
#include "nn/base/text.h"
#include "train/metrics/output_file.h"

namespace topknot {
namespace {

using Json = nlohmann::ordered_json;

// Each structure's fields once, for writing and for reading.
template <class T, class Visit>
void fields(T& t, Visit&& visit) {
  using Plain = std::remove_const_t<T>;
  if constexpr (std::is_same_v<Plain, ExchangeProfile::Parameter>) {
    visit("name", t.name), visit("numel", t.numel), visit("compressed", t.compressed);
    visit("backward_s", t.backward_s), visit("ready_s", t.ready_s);
  } else if constexpr (std::is_same_v<Plain, ExchangeProfile::Group>) {
    visit("elements", t.elements), visit("bytes", t.bytes), visit("later_bytes", t.later_bytes);
    visit("encode_s", t.encode_s), visit("decode_s", t.decode_s);
  } else if constexpr (std::is_same_v<Plain, ExchangeProfile::Fit>) {
    visit("alpha", t.alpha), visit("beta", t.beta), visit("ranks", t.ranks);
  } else if constexpr (std::is_same_v<Plain, Link>) {
    visit("alpha", t.alpha), visit("beta", t.beta), visit("overhead", t.overhead);
  } else {
    visit("model", t.model), visit("dataset", t.dataset), visit("method", t.method);
    visit("options", t.options), visit("density", t.density), visit("collective", t.collective);
    visit("ranks", t.ranks), visit("threads", t.threads), visit("batch", t.batch);
    visit("backend", t.backend), visit("overlaps", t.overlaps), visit("sums", t.sums);
    visit("data_s", t.data_s), visit("forward_s", t.forward_s), visit("backward_s", t.backward_s);
    visit("update_s", t.update_s), visit("link", t.link), visit("gather", t.gather);
    visit("reduce", t.reduce), visit("dense", t.dense), visit("dense_sums", t.dense_sums);
    visit("groups", t.groups);
    visit("parameters", t.parameters);
  }
}

template <class T>
Json to_json(const T& value);
template <class T>
Json to_json(const std::vector<T>& values) {
  Json json = Json::array();
  for (const T& value : values) json.push_back(to_json(value));
  return json;
}
template <class T>
Json to_json(const T& value) {
  if constexpr (std::is_arithmetic_v<T> || std::is_same_v<T, std::string>) {
    return value;
  } else {
    Json json = Json::object();
    fields(value, [&](const char* name, const auto& field) { json[name] = to_json(field); });
    return json;
  }
}

class Reader {
 public:
  explicit Reader(std::string path) : path_(std::move(path)) {}

  [[noreturn]] void fail(const std::string& what) const {
    throw UserError("exchange.profile: " + path_ + ": " + what +
                    "; give the exchange_profile.json of a run that measured, or leave the key out");
  }

  template <class T>
  void read(const Json& json, const std::string& at, std::vector<T>& values) const {
    if (!json.is_array()) fail(at + " is no list");
    values.resize(json.size());
    for (std::size_t i = 0; i < json.size(); ++i) read(json[i], fmt::format("{}[{}]", at, i), values[i]);
  }

  template <class T>
  void read(const Json& json, const std::string& at, T& value) const {
    if constexpr (std::is_same_v<T, bool>) {
      if (!json.is_boolean()) fail(at + " is not true or false");
      value = json.get<bool>();
    } else if constexpr (std::is_same_v<T, std::string>) {
      if (!json.is_string()) fail(at + " is no text");
      value = json.get<std::string>();
    } else if constexpr (std::is_integral_v<T>) {
      const auto number = whole_number(json);
      if (!number || *number < 0 || *number > std::int64_t{1} << (std::is_same_v<T, int> ? 30 : 50))
        fail(at + " is no whole number in its range");
      value = static_cast<T>(*number);
    } else if constexpr (std::is_floating_point_v<T>) {
      constexpr double kMost = 1e12;  // seconds and seconds per byte; sums and products of them stay finite
      if (!json.is_number() || !(json.get<double>() >= 0 && json.get<double>() <= kMost))
        fail(at + " is no number from 0 to 1e12");
      value = json.get<double>();
    } else {
      if (!json.is_object()) fail((at.empty() ? "it" : at) + " is no JSON object");
      fields(value, [&](const char* name, auto& field) {
        const std::string inner = at.empty() ? name : at + "." + name;
        const auto found = json.find(name);
        if (found == json.end()) fail(inner + " is missing");
        read(*found, inner, field);
      });
    }
  }

 private:
  std::string path_;
};

std::string shown(const ExchangeProfile::Parameter& parameter) {
  return fmt::format("{} of {} elements{}", parameter.name, parameter.numel,
                     parameter.compressed ? "" : ", dense");
}

}  // namespace

std::string exchange_profile_json(const ExchangeProfile& profile) {
  return to_json(profile).dump(2) + "\n";
}

ExchangeProfile parse_exchange_profile(const std::string& text, const std::string& path) {
  const Reader reader(path);
  const Json json = Json::parse(text, nullptr, false);
  ExchangeProfile profile;
  reader.read(json, "", profile);
  if (profile.parameters.empty()) reader.fail("parameters is empty");
  if (profile.groups.empty()) reader.fail("groups is empty");
  for (std::size_t i = 1; i < profile.groups.size(); ++i)
    if (!(profile.groups[i - 1].elements < profile.groups[i].elements))
      reader.fail("groups is not in the order of elements");
  return profile;
}

ExchangeProfile read_exchange_profile(const std::string& path) {
  constexpr std::size_t kMostBytes = 64 << 20;
  return parse_exchange_profile(read_text_file(path, kMostBytes), path);
}

std::string profile_options(const Config& config) {
  // Keys that bear on when and where, not on the cost of a message.
  static const std::set<std::string> left_out = {"name",          "density",  "warmup", "warmup_epochs",
                                                 "layer_density", "alpha_s",  "clip",   "beta_s_per_byte",
                                                 "dense_1d",      "min_numel"};
  const Config defaults;
  const std::set<std::string> without_use = keys_without_use(config);
  const std::string prefix = "compress.";
  std::string text;
  for (const Key& key : config_keys()) {
    if (key.name.compare(0, prefix.size(), prefix) != 0) continue;
    const std::string name = key.name.substr(prefix.size());
    const std::string value = key_value(key, config);
    if (left_out.count(name) || without_use.count(key.name) || value == key_value(key, defaults)) continue;
    text += (text.empty() ? "" : " ") + name + "=" + value;
  }
  return text;
}

std::string check_exchange_profile(const ExchangeProfile& profile, const Config& config,
                                   const ParameterArena& arena, int ranks, const std::string& backend,
                                   const std::string& path) {
  const auto differs = [&](const std::string& what, const std::string& there, const std::string& here) {
    throw UserError("exchange.profile: " + path + " was measured for another run: " + what + " is " + there +
                    " there and " + here + " here; leave the key out to measure anew");
  };
  const bool dense = config.compress.name == "dense";
  const auto same = [&](const std::string& what, const std::string& there, const std::string& here) {
    if (there != here) differs(what, there.empty() ? "(default)" : there, here.empty() ? "(default)" : here);
  };
  same("compress.name", profile.method, config.compress.name);
  if (profile.density != config.compress.density && !keys_without_use(config).count("compress.density"))
    differs("compress.density", short_text(profile.density), short_text(config.compress.density));
  same("compress.*", profile.options, profile_options(config));
  same("the number of ranks", std::to_string(profile.ranks), std::to_string(ranks));
  same("the number of parameters", std::to_string(profile.parameters.size()),
       std::to_string(arena.parameters().size()));
  for (std::size_t i = 0; i < profile.parameters.size(); ++i) {
    const Parameter& here = *arena.parameters()[i];
    same(fmt::format("parameter {}", i), shown(profile.parameters[i]),
         shown({here.name(), here.numel(), !dense && here.compressible(), 0, 0}));
  }
  std::string off;
  const auto note = [&](const std::string& what, const std::string& there, const std::string& here) {
    if (there != here) off += (off.empty() ? "" : ", ") + what + " " + there + " (here " + here + ")";
  };
  note("dist.backend", profile.backend, backend);
  note("threads per rank", std::to_string(profile.threads), std::to_string(compute_threads(config)));
  note("data.batch_size", std::to_string(profile.batch), std::to_string(config.data.batch_size));
  return off;
}

}  // namespace topknot

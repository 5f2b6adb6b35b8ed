#include "train/plan/profile.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>

#include "compress/sparse.h"
#include "dist/sparse/coded_sum.h"
#include "dist/sparse/sparse_collective.h"
#include "nn/base/check.h"
#include "nn/base/file.h"
#include "nn/base/text.h"
#include "train/metrics/output_file.h"

namespace topknot {
namespace {

using Json = nlohmann::ordered_json;

// visit("name", t.name) for `name`.
#define FIELD(field) visit(#field, t.field)

// Each structure's fields once, for writing and for reading.
template <class T, class Visit>
void fields(T& t, Visit&& visit) {
  using Plain = std::remove_const_t<T>;
  if constexpr (std::is_same_v<Plain, ExchangeProfile::Parameter>) {
    FIELD(name), FIELD(numel), FIELD(compressed), FIELD(backward_s), FIELD(ready_s);
  } else if constexpr (std::is_same_v<Plain, ExchangeProfile::Group>) {
    FIELD(elements), FIELD(bytes), FIELD(later_bytes), FIELD(encode_s), FIELD(decode_s);
  } else if constexpr (std::is_same_v<Plain, ExchangeProfile::Fit>) {
    FIELD(alpha), FIELD(beta), FIELD(ranks);
  } else if constexpr (std::is_same_v<Plain, Link>) {
    FIELD(alpha), FIELD(beta), FIELD(overhead);
  } else if constexpr (std::is_same_v<Plain, NamedProfile>) {
    FIELD(option), FIELD(profile);
  } else {
    FIELD(model), FIELD(dataset), FIELD(method), FIELD(options), FIELD(density), FIELD(collective);
    FIELD(ranks), FIELD(threads), FIELD(batch), FIELD(backend), FIELD(overlaps), FIELD(sums), FIELD(data_s);
    FIELD(forward_s), FIELD(backward_s), FIELD(update_s), FIELD(link), FIELD(gather), FIELD(reduce);
    FIELD(dense), FIELD(dense_sums), FIELD(groups), FIELD(parameters);
  }
}
#undef FIELD

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
  // `where`: of the file, in messages; `remedy`: what to do.
  Reader(std::string where, std::string remedy) : where_(std::move(where)), remedy_(std::move(remedy)) {}

  [[noreturn]] void fail(const std::string& what) const {
    throw UserError(where_ + ": " + what + "; " + remedy_);
  }

  // Checks the requirements of a usable profile. `at`: before its fields.
  void check(const ExchangeProfile& profile, const std::string& at) const {
    if (profile.parameters.empty()) fail(at + "parameters is empty");
    if (profile.groups.empty()) fail(at + "groups is empty");
    for (std::size_t i = 1; i < profile.groups.size(); ++i)
      if (!(profile.groups[i - 1].elements < profile.groups[i].elements))
        fail(at + "groups is not in the order of elements");
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
        fail(at + " is no number from 0 to 1,000,000,000,000");
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
  std::string where_, remedy_;
};

std::string shown(const ExchangeProfile::Parameter& parameter) {
  return fmt::format("{} of {} elements{}", parameter.name, parameter.numel,
                     parameter.compressed ? "" : ", dense");
}

using Cost = ExchangeProfile::Group;

// An all-reduce's bytes on a rank's link, per byte of data: each direction carries (P-1)/P of it twice.
double reduce_share(int ranks) {
  return 2.0 * (ranks - 1) / ranks;
}

ExchangeProfile::Fit reduce_at(const ExchangeProfile& from, const ExchangeProfile& to,
                               const PredictedNetwork& network) {
  ExchangeProfile::Fit fit;
  fit.ranks = to.ranks;
  const bool coded = codes_sums(from.collective), ring = from.is_dense() && !coded;
  if (from.ranks < 2 || network.latency) {
    fit.alpha = ring ? 2 * (to.ranks - 1) * to.link.alpha
                     : 2 * (to.link.alpha + std::max(0, to.ranks - 2) * to.link.overhead);
  } else if (ring) {
    fit.alpha = from.reduce.alpha * (to.ranks - 1) / (from.ranks - 1);
  } else {
    fit.alpha = std::max(0.0, from.reduce.alpha + 2 * (to.ranks - from.ranks) * to.link.overhead);
  }
  if (coded) {  // each rank codes and decodes all, however many there are
    const Cost& all = from.groups.back();
    const double share =
        all.bytes < 3 * all.elements ? kCodedBFloat16 : kCodedFloat;  // by the width of its values
    const double coder =
        from.ranks < 2 ? kCoderSeconds
                       : std::max(0.0, from.reduce.beta - share * from.link.beta * reduce_share(from.ranks));
    const bool there = to.ranks == from.ranks && !network.bits_per_s;
    fit.beta = there ? from.reduce.beta : share * to.link.beta * reduce_share(to.ranks) + coder;
    return fit;
  }
  const double byte = network.bits_per_s ? to.link.beta : from.reduce.beta / reduce_share(from.ranks);
  fit.beta = byte * reduce_share(to.ranks);
  return fit;
}

}  // namespace

std::string exchange_profile_json(const ExchangeProfile& profile) {
  return to_json(profile).dump(2) + "\n";
}

ExchangeProfile parse_exchange_profile(const std::string& text, const std::string& path) {
  const Reader reader("exchange.profile: " + path,
                      "give the exchange_profile.json of a run that measured, or leave the key out");
  const Json json = Json::parse(text, nullptr, false);
  ExchangeProfile profile;
  reader.read(json, "", profile);
  reader.check(profile, "");
  return profile;
}

std::string named_profiles_json(const std::vector<NamedProfile>& profiles) {
  std::vector<std::string> lines;
  for (const NamedProfile& profile : profiles) lines.push_back(to_json(profile).dump());
  return fmt::format("[\n{}\n]\n", fmt::join(lines, ",\n"));
}

std::vector<NamedProfile> parse_named_profiles(const std::string& text, const std::string& path) {
  const Reader reader(path, "give a run of this version that chose by compress.name=auto");
  std::vector<NamedProfile> profiles;
  reader.read(Json::parse(text, nullptr, false), "it", profiles);
  if (profiles.empty()) reader.fail("it is empty");
  for (const NamedProfile& profile : profiles) reader.check(profile.profile, profile.option + ": ");
  return profiles;
}

ExchangeProfile read_exchange_profile(const std::string& path) {
  constexpr std::size_t kMostBytes = 64 << 20;
  return parse_exchange_profile(read_text_file(path, kMostBytes), path);
}

std::string profile_options(const Config& config) {
  // Keys that bear on when and where, not on the cost of a message.
  static const std::set<std::string> left_out = {"name",     "density", "warmup",          "layer_density",
                                                 "alpha_s",  "clip",    "beta_s_per_byte", "dense_1d",
                                                 "min_numel"};
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
  const auto same = [&](const std::string& what, const std::string& there, const std::string& here) {
    if (there != here) differs(what, there.empty() ? "(default)" : there, here.empty() ? "(default)" : here);
  };
  same("compress.name", profile.method, config.compress.name);
  if (profile.density != config.compress.density && !keys_without_use(config).count("compress.density"))
    differs("compress.density", short_text(profile.density), short_text(config.compress.density));
  same("compress.*", profile.options, profile_options(config));
  if (codes_sums(profile.collective) != codes_sums(config.exchange.collective))
    differs("exchange.collective", profile.collective, config.exchange.collective);
  same("the number of ranks", std::to_string(profile.ranks), std::to_string(ranks));
  same("the number of parameters", std::to_string(profile.parameters.size()),
       std::to_string(arena.parameters().size()));
  for (std::size_t i = 0; i < profile.parameters.size(); ++i) {
    const Parameter& here = *arena.parameters()[i];
    same(fmt::format("parameter {}", i), shown(profile.parameters[i]),
         shown({here.name(), here.numel(), compresses(config) && here.compressible(), 0, 0}));
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

double at_size(const std::vector<Cost>& groups, double Cost::*figure, double elements) {
  TOPKNOT_CHECK(!groups.empty(), "a profile without measured groups");
  if (elements <= 0) return 0;
  if (elements <= groups.front().elements) return groups.front().*figure;
  for (std::size_t i = 1; i < groups.size(); ++i) {
    const Cost &below = groups[i - 1], &above = groups[i];
    if (elements > above.elements) continue;
    const double part = (elements - below.elements) / (above.elements - below.elements);
    return below.*figure + part * (above.*figure - below.*figure);
  }
  return groups.back().*figure * (elements / groups.back().elements);
}

std::vector<LayerCost> sent_layers(const ExchangeProfile& profile) {
  std::vector<LayerCost> layers;
  double ready = 0;
  for (const auto& parameter : profile.parameters) {
    if (!profile.is_dense() && !parameter.compressed) continue;
    layers.push_back({static_cast<double>(parameter.numel), std::max(0.0, parameter.ready_s - ready)});
    ready = std::max(ready, parameter.ready_s);
  }
  return layers;
}

double entries_of(const ExchangeProfile& profile, double elements) {
  return std::max(1.0, profile.density * elements);
}

std::string quickest_collective(const ExchangeProfile& profile) {
  double elements = 0;
  for (const LayerCost& layer : sent_layers(profile)) elements += layer.elements;
  if (elements <= 0) return "all_gather";
  const double k = entries_of(profile, elements);
  return cheapest_collective(profile.link, profile.ranks, k,
                             at_size(profile.groups, &Cost::bytes, elements) / k);
}

bool sends_entries(const ExchangeProfile& profile) {
  return !profile.sums && sparse_presets().contains(profile.method);
}

ExchangeProfile profile_at(const ExchangeProfile& profile, int ranks, const PredictedNetwork& network,
                           const std::string& collective) {
  TOPKNOT_CHECK(ranks >= 1, "at least one rank");
  if (profile.ranks < 2 && ranks > 1 && !(network.bits_per_s && network.latency))
    throw UserError(
        "the profile was measured with one rank, which knows no network; give --rate (not measured) and "
        "--latency, or profile a run of two ranks or more");
  ExchangeProfile at = profile;
  at.ranks = ranks;
  at.collective = collective;
  // Collectives run during the computation on a network that is given by its rate (dist.backend gloo).
  at.overlaps = profile.overlaps || network.bits_per_s.has_value();
  at.link.overhead = profile.ranks == 2 ? profile.gather.alpha : profile.link.overhead;
  if (network.latency) at.link.alpha = *network.latency;
  if (network.bits_per_s) at.link.beta = 8 / (*network.bits_per_s * network.efficiency);
  at.gather.ranks = ranks;
  at.gather.alpha = network.latency
                        ? at.link.alpha + std::max(0, ranks - 2) * at.link.overhead
                        : std::max(0.0, profile.gather.alpha + (ranks - profile.ranks) * at.link.overhead);
  at.gather.beta = (ranks - 1) * at.link.beta;
  at.reduce = reduce_at(profile, at, network);
  if (ranks == 1) at.gather = at.reduce = {};
  if (collective == "auto") at.collective = sends_entries(at) ? quickest_collective(at) : "all_gather";
  if (codes_sums(collective) && !codes_sums(profile.collective))
    throw UserError("--collective " + collective +
                    ": the profile has plain sums; give a run that measured coded ones");
  if (!codes_sums(collective) && !sends_entries(at) && at.collective != "all_gather")
    throw UserError("--collective " + collective + ": method " + profile.method +
                    " sends no list of entries; leave it to all_gather or auto");
  // Decoding time follows the work on each element. The measured one is of a message from each rank, whatever the
  // collective. A sum is one message for any number of ranks. No collective changes how the dense part is sent.
  const auto scale = [&](Cost& group, double share, double messages) {
    group.decode_s *= (kElementWeight + messages * share) / (kElementWeight + profile.ranks * share);
  };
  const double share = sends_entries(profile) ? profile.density : 1;
  if (!profile.sums)
    for (Cost& group : at.groups) scale(group, share, at.collective == "all_gather" ? ranks : 1);
  if (!profile.dense_sums) scale(at.dense, 1, ranks);
  return at;
}

}  // namespace topknot

#include "train/plan/exchange_profile.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <nlohmann/json.hpp>
#include <set>

#include "dist/exchange/transport.h"
#include "nn/base/check.h"
#include "nn/base/clock.h"
#include "nn/base/file.h"
#include "nn/base/text.h"
#include "train/metrics/metrics.h"
#include "train/metrics/output_file.h"
#include "train/plan/layer_density.h"
#include "train/plan/network_times.h"

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
  } else if constexpr (std::is_same_v<Plain, NamedProfile>) {
    visit("option", t.option), visit("profile", t.profile);
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

constexpr int kSizes = 5;                                // of groups
constexpr int kWarmUp = 2, kTimed = 7, kLeastTimed = 2;  // rounds of one size
constexpr double kEnough = 0.2;                          // seconds for one size; then kLeastTimed rounds do

Group run_of(std::span<Parameter* const> parameters, bool compressed) {
  const std::size_t begin = parameters.front()->offset();
  Group group{.begin = begin, .end = begin, .compressed = compressed, .parameters = {}};
  for (Parameter* parameter : parameters) {
    group.end += parameter->numel();
    group.parameters.push_back(parameter);
  }
  return group;
}

// About kSizes runs of neighbouring parameters, from the smallest one to all, by rising size.
std::vector<Group> sample_groups(std::span<Parameter* const> parameters, bool compressed) {
  std::vector<double> sums{0};  // elements before each parameter
  double least = 1e300;
  for (const Parameter* parameter : parameters) {
    const auto elements = static_cast<double>(parameter->numel());
    sums.push_back(sums.back() + elements);
    least = std::min(least, elements);
  }
  std::vector<Group> groups;
  for (int i = 0; i < kSizes; ++i) {
    const double target = least * std::pow(sums.back() / least, static_cast<double>(i) / (kSizes - 1));
    std::size_t from = 0, to = 1;
    double best = 1e300;
    for (std::size_t b = 0; b < parameters.size(); ++b) {
      // The first run of at least that size, and the one before it.
      const auto first = sums.begin() + static_cast<std::ptrdiff_t>(b) + 1;
      const auto reached =
          static_cast<std::size_t>(std::lower_bound(first, sums.end(), sums[b] + target) - sums.begin());
      for (const std::size_t e : {reached - 1, reached}) {
        if (e <= b || e >= sums.size()) continue;
        const double off = std::abs(std::log((sums[e] - sums[b]) / target));
        if (off < best) best = off, from = b, to = e;
      }
    }
    Group group = run_of(parameters.subspan(from, to - from), compressed);
    if (groups.empty() || groups.back().numel() < group.numel()) groups.push_back(std::move(group));
  }
  return groups;
}

ExchangeProfile::Group measure_group(const Group& group, const ExchangeOptions& options, double density,
                                     int ranks, const Noise& noise, bool& sums) {
  const std::unique_ptr<Compressor> compressor =
      make_group_compressor(group, {0, group.numel()}, options, ranks);
  std::vector<float> one(group.numel()), other(group.numel());
  Slice slice{one, other};
  std::vector<double> encode, decode;
  const std::vector<float> weights(static_cast<std::size_t>(ranks), 1.0f);
  ExchangeProfile::Group cost;
  cost.elements = static_cast<double>(group.numel());
  const auto begin = Clock::now();
  for (int round = 0; round < kWarmUp + kTimed; ++round) {
    noise.fill(slice.gradient, round);
    StepContext info;
    info.step = round;
    info.density = group_density(group, options, density);
    info.weights = weights;
    auto start = Clock::now();
    Message message = compressor->encode(slice, info);
    const double encoding = seconds_since(start);
    cost.bytes = static_cast<double>(message.bytes());
    cost.later_bytes = 0;
    sums = message.kind != Message::Kind::block;
    double decoding = 0;
    for (bool more = true; more;) {
      Round round;
      round.sum = message.sum, round.sum_bfloat16 = message.sum_bfloat16;
      // Simulates a gather in which every rank sends this rank's block.
      std::vector<std::vector<std::byte>> blocks;
      if (message.kind == Message::Kind::block) blocks.assign(static_cast<std::size_t>(ranks), message.block);
      round.blocks = blocks;
      start = Clock::now();
      std::optional<Message> next = compressor->decode(round);
      decoding += seconds_since(start);
      if ((more = next.has_value())) {
        message = std::move(*next);
        cost.later_bytes += static_cast<double>(message.bytes());
      }
    }
    start = Clock::now();
    if (compressor->commit({}).data() == slice.residual.data()) std::swap(slice.gradient, slice.residual);
    decoding += seconds_since(start);
    if (round < kWarmUp) continue;
    encode.push_back(encoding);
    decode.push_back(decoding);
    if (round - kWarmUp + 1 >= kLeastTimed && seconds_since(begin) > kEnough) break;
  }
  cost.encode_s = quantile(encode, 0.5);
  cost.decode_s = quantile(decode, 0.5);
  return cost;
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
  if (codes_sums(profile.collective) != codes_sums(config.exchange.collective))
    differs("exchange.collective", profile.collective, config.exchange.collective);
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

bool sums_bfloat16(const ExchangeOptions& options) {
  return options.compress.name == "dense" && options.compress.values == "bf16";
}

ExchangeProfile measure_layers(const Config& config, const Dataset& data, const ParameterArena& arena,
                               CollectiveQueue& queue) {
  const Communicator& communicator = queue.communicator();
  ExchangeProfile profile;
  profile.model = config.model.name;
  profile.dataset = config.data.name;
  profile.ranks = communicator.size();
  profile.threads = compute_threads(config);
  profile.batch = config.data.batch_size;
  profile.backend = communicator.network();
  profile.overlaps = communicator.overlaps();
  const LayerTimes times = measure_layer_times(config, data, communicator.rank(), profile.ranks,
                                               [&] { queue.run([](Communicator& c) { c.barrier(); }); });
  double backward = 0;
  for (const double ready : times.ready) backward = std::max(backward, ready);
  const bool late =
      (config.compress.clip > 0 || config.train.clip_local > 0) && config.train.clip_local_scope == "model";
  const auto parameters = arena.parameters();
  for (std::size_t i = 0; i < parameters.size(); ++i)
    profile.parameters.push_back({parameters[i]->name(), parameters[i]->numel(), false,
                                  late ? (i == 0 ? backward : 0) : times.backward[i],
                                  late ? backward : times.ready[i]});
  // In a step's batches, all backward passes but the last send nothing.
  const int batches = config.train.accumulate;
  profile.data_s = batches * times.data_s;
  profile.forward_s = batches * times.forward_s + (batches - 1) * backward;
  profile.backward_s = backward;
  profile.update_s = times.update_s;
  return profile;
}

void measure_method(const Config& config, const ParameterArena& arena, CollectiveQueue& queue,
                    const ExchangeOptions& options, ExchangeProfile& profile) {
  const bool compressing = config.compress.name != "dense";
  profile.method = config.compress.name;
  profile.options = profile_options(config);
  profile.density = compressing ? config.compress.density : 1.0;
  profile.dense_sums = options.dense_values == "fp32";
  ExchangeOptions plain = options;
  plain.collective = "all_gather";
  const auto parameters = arena.parameters();
  std::size_t handled = parameters.size();
  if (compressing)
    handled = static_cast<std::size_t>(std::count_if(parameters.begin(), parameters.end(),
                                                     [](const Parameter* p) { return p->compressible(); }));
  for (std::size_t i = 0; i < parameters.size(); ++i)
    profile.parameters[i].compressed = compressing && parameters[i]->compressible();
  const Noise noise(arena.size());
  const auto cost = [&](const Group& group, bool& sums) {
    queue.run([](Communicator& c) { c.barrier(); });
    return measure_group(group, plain, profile.density, profile.ranks, noise, sums);
  };
  profile.groups.clear();
  if (handled > 0) {
    for (const Group& group : sample_groups(parameters.first(handled), compressing))
      profile.groups.push_back(cost(group, profile.sums));
  } else {
    profile.groups.push_back({});
  }
  bool sums = true;
  profile.dense = {};
  if (handled < parameters.size()) profile.dense = cost(run_of(parameters.subspan(handled), false), sums);
}

ExchangeProfile measure_exchange(const Config& config, const Dataset& data, const ParameterArena& arena,
                                 CollectiveQueue& queue, const ExchangeOptions& options) {
  ExchangeProfile profile = measure_layers(config, data, arena, queue);
  measure_method(config, arena, queue, options, profile);
  constexpr double kLeastLargest = 65536;  // bytes, so that a model's small messages do not blur the fit
  const double message = profile.groups.back().bytes;
  const double gathered = std::max(profile.sums ? 0 : message, profile.dense_sums ? 0 : profile.dense.bytes);
  const double summed = std::max(profile.sums ? message : 0, profile.dense_sums ? profile.dense.bytes : 0);
  const SumOrder order =
      config.compress.name != "dense" || options.ordered_sum ? SumOrder::ranks : SumOrder::library;
  const NetworkTimes network =
      measure_network(queue, static_cast<std::size_t>(std::max(gathered, kLeastLargest)),
                      static_cast<std::size_t>(std::max(summed, kLeastLargest)), order);
  profile.link = network.link;
  profile.gather = network.gather;
  profile.reduce = codes_sums(options.collective)
                       ? measure_coded_sum(queue, static_cast<std::size_t>(std::max(summed, kLeastLargest)),
                                           sums_bfloat16(options))
                       : network.reduce;
  return profile;
}

}  // namespace topknot

// Files that a run writes and a later one, or another program, reads.
#include <fmt/format.h>
#include <cmath>
#include <string>

#include <nlohmann/json.hpp>

#include "nn/base/algorithm_cache.h"
#include "nn/base/check.h"
#include "nn/base/checksum.h"
#include "nn/core/parameter.h"
#include "nn/layers/layers.h"
#include "tests/fuzz/inputs/input_target.h"
#include "train/checkpoint/checkpoint.h"
#include "train/metrics/metrics.h"
#include "train/metrics/run_config.h"
#include "train/plan/choose.h"

namespace topknot::fuzz {
namespace {

// The manifest's body, with the checksum that a random change would not hit; and the input as a whole file.
void manifest(Bytes input) {
  const std::string text(text_of(input));
  try {
    parse_manifest(text, "input");
  } catch (const UserError&) {
  }
  const auto body = nlohmann::ordered_json::parse(
      text, [](int depth, auto, const auto&) { return depth < 8; }, false);
  if (body.is_discarded()) throw UserError("no JSON");
  std::string inner;
  try {
    inner = body.dump();
  } catch (const nlohmann::json::exception& error) {
    throw UserError(error.what());
  }
  Checksum checksum;
  checksum.update(std::as_bytes(std::span(inner)));
  const Manifest read = parse_manifest(fmt::format(R"({{"checksum":"{:016x}","manifest":{}}})"
                                                   "\n",
                                                   checksum.value(), inner),
                                       "input");
  const Manifest again = parse_manifest(manifest_text(read), "its copy");
  expect(again.files == read.files && again.config == read.config && again.ranks == read.ranks &&
             again.position.step == read.position.step,
         "a manifest's copy differs");
}

void exchange_profile(Bytes input) {
  const ExchangeProfile profile = parse_exchange_profile(std::string(text_of(input)), "input");
  const std::string text = exchange_profile_json(profile);
  expect(exchange_profile_json(parse_exchange_profile(text, "its copy")) == text, "a profile's copy differs");
}

void auto_profiles(Bytes input) {
  const auto profiles = parse_auto_profiles(std::string(text_of(input)), "input");
  const std::string text = named_profiles_json(profiles);
  expect(named_profiles_json(parse_auto_profiles(text, "its copy")) == text, "the profiles' copy differs");
  for (const int ranks : {2, 1 << 20}) {
    const ChoiceAt at = choice_at(profiles, ranks, {"given", 1e9, 1e-4});
    expect(at.options.size() == profiles.size() && at.taken < at.options.size(),
           "a choice that is no option");
    for (const ChoiceAt::Option& option : at.options)
      expect(std::isfinite(option.step_s), "a step that is not finite");
  }
}

void layer_density(Bytes input) {
  static const Scratch scratch;
  static const std::unique_ptr<ParameterStore> store = [] {
    auto made = std::make_unique<ParameterStore>();
    made->add("fc1.weight", {8, 4}, constant(0));
    made->add("fc1.bias", {8}, constant(0));
    made->build([](const Parameter&) { return true; }, 1);
    return made;
  }();
  const LayerDensity densities =
      read_layer_density(scratch.write("layer_density.json", input), store->arena());
  for (const auto& [name, density] : densities)
    expect(density > 0 && density <= 1 && name.starts_with("fc1."),
           "a density out of range, or of no parameter");
}

void algorithm_cache(Bytes input) {
  static const Scratch scratch;
  const std::string path = scratch.write("algorithms", input);
  const std::string key = "a key of its own";
  // Twice: the first line is lost where the input ends in a line that was cut off.
  for (int i = 0; i < 2; ++i) AlgorithmCache(path).keep(key, "own kernels");
  expect(AlgorithmCache(path).find(key).has_value(), "what was kept is not found");
}

// As a run that goes on, and predict, read them.
void metrics(Bytes input) {
  static const Scratch scratch;
  read_metrics(scratch.write("metrics.jsonl", input));
}

void run_config(Bytes input) {
  static const Scratch scratch;
  const RunConfig config(scratch.write("config.yaml", input));
  for (const RunConfig::Entry& entry : config.entries()) config.text(entry.key);
}

const bool added = [] {
  input_targets().add("manifest", "the manifest of a checkpoint", manifest);
  input_targets().add("exchange_profile", "exchange_profile.json", exchange_profile);
  input_targets().add("auto_profiles", "auto_profiles.json", auto_profiles);
  input_targets().add("layer_density", "densities by parameter", layer_density);
  input_targets().add("algorithm_cache", "timed algorithms of a GPU", algorithm_cache);
  input_targets().add("metrics", "metrics.jsonl", metrics);
  input_targets().add("run_config", "config.yaml of a run directory", run_config);
  return true;
}();

}  // namespace
}  // namespace topknot::fuzz

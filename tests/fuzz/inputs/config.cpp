// Configuration files and command-line overrides.
#include <algorithm>
#include <string>
#include <vector>

#include "nn/base/check.h"
#include "tests/fuzz/inputs/input_target.h"
#include "train/checkpoint/model_file.h"
#include "train/checkpoint/model_names.h"
#include "train/config/config.h"

namespace topknot::fuzz {
namespace {

const Scratch& config_scratch() {
  static const Scratch scratch;
  return scratch;
}

// What every program does with a configuration; a good one reads back to itself.
void use(const LoadedConfig& loaded) {
  throw_problems(loaded.problems);
  throw_problems(check_config(loaded.config));
  unused_keys(loaded);
  run_directory_name(loaded.config);
  const std::string text = dump_yaml(loaded.config, false, loaded.origins);
  const std::string path = config_scratch().write("again.yaml", std::as_bytes(std::span(text)));
  const LoadedConfig again = load_config(path, {});
  for (const Problem& problem : again.problems) throw Finding("its own dump is refused: " + problem.message);
  expect(dump_yaml(again.config) == dump_yaml(loaded.config), "a configuration differs from its own dump");
}

void config_file(Bytes input) {
  use(load_config(config_scratch().write("config.yaml", input), {}));
}

// One override per line.
void overrides(Bytes input) {
  std::vector<std::string> words;
  const std::string_view text = text_of(input);
  for (std::size_t begin = 0; begin <= text.size();) {
    const std::size_t end = std::min(text.find('\n', begin), text.size());
    words.emplace_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  use(load_config("", words));
}

void hugging_face_config(Bytes input) {
  LoadedConfig loaded;
  adopt_architecture(loaded, keys_from_hugging_face(std::string(text_of(input)), "input"), "input");
  throw_problems(loaded.problems);
  use(loaded);
}

const bool added = [] {
  input_targets().add("config", "a configuration file", config_file);
  input_targets().add("hugging_face_config", "Hugging Face's config.json", hugging_face_config);
  input_targets().add("overrides", "overrides of the command line, one per line", overrides);
  return true;
}();

}  // namespace
}  // namespace topknot::fuzz

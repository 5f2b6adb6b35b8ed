// What a YAML file may hold beside keys and values, and what is said of it.
#include "tests/support/error_text.h"
#include "tests/support/temp_folder.h"
#include "tests/support/text.h"
#include "train/config/config.h"

namespace topknot {
namespace {

const TempFolder& folder() {
  static const TempFolder temp;
  return temp;
}

// The path of a new file of that content.
std::string file(const std::string& text) {
  static int count = 0;
  const std::string name = std::to_string(count++) + ".yaml";
  folder().write(name, {text.begin(), text.end()});
  return folder().at(name);
}

std::string only_problem(const LoadedConfig& loaded) {
  REQUIRE(loaded.problems.size() == 1);
  return loaded.problems[0].message;
}

TEST_CASE("merge keys, tabs as indentation and deep nesting are named as such, with their line") {
  const std::string merge = file("model: &base\n  name: mlp\noptimizer:\n  <<: *base\n");
  CHECK(contains(only_problem(load_config(merge, {})), "'<<' (" + merge + ":4:3): merge keys are not read"));
  for (const char* text :
       {"model:\n\tname: mlp\n", "model:\n  name: mlp\n\tdropout: 0\n", "seed:\n \t- 1\n"}) {
    const std::string tabs = file(text);
    CHECK(contains(only_problem(load_config(tabs, {})), "begins with a tab; YAML is indented with spaces"));
  }
  const std::string flow = file("model: {\n\tname: mlp}\nseed:\t2\n");  // where tabs are no indentation
  CHECK(load_config(flow, {}).problems.empty());
  std::string sections;
  for (int i = 0; i < 1200; ++i) sections += std::string(static_cast<std::size_t>(i), ' ') + "a:\n";
  for (const std::string& text : {std::string(100000, '['), sections}) {
    const std::string deep = file(text);
    CHECK(contains(only_problem(load_config(deep, {})), "within each other hundreds of levels deep"));
  }
}

TEST_CASE("names and values of a file cannot move the cursor or begin lines in messages") {
  const std::string path = file("\"a\\e[2J\\nerror: b\": 1\n");
  CHECK(contains(only_problem(load_config(path, {})), "unknown key 'a\\x1b[2J\\nerror: b'"));
}

}  // namespace
}  // namespace topknot

#include "train/metrics/run_config.h"

#include <fstream>

#include "tests/support/catch.h"
#include "tests/support/error_text.h"
#include "tests/support/temp_folder.h"
#include "train/config/config.h"

using namespace topknot;

TEST_CASE("a run's configuration reads as the texts of its file, in order, with the values that were given") {
  const TempFolder temp;
  std::ofstream(temp.at("config.yaml"))
      << "# The effective configuration\nseed: 5  # command line\n\nmodel:\n"
         "  name: mlp\n  hidden: [5, 6]  # file\ndata:\n"
         "  root: \"a #b\\\"c\\\\\"  # file\n  noise: none\n";
  const RunConfig config(temp.at("config.yaml"));
  REQUIRE(config.entries().size() == 5);
  CHECK(config.entries()[0].key == "seed");
  CHECK(config.entries()[0].given);
  CHECK(config.find("model.name")->text == "mlp");
  CHECK_FALSE(config.find("model.name")->given);
  CHECK(config.find("model.hidden")->text == "[5, 6]");
  CHECK(config.find("data.root")->text == R"("a #b\"c\\")");
  CHECK(config.find("data.root")->given);
  CHECK(config.find("data.size") == nullptr);
  CHECK(config.text("data.root") == R"(a #b"c\)");
  CHECK(config.text("data.size").empty());
  CHECK(config.number("seed") == 5);
  CHECK(config.numbers("model.hidden") == std::vector<double>{5, 6});
  CHECK(user_error([&] { config.number("data.noise"); }, {"config.yaml", "data.noise", "none"}));
}

TEST_CASE("every key of a configuration reads as it was written") {
  const TempFolder temp;
  const LoadedConfig loaded =
      load_config("", {"data.root=a b: #c", "exchange.merge=size:4000", "exchange.groups=[2,1]"});
  std::ofstream(temp.at("config.yaml")) << dump_yaml(loaded.config, false, loaded.origins);
  const RunConfig config(temp.at("config.yaml"));
  CHECK(config.text("data.root") == "a b: #c");
  CHECK(config.text("exchange.merge") == "size:4000");
  CHECK(config.numbers("exchange.groups") == std::vector<double>{2, 1});
  for (const auto& entry : config.entries()) {
    INFO(entry.key);
    const Key* key = find_key(entry.key);
    REQUIRE(key);
    CHECK(entry.text == key_value(*key, loaded.config));
    CHECK(entry.given == (loaded.origins.count(entry.key) > 0));
  }
}

TEST_CASE("a file that no run wrote is refused with its line") {
  const TempFolder temp;
  std::ofstream(temp.at("config.yaml")) << "seed: 1\nhello\n";
  CHECK(user_error([&] { RunConfig config(temp.at("config.yaml")); }, {"config.yaml:2", "key: value"}));
  CHECK(user_error([&] { RunConfig config(temp.at("absent.yaml")); }, {"absent.yaml"}));
}

// What a method's name says of other keys (settings_of()), in configurations and in runs.
#include <regex>

#include "compress/sparse.h"
#include "tests/train/resumed_run.h"
#include "train/config/config.h"

using namespace topknot;
using namespace topknot::testing;

TEST_CASE("a method's name fills what its paper says, given keys win, and the dump says what is from where") {
  const LoadedConfig sparseloco = load_config("", {"compress.name=sparseloco", "exchange.every=30"});
  CHECK(sparseloco.config.compress.density * 4096 == 64);
  CHECK(sparseloco.config.outer.name == "sgd");
  CHECK(sparseloco.config.outer.lr == 1);
  CHECK(sparseloco.config.outer.momentum == 0);
  CHECK(check_config(sparseloco.config).empty());
  CHECK(unused_keys(sparseloco).empty());
  const auto dump = [](const LoadedConfig& loaded) {
    return dump_yaml(loaded.config, false, loaded.origins);
  };
  CHECK(says(dump(sparseloco), {"  density: 0.015625  # sparseloco\n", "  outer.lr: 1  # sparseloco\n"}));

  const LoadedConfig given = load_config(yaml_file("exchange: {outer.lr: 0.5}\n"),
                                         {"compress.name=sparseloco", "compress.density=0.001"});
  CHECK(given.config.compress.density == 0.001);
  CHECK(given.config.outer.lr == 0.5);
  CHECK(given.config.outer.name == "sgd");
  CHECK(says(dump(given), {"  density: 0.001  # command line\n", "  outer.lr: 0.5  # file\n"}));

  // What goes with another value than the given one is left alone.
  CHECK(load_config("", {"compress.name=sparseloco", "exchange.outer.name=nesterov"}).config.outer.momentum ==
        0.9);
  CHECK(load_config("", {"compress.name=demo"}).config.optimizer.lr == 4e-4);
  CHECK(load_config("", {"compress.name=demo", "optimizer.name=sgd"}).config.optimizer.lr ==
        Config().optimizer.lr);
  CHECK(load_config("", {"compress.name=dgc"}).config.compress.warmup.size() == 4);

  const LoadedConfig muloco = load_config("", {"compress.name=muloco"});
  CHECK(muloco.config.compress.name == "dense");
  CHECK(muloco.config.optimizer.name == "muon");
  CHECK(muloco.config.outer.momentum == 0.8);
  CHECK(says(dump(muloco), {"  name: dense  # command line: muloco\n", "  variant: muloco  # muloco\n"}));
  CHECK(contains(check_config(load_config("", {"compress.name=mulocco"}).config).at(0).message, "'muloco'"));
}

TEST_CASE("every method and recipe gives a valid run, whose dump is read back as it was") {
  std::vector<std::string> names = compressors().names();
  for (const std::string& recipe : recipes().names()) names.push_back(recipe);
  for (const std::string& name : names) {
    INFO(name);
    const std::string every = recipes().contains(name) ? "4" : "0";  // a recipe is for local steps
    const LoadedConfig loaded = load_config("", {"compress.name=" + name, "exchange.every=" + every});
    CHECK(check_config(loaded.config).empty());
    for (const std::string& dump :
         {dump_yaml(loaded.config), dump_yaml(loaded.config, true),
          dump_yaml(loaded.config, false, loaded.origins, keys_without_use(loaded.config))}) {
      const LoadedConfig again = load_config(yaml_file(dump), {});
      CHECK(dump_yaml(again.config) == dump_yaml(loaded.config));
    }
    if (loaded.config.compress.name != name) continue;
    const std::string without_tail =
        "runs/resnet20-synthetic_images-" + name +
        (name == "dense" ? "" : "-" + key_value(*find_key("compress.density"), loaded.config)) + "-r1-s1";
    CHECK(run_directory_name(loaded.config) == without_tail);
  }
}

TEST_CASE("a resumed run keeps what its method's name has filled in, and values of before a name did") {
  const Keys keys = {"data.train_size=256", "train.max_steps=20", "dist.ranks=2", "compress.name=sparseloco",
                     "exchange.every=4"};
  const StoppedRun temp(keys, 5);
  const std::string file = temp.at("run/config.yaml");
  const std::string text = text_of(file);
  CHECK(says(text, {"  outer.lr: 1  # sparseloco\n"}));
  const LoadedConfig loaded = load_resumed_config(temp.at("run"), {});
  CHECK(loaded.config.outer.lr == 1);
  CHECK(loaded.origins.at("exchange.outer.lr") == Origin::method);

  std::ofstream(file) << std::regex_replace(text, std::regex("outer.lr: 1  # sparseloco"), "outer.lr: 0.7");
  CHECK(load_resumed_config(temp.at("run"), {}).config.outer.lr == 0.7);
}

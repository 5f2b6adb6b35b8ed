#include "train/config/config.h"

#include "tests/support/test.h"

#include <sys/stat.h>
#include <unistd.h>

#include <regex>

namespace topknot {
namespace {

const fs::path kSource = TOPKNOT_SOURCE_DIR;

std::string only_problem(const LoadedConfig& loaded) {
  REQUIRE(loaded.problems.size() == 1);
  return loaded.problems[0].message;
}
std::string problem_in(const std::string& file) {
  return only_problem(load_config(file, {}));
}
std::string problem_of(const std::string& override) {
  return only_problem(load_config("", {override}));
}

// The others are lists of commands for netlab.
std::vector<fs::path> configurations() {
  std::vector<fs::path> all;
  for (const char* folder : {"configs", "lab/configs"})
    for (const auto& entry : fs::recursive_directory_iterator(kSource / folder))
      if (entry.path().extension() == ".yaml") all.push_back(entry.path());
  return all;
}

CommandLine parse(std::vector<const char*> words) {
  words.insert(words.begin(), "train");
  return parse_command_line(static_cast<int>(words.size()), words.data());
}

}  // namespace

TEST_CASE("a text whose bytes could not be read back from config.yaml is refused") {
  for (const char* text : {"\\0", "a\\rb", "\\x1b[31m", "\\x7f"}) {
    const std::string file = yaml_file(std::string("output:\n  dir: \"") + text + "\"\n");
    CHECK(says(problem_in(file), {"output.dir (" + file}));
  }
  CHECK(says(problem_of("output.dir=a\xff"), {"holds characters that are no text: 'a\\xff'"}));
  CHECK(says(problem_of("model.freeze=[a,\x01]"), {"model.freeze"}));
  CHECK(load_config("", {"output.dir=Läufe/a b\t\"c\""}).problems.empty());
}

TEST_CASE("a list of texts reads the same from a file, the command line and its own dump") {
  const std::string file = yaml_file("model: {freeze: [stem, \"*.bn\", 'a\"b']}\n");
  const std::vector<std::string> freeze = {"stem", "*.bn", "a\"b"};
  CHECK(load_config(file, {}).config.model.freeze == freeze);
  const Config config = load_config("", {"model.freeze=[stem, *.bn,a\"b]"}).config;
  CHECK(config.model.freeze == freeze);
  const std::string dump = yaml_file(dump_yaml(config));
  const auto again = load_config(dump, {});
  CHECK(again.problems.empty());
  CHECK(again.config.model.freeze == freeze);
  CHECK(key_type(*find_key("model.freeze")) == "a list of texts");
}

TEST_CASE("the command line wins over the file and the file over defaults, and origins say so") {
  const std::string file = yaml_file(
      "optimizer:\n  lr: 0.2\n  momentum: 0.5\nseed: 7\ncompress: {name: topk, warmup: [0.1, 0.01]}\n");
  const auto loaded = load_config(file, {"optimizer.lr=0.3", "model.hidden=5,6"});
  REQUIRE(loaded.problems.empty());
  CHECK(loaded.config.optimizer.lr == 0.3);
  CHECK(loaded.config.optimizer.momentum == 0.5);
  CHECK(loaded.config.seed == 7);
  CHECK(loaded.config.compress.warmup == std::vector<double>{0.1, 0.01});
  CHECK(loaded.config.model.given<std::vector<int>>("hidden") == std::vector<int>{5, 6});
  CHECK(loaded.config.train.epochs == 1);
  CHECK(loaded.origins.at("optimizer.lr") == Origin::command_line);
  CHECK(loaded.origins.at("optimizer.momentum") == Origin::file);
  CHECK(loaded.origins.count("train.epochs") == 0);
}

TEST_CASE("the dumped configuration reads back to the same one, non-default values of every key included") {
  std::vector<std::string> overrides;
  for (const Key& key : config_keys()) {
    std::string value = "0.5";
    if (!key.choices.empty()) {
      value = key.choices.back();
      if (contains(value, ":")) value = value.substr(0, value.find(':')) + ":2.5";
    } else if (contains(key_type(key), "text")) {
      value = "a \"b\": #c\\";
    } else if (contains(key_type(key), "integer")) {
      value = std::to_string(static_cast<int>(std::max(key.least, 2.0)));
    } else if (key_type(key) == "true or false") {
      value = key_value(key, Config()) == "true" ? "false" : "true";
    } else if (key.least >= 1) {
      value = "1.5";
    }
    overrides.push_back(key.name + "=" + value);
  }
  const auto loaded = load_config("", overrides);
  for (const auto& problem : loaded.problems) INFO(problem.message);
  REQUIRE(loaded.problems.empty());
  for (const bool only_non_default : {false, true}) {
    const std::string file = yaml_file(dump_yaml(loaded.config, only_non_default, loaded.origins));
    const auto again = load_config(file, {});
    REQUIRE(again.problems.empty());
    CHECK(dump_yaml(again.config) == dump_yaml(loaded.config));
  }
  CHECK(dump_yaml(Config(), true).empty());
}

TEST_CASE("the value of a secret key stands in no message and no dump") {
  const std::string word = "open-sesame";
  const Config config = load_config("", {"dist.token=" + word}).config;
  CHECK(config.dist.token == word);
  CHECK(key_value(*find_key("dist.token"), config) == "given");
  CHECK_FALSE(contains(dump_yaml(config), word));
  CHECK_FALSE(contains(problem_of("dist.token=" + word + "\x01"), word));
  CHECK_FALSE(contains(problem_of("dist.token=[" + word + "]"), word));
  CHECK(without_secret("dist.token=" + word) == "dist.token=(not shown)");
  CHECK(without_secret("--dist.token=" + word) == "--dist.token=(not shown)");
  for (const std::string plain : {"seed=1", "dist.token", "-q", "--", "=", "a=dist.token=b"})
    CHECK(without_secret(plain) == plain);
  for (const std::vector<const char*>& words :
       std::vector<std::vector<const char*>>{{"--dist.token=open-sesame"}, {"dist.token", "open-sesame"}}) {
    const std::string text = error_text([&] { parse(words); });
    CHECK(contains(text, "dist.token"));
    CHECK_FALSE(contains(text, word));
  }
}

TEST_CASE("all mistakes of a file and a command line are reported at once") {
  const std::string file = yaml_file("seed: x\ntrain:\n  lr: 2\n  epochs: -1\nmodel: resnet20\n");
  const auto loaded = load_config(file, {"optimizer.lrr=2", "dist.backend=mpi"});
  CHECK(loaded.problems.size() == 6);
  CHECK_USER_ERROR(throw_problems(loaded.problems), "6 problems", "'optimizer.lrr'", "seed");
  CHECK_NOTHROW(throw_problems({}));
}

TEST_CASE("an unknown key names its place and the key that was meant, in another section too") {
  const std::string file = yaml_file("train:\n  lr: 2\n");
  const auto message = problem_in(file);
  CHECK(says(message, {"'train.lr'", ":2:3", "did you mean 'optimizer.lr'"}));
  CHECK(contains(problem_of("optimizer.momentun=0"), "did you mean 'optimizer.momentum'"));
  CHECK(contains(problem_in(yaml_file("optimiser:\n  lr: 2\n  momentum: 0\n")), "did you mean 'optimizer'"));
}

TEST_CASE("a section within a section reads as dotted keys do, and its own name suggests a key") {
  const LoadedConfig loaded =
      load_config(yaml_file("dist:\n  link: {rate: 100mbit, latency: 1ms}\n"), {"dist.link.latency=2ms"});
  CHECK(loaded.problems.empty());
  CHECK(loaded.config.dist.link_rate == "100mbit");
  CHECK(loaded.config.dist.link_latency == "2ms");
  CHECK(load_config(yaml_file("dist:\n  link.rate: 100mbit\n"), {}).config.dist.link_rate == "100mbit");
  CHECK(says(problem_of("dist.link=1gbit"), {"did you mean 'dist.link.rate'"}));
}

TEST_CASE("values of a wrong type, out of range or of no choice are refused by range, and change nothing") {
  const auto refused = [](const std::string& text, const std::string& part) {
    INFO(text);
    const auto loaded = load_config("", {text});
    CHECK(says(only_problem(loaded), {part}));
    CHECK(dump_yaml(loaded.config, true).empty());
  };
  for (const char* text :
       {"train.epochs=1.5", "train.epochs=many", "train.epochs=", "optimizer.lr=0", "optimizer.nesterov=1",
        "compress.density=1.01", "compress.density=0", "compress.density=1e-400", "compress.warmup=[0.1,2]",
        "compress.warmup=[0.1", "compress.capacity=0.5", "dist.ranks=0", "dist.ranks=1025",
        "dist.backend=mpi", "exchange.merge=size:", "exchange.merge=size:-1", "seed=-1", "model.name=[a,b]",
        "data.shard=uneven"})
    refused(text, "");
  refused("optimizer.lr=1e999", "above 0, at most 1,000,000");
  refused("optimizer.lr=1e-310", "optimizer.lr");
  refused("optimizer.lr=1e-39", "too close to 0: 1e-39");  // vanishes in float32
  refused("optimizer.weight_decay=-1e-310", "give 0, or at least");
  refused("compress.warmup=0.1,4e-324", "too close to 0");
  refused("dist.ranks=99999999999999999999", "must be 1 to 1024");
  refused("exchange.merge=size:4e-324", "size:BYTES");
  refused("seed=9x", "an integer");
  refused("seed=99999999999999999999", "must be 0 to 18446744073709551615, not 99999999999999999999");
  for (const char* value : {"nan", "inf", "-inf", "NaN", "Infinity"})
    for (const char* key : {"optimizer.lr=", "dist.timeout_s=", "compress.capacity=", "train.eval_every="})
      CHECK(load_config("", {std::string(key) + value}).problems.size() == 1);
  CHECK(load_config("", {"exchange.merge=size:4096", "compress.capacity=none", "data.shard=uneven:3",
                         "optimizer.lr=1.2e-38", "optimizer.weight_decay=0"})
            .problems.empty());
}

TEST_CASE("a file that is no configuration is refused with reason and place, and never waited for") {
  const std::string broken = yaml_file("seed: 1\nmodel: {name: [a\n"), pipe = yaml_file(""),
                    both = yaml_file("model.name: mlp\nmodel: {name: lenet}\n"),
                    merge = yaml_file("model: &base\n  name: mlp\noptimizer:\n  <<: *base\n"),
                    unexpected = "not readable as YAML: unexpected character",
                    tab = "begins with a tab; YAML is indented with spaces",
                    deep = "within each other hundreds of levels deep";
  fs::remove(pipe);
  REQUIRE(mkfifo(pipe.c_str(), 0600) == 0);
  std::string sections;
  for (std::size_t i = 0; i < 1200; ++i) sections += std::string(i, ' ') + "a:\n";
  for (const auto& [file, part] : std::vector<std::pair<std::string, std::string>>{
           {yaml_file(","), unexpected},
           {yaml_file(", lr: 1\nseed: 2\n"), unexpected},
           {yaml_file("# a comment\n,\n"), unexpected},
           {broken, broken + ":"},
           {yaml_file("- 1\n"), ":1:1"},
           {yaml_file("seed: 1\nseed: 2\n"), "twice"},
           {both, "'model.name' (" + both + ":2:9) stands twice"},
           {yaml_file("---\nseed: 1\n---\nseed: 2\n"), ":3:1: a second YAML document"},
           {merge, "'<<' (" + merge + ":4:3): merge keys are not read"},
           {yaml_file("model:\n\tname: mlp\n"), tab},
           {yaml_file("model:\n  name: mlp\n\tdropout: 0\n"), tab},
           {yaml_file("seed:\n \t- 1\n"), tab},
           {yaml_file(std::string(100000, '[')), deep},
           {yaml_file(sections), deep},
           // Names of a file cannot move the cursor or begin lines.
           {yaml_file("\"a\\e[2J\\nerror: b\": 1\n"), "unknown key 'a\\x1b[2J\\nerror: b'"},
           {"no/such.yaml", "no/such.yaml: cannot be read"},
           {fs::temp_directory_path().string(), "folder"},
           {"/proc/self/mem", "cannot be read: Input/output error"},  // a regular file whose first read fails
           {"/dev/zero", "device"},
           {pipe, "named pipe"},
           {yaml_file("seed: 1\n" + std::string(1 << 20, '#') + "\n"), "larger than 1.05 MB"}})
    CHECK(says(problem_in(file), {part}));
  for (const std::string& text : {std::string("---\nseed: 1\n...\n"), std::string("# nothing\nmodel:\n"),
                                  std::string("model: {\n\tname: mlp}\nseed:\t2\n"),  // no indentation
                                  "seed: 1\n" + std::string(100000, '#') + "\n"})
    CHECK(load_config(yaml_file(text), {}).problems.empty());
}

TEST_CASE("a pipe of the shell is read as a configuration, however its pieces come") {
  int ends[2];
  REQUIRE(pipe(ends) == 0);
  std::thread writer([&] {
    for (const char letter : std::string("seed: 7\n")) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
      if (write(ends[1], &letter, 1) != 1) break;
    }
    close(ends[1]);
  });
  const auto loaded = load_config("/dev/fd/" + std::to_string(ends[0]), {});
  writer.join();
  close(ends[0]);
  CHECK(loaded.problems.empty());
  CHECK(loaded.config.seed == 7);
}

TEST_CASE("of very many problems the first are shown and the others counted") {
  std::string text = "? " + std::string(20000, 'x') + "\n: 1\n";
  for (int i = 0; i < 50000; ++i) text += "key" + std::to_string(i) + ": 1\n";
  const std::string file = yaml_file(text);
  const auto loaded = load_config(file, {});
  CHECK(loaded.problems.size() == 50001);
  const std::string message = error_text<UserError>([&] { throw_problems(loaded.problems); });
  CHECK(says(message, {"50001 problems in the configuration", "'key18'"}));
  CHECK_FALSE(contains(message, "'key19'"));
  CHECK(contains(message, "and 49981 more"));
  CHECK(message.size() < 5000);
}

TEST_CASE("checks across keys find what cannot work together") {
  using Names = std::set<std::string>;
  for (const auto& [keys, expected] : std::vector<std::pair<std::vector<std::string>, Names>>{
           {{}, {}},
           {{"model.name=resnet2"}, {"model.name"}},
           {{"train.epochs=0"}, {"train.epochs"}},
           {{"train.epochs=0", "train.max_steps=3"}, {}},
           {{"compress.scope=model", "exchange.merge=none"}, {"compress.scope"}},
           {{"compress.scope=model"}, {}},
           {{"exchange.ranks_per_host=2", "dist.ranks=4"}, {"exchange.ranks_per_host"}},
           {{"compress.name=topk", "exchange.ranks_per_host=3", "dist.ranks=4"}, {"exchange.ranks_per_host"}},
           {{"compress.name=topk", "exchange.ranks_per_host=2", "dist.ranks=4"}, {}},
           {{"compress.name=topk", "exchange.ranks_per_host=2"}, {}},  // ranks from the launcher
           {{"compress.name=topk", "exchange.ranks_per_host=2", "exchange.hierarchy=parts",
             "train.distribution_every=5"},
            {"train.distribution_every"}},
           {{"dist.master=host:1", "dist.backend=threads"}, {"dist.master"}},
           {{"dist.master=host:1", "dist.backend=gloo"}, {}},
           {{"dist.master=host", "dist.backend=gloo"}, {"dist.master"}},
           {{"dist.nccl=Ring"}, {"dist.nccl"}},
           {{"dist.timeout_s=1e-5"}, {"dist.timeout_s"}},  // below a millisecond
           {{"dist.timeout_s=0.001"}, {}},
           {{"dist.timeout_s=0"}, {}},
           {{"dist.link.rate=1gbit", "dist.backend=threads"}, {}},
           {{"dist.link.rate=1gbit", "dist.backend=gloo"}, {"dist.link.rate"}},
           {{"dist.link.rate=fast"}, {"dist.link.rate"}},
           {{"dist.link.rate=1gbit", "dist.link.latency=x"}, {"dist.link.rate"}},
           {{"schedule.name=multistep"}, {"schedule.milestones"}},
           {{"data.root=no/such/folder"}, {"data.root"}},
           {{"optimizer.nesterov=true", "optimizer.momentum=0", "schedule.min_lr=1"},
            {"optimizer.nesterov", "schedule.min_lr"}}}) {
    Names found;
    for (const auto& problem : check_config(load_config("", keys).config)) found.insert(problem.key);
    INFO((keys.empty() ? "no keys" : keys.front() + " ... " + keys.back()));
    CHECK(found == expected);
  }
}

TEST_CASE("keys that the choices, the device or the data do not use are named, with whose they are") {
  using Lines = std::vector<std::string>;
  // The notes that are expected, or how many there are.
  for (const auto& [keys, lines, count] : std::vector<std::tuple<Lines, Lines, std::size_t>>{
           {{"compress.name=topk", "compress.mu=3"},
            {"compress.mu is for regtopk and changes nothing here (compress.name=topk)"},
            1},
           {{"compress.name=topk", "compress.select=regtopk", "compress.mu=3"}, {}, 0},
           {{"compress.name=regtopk", "compress.mu=3"}, {}, 0},
           {{"compress.name=dgc", "compress.momentum_masking=false"}, {}, 0},
           {{"compress.name=dgc", "compress.memory=residual", "compress.momentum_masking=false"},
            {"compress.momentum_masking is for dgc and changes nothing here (compress.name=dgc "
             "compress.memory=residual)"},
            1},
           {{"compress.name=acpsgd", "compress.rank=2", "compress.density=0.1"},
            {"compress.density is for methods that select entries and changes nothing here "
             "(compress.name=acpsgd)"},
            1},
           {{"compress.name=topk", "compress.alpha_s=1"}, {}, 1},
           {{"compress.name=topk", "compress.alpha_s=1", "compress.layer_density=auto"}, {}, 0},
           {{"compress.dense_values=bf16"}, {}, 1},
           {{"schedule.gamma=0.5"}, {}, 1},
           {{"train.graphs=true"},
            {"train.graphs is for GPUs and changes nothing here (train.device=cpu)"},
            1},
           {{"train.deterministic=true", "data.on_device=auto"}, {}, 2},
           {{"train.precision=tf32"},
            {"train.precision tf32 is for GPUs; fp32 is used here (train.device=cpu)"},
            1},
           {{"train.precision=fp32"}, {}, 0},
           {{"data.name=cifar10", "data.classes=10"},
            {"data.classes is for synthetic_images and changes nothing here (data.name=cifar10)"},
            1},
           {{"data.name=mnist", "data.image_size=32", "data.noise=0.1"}, {}, 2},
           {{"data.classes=10", "data.image_size=64", "data.noise=0.1"}, {}, 0},
           {{"data.root=/tmp"}, {}, 1},
           {{"data.name=mnist", "data.root=/tmp"}, {}, 0},
           {{"train.clip_local_scope=tensor"}, {}, 1},
           {{"train.clip_local_scope=tensor", "compress.clip=1"}, {}, 0},
           {{"train.checkpoint_every=1", "train.checkpoint_keep=0"}, {}, 1},
           {{"train.checkpoint_every=1"}, {}, 0},
           {{"resume.residuals=sum"}, {}, 1},
           {{"dist.link.latency=1ms"}, {}, 1},
           {{"dist.link.latency=1ms", "dist.link.rate=100mbit"}, {}, 0},
           {{"dist.token=word", "dist.backend=threads"}, {}, 1},
           {{"dist.token=word"}, {}, 0},  // a launcher may choose gloo
           {{}, {}, 0}}) {
    Lines given = keys;
    given.push_back("train.device=cpu");
    const Lines notes = unused_keys(load_config("", given));
    INFO(given.front());
    CHECK(notes.size() == count);
    if (!lines.empty()) CHECK(notes == lines);
  }
  // A file for one method or for GPUs, run with another or on a CPU.
  const std::string regtopk = yaml_file("compress: {name: regtopk, mu: 3, density: 0.1}\n"),
                    topk = yaml_file("compress: {name: topk, mu: 3}\n"),
                    gpus = yaml_file("train: {graphs: true, deterministic: true}\n");
  for (const auto& [file, keys, count] : std::vector<std::tuple<std::string, Lines, std::size_t>>{
           {regtopk, {}, 0},
           {regtopk, {"compress.name=topk"}, 0},
           {regtopk, {"compress.name=topk", "compress.q=2"}, 1},
           {topk, {}, 1},
           {gpus, {"train.device=cpu"}, 0},
           {gpus, {"train.device=cuda"}, 0}}) {
    INFO(file << (keys.empty() ? "" : " " + keys.back()));
    CHECK(unused_keys(load_config(file, keys)).size() == count);
  }
}

TEST_CASE("a run directory is named by what the run is and by every key that differs from its default") {
  const auto name = [](const std::vector<std::string>& overrides) {
    return run_directory_name(load_config("", overrides).config);
  };
  CHECK(name({}) == "runs/resnet20-synthetic_images-dense-r1-s1");
  CHECK(name({"compress.name=topk", "dist.ranks=4", "seed=7"}) ==
        "runs/resnet20-synthetic_images-topk-0.001-r4-s7");
  CHECK(name({"compress.name=regtopk", "compress.mu=2", "optimizer.lr=0.05", "data.root=/somewhere",
              "data.workers=3", "train.algorithm_cache=/somewhere"}) ==
        "runs/resnet20-synthetic_images-regtopk-0.001-r1-s1-lr_0.05-mu_2");
  CHECK(name({"compress.warmup=[0.25, 0.1]", "exchange.merge=size:1000"}) ==
        "runs/resnet20-synthetic_images-dense-r1-s1-warmup_0.25,0.1-merge_size_1000");
  CHECK(name({"schedule.name=cosine"}) == "runs/resnet20-synthetic_images-dense-r1-s1-schedule.name_cosine");
  const std::vector<std::string> many = {"compress.name=dgc",        "optimizer.lr=0.05",
                                         "optimizer.weight_decay=0", "train.epochs=3",
                                         "train.log_every=7",        "compress.sample_ratio=0.1"};
  std::vector<std::string> others = many;
  others.back() = "compress.sample_ratio=0.2";
  CHECK(name(many).size() == std::string("runs/resnet20-synthetic_images-dgc-0.001-r1-s1-01234567").size());
  CHECK(name(many) == name(many));
  CHECK(name(many) != name(others));
  CHECK(name({"output.dir=here", "seed=3"}) == "here");
}

TEST_CASE("a method's or model's keys come from its registration, and a shared one names all its users") {
  CHECK(contains(help_text(), "  compress.mu=4"));
  CHECK(contains(find_key("compress.mu")->help, "regtopk: temperature"));
  CHECK(find_key("compress.rank")->users == std::vector<std::string>{"acpsgd", "powersgd"});
  CHECK(contains(list_text("compressors", "", 200),
                 "compress.mu=4: temperature of the regulariser (number, above 0, at most 1,000,000,000)"));
  CHECK(find_key("model.tied")->users == std::vector<std::string>{"llama", "lstm_lm"});
  CHECK(contains(list_text("models", "", 200), "model.heads=4: heads of attention; they divide model.width"));
  for (const NameList& list : name_lists())
    for (const std::string& name : list.registry.names()) {
      INFO(list.list << " " << name);
      CHECK(contains(list_text(list.list), name));
      CHECK_FALSE(list.registry.help(name).empty());
    }
}

TEST_CASE("density follows the warm-up list by epoch and never falls below the configured one") {
  const auto config = load_config("", {"compress.density=0.01", "compress.warmup=0.25,0.001"}).config;
  CHECK(density_at_epoch(config, 0) == 0.25);
  CHECK(density_at_epoch(config, 1) == 0.01);
  CHECK(density_at_epoch(config, 2) == 0.01);
}

TEST_CASE(
    "every key has a unique name, a help line, a default inside its own range, and a place in the docs") {
  const std::string page = text_of(kSource / "docs/configuration.md"), table = key_reference_markdown();
  std::set<std::string> names;
  for (const Key& key : config_keys()) {
    INFO(key.name);
    CHECK(names.insert(key.name).second);
    CHECK_FALSE(key.help.empty());
    CHECK(find_key(key.name) == &key);
    std::string value = key_value(key, Config());
    CHECK(contains(table, "| `" + key.name + "` | `" + value + "` | "));
    CHECK(contains(page, "`" + key.name.substr(0, key.name.find('.')) + "`"));
    if (value == "\"\"") value.clear();
    CHECK(load_config("", {key.name + "=" + value}).problems.empty());
    CHECK(contains(help_text(), "  " + key.name + "="));
  }
}

TEST_CASE("docs/methods.md holds the tables of keys that the program prints") {
  const std::string methods = text_of(kSource / "docs/methods.md");
  CHECK(contains(methods, "<!-- keys: begin -->\n" + method_keys_markdown() + "<!-- keys: end -->"));
}

TEST_CASE("every file in configs is valid") {
  CHECK(configurations().size() >= 13);
  for (const fs::path& path : configurations()) {
    INFO(path.string());
    const auto loaded = load_config(path.string(), {});
    for (const auto& problem : loaded.problems) UNSCOPED_INFO(problem.message);
    CHECK(loaded.problems.empty());
    CHECK(check_config(loaded.config).empty());
    CHECK(unused_keys(loaded).empty());
  }
}

TEST_CASE("an accuracy that a configuration states is in the page that it names") {
  const std::regex source("\\((lab/records/[a-z0-9_/]+\\.md), as of commit [0-9a-f]{7,}\\)"),
      decimal("[0-9]+\\.[0-9]+");
  int figures = 0;
  for (const fs::path& path : configurations()) {
    std::ifstream stream(path);
    for (std::string line; std::getline(stream, line);) {
      if (line.rfind("# Test accuracy", 0) != 0) continue;
      INFO(path.string() << ": " << line);
      std::smatch place;
      REQUIRE(std::regex_search(line, place, source));
      const std::string page = text_of(kSource / place[1].str());
      for (std::sregex_iterator figure(line.begin(), line.end(), decimal), end; figure != end;
           ++figure, ++figures)
        CHECK(contains(page, figure->str()));
    }
  }
  CHECK(figures >= 12);
}

TEST_CASE("the command line of train knows its flags and explains what it does not know") {
  CHECK_FALSE(parse({}).text.empty());
  CHECK(says(parse({"--help"}).text, {"optimizer.lr=0.1", "Exit codes:"}));
  const auto line = parse({"a.yaml", "--dry-run", "seed=3", "data.root=/a/b=c"});
  CHECK(line.file == "a.yaml");
  CHECK(line.dry_run);
  CHECK_FALSE(line.validate);
  CHECK(line.overrides == std::vector<std::string>{"seed=3", "data.root=/a/b=c"});
  CHECK(line.text.empty());
  const std::vector<const char*> refused[] = {
      {"--lits"}, {"--list", "modles"}, {"--list"},           {"--list", ""},
      {""},       {"a.yaml", ""},       {"a.yaml", "b.yaml"}, {"---"}};
  for (const auto& words : refused) CHECK_THROWS_AS(parse(words), UserError);
}

TEST_CASE("train --help and --list keys show one key or section, and suggest the one that was meant") {
  for (const char* word : {"compress.density", "compress.density=0.1"}) {
    const std::string text = parse({"--help", word}).text;
    CHECK(says(text, {"compress.density=0.001\n  share of a gradient's entries that is sent\n",
                      "above 0, at most 1"}));
    CHECK_FALSE(contains(text, "compress.warmup"));
  }
  CHECK(contains(parse({"--help", "data.name"}).text, "cifar10"));
  CHECK(contains(parse({"configs/demo_topk.yaml", "--help"}).text, "Flags:"));
  for (const auto& words :
       {std::vector<const char*>{"--help", "optimizer"}, {"--list", "keys", "optimizer"}}) {
    const std::string text = parse(words).text;
    CHECK(text.rfind("optimizer: how ", 0) == 0);
    CHECK(contains(text, "optimizer.nesterov=false"));
    CHECK_FALSE(contains(text, "schedule."));
  }
  CHECK_USER_ERROR(parse({"--help", "compres.density"}), "did you mean 'compress.density'");
  CHECK_USER_ERROR(parse({"--list", "keys", "optimiser"}), "did you mean 'optimizer'");
  CHECK_USER_ERROR(parse({"--list", "models", "optimizer"}), "--list", "'optimizer'");
}

TEST_CASE("a key that is given like a flag or a file is explained") {
  const std::vector<const char*> apart{"a.yaml", "compress.density", "0.01"};
  CHECK_USER_ERROR(parse(apart), "compress.density=0.01", "without a value");
  CHECK_USER_ERROR(parse({"compress.density", "--dry-run"}), "compress.density=VALUE", "0.001");
  CHECK_USER_ERROR(parse({"--compress.density=0.01"}), "write compress.density=0.01");
  CHECK_USER_ERROR(parse({"--compress.density", "0.01"}), "write compress.density=VALUE");
  CHECK(contains(only_problem(load_config("", parse({"compress.denisty"}).overrides)), "section.key=value"));
  CHECK(parse({"data.yaml"}).file == "data.yaml");
}

TEST_CASE("an unknown name brings the names that begin like it, and those of its family") {
  const auto message = [](const std::string& name) {
    return check_config(load_config("", {"model.name=" + name}).config).at(0).message;
  };
  for (const char* name : {"resnet", "resnet21", "ResNet"}) {
    CHECK(says(message(name), {"'resnet20'", "'resnet110'?"}));
    CHECK_FALSE(contains(message(name), "'lenet'"));
  }
  CHECK(contains(message("vgg"), "did you mean 'vgg16', 'vgg16_bias' or 'vgg16_imagenet'?"));
  CHECK(contains(message("lenett"), "did you mean 'lenet'?"));
  CHECK(contains(problem_of("compress.dens=1"), "did you mean 'compress.density'?"));
}

TEST_CASE("train --list models counts the parameters of the models as built") {
  const std::string text = list_text("models");
  for (const char* line : {"resnet20      269722", "vgg16       14724042", "linear         30730"})
    CHECK(contains(text, line));
}

}  // namespace topknot

#pragma once
// The configuration of a run. Every key is declared once, as an Option (nn/base/registry.h). Keys of single
// models, data sets, optimizers, schedules and methods (compress.mu) are declared where these are registered. All
// others have their default in `Config`, and name, range or choices and one line of help in train/config/config_keys.cpp. The parser,
// --help, --validate, the effective config in the run directory and `--list keys-markdown` all come from
// config_keys().
//
// Layers, later ones win: defaults, what the method's paper says (settings_of(), compress/sparse.h), YAML file, command
// line (`section.key=value`). A user's mistakes never
// throw here: they are collected, so that all of them can be shown at once.

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <variant>
#include <vector>

#include "compress/compressor.h"
#include "data/loader.h"
#include "dist/exchange/exchange.h"
#include "dist/launch/launch.h"
#include "nn/base/registry.h"
#include "nn/models/model.h"
#include "optim/optimizer.h"
#include "optim/schedule.h"

namespace topknot {

// A section is its module's own options if there are such, and what train makes of it besides. What those
// options have from other sections or from the data (the seed, a model's input) counts where they are made,
// in train/setup.h.
struct Config {
  std::uint64_t seed = 1;

  struct Model : ModelOptions {
    std::string name = "resnet20";
    std::string init_from;  // a safetensors file; empty: initialised by the seed
    // Patterns of names: matches_name(), train/checkpoint/model_file.h.
    std::vector<std::string> reinit, freeze;
  } model;

  struct Data : DatasetOptions, LoaderKeys {
    Data() { workers = 1; }
    std::string name = "synthetic_images";
    std::string shard = "even";      // parse_shard_rule()
    std::string augment = "auto";    // auto, true, false: resolve_augment()
    std::string on_device = "auto";  // auto, true, false
  } data;

  struct Optimizer : OptimizerOptions {
    Optimizer() { momentum = 0.9, weight_decay = 1e-4; }
  } optimizer;
  ScheduleOptions schedule;

  struct Compress : CompressOptions, CompressKeys {
    double density = 0.001;
    std::vector<double> warmup;  // densities of epoch 0, 1, ...
    bool dense_1d = true;
    std::int64_t min_numel = 0;
    double clip = 0;  // 0: off
    std::string layer_density;
    // Seconds per message and per byte for layer_density auto: 1 Gbit/s Ethernet, from the code of LAGS-SGD.
    double alpha_s = 1.744e-3, beta_s_per_byte = 9e-9;
  } compress;

  struct Exchange : ExchangeKeys {
    Exchange() { merge = "auto"; }
    std::string profile;     // a file of measured times; empty: measured if they are needed
    std::int64_t every = 0;  // steps; 0: gradients are exchanged, in every step
    std::int64_t overlap_steps = 0;
  } exchange;

  // Keys of compress.name: auto (train/plan/choose.h).
  struct Auto {
    std::string accuracy = "safe";  // exact, safe, local_steps, aggressive
  } automatic;

  // The outer optimizer, applied to the exchanged change of the weights (train/local_steps.h).
  struct Outer {
    std::string name = "nesterov";  // nesterov, sgd
    double lr = 0.7, momentum = 0.9;
    double alpha = 0;  // what a rank keeps of its own weights
  } outer;

  struct Dist : DistKeys {
    Dist() { backend = "auto"; }
    int ranks = 1;
    bool ordered_sum = false;
    std::string link_rate;  // dist.link.rate; "": no emulated link
    std::string link_latency = "50us";
  } dist;

  struct Elastic {
    int min_ranks = 0;             // 0: when a rank dies, all end
    int respawns = 0;              // how often one is started again
    std::string batch = "global";  // what stays the same for any number of ranks, and how the rate follows it
  } elastic;

  struct Train {
    int epochs = 1;
    std::int64_t max_steps = 0;  // 0: no limit
    int threads = 0;             // 0: see compute_threads()
    std::string device = "auto";
    std::string precision = "fp32";
    std::string graphs = "true";  // true, false, parts
    std::string unproven = "none";
    std::string trial;  // "": none is forced
    bool deterministic = false;
    std::string algorithm_cache = "auto";
    std::string bn_stats = "mean";
    int accumulate = 1;
    double clip_local = 0;  // 0: off
    std::string clip_local_scope = "model";
    double clip_global = 0;  // 0: off
    double label_smoothing = 0;
    double eval_every = 1;        // epochs; 0: at the end only
    double target_accuracy = 0;   // 0: none
    double peak_tflops = 0;       // 0: not known
    double checkpoint_every = 0;  // epochs; 0: at evaluations, stops and the end only
    int checkpoint_keep = 2;      // 0: no checkpoints
    std::int64_t stop_after = 0;  // steps of this start; 0: no limit
    int log_every = 10;           // steps
    int check_every = 50;         // steps; 0: never
    int max_skips = 10;
    std::vector<int> record_gradients;    // how many steps, after how many (0); empty: none
    std::int64_t distribution_every = 0;  // steps; 0: never
    bool step_times = true;               // on a GPU
    std::vector<int> profile_steps;       // the same; after the warm-up, kWarmUpSteps
  } train;

  struct Resume {
    std::string residuals = "keep";  // keep, sum, reset
    std::string data = "check";      // check, accept
    std::string method = "keep";     // keep, choose
  } resume;

  struct Output {
    std::string dir;  // "": run_directory_name()
    bool overwrite = false;
    bool tensorboard = false;
  } output;

  std::string named;  // no key: compress.name as it was given, which may be a recipe's
};

// A key's place in a Config. An unset optional, or 0 if the key has a `none_word`, is written as that word.
using KeyRef =
    std::variant<bool*, int*, std::int64_t*, std::uint64_t*, double*, std::string*, std::optional<double>*,
                 std::vector<int>*, std::vector<double>*, std::vector<std::string>*>;

// The subject of a key.
enum class KeyScope {
  run,    // what is trained and how
  start,  // one start of a run, and what it writes
  host,   // where a rank runs and what it writes there: may differ by host
};

// An option by its whole name, "optimizer.lr". Its default is what `ref` finds in a Config() (`standard` is
// of options that methods declare). The range holds for the entries of a list too; a choice such as
// "size:BYTES" takes a positive number after the colon.
struct Key : Option {
  std::function<KeyRef(Config& config)> ref;
  std::string none_word = {};  // "none", "auto": of a number that need not be given
  std::string registry = {};   // NameList::kind, if the value is a registered name: "model", "dataset", ...
  bool may_be_empty = false;   // of such a name: the method's own choice
  // Users of the key; empty: everything. A user is a choice (of the section's name, its selection or memory),
  // a backend, kSelectingMethods and the like, or another key, if that is not 0, empty or false.
  std::vector<std::string> users = {};
  std::vector<std::string> ignored_by = {};  // data sets and optimizers that make no use of it
  bool secret = false;                       // its value is neither written nor shown
  KeyScope scope = KeyScope::run;
};

// In the order of sections; the only place that knows all keys.
const std::vector<Key>& config_keys();
const Key* find_key(const std::string& name);     // null if unknown
std::vector<std::string> config_sections();       // in order
bool is_config_section(const std::string& name);  // also of a section within a section, such as dist.link

std::string key_type(const Key& key);  // "number", "list of integers", "true or false", ...
// The value as YAML: 0.1, [1, 2], "", none. "given" in place of a secret.
std::string key_value(const Key& key, const Config& config);
// A word of the command line as messages and files have it: without the value of a secret key.
std::string without_secret(const std::string& word);

// method: settings_of() the method or recipe that compress.name was given. measured, chosen: by the run when it started;
// in its own config.yaml only. weights: what the file of model.init_from was made with.
enum class Origin { default_value, method, file, command_line, measured, chosen, weights };
// "default", "file", "command line", "measured at the start", "auto", "model.init_from", or config.named.
std::string origin_name(Origin origin, const Config& config);

// One mistake. `message` is complete: what, where (key, file:line:column), what to do.
struct Problem {
  std::string key;  // "" if it is about no single key
  std::string message;
};

struct LoadedConfig {
  Config config;
  std::map<std::string, Origin> origins;  // by key; keys that are absent have their default
  std::vector<Problem> problems;
  bool resumed = false;  // of a run that goes on: `train --resume`

  Origin origin(const std::string& key) const {
    const auto found = origins.find(key);
    return found == origins.end() ? Origin::default_value : found->second;
  }
};

// Reads `file` ("" for none) and applies `overrides`, each "section.key=value"; a list is [1,2] or 1,2. Then the
// settings of the method take the places of defaults. Never throws for bad input.
LoadedConfig load_config(const std::string& file, const std::vector<std::string>& overrides);
// Config() with the settings of config's method: what load_config() would make of compress.name alone.
Config method_defaults(const Config& config);

// compress.name of a run that chooses its method when it starts; the run's own config.yaml has the choice.
inline constexpr const char* kAutoMethod = "auto";
inline bool chooses_method(const Config& config) {
  return config.compress.name == kAutoMethod;
}
// Returns the configuration by which such a run is checked before it has chosen.
Config before_choice(Config config);

// Whether gradients are sent otherwise than as plain sums.
inline bool compresses(const Config& config) {
  return !sums_plainly(config.compress.name, config.compress.values);
}

// Whether the ranks exchange what several steps have done to their weights (train/local_steps.h).
inline bool makes_local_steps(const Config& config) {
  return config.exchange.every > 0;
}
// Section compress with seed, momentum and nesterov of what takes the average, as factories get it.
CompressOptions compress_options(const Config& config);

// Finds problems that no single key can show: an unknown model, keys that contradict each other. Callers
// append those that only they can see (a missing data folder, no GPU).
std::vector<Problem> check_config(const Config& config);

// A line for each key that was given and that the chosen method, model, data or device does not use. A key of
// the file stays unmentioned where the command line names another method: the file was written for its own.
// For configurations that check_config() has passed.
std::vector<std::string> unused_keys(const LoadedConfig& loaded);
// The keys that a run of this configuration does not use, whatever their values.
std::set<std::string> keys_without_use(const Config& config);
// In Key::users: compress.name is made of pieces, one of which selects entries; it is not dense; the device
// is a GPU; the run was started by --resume.
inline constexpr const char* kSelectingMethods = "methods that select entries";
inline constexpr const char* kCompressingMethods = "methods that compress";
inline constexpr const char* kAutoRuns = "compress.name=auto";
inline constexpr const char* kGpus = "GPUs";
inline constexpr const char* kResume = "train --resume";

// Throws one UserError that lists them, the first 20 and a count of the others; does nothing if there are
// none.
void throw_problems(const std::vector<Problem>& problems);

// A file that `train FILE` reads to the same Config, but for the keys of `without` and for secret ones, which
// are empty. With `origins`, each value that is not a default says in a comment where it came from.
std::string dump_yaml(const Config& config, bool only_non_default = false,
                      const std::map<std::string, Origin>& origins = {},
                      const std::set<std::string>& without = {});

// All keys by section, or those of one, for --help and `--list keys`: names, types, defaults, ranges, help,
// in lines of `width` columns. Throws UserError for an unknown section.
std::string key_help(int width, const std::string& section = "");
std::string key_help(int width, const Key& key);  // of one key, for --help KEY
// All keys by section as Markdown tables, for `--list keys-markdown`.
std::string key_reference_markdown();
// The keys that single methods declare, as docs/methods.md has them.
std::string method_keys_markdown();

// Whether train.device is a GPU here.
bool on_gpu(const Config& config);
// train.threads. If it is 0: one rank's share of the cores that the process may use (usable_cores(),
// local_ranks()), at most OMP_NUM_THREADS. OpenMP may give fewer (settle_threads()).
int compute_threads(const Config& config);
// compress.density at an epoch, from 0: the entry of compress.warmup, never below compress.density; after the
// list compress.density. Density warm-up: Lin et al., "Deep Gradient Compression", ICLR 2018; the lists of
// Shi et al., arXiv 1911.08772.
double density_at_epoch(const Config& config, int epoch);
// Of train.record_gradients and train.profile_steps.
inline bool asks_for_steps(const std::vector<int>& key) {
  return !key.empty() && key[0] > 0;
}
// output.dir, or where it is empty "runs/MODEL-DATA-METHOD[-DENSITY]-rRANKS-sSEED", followed by "-KEY_VALUE"
// for every other key that differs from its default: "runs/resnet20-cifar10-regtopk-0.01-r4-s1-lr_0.05-mu_2".
// KEY is the last part of the key's name, with its section if two sections have that name. Characters other
// than letters, digits, '.', ',', '_' and '-' become '_'. Beyond 60 characters that tail is its hash instead.
// Keys that do not say what the run is (KeyScope) are left out.
std::string run_directory_name(const Config& config);

// The registries whose names are values of keys, or that `train --list` shows.
struct NameList {
  std::string list;                 // "models", as in --list models
  std::string kind;                 // "model", as in Key::registry and in messages
  std::string section;              // of the keys that what is registered declares
  const RegisteredNames& registry;  // names, help, options
};
const std::vector<NameList>& name_lists();
// The arguments of --list: the names of name_lists(), configs, keys, keys-markdown, methods-markdown.
std::vector<std::string> list_names();
// The output of --list, in lines of `width` columns; `section`: of `keys`, or "". Throws UserError for
// unknown names, and if there are no configurations.
std::string list_text(const std::string& list, const std::string& section = "", int width = 80);

// Values to and from text: what the parser, the dump and the help share.

// A value as it was written, in a YAML file or on the command line.
struct RawValue {
  bool list = false;
  std::vector<std::string> items;  // one where it is no list
  std::string shown() const;       // 3, [1, 2]
};

// "3" or "[1,2]" or, for a list key, "1,2". nullopt if a bracket is missing.
std::optional<RawValue> parse_raw(const std::string& text, bool list_key);

inline constexpr const char* kEmptyText = "\"\"";  // key_value() of a text that is empty

bool is_list(const Key& key);

// "optimizer" of "optimizer.lr"; "" of "seed".
inline std::string section_of(const std::string& key) {
  const auto dot = key.find('.');
  return dot == std::string::npos ? "" : key.substr(0, dot);
}
// "lr" of "optimizer.lr".
inline std::string last_part(const std::string& key) {
  return key.substr(key.find('.') + 1);
}

// Writes the value into config; returns "" or what is wrong with it ("needs a number, not 'fast'").
std::string set_key(const Key& key, const RawValue& value, Config& config);

// Formats a YAML scalar: quoted if plain text would mean something else.
std::string yaml_string(const std::string& text);

// The command line of `train`: [FILE.yaml] [section.key=value ...] and a few flags.
struct CommandLine {
  std::string file;                    // "" if none is given
  std::vector<std::string> overrides;  // "a.b=c", in order
  std::string resume;                  // --resume: the run directory, or ""
  bool validate = false;
  bool dry_run = false;
  bool dump_config = false;
  bool check_network = false;
  std::string coordinate;  // --coordinate: HOST:PORT, or ""
  bool quiet = false, brief = false;
  bool verbose = false;
  // Not empty: print it on standard output and leave with 0 (--help, --list, --version, or no argument at
  // all).
  std::string text;
};

// Throws UserError for an unknown flag or an argument that is neither a file nor a.b=c.
CommandLine parse_command_line(int argc, const char* const* argv);

std::string teaching_text();  // what `train` alone prints: what it is, three examples, where to go on
// --help: examples, flags, exit codes, every key by section, in lines of `width` columns.
std::string help_text(int width = 80);

}  // namespace topknot

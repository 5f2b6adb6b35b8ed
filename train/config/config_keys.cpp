// The table of keys. Adding one takes a member of Config, or of the options that a section of it is, and a
// row here; a key of what is registered (a model, a method) is declared where that is registered.

#include <fmt/format.h>

#include <algorithm>

#include "compress/codec/codec.h"
#include "compress/memory/memory.h"
#include "compress/select/selector.h"
#include "compress/sparse.h"
#include "dist/comm/communicator.h"
#include "dist/plan/merge_plan.h"
#include "dist/sparse/sparse_collective.h"
#include "train/config/config.h"
#include "train/config/key_rows.h"

namespace topknot {
namespace {

using namespace key_rows;

std::vector<Key> run_keys() {
  constexpr auto m = &Config::model;
  constexpr auto d = &Config::data;
  using Model = Config::Model;
  using Data = Config::Data;
  return {
      number(
          "seed", [](Config& c) -> KeyRef { return &c.seed; }, 0, kNoLimit,
          "of everything random: first weights, order and augmentation of the data, dropout"),

      registered("model.name", at<m, &Model::name>, "model", "which model (train --list models)"),
      number("model.dropout", at<m, &Model::dropout>, 0, 0.99, "dropout rate, in models that have dropout"),
      text("model.init_from", at<m, &Model::init_from>,
           "safetensors file with the first weights and statistics; empty: drawn by the seed"),
      text("model.reinit", at<m, &Model::reinit>,
           "patterns of names (fc, stage4.*): drawn by the seed, whatever model.init_from has of them"),
      text("model.freeze", at<m, &Model::freeze>,
           "patterns of parameter names: not trained, not exchanged; [\"*\", \"!fc\"]: all but fc; "
           "statistics of batch norm still follow the data"),

      registered("data.name", at<d, &Data::name>, "dataset", "which data set (train --list datasets)"),
      text("data.root", at<d, &Data::root>, "folder that holds the data set's files")
          .not_of({"synthetic_images", "synthetic_regression"})
          .on_host(),
      number("data.batch_size", at<d, &Data::batch_size>, 1, 1e6, "samples a rank takes in one step"),
      text("data.shard", at<d, &Data::shard>,
           "how ranks share the training set: equal parts, the largest RATIO times the smallest, or sorted "
           "by label",
           {"even", "uneven:RATIO", "by_label"}),
      text("data.augment", at<d, &Data::augment>,
           "random crops and flips of training images; auto: the data set's way", {"auto", "true", "false"}),
      text("data.on_device", at<d, &Data::on_device>,
           "keep the data set in the GPU's memory and make batches there; auto: where it takes a quarter of "
           "it or less",
           {"auto", "true", "false"})
          .used_by({kGpus})
          .not_of({"text", "tokens", "speech"}),
      number("data.workers", at<d, &Data::workers>, 0, 256,
             "threads per rank that prepare batches ahead; 0: each batch is made when the step needs it")
          .on_host(),
      number("data.train_size", at<d, &Data::train_size>, 0, 1e9,
             "use only the first so many training samples (synthetic data: make so many); 0: all"),
      number("data.test_size", at<d, &Data::test_size>, 0, 1e9, "the same for test samples"),
  };
}

std::vector<Key> method_keys() {
  constexpr auto o = &Config::optimizer;
  constexpr auto s = &Config::schedule;
  constexpr auto c = &Config::compress;
  using Compress = Config::Compress;
  return {
      registered("optimizer.name", at<o, &OptimizerOptions::name>, "optimizer",
                 "which update rule (train --list optimizers)"),
      above("optimizer.lr", at<o, &OptimizerOptions::lr>, 0, 1e6,
            "learning rate; never scaled by the number of ranks"),
      number("optimizer.momentum", at<o, &OptimizerOptions::momentum>, 0, 0.9999, "momentum; 0: none")
          .not_of({"adamw", "muon", "sign"}),
      flag("optimizer.nesterov", at<o, &OptimizerOptions::nesterov>, "Nesterov's form of momentum")
          .not_of({"adamw", "muon", "sign"}),
      number("optimizer.weight_decay", at<o, &OptimizerOptions::weight_decay>, 0, 10,
             "weight decay, added to the gradient; adamw, muon: taken from the weights"),
      flag("optimizer.decay_1d", at<o, &OptimizerOptions::decay_1d>,
           "decay 1-D parameters (biases, norms) too"),

      registered("schedule.name", at<s, &ScheduleOptions::name>, "schedule",
                 "how the learning rate changes (train --list schedules)"),
      number("schedule.warmup_epochs", at<s, &ScheduleOptions::warmup_epochs>, 0, 1e6,
             "epochs in which the rate rises linearly to optimizer.lr"),
      number("schedule.warmup_steps", at<s, &ScheduleOptions::warmup_steps>, 0, 1e12,
             "the same in steps, W of them: step i has (i + 1) / (W + 1) of optimizer.lr; in place of "
             "schedule.warmup_epochs"),

      registered("compress.name", at<c, &Compress::name>, "compressor",
                 "how gradients are compressed (train --list compressors); dense: not at all; auto: what "
                 "takes the least time here by measured times"),
      shared("density", at<c, &Compress::density>).used_by({kSelectingMethods}),
      above("compress.warmup", at<c, &Compress::warmup>, 0, 1,
            "densities of the first epochs, one per epoch; compress.density after them")
          .used_by({kSelectingMethods}),
      shared_piece("select", at<c, &Compress::select>, "selection", "selections"),
      shared_piece("memory", at<c, &Compress::memory>, "memory", "memories"),
      shared_piece("codec", at<c, &Compress::codec>, "index codec", "codecs"),
      shared_piece("values", at<c, &Compress::values>, "value codec", "values"),
      shared("transform", at<c, &Compress::transform>).used_by({kSelectingMethods}),
      shared("aggregate", at<c, &Compress::aggregate>).used_by({kSelectingMethods}),
      shared("feedback_decay", at<c, &Compress::feedback_decay>).or_word("auto").used_by({"residual"}),
      text("compress.scope", at<c, &Compress::scope>, "over what k and the threshold are computed",
           {"model", "group", "tensor"}),
      shared("capacity", at<c, &Compress::capacity>).or_word("none"),
      shared("dense_1d", at<c, &Compress::dense_1d>),
      shared("min_numel", at<c, &Compress::min_numel>),
      text("compress.dense_values", at<c, &Compress::dense_values>,
           "how a compressed method sends its dense tensors; below fp32 the rounding error is carried on",
           {"fp32", "fp16", "bf16"})
          .used_by({kCompressingMethods}),
      number("compress.clip", at<c, &Compress::clip>, 0, 1e9,
             "greatest norm of the averaged gradient that local clipping aims at: each rank's gradient is "
             "clipped at sqrt(ranks) times it; 0: off"),
      shared("lr_inside", at<c, &Compress::lr_inside>),
      text("compress.layer_density", at<c, &Compress::layer_density>,
           "a density for each tensor: a JSON file {\"parameter\": density}, or auto: from measured times")
          .used_by({kSelectingMethods}),
      number("compress.alpha_s", at<c, &Compress::alpha_s>, 0, 1e3,
             "seconds that a message takes to begin with")
          .of({"layer_density=auto"}),
      above("compress.beta_s_per_byte", at<c, &Compress::beta_s_per_byte>, 0, 1, "seconds that a byte takes")
          .of({"layer_density=auto"}),
  };
}

OptionValues& values_of(Config& config, const std::string& section) {
  if (section == "model") return config.model;
  if (section == "data") return config.data;
  if (section == "optimizer") return config.optimizer;
  if (section == "schedule") return config.schedule;
  return config.compress;
}

// Keys of a section that what is registered declares. Entries that share an option declare it alike.
std::vector<Key> declared_keys(const std::string& section) {
  std::vector<Row> rows;  // by the options' own names
  for (const NameList& list : name_lists())
    for (const std::string& name : list.section == section ? list.registry.names() : Names())
      for (const Option& option : list.registry.options(name)) {
        auto row = std::ranges::find(rows, option.name, &Row::name);
        if (row == rows.end()) static_cast<Option&>(*(row = rows.emplace(row))) = option;
        TOPKNOT_CHECK(
            static_cast<const Option&>(*row) == option,
            fmt::format("{} declares {}.{} otherwise than {}", name, section, option.name, row->users[0]));
        if (std::ranges::count(row->users, name) == 0) row->users.push_back(name);
      }
  std::vector<Key> keys;
  for (Row& row : rows) {
    row.ref = [option = Option(row), section](Config& config) {
      return std::visit([](auto& value) -> KeyRef { return &value; }, values_of(config, section).at(option));
    };
    if (std::holds_alternative<std::optional<double>>(row.standard)) row.none_word = "auto";
    row.name = section + "." + row.name;
    keys.push_back(row.of(row.users));
  }
  return keys;
}

}  // namespace

const std::vector<Key>& config_keys() {
  static const std::vector<Key> keys = [] {
    std::vector<Key> all;
    for (const auto& part : {run_keys(), method_keys(), machine_keys()})
      all.insert(all.end(), part.begin(), part.end());
    for (const char* section : {"model", "data", "optimizer", "schedule", "compress"}) {
      const std::vector<Key> own = declared_keys(section);
      const auto of_section = [&](const Key& key) { return section_of(key.name) == section; };
      all.insert(std::find_if(all.rbegin(), all.rend(), of_section).base(), own.begin(), own.end());
    }
    return all;
  }();
  return keys;
}

const Key* find_key(const std::string& name) {
  for (const Key& key : config_keys())
    if (key.name == name) return &key;
  return nullptr;
}

const std::vector<NameList>& name_lists() {
  static const std::vector<NameList> lists = {{"models", "model", "model", models()},
                                              {"datasets", "dataset", "data", datasets()},
                                              {"compressors", "compressor", "compress", compressors()},
                                              {"recipes", "recipe", "compress", recipes()},
                                              {"selections", "selection", "compress", selectors()},
                                              {"memories", "memory", "compress", memories()},
                                              {"codecs", "index codec", "compress", index_codecs()},
                                              {"values", "value codec", "compress", value_codecs()},
                                              {"optimizers", "optimizer", "optimizer", optimizers()},
                                              {"schedules", "schedule", "schedule", schedules()},
                                              {"collectives", "collective", "exchange", collectives()},
                                              {"merges", "merge rule", "exchange", merge_rules()},
                                              {"backends", "backend", "dist", backends()}};
  return lists;
}

}  // namespace topknot

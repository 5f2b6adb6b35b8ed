// The table of keys. Adding one takes a member of Config, or of the options that a section of it is, and a
// row here; a key of one method or model is declared where that is registered.

#include <fmt/format.h>

#include <algorithm>
#include <list>

#include "compress/codec/codec.h"
#include "compress/memory/memory.h"
#include "compress/select/selector.h"
#include "compress/sparse.h"
#include "dist/comm/communicator.h"
#include "dist/plan/merge_plan.h"
#include "dist/sparse/sparse_collective.h"
#include "optim/muon.h"
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
      number("model.hidden", at<m, &Model::hidden>, 1, 1e6, "widths of the hidden layers of mlp")
          .used_by({"mlp"}),
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
      number("data.classes", at<d, &Data::classes>, 2, 1000, "classes of synthetic_images")
          .not_of({"cifar10", "image_folder", "mnist", "speech", "synthetic_regression", "text", "tokens"}),
      number("data.image_size", at<d, &Data::image_size>, 0, 512,
             "height and width of synthetic_images (8 or more) and of image_folder's samples, in pixels; 0: "
             "32 and 224")
          .not_of({"cifar10", "mnist", "speech", "synthetic_regression", "text", "tokens"}),
      number("data.resize", at<d, &Data::resize>, 0, 4096,
             "pixels of the shorter side in evaluation, before the centre is cut out; 0: 256/224 of "
             "data.image_size")
          .of({"image_folder"}),
      number("data.mean", at<d, &Data::mean>, 0, 1,
             "what is taken from each channel (or from all, one number), whose pixels are 0 to 1; []: 0.485, "
             "0.456, 0.406, ImageNet's")
          .of({"image_folder"}),
      above("data.std", at<d, &Data::std>, 0, 10,
            "what each channel is divided by then; []: 0.229, 0.224, 0.225, ImageNet's")
          .of({"image_folder"}),
      number("data.max_bad_files", at<d, &Data::max_bad_files>, 0, 1e9,
             "damaged files that a rank passes over: the next picture of the class stands in; a recording is "
             "left out, or one of nearly its length stands in; one more ends the run")
          .of({"image_folder", "speech"}),
      number("data.noise", at<d, &Data::noise>, 0, 1,
             "noise of synthetic data, as a standard deviation; auto: the data set's own")
          .or_word("auto")
          .not_of({"cifar10", "image_folder", "mnist", "speech", "text", "tokens"}),
      number("data.sequence_length", at<d, &Data::sequence_length>, 1, 1e5,
             "tokens of a step in each row of the batch, through which gradients go back")
          .of({"text", "tokens"}),
      text("data.tokens", at<d, &Data::tokens>,
           "what a token is: a word, a byte, or a character of UTF-8 that the training text has",
           {"word", "byte", "char"})
          .of({"text"}),
      text(
          "data.windows", at<d, &Data::windows>,
          "the training windows: each row of the batch goes down a column of the text, and a recurrent state "
          "goes on; or each begins at a token drawn at random, with a state of zeros",
          {"columns", "random"})
          .of({"text", "tokens"}),
      text(
          "data.token_type", at<d, &Data::token_type>,
          "the type of tokens in files without a header; auto: uint16, and files that look wider are refused",
          {"auto", "uint16", "uint32", "int64"})
          .of({"tokens"}),
      number("data.vocabulary", at<d, &Data::vocabulary>, 2, 1e7,
             "how many different tokens the model has; a greater one in the files ends the run")
          .of({"tokens"}),
      number("data.bytes_per_token", at<d, &Data::bytes_per_token>, 0, 1e6,
             "mean bytes of the validation text per token, for bits per byte; 0: not known")
          .of({"tokens"}),
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
      number("optimizer.beta1", at<o, &OptimizerOptions::beta1>, 0, 0.9999,
             "decay of the mean gradient; auto: 0.9")
          .or_word("auto")
          .of({"adamw", "muon"}),
      number("optimizer.beta2", at<o, &OptimizerOptions::beta2>, 0, 0.999999,
             "decay of the mean square; auto: adamw's 0.999, the variant's")
          .or_word("auto")
          .of({"adamw", "muon"}),
      above("optimizer.epsilon", at<o, &OptimizerOptions::epsilon>, 0, 1,
            "added to the square root of the mean square; auto: adamw's 1e-8, the variant's")
          .or_word("auto")
          .of({"adamw", "muon"}),
      text("optimizer.variant", at<o, &OptimizerOptions::variant>,
           "which published program's numbers it has (docs/optim.md)", muon_variants())
          .of({"muon"}),
      number("optimizer.muon_momentum", at<o, &OptimizerOptions::muon_momentum>, 0, 0.9999,
             "momentum of the matrices; auto: 0.95")
          .or_word("auto")
          .of({"muon"}),
      above("optimizer.adam_lr", at<o, &OptimizerOptions::adam_lr>, 0, 1e6,
            "learning rate of what is no matrix, by the schedule of optimizer.lr; auto: the variant's")
          .or_word("auto")
          .of({"muon"}),

      registered("schedule.name", at<s, &ScheduleOptions::name>, "schedule",
                 "how the learning rate changes (train --list schedules)"),
      above("schedule.milestones", at<s, &ScheduleOptions::milestones>, 0, 1e6, "epochs where the rate drops")
          .of({"multistep"}),
      above("schedule.factors", at<s, &ScheduleOptions::factors>, 0, 1,
            "the rate from each milestone on, over optimizer.lr, in place of schedule.gamma")
          .of({"multistep"}),
      above("schedule.gamma", at<s, &ScheduleOptions::gamma>, 0, 1,
            "factor at each milestone, in each epoch, or where the test loss has not fallen")
          .of({"multistep", "exponential", "plateau"}),
      number("schedule.decay_from", at<s, &ScheduleOptions::decay_from>, 0, 1e6,
             "the first epoch, from 0, whose rate is multiplied")
          .of({"exponential"}),
      number("schedule.patience", at<s, &ScheduleOptions::patience>, 0, 1e6,
             "evaluations without a lower test loss that change nothing")
          .of({"plateau"}),
      number("schedule.warmup_epochs", at<s, &ScheduleOptions::warmup_epochs>, 0, 1e6,
             "epochs in which the rate rises linearly to optimizer.lr"),
      number("schedule.warmup_steps", at<s, &ScheduleOptions::warmup_steps>, 0, 1e12,
             "the same in steps, W of them: step i has (i + 1) / (W + 1) of optimizer.lr; in place of "
             "schedule.warmup_epochs"),
      number("schedule.decay_steps", at<s, &ScheduleOptions::decay_steps>, 0, 1e12,
             "steps after which the rate is schedule.min_lr; 0: those of the run")
          .of({"cosine"}),
      number("schedule.min_lr", at<s, &ScheduleOptions::min_lr>, 0, 1e6,
             "the rate at the end, the least rate")
          .of({"cosine", "plateau"}),

      registered(
          "compress.name", at<c, &Compress::name>, "compressor",
          "how gradients are compressed (train --list compressors); dense: not at all; auto: what takes the "
          "least time here by measured times"),
      shared("density", at<c, &Compress::density>).used_by({kSelectingMethods}),
      above("compress.warmup", at<c, &Compress::warmup>, 0, 1,
            "densities of the first epochs, one per epoch; compress.density after them")
          .used_by({kSelectingMethods}),
      number("compress.warmup_epochs", at<c, &Compress::warmup_epochs>, 0, 1e6,
             "epochs in which the density falls exponentially to compress.density; in place of the list")
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

// Keys of single models or methods, from their registrations. Entries that share an option declare it alike.
template <auto Section>
std::vector<Key> declared_keys(const std::string& section,
                               const std::vector<const RegisteredNames*>& registries) {
  std::list<Row> rows;  // by the options' own names
  for (const RegisteredNames* registry : registries)
    for (const std::string& name : registry->names()) {
      auto next = rows.end();  // an entry's options keep their order
      for (const Option& option : registry->options(name)) {
        auto row = std::ranges::find(rows, option.name, &Row::name);
        if (row == rows.end()) static_cast<Option&>(*(row = rows.emplace(next))) = option;
        next = std::next(row);
        TOPKNOT_CHECK(
            static_cast<const Option&>(*row) == option,
            fmt::format("{} declares {}.{} otherwise than {}", name, section, option.name, row->users[0]));
        if (std::ranges::count(row->users, name) == 0) row->users.push_back(name);
      }
    }
  std::vector<Key> keys;
  for (Row& row : rows) {
    row.ref = [option = Option(row)](Config& config) {
      return std::visit([](auto& value) -> KeyRef { return &value; }, (config.*Section).at(option));
    };
    row.name = section + "." + row.name;
    keys.push_back(row.of(row.users));
  }
  return keys;
}

}  // namespace

const std::vector<Key>& config_keys() {
  static const std::vector<Key> keys = [] {
    std::vector<Key> all = run_keys(), own = declared_keys<&Config::model>("model", {&models()});
    all.insert(std::ranges::find(all, "model.init_from", &Key::name), own.begin(), own.end());
    own = declared_keys<&Config::compress>(
        "compress", {&memories(), &selectors(), &index_codecs(), &value_codecs(), &compressors()});
    for (const auto& part : {method_keys(), own, machine_keys()})
      all.insert(all.end(), part.begin(), part.end());
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
  static const std::vector<NameList> lists = {{"models", "model", models()},
                                              {"datasets", "dataset", datasets()},
                                              {"compressors", "compressor", compressors()},
                                              {"recipes", "recipe", recipes()},
                                              {"selections", "selection", selectors()},
                                              {"memories", "memory", memories()},
                                              {"codecs", "index codec", index_codecs()},
                                              {"values", "value codec", value_codecs()},
                                              {"optimizers", "optimizer", optimizers()},
                                              {"schedules", "schedule", schedules()},
                                              {"collectives", "collective", collectives()},
                                              {"merges", "merge rule", merge_rules()},
                                              {"backends", "backend", backends()}};
  return lists;
}

}  // namespace topknot

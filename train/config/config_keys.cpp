// The table of keys. Adding one takes a member of Config, or of the options that a section of it is, and a
// row here; a key of one method is declared where the method is registered.

#include <fmt/format.h>

#include <algorithm>

#include "compress/codec/codec.h"
#include "compress/memory/memory.h"
#include "compress/select/selector.h"
#include "dist/comm/communicator.h"
#include "dist/plan/merge_plan.h"
#include "dist/sparse/sparse_collective.h"
#include "optim/muon.h"
#include "train/config/config.h"

namespace topknot {
namespace {

constexpr double kNoLimit = 1e300;

using Names = std::vector<std::string>;

// A key, and what else its row says of it.
struct Row : Key {
  Row used_by(Names names) {
    users = std::move(names);
    return *this;
  }
  // As used_by, said in the help.
  Row of(Names names) {
    help = fmt::format("{}: {}", fmt::join(names, ", "), help);
    return used_by(std::move(names));
  }
  Row not_of(Names names) {
    ignored_by = std::move(names);
    return *this;
  }
  Row or_word(std::string word) {
    none_word = std::move(word);
    return *this;
  }
  Row hidden() {
    secret = true;
    return *this;
  }
  Row on_host() {
    scope = KeyScope::host;
    return *this;
  }
  Row of_start() {
    scope = KeyScope::start;
    return *this;
  }
};

using Place = KeyRef (*)(Config&);

Row flag(std::string name, Place place, std::string help) {
  Row row;
  row.name = std::move(name), row.ref = place, row.help = std::move(help);
  return row;
}

Row number(std::string name, Place place, double least, double greatest, std::string help) {
  Row row = flag(std::move(name), place, std::move(help));
  row.least = least, row.greatest = greatest;
  return row;
}

Row above(std::string name, Place place, double least, double greatest, std::string help) {
  Row row = number(std::move(name), place, least, greatest, std::move(help));
  row.above = true;
  return row;
}

Row text(std::string name, Place place, std::string help, Names choices = {}) {
  Row row = flag(std::move(name), place, std::move(help));
  row.choices = std::move(choices);
  return row;
}

Row registered(std::string name, Place place, std::string kind, std::string help) {
  Row row = text(std::move(name), place, std::move(help));
  row.registry = std::move(kind);
  return row;
}

Row piece(std::string name, Place place, std::string kind, std::string help) {
  Row row = registered(std::move(name), place, std::move(kind), std::move(help));
  row.may_be_empty = true;
  return row;
}

// Choices: the names of a registry, and a word of the key's own.
Names with(std::string word, Names names) {
  names.push_back(std::move(word));
  return names;
}

template <auto Section, auto Member>
KeyRef at(Config& config) {
  return &(config.*Section.*Member);
}

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
      number("model.width", at<m, &Model::width>, 1, 1e5, "units of a layer, and of a token's embedding")
          .of({"lstm_lm", "deep_speech", "gpt", "llama"}),
      number("model.layers", at<m, &Model::layers>, 1, 1000, "layers: of LSTM, of attention")
          .of({"lstm_lm", "deep_speech", "gpt", "llama"}),
      flag("model.tied", at<m, &Model::tied>, "the output layer has the embedding's weight; gpt's always has")
          .of({"lstm_lm", "llama"}),
      number("model.heads", at<m, &Model::heads>, 1, 1e4, "heads of attention; they divide model.width")
          .of({"gpt", "llama"}),
      number("model.kv_heads", at<m, &Model::kv_heads>, 0, 1e4,
             "heads of keys and values; they divide model.heads; 0: as many")
          .of({"llama"}),
      number("model.context", at<m, &Model::context>, 0, 1e7,
             "positions; 0: data.sequence_length, which may not be more")
          .of({"gpt", "llama"}),
      number("model.feed_forward", at<m, &Model::feed_forward>, 0, 1e6,
             "width of the feed-forward layers; 0: 4 model.width in gpt, 8/3 to a multiple of 256 in llama")
          .of({"gpt", "llama"}),
      flag("model.bias", at<m, &Model::bias>, "linear layers and norms have biases; false: as nanoGPT's")
          .of({"gpt"}),
      text("model.gelu", at<m, &Model::gelu>, "GELU by tanh, as GPT-2's, or exact, as nanoGPT's",
           {"tanh", "exact"})
          .of({"gpt"}),
      above("model.norm_epsilon", at<m, &Model::norm_epsilon>, 0, 1, "added to the variance in norms")
          .of({"gpt", "llama"}),
      above("model.rope_base", at<m, &Model::rope_base>, 1, 1e9, "base of the rotary positions' angles")
          .of({"llama"}),
      number("model.init_uniform", at<m, &Model::init_uniform>, 0, 10,
             "first values of all parameters are uniform in +- this; 0: those of PyTorch's language model")
          .of({"lstm_lm"}),
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
      number("schedule.min_lr", at<s, &ScheduleOptions::min_lr>, 0, 1e6,
             "the rate at the end, the least rate")
          .of({"cosine", "plateau"}),

      registered("compress.name", at<c, &Compress::name>, "compressor",
                 "how gradients are compressed (train --list compressors); dense: not at all"),
      above("compress.density", at<c, &Compress::density>, 0, 1, "share of a gradient's entries that is sent")
          .used_by({kSelectingMethods}),
      above("compress.warmup", at<c, &Compress::warmup>, 0, 1,
            "densities of the first epochs, one per epoch; compress.density after them")
          .used_by({kSelectingMethods}),
      number("compress.warmup_epochs", at<c, &Compress::warmup_epochs>, 0, 1e6,
             "epochs in which the density falls exponentially to compress.density; in place of the list")
          .used_by({kSelectingMethods}),
      piece("compress.select", at<c, &Compress::select>, "selection",
            "which entries are sent, in place of the method's own choice (train --list selections)"),
      piece("compress.memory", at<c, &Compress::memory>, "memory",
            "what happens to the rest, in place of the method's own (train --list memories)"),
      piece("compress.codec", at<c, &Compress::codec>, "index codec",
            "how positions are written, in place of the method's own (train --list codecs)"),
      piece("compress.values", at<c, &Compress::values>, "value codec",
            "how values are written, in place of the method's own (train --list values)"),
      text(
          "compress.transform", at<c, &Compress::transform>,
          "dct: entries are selected among cosine coefficients of blocks of 64 x 64; auto: none but for demo",
          {"auto", "none", "dct"})
          .used_by({kSelectingMethods}),
      text("compress.aggregate", at<c, &Compress::aggregate>,
           "each entry becomes its mean over all ranks, or over those that sent it; auto: ranks but for "
           "sparseloco and demo",
           {"auto", "ranks", "contributors"})
          .used_by({kSelectingMethods}),
      number(
          "compress.feedback_decay", at<c, &Compress::feedback_decay>, 0, 1,
          "memory residual: factor of what was kept back, in the next step; auto: 1 but for sparseloco, demo")
          .or_word("auto")
          .used_by({"residual"}),
      text("compress.scope", at<c, &Compress::scope>, "over what k and the threshold are computed",
           {"model", "group", "tensor"}),
      number("compress.capacity", at<c, &Compress::capacity>, 1, 1e9,
             "most entries that may be sent, as a multiple of k; none: no limit")
          .or_word("none"),
      flag("compress.dense_1d", at<c, &Compress::dense_1d>, "1-D parameters (biases, norms) are sent dense"),
      number("compress.min_numel", at<c, &Compress::min_numel>, 0, 1e12,
             "parameters with fewer elements are sent dense"),
      text("compress.dense_values", at<c, &Compress::dense_values>,
           "how a compressed method sends its dense tensors; below fp32 the rounding error is carried on",
           {"fp32", "fp16", "bf16"})
          .used_by({kCompressingMethods}),
      number("compress.clip", at<c, &Compress::clip>, 0, 1e9,
             "greatest norm of the averaged gradient that local clipping aims at: each rank's gradient is "
             "clipped at sqrt(ranks) times it; 0: off"),
      flag("compress.lr_inside", at<c, &Compress::lr_inside>,
           "accumulate learning rate times gradient (LAGS-SGD); without momentum"),
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

// Of single methods, from their registrations. Methods that share an option declare it alike.
std::vector<Key> declared_keys() {
  std::vector<Row> rows;  // by the options' own names
  for (const RegisteredNames* registry : std::initializer_list<const RegisteredNames*>{
           &memories(), &selectors(), &index_codecs(), &value_codecs(), &compressors()})
    for (const std::string& name : registry->names())
      for (const Option& option : registry->options(name)) {
        auto row =
            std::find_if(rows.begin(), rows.end(), [&](const Row& r) { return r.name == option.name; });
        if (row == rows.end()) {
          row = rows.emplace(row);
          static_cast<Option&>(*row) = option;
        }
        TOPKNOT_CHECK(
            static_cast<const Option&>(*row) == option,
            fmt::format("{} declares compress.{} otherwise than {}", name, option.name, row->users[0]));
        if (std::find(row->users.begin(), row->users.end(), name) == row->users.end())
          row->users.push_back(name);
      }
  std::vector<Key> keys;
  for (Row& row : rows) {
    row.ref = [option = Option(row)](Config& config) {
      return std::visit([](auto& value) -> KeyRef { return &value; }, config.compress.at(option));
    };
    row.name = "compress." + row.name;
    keys.push_back(row.of(row.users));
  }
  return keys;
}

std::vector<Key> machine_keys() {
  constexpr auto e = &Config::exchange;
  constexpr auto u = &Config::outer;
  constexpr auto d = &Config::dist;
  constexpr auto t = &Config::train;
  constexpr auto o = &Config::output;
  constexpr auto r = &Config::resume;
  using Dist = Config::Dist;
  using Train = Config::Train;
  return {
      text("exchange.merge", at<e, &Config::Exchange::merge>,
           "what is sent together (train --list merges); auto: buckets, so that groups are sent while the "
           "backward pass goes on",
           merge_forms()),
      number("exchange.groups", at<e, &Config::Exchange::groups>, 1, 1e9,
             "the plan itself: how many parameters each group has, in the order in which they are sent; a "
             "run that measures writes it to its config.yaml"),
      text("exchange.profile", at<e, &Config::Exchange::profile>,
           "exchange_profile.json of an earlier run, in place of measuring anew"),
      number("exchange.every", at<e, &Config::Exchange::every>, 0, 1e9,
             "local steps: each rank makes so many steps of its own, then the changes of the weights are "
             "exchanged and the outer optimizer applies their average; 0: gradients, in every step"),
      text("exchange.collective", at<e, &Config::Exchange::collective>,
           "how selected entries become one sum (train --list collectives); auto: the quickest by measured "
           "times",
           with("auto", collectives().names())),
      number("exchange.ranks_per_host", at<e, &Config::Exchange::ranks_per_host>, 0, 1024,
             "neighbouring ranks that share a host: their gradients are summed dense, and one message a host "
             "is compressed and is sent; 0: no hierarchy"),

      text("exchange.outer.name", at<u, &Config::Outer::name>,
           "optimizer of the changes that ranks exchange: SGD with Nesterov's momentum, or as it is",
           {"nesterov", "sgd"})
          .used_by({"exchange.every"}),
      above("exchange.outer.lr", at<u, &Config::Outer::lr>, 0, 1e3,
            "its rate, which no schedule changes; 1 adds the change as it is")
          .used_by({"exchange.every"}),
      number("exchange.outer.momentum", at<u, &Config::Outer::momentum>, 0, 0.9999, "its momentum")
          .used_by({"exchange.every"}),

      text("dist.backend", at<d, &Dist::backend>,
           "how ranks start and talk (train --list backends); auto: threads; under torchrun, mpirun or srun "
           "nccl where each rank has a GPU, else gloo",
           with("auto", backends().names())),
      number("dist.ranks", at<d, &Dist::ranks>, 1, 1024, "how many ranks train together"),
      text("dist.master", at<d, &Dist::master>,
           "processes on several hosts: HOST:PORT or [IPv6 address]:PORT where rank 0 listens")
          .on_host(),
      text("dist.interface", at<d, &Dist::interface>, "gloo, nccl: network interface to use, such as eth0")
          .on_host(),
      text("dist.nccl", at<d, &Dist::nccl>,
           "nccl: settings of NCCL, such as \"IB_HCA=mlx5_0 NET_GDR_LEVEL=PHB\": variables of the "
           "environment without NCCL_, which holds where it has them")
          .used_by({"nccl"})
          .of_start(),
      flag("dist.bind_cores", at<d, &Dist::bind_cores>,
           "nccl: a rank keeps to the cores next to its GPU, of those that it may use")
          .used_by({"nccl"}),
      text("dist.token", at<d, &Dist::token>,
           "gloo, nccl: a word that only this job's processes have; others are refused at dist.master; "
           "written to no file")
          .hidden()
          .used_by({"gloo", "nccl"})
          .on_host(),
      flag("dist.ordered_sum", at<d, &Dist::ordered_sum>,
           "dense sums in rank order, the same bits on every backend; slower on large models"),
      number("dist.timeout_s", at<d, &Dist::timeout_s>, 0, 1e6,
             "seconds after which a silent rank ends the run, of the time in which the waiting rank itself "
             "runs; 0: never"),
      text("dist.link.rate", at<d, &Dist::link_rate>,
           "threads: emulate links of this rate between the ranks, such as 100mbit: results arrive when they "
           "would over such a network; empty: as fast as memory"),
      text("dist.link.latency", at<d, &Dist::link_latency>,
           "of one message over the emulated link, such as 50us")
          .used_by({"dist.link.rate"}),

      number("train.epochs", at<t, &Train::epochs>, 0, 1e6,
             "passes over the training set; 0: until train.max_steps"),
      number("train.max_steps", at<t, &Train::max_steps>, 0, 1e12, "stop after so many steps; 0: no limit"),
      number("train.threads", at<t, &Train::threads>, 0, 1024,
             "compute threads per rank; 0: the cores that the affinity mask and the CPU quota leave, divided "
             "by the ranks of this machine, at most OMP_NUM_THREADS"),
      text("train.device", at<t, &Train::device>, "where to compute; auto: a GPU where there is one",
           {"auto", "cpu", "cuda"}),
      text("train.precision", at<t, &Train::precision>,
           "fp32; bf16: activations and products in bfloat16, weights, gradients and statistics in fp32; "
           "tf32: of products on a GPU",
           {"fp32", "tf32", "bf16"}),
      flag("train.graphs", at<t, &Train::graphs>,
           "on a GPU: steps are recorded as CUDA graphs and replayed; the same numbers, less work for the "
           "host")
          .used_by({kGpus}),
      flag("train.deterministic", at<t, &Train::deterministic>,
           "the same bits in every run on a GPU too, slower there; on a CPU always so")
          .used_by({kGpus}),
      text("train.algorithm_cache", at<t, &Train::algorithm_cache>,
           "folder where algorithms that a GPU's timing chose are kept for later runs; auto: "
           "~/.cache/topknot; none: not kept")
          .used_by({kGpus})
          .on_host(),
      text("train.bn_stats", at<t, &Train::bn_stats>,
           "batch-norm statistics for evaluation: means and variances averaged over ranks, rank 0's, or each "
           "rank its own",
           {"mean", "rank0", "local"}),
      number("train.accumulate", at<t, &Train::accumulate>, 1, 1e6, "batches that make one step"),
      number("train.clip_local", at<t, &Train::clip_local>, 0, 1e9,
             "greatest norm of a rank's gradient, before compression; 0: off"),
      text("train.clip_local_scope", at<t, &Train::clip_local_scope>,
           "clip_local measures the whole gradient (no overlap with backward) or each tensor",
           {"model", "tensor"})
          .used_by({"train.clip_local", "compress.clip"}),
      number("train.clip_global", at<t, &Train::clip_global>, 0, 1e9,
             "greatest norm of the averaged gradient; 0: off"),
      number("train.label_smoothing", at<t, &Train::label_smoothing>, 0, 0.99,
             "share of a training label that is spread evenly over all classes")
          .not_of({"speech", "synthetic_regression"}),
      number("train.eval_every", at<t, &Train::eval_every>, 0, 1e6,
             "epochs between evaluations, 0.25: four per epoch; 0: only at the end"),
      number("train.target_accuracy", at<t, &Train::target_accuracy>, 0, 1,
             "end the run at the first evaluation whose test accuracy is at least this; 0: none")
          .not_of({"synthetic_regression", "text", "tokens"}),
      number("train.peak_tflops", at<t, &Train::peak_tflops>, 0, 1e6,
             "the most TFLOP/s (1e12 a second) that a rank's device can do in train.precision: the end of "
             "the run then says what share of it the model's operations came to; 0: not known")
          .not_of({"speech"})
          .on_host(),
      number("train.checkpoint_every", at<t, &Train::checkpoint_every>, 0, 1e6,
             "epochs between checkpoints, 0.1: ten per epoch; there is one at each evaluation, stop and end "
             "in any case")
          .used_by({"train.checkpoint_keep"}),
      number("train.checkpoint_keep", at<t, &Train::checkpoint_keep>, 0, 1e6,
             "how many of the last checkpoints are kept, and the best besides; 0: none are written"),
      number("train.stop_after", at<t, &Train::stop_after>, 0, 1e12,
             "save and stop after so many steps of this start, as at a signal; 0: no limit")
          .of_start(),
      number("train.log_every", at<t, &Train::log_every>, 1, 1e9, "steps between lines of progress"),
      number("train.check_every", at<t, &Train::check_every>, 0, 1e9,
             "steps between checks that all ranks hold the same weights; 0: never"),
      number("train.max_skips", at<t, &Train::max_skips>, 1, 1e9,
             "stop after so many steps in a row that were not finite"),
      number("train.record_gradients", at<t, &Train::record_gradients>, 0, 1e9,
             "write rank 0's own gradients of so many steps to gradients.npy in the run directory; 0: none"),
      number("train.record_from", at<t, &Train::record_from>, 0, 1e12,
             "steps before the first one that record_gradients writes")
          .used_by({"train.record_gradients"}),
      number("train.distribution_every", at<t, &Train::distribution_every>, 0, 1e9,
             "steps between looks at the distribution of rank 0's accumulated gradient; 0: none"),
      flag("train.step_times", at<t, &Train::step_times>,
           "measure the parts of each step with the GPU's clock, for metrics.jsonl and compare")
          .used_by({kGpus}),
      number("train.profile_steps", at<t, &Train::profile_steps>, 0, 1e6,
             "write a Chrome trace of so many steps, a file per rank, to the run directory; 0: none"),
      number(
          "train.profile_from", at<t, &Train::profile_from>, 0, 1e12,
          "steps before the first one that profile_steps traces; a run too short for it is traced at its end")
          .used_by({"train.profile_steps"}),

      text("resume.residuals", at<r, &Config::Resume::residuals>,
           "train --resume: what becomes of the ranks' residuals; keep needs the same number of ranks, sum "
           "shares them out, reset drops them",
           {"keep", "sum", "reset"})
          .used_by({kResume})
          .of_start(),
      text("resume.data", at<r, &Config::Resume::data>,
           "train --resume: check refuses data other than those of the checkpoint, accept goes on with them",
           {"check", "accept"})
          .used_by({kResume})
          .of_start(),

      text("output.dir", at<o, &Config::Output::dir>,
           "run directory; empty: a name made from the configuration, in runs/")
          .on_host(),
      flag("output.overwrite", at<o, &Config::Output::overwrite>, "replace an earlier run in the same folder")
          .on_host(),
      flag("output.tensorboard", at<o, &Config::Output::tensorboard>,
           "write an event file for TensorBoard into the run directory")
          .of_start(),
  };
}

}  // namespace

const std::vector<Key>& config_keys() {
  static const std::vector<Key> keys = [] {
    std::vector<Key> all;
    for (const auto& part : {run_keys(), method_keys(), declared_keys(), machine_keys()})
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

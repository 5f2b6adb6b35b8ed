#include "train/sample.h"

#include <fmt/format.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <numeric>

#include "nn/base/check.h"
#include "nn/base/terminal.h"
#include "nn/core/rng.h"
#include "nn/core/threads.h"
#include "train/checkpoint/checkpoint.h"
#include "train/checks.h"
#include "train/setup.h"
#include "train/start.h"

namespace topknot {
namespace {

constexpr const char* kUsage =
    "train sample RUN [--prompt TEXT] [--tokens N] [--temperature T] [--top-k K] [--seed S] [--step N] "
    "[section.key=value ...]";

// The run's configuration, for one sequence on this machine's CPU.
Config sampling_config(const FoundCheckpoint& checkpoint, const std::vector<std::string>& overrides) {
  for (const std::string& word : overrides)
    if (const std::string key = word.substr(0, word.find('='));
        find_key(key) && key != "train.threads" &&
        (key == "data.batch_size" || (section_of(key) != "data" && section_of(key) != "model")))
      throw UserError(
          fmt::format("{}: train sample takes keys of data and model, and train.threads; the rest is as the "
                      "run has it, on the CPU and in fp32; leave it out",
                      key));
  const std::string& checkpoints = checkpoint.store.directory();  // in the run's
  LoadedConfig loaded = load_resumed_config(checkpoints.substr(0, checkpoints.find_last_of('/')), overrides);
  adopt_architecture(loaded, checkpoint.manifest.config, checkpoint.store.path(checkpoint.step));
  throw_problems(loaded.problems);
  Config config = loaded.config;
  config.data.batch_size = 1;
  config.train.device = "cpu";
  config.train.precision = "fp32";
  return config;
}

void check_vocabulary(const FoundCheckpoint& checkpoint, const Dataset& data, const std::string& run) {
  const auto then = checkpoint.manifest.data.find(kVocabularyFingerprint);
  if (then != checkpoint.manifest.data.end() && then->second != vocabulary_fingerprint(data))
    throw UserError(fmt::format(
        "{}: the vocabulary of data.root is not the one that the run was trained with; give data.root=DIR "
        "with the run's data",
        run));
}

std::vector<std::int32_t> encode_prompt(const Dataset& data, const std::string& prompt) {
  std::vector<std::int32_t> tokens;
  try {
    tokens = data.encode(prompt);
  } catch (const UserError& error) {
    throw UserError(fmt::format("--prompt: {}; leave that out", error.what()));
  }
  if (tokens.empty() && data.token_name() == "token")
    throw UserError(
        fmt::format("--prompt: data.name={} knows no texts: give the numbers of the first tokens, from 0 "
                    "to {}, with blanks between them",
                    data.name(), data.classes() - 1));
  if (tokens.empty()) throw UserError("--prompt: has no token; give a text, or leave it out");
  return tokens;
}

// The last token's logits after the window.
std::vector<float> next_logits(BuiltModel& model, std::span<const std::int32_t> window) {
  const auto steps = static_cast<std::int64_t>(window.size());
  Tensor ids = Tensor::empty({1, steps, 1, 1});
  std::copy(window.begin(), window.end(), ids.data());
  ForwardContext context;
  context.training = false;
  model.store.reset_states();
  const std::vector<float> all = model.forward(ids, context).value().to_vector();
  return {all.end() - static_cast<std::ptrdiff_t>(all.size()) / steps, all.end()};
}

// "logit 17 of 65 is NaN"; "" if all are finite.
std::string non_finite_logit(std::span<const float> logits) {
  const auto at = std::find_if(logits.begin(), logits.end(), [](float z) { return !std::isfinite(z); });
  if (at == logits.end()) return "";
  return fmt::format("logit {} of {} is {}", at - logits.begin(), logits.size(),
                     std::isnan(*at) ? "NaN" : "infinite");
}

// In [0, 1), 53 bits: with 24 bits rare tokens of a large vocabulary would never be drawn.
double uniform_draw(const CounterRng& rng, std::uint64_t i) {
  const std::uint64_t bits = (std::uint64_t{rng.bits(2 * i)} << 32) | rng.bits(2 * i + 1);
  return static_cast<double>(bits >> 11) * 0x1p-53;
}

}  // namespace

std::int32_t draw_token(std::span<const float> logits, double temperature, std::int64_t top_k, double u) {
  TOPKNOT_CHECK(!logits.empty() && temperature >= 0 && top_k >= 0 && u >= 0 && u < 1,
                "draw_token: logits, a temperature and a top_k of 0 or more, and a draw in [0, 1)");
  TOPKNOT_CHECK(non_finite_logit(logits).empty(), "draw_token: " + non_finite_logit(logits));
  const auto likelier = [&](std::int32_t a, std::int32_t b) {
    const float za = logits[static_cast<std::size_t>(a)], zb = logits[static_cast<std::size_t>(b)];
    return za != zb ? za > zb : a < b;
  };
  std::vector<std::int32_t> tokens(logits.size());
  std::iota(tokens.begin(), tokens.end(), 0);
  const std::int32_t best = *std::min_element(tokens.begin(), tokens.end(), likelier);
  if (temperature == 0) return best;
  if (top_k > 0 && top_k < static_cast<std::int64_t>(tokens.size())) {
    std::nth_element(tokens.begin(), tokens.begin() + top_k - 1, tokens.end(), likelier);
    tokens.resize(static_cast<std::size_t>(top_k));
    std::sort(tokens.begin(), tokens.end());
  }
  const double top = logits[static_cast<std::size_t>(best)];
  const auto weight = [&](std::int32_t token) {
    return std::exp((logits[static_cast<std::size_t>(token)] - top) / temperature);
  };
  double sum = 0;
  for (const std::int32_t token : tokens) sum += weight(token);
  double rest = u * sum;
  for (const std::int32_t token : tokens)
    if ((rest -= weight(token)) < 0) return token;
  return best;  // of the rounding of `rest`
}

void sample_text(const std::string& run, const SampleOptions& options,
                 const std::function<void(std::string_view)>& write) {
  const FoundCheckpoint checkpoint = find_checkpoint(run, options.step);
  const Config config = sampling_config(checkpoint, options.overrides);
  const SafetensorsFile file = read_model_file(checkpoint);
  DatasetOptions data_options = dataset_options(config);
  const bool other_data = std::ranges::any_of(
      options.overrides, [](const std::string& word) { return word.starts_with("data."); });
  if (const auto stored = file.metadata().find(kVocabulary); stored != file.metadata().end() && !other_data)
    data_options.stored_vocabulary = stored->second;
  const auto data = make_dataset(config.data.name, data_options, Split::train);
  if (data->task() != Task::language_model)
    throw UserError(fmt::format("{}: data.name={} is no text; train sample is for language models", run,
                                config.data.name));
  check_vocabulary(checkpoint, *data, run);
  const auto model = build_model(config, *data, {}, /*first_weights=*/false);
  load_model(model->store, file);
  set_team_size(compute_threads(config));

  std::vector<std::int32_t> text = encode_prompt(*data, options.prompt);
  // Positions after the run's windows are trained only if the weights came from elsewhere.
  const int positions = config.model.init_from.empty() ? 0 : config.model.get<int>(option::context);
  const auto context = static_cast<std::size_t>(positions > 0 ? positions : data->sample_shape()[0]);
  for (const std::int32_t token : text) write(data->token_text(token));
  const CounterRng rng(options.seed, RngUse::sample);
  for (std::int64_t i = 0; i < options.tokens; ++i) {
    const std::size_t window = std::min(text.size(), context);
    const std::vector<float> logits = next_logits(*model, std::span(text).last(window));
    if (const std::string what = non_finite_logit(logits); !what.empty())
      throw UserError(fmt::format(
          "{}: after {} tokens {}, so nothing can be drawn: the weights of step {} are too large; "
          "take an earlier checkpoint with --step",
          run, text.size(), what, checkpoint.step));
    text.push_back(draw_token(logits, options.temperature, options.top_k,
                              uniform_draw(rng, static_cast<std::uint64_t>(i))));
    write(data->token_text(text.back()));
  }
}

int sample_command(int argc, const char* const* argv) {
  CLI::App app("train sample");
  app.set_help_flag();
  SampleOptions options;
  std::string run;
  std::int64_t step = 0;
  bool help = false;
  app.add_flag("-h,--help", help);
  app.add_option("run", run);
  app.add_option("overrides", options.overrides);
  app.add_option("--prompt", options.prompt);
  const CLI::Validator at_least_0(
      [](const std::string& text) { return text.starts_with('-') ? "must be 0 or more, not " + text : ""; },
      "");
  app.add_option("--tokens", options.tokens)->check(at_least_0);
  app.add_option("--temperature", options.temperature)->check(at_least_0);
  app.add_option("--top-k", options.top_k)->check(at_least_0);
  app.add_option("--seed", options.seed)->check(at_least_0);
  app.add_option("--step", step);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& parse_error) {
    throw UserError(fmt::format("train sample: {}; usage: {}", parse_error.what(), kUsage));
  }
  if (help) {
    const std::string text =
        std::string(kUsage) +
        "\n\nPrints TEXT and N tokens (200) that the language model of the newest checkpoint, or of step N, "
        "goes on with. T divides the logits: 1 (the default) draws by the model's own probabilities, less "
        "makes likely tokens likelier, 0 takes the likeliest one. K: only the K likeliest tokens (0: all). "
        "The same seed (1) gives the same text. TEXT is in the vocabulary of the run, which the "
        "checkpoint has, and by default the end of a line. Keys take the place of those of the run, such as "
        "train.threads=1.\n\n"
        "On the CPU, in fp32. The last data.sequence_length tokens (model.context, if model.init_from was "
        "given) are computed anew for each token.\n";
    std::fputs(reflowed(text, terminal_columns(STDOUT_FILENO)).c_str(), stdout);
    return 0;
  }
  if (!std::isfinite(options.temperature))
    throw UserError(
        fmt::format("train sample: --temperature {}: give a number of 0 or more", options.temperature));
  if (run.empty()) throw UserError(fmt::format("train sample: RUN is missing; usage: {}", kUsage));
  if (app.count("--step")) options.step = step;
  sample_text(run, options, [](std::string_view text) {
    std::fwrite(text.data(), 1, text.size(), stdout);
    std::fflush(stdout);
  });
  std::fputs("\n", stdout);
  return 0;
}

}  // namespace topknot

#pragma once
// `train sample RUN --prompt TEXT`: a run's language model goes on with a text.

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace topknot {

struct SampleOptions {
  std::string prompt = "\n";  // in the data's vocabulary; "\n" is the end of a line
  std::int64_t tokens = 200;  // that follow the prompt
  double temperature = 1;     // logits are divided by it; 0: always the likeliest token
  std::int64_t top_k = 0;     // only so many of the likeliest; 0: all
  std::uint64_t seed = 1;
  std::optional<std::int64_t> step = {};    // of the checkpoint; none: the newest
  std::vector<std::string> overrides = {};  // of the run's configuration, "data.root=DIR"
};

// A token drawn with the probabilities softmax(logits / temperature), of the top_k greatest logits alone; of
// equal ones those of the lower tokens. `u` in [0, 1): the draw. Throws Error if a logit is not finite.
std::int32_t draw_token(std::span<const float> logits, double temperature, std::int64_t top_k, double u);

// Calls `write` with the prompt and then with the text of each token, as it is drawn. The same bits for the
// same options. The model computes on the CPU in fp32, and the whole window anew for each token: the last
// data.sequence_length tokens, whose positions the run trained, or model.context with model.init_from.
// Throws UserError: no checkpoint, a model that is no language model, a prompt that the vocabulary has not,
// data with another vocabulary than the run's, logits that are not finite.
void sample_text(const std::string& run, const SampleOptions& options,
                 const std::function<void(std::string_view)>& write);

// The subcommand; argv[0] is "sample". Returns an exit code. Throws UserError for a wrong command line too.
int sample_command(int argc, const char* const* argv);

}  // namespace topknot

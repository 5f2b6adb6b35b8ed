#include "nn/core/cuda/trial.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <mutex>
#include <sstream>
#include <utility>
#include <vector>

#include "nn/base/algorithm_cache.h"
#include "nn/base/log.h"
#include "nn/base/text.h"
#include "nn/core/cuda/context.h"

namespace topknot::cuda {
namespace {

constexpr std::uint64_t kHostsWork = 200000;  // ns; more than it takes, so that the GPU's time is measured
constexpr float kNever = std::numeric_limits<float>::infinity();
constexpr float kTie = 0.98f;  // of candidate 0's time: who is not below it does not win

// What Trial::force() says: beginnings of keys, and names.
struct Forced {
  std::vector<std::pair<std::string, std::string>> choices;
};

std::vector<std::string>& subjects() {
  static std::vector<std::string> all;
  return all;
}

// Not found: the number of candidates.
std::size_t number_of(const std::string& name, std::span<const TrialCandidate> candidates) {
  const auto named = [&](const TrialCandidate& c) { return c.name == name; };
  return static_cast<std::size_t>(std::find_if(candidates.begin(), candidates.end(), named) -
                                  candidates.begin());
}

std::size_t forced_number(const std::string& name, const std::string& key, bool deterministic,
                          std::span<const TrialCandidate> candidates) {
  const std::size_t i = number_of(name, candidates);
  std::vector<std::string> names;
  for (const TrialCandidate& c : candidates) names.push_back(c.name);
  if (i == candidates.size())
    throw UserError("train.trial: " + unknown_name_message("candidate of " + key, name, names));
  if (deterministic && !candidates[i].repeats)
    throw UserError(fmt::format(
        "train.trial: '{}' does not repeat its bits, which train.deterministic asks of {}", name, key));
  return i;
}

// The shortest of so many runs, in milliseconds; kNever if the candidate refuses the shape, or `failed`.
float shortest_ms(Context& context, const TrialCandidate& candidate, int runs, bool& failed) try {
  Event begin(true), end(true);
  float shortest = kNever;
  for (int i = 0; i < runs; ++i) {
    hold(context.stream(), kHostsWork);
    begin.record(context.stream());
    if (!candidate.run()) {
      cudaGetLastError();
      return kNever;
    }
    end.record(context.stream());
    end.synchronize();
    shortest = std::min(shortest, milliseconds_between(begin, end));
  }
  return shortest;
} catch (const OutOfMemory&) {  // no room to try it
  failed = true;
  return kNever;
} catch (const CudaError& error) {
  cudaGetLastError();
  // Throws if the GPU is lost. Collectives may wait for a rank that waits for this trial to end.
  TOPKNOT_CUDA(cudaStreamSynchronize(context.stream()));
  log_warning(fmt::format("{} is left out: {}", candidate.name, error.what()));
  failed = true;
  return kNever;
}

}  // namespace

TrialSubject::TrialSubject(const char* subject) : name(subject) {
  subjects().push_back(subject);
}

void Trial::force(const std::string& choices) {
  auto& forced = Context::current().keep<Forced>().choices;
  forced.clear();
  std::istringstream all(choices);
  for (std::string choice; std::getline(all, choice, ';');) {
    const auto equals = choice.find('=');
    if (equals == std::string::npos) throw UserError("train.trial: must be KEY=NAME, not '" + choice + "'");
    const std::string key = choice.substr(0, equals);
    if (std::ranges::none_of(subjects(),
                             [&](const std::string& subject) { return key.starts_with(subject); }))
      throw UserError("train.trial: " + unknown_name_message("trial", key, subjects()));
    forced.emplace_back(key, choice.substr(equals + 1));
  }
}

std::size_t Trial::pick(const std::string& key, std::span<const TrialCandidate> candidates) {
  Context& context = Context::current();
  const bool deterministic = context.options().deterministic;
  for (const auto& [beginning, name] : context.keep<Forced>().choices)
    if (key.starts_with(beginning)) return forced_number(name, key, deterministic, candidates);
  if (deterministic) {
    const auto repeats =
        std::find_if(candidates.begin(), candidates.end(), [](auto& c) { return c.repeats; });
    return repeats == candidates.end() ? 0 : static_cast<std::size_t>(repeats - candidates.begin());
  }
  if (candidates.size() == 1) return 0;
  // Ranks of a process share a GPU, and choices by the file.
  static std::mutex one_at_a_time;
  const std::lock_guard lock(one_at_a_time);
  const std::string cache_key = "trial of " + key;
  const auto kept = context.algorithm_cache().find(cache_key);
  const std::size_t known = kept ? number_of(*kept, candidates) : candidates.size();
  if (capturing(context.stream())) return known == candidates.size() ? 0 : known;

  bool failed = false;
  if (known != candidates.size() && shortest_ms(context, candidates[known], 1, failed) < kNever) return known;
  std::size_t best = 0;
  std::vector<float> ms;
  std::string times;
  for (const TrialCandidate& c : candidates) {
    ms.push_back(shortest_ms(context, c, kTrialTimings, failed));
    times += fmt::format("{}{} {:f} ms", times.empty() ? "" : ", ", c.name, ms.back());
    const float least = best == 0 ? kTie * ms[0] : ms[best];
    if (ms.back() < least) best = ms.size() - 1;
  }
  log_debug(fmt::format("trial of {}: {} of {}", key, candidates[best].name, times));
  if (!failed && ms[best] < kNever) context.algorithm_cache().keep(cache_key, candidates[best].name);
  return best;
}

}  // namespace topknot::cuda

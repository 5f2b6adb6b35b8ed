#include "train/checks.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <nlohmann/json.hpp>

#include "nn/base/check.h"
#include "nn/base/log.h"
#include "nn/base/program.h"
#include "nn/base/text.h"
#include "nn/core/threads.h"

namespace topknot {
namespace {

using Table = nlohmann::ordered_json;  // an object: name to text

std::string shortened(const std::string& text) {
  constexpr std::size_t kLongest = 80;
  return text.size() <= kLongest ? text : text.substr(0, kLongest) + "...";
}

// "rank 2", "ranks 0, 1 and 3", "ranks 0, 1, 2, 3 and 60 more"
std::string ranks_text(const std::vector<std::size_t>& ranks) {
  constexpr std::size_t kShown = 4;
  if (ranks.size() == 1) return fmt::format("rank {}", ranks[0]);
  const std::size_t listed = ranks.size() > kShown + 1 ? kShown : ranks.size() - 1;
  const std::string last = ranks.size() > kShown + 1 ? fmt::format("{} more", ranks.size() - listed)
                                                     : std::to_string(ranks.back());
  return fmt::format("ranks {} and {}", fmt::join(ranks.begin(), ranks.begin() + listed, ", "), last);
}

// "optimizer.lr is 0.1 on ranks 0, 1 and 3, 0.2 on rank 2"; "" if all ranks have the same.
std::string difference(const std::string& name, const std::vector<Table>& tables) {
  std::vector<std::string> values;  // in the order of ranks
  std::map<std::string, std::vector<std::size_t>> ranks;
  for (std::size_t rank = 0; rank < tables.size(); ++rank) {
    const std::string value = tables[rank].value(name, "");
    if (!ranks.count(value)) values.push_back(value);
    ranks[value].push_back(rank);
  }
  if (values.size() == 1) return "";
  constexpr std::size_t kShown = 4;
  std::string text = name + " is ";
  for (std::size_t i = 0; i < std::min(values.size(), kShown); ++i)
    text += fmt::format("{}{} on {}", i ? ", " : "", shortened(values[i]), ranks_text(ranks[values[i]]));
  return values.size() > kShown ? text + ", other values on the others" : text;
}

void compare(Communicator& communicator, const std::string& what, const Table& mine,
             const std::string& remedy) {
  // Values need not be valid UTF-8.
  const std::string text = mine.dump(-1, ' ', false, Table::error_handler_t::replace);
  const std::vector<std::string> all = gather_texts(communicator, text);
  if (std::equal(all.begin() + 1, all.end(), all.begin())) return;
  std::vector<Table> tables;
  for (const std::string& one : all) tables.push_back(Table::parse(one));
  constexpr std::size_t kShown = 5;
  std::vector<std::string> lines;
  for (const auto& item : mine.items())
    if (std::string line = difference(item.key(), tables); !line.empty()) lines.push_back(std::move(line));
  const std::size_t more = lines.size() - std::min(lines.size(), kShown);
  lines.resize(lines.size() - more);
  meet_to_throw(communicator);
  throw UserError(fmt::format("the ranks disagree about the {}: {}{}; {}", what, fmt::join(lines, "; "),
                              more > 0 ? fmt::format("; and {} more", more) : "", remedy));
}

}  // namespace

void check_same_configuration(Communicator& communicator, const Config& config) {
  check_same(communicator, "the program's version", program_version());
  Table table;
  for (const Key& key : config_keys())
    if (key.scope != KeyScope::host) table[key.name] = key_value(key, config);
  compare(communicator, "configuration", table, "start all ranks with the same file and command line");
}

DataFingerprint data_fingerprint(const RunData& data) {
  DataFingerprint fingerprint;
  const auto add = [&](const std::string& split, const Dataset& set) {
    fingerprint["the number of " + split + " samples"] = std::to_string(set.size());
    fingerprint["the shape of " + split + " samples"] = set.sample_shape().str();
    fingerprint["the number of classes of " + split + " samples"] = std::to_string(set.classes());
    fingerprint["the number of targets of " + split + " samples"] = std::to_string(set.targets());
    fingerprint["the checksum of " + split + " samples"] = fmt::format("{:016x}", data_checksum(set));
  };
  add("training", *data.train);
  add("test", *data.test);
  if (data.held_out) add("held-out", *data.held_out);
  fingerprint[kVocabularyFingerprint] = vocabulary_fingerprint(*data.train);
  return fingerprint;
}

std::string vocabulary_fingerprint(const Dataset& data) {
  return fmt::format("{:016x}", data.class_names_checksum());
}

void check_same_data(Communicator& communicator, const DataFingerprint& mine) {
  if (communicator.size() == 1) return;
  compare(communicator, "data", Table(mine), "give every rank the same files in data.root");
}

std::vector<int> settle_threads(Communicator& communicator, const Config& config,
                                const std::vector<int>& before) {
  const auto rank = static_cast<std::size_t>(communicator.rank());
  const int own = compute_threads(config);
  const bool as_before = config.train.threads == 0 && !on_gpu(config) &&
                         before.size() == static_cast<std::size_t>(communicator.size());
  const int wanted = as_before ? before[rank] : own, threads = set_team_size(wanted);
  std::string mine;
  if (threads < wanted) {
    const std::string limits = team_limits();
    mine = fmt::format("train.threads: {} of {} on rank {} ({}); the run goes on with these{}",
                       count_text(threads, "compute thread"), wanted, rank,
                       limits.empty() ? "OpenMP gives no more" : limits,
                       as_before ? ", and its results differ in rounding from an undisturbed one's" : "");
  } else if (wanted != own) {
    mine = fmt::format(
        "resume: {} on rank {}, as before, for the same results; this machine would have {} "
        "(train.threads={} takes them)",
        count_text(wanted, "compute thread"), rank, own, own);
  }
  const std::vector<std::string> texts = gather_texts(communicator, mine);
  const auto first = std::ranges::find_if_not(texts, &std::string::empty);
  if (rank == 0 && first != texts.end()) log_warning(*first);
  std::vector<std::vector<std::byte>> all;
  communicator.all_gather(std::as_bytes(std::span(&threads, 1)), all);
  std::vector<int> result(all.size());
  for (std::size_t r = 0; r < all.size(); ++r) std::memcpy(&result[r], all[r].data(), sizeof(int));
  return result;
}

std::string checksum_hex(std::span<const float> weights) {
  return fmt::format("{:016x}", parameter_checksum(weights));
}

void check_same_parameters(ParameterArena& arena, CollectiveQueue& queue, const Communicator& communicator,
                           const std::string& when) {
  if (communicator.size() == 1) return;
  std::vector<const Parameter*> parameters(arena.parameters().begin(), arena.parameters().end());
  parameters.insert(parameters.end(), arena.frozen().begin(), arena.frozen().end());
  std::vector<std::span<const float>> slices;  // one per parameter, so that a difference can be named
  for (const Parameter* p : parameters) slices.emplace_back(p->value(), p->numel());
  const std::vector<std::uint64_t> mine = backend(arena.device()).checksums(slices);
  std::vector<std::vector<std::byte>> all;
  queue.run([&](Communicator& c) { c.all_gather(std::as_bytes(std::span(mine)), all); });
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    TOPKNOT_CHECK(all[rank].size() == all[0].size(),
                  fmt::format("rank {} has another model than rank 0", rank));
    for (std::size_t i = 0; i < mine.size(); ++i)
      TOPKNOT_CHECK(!std::memcmp(all[rank].data() + 8 * i, all[0].data() + 8 * i, 8),
                    fmt::format("the ranks' parameters differ {}: {} on rank {} is not rank 0's", when,
                                parameters[i]->name(), rank));
  }
}

}  // namespace topknot

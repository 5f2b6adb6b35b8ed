#include "train/elastic.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>
#include <numeric>
#include <utility>

#include "nn/base/check.h"
#include "nn/base/log.h"
#include "nn/base/text.h"

namespace topknot {
namespace {

// The latest agreement of the ranks. Collective.
Agreement latest_agreement(Communicator& communicator, const Agreement& mine) {
  std::vector<std::byte> block(sizeof mine.step);
  std::memcpy(block.data(), &mine.step, sizeof mine.step);
  block.insert(block.end(), mine.flags.begin(), mine.flags.end());
  std::vector<std::vector<std::byte>> all;
  communicator.all_gather(block, all);
  Agreement latest;
  for (const auto& theirs : all) {
    TOPKNOT_CHECK(theirs.size() >= sizeof latest.step, "a damaged agreement block");
    std::int64_t step;
    std::memcpy(&step, theirs.data(), sizeof step);
    if (step > latest.step) latest = {step, {theirs.begin() + sizeof step, theirs.end()}};
  }
  return latest;
}

}  // namespace

Views::Views(Rejoin rejoin, Communicator& first) : rejoin_(std::move(rejoin)), current_(&first) {
  view_.ranks.resize(static_cast<std::size_t>(first.size()));
  std::iota(view_.ranks.begin(), view_.ranks.end(), 0);
  told_ = view_.ranks;
}

bool Views::join_next(const Communicator& failed, const Agreement& mine) {
  if (&failed != current_) return true;
  const Agreement known = mine.step > agreed_.step ? mine : agreed_;
  for (;;) try {
      std::unique_ptr<Communicator> next = rejoin_(view_);
      if (!next) return false;
      set_log_rank(next->rank(), next->size());
      agreed_ = latest_agreement(*next, known);
      joined_.push_back(std::move(next));
      current_ = joined_.back().get();
      return true;
    } catch (const CollectiveError& error) {
      log_debug(fmt::format("view {} did not come about: {}", view_.number, error.what()));
    }
}

AgreementSource Views::agreement_source(const Communicator& used, const Agreement& mine) {
  return [this, &used, &mine](std::int64_t step) {
    return join_next(used, mine) && agreed_.step == step ? agreed_.flags : std::vector<std::byte>();
  };
}

void Views::prepare(RunInMemory* memory, RunInputs& inputs) {
  const bool root = current_->rank() == 0;
  if (root && !inputs.folder.lock)
    inputs.folder.lock = std::make_shared<RunLock>(RunLock::of_parent(inputs.folder.path));
  if (!memory) return;
  const std::int64_t step = memory->last.position.step;
  TOPKNOT_CHECK(step == agreed_.step, "this rank has not made the step that the others have agreed on");
  inputs.config = memory->config;
  inputs.resume = true;  // no first weights are read
  memory->note += (memory->note.empty() ? "" : "; ") + news();
  if (root) memory->run.manifest.metrics_bytes = metrics_bytes_before(inputs.folder.metrics_jsonl(), step);
}

std::string Views::news() {
  std::vector<std::string> dead;
  for (const int rank : told_)
    if (std::ranges::count(view_.ranks, rank) == 0) dead.push_back(fmt::format("rank {}", rank));
  told_ = view_.ranks;
  return fmt::format("view {}: {} {} gone, and what {} had not sent is lost; {} on after step {}",
                     view_.number, fmt::join(dead, " and "), dead.size() == 1 ? "is" : "are",
                     dead.size() == 1 ? "it" : "they",
                     view_.ranks.size() == 1 ? fmt::format("rank {} goes", view_.ranks.front())
                                             : fmt::format("ranks {} go", fmt::join(view_.ranks, ", ")),
                     agreed_.step);
}

std::uint64_t metrics_bytes_before(const std::string& path, std::int64_t step) {
  std::ifstream file(path, std::ios::binary);
  std::uint64_t bytes = 0;
  for (std::string line; std::getline(file, line) && !file.eof(); bytes += line.size() + 1) {
    const auto record = nlohmann::json::parse(line, nullptr, false);
    if (record.is_object() && record.value("event", "") == "step" &&
        record.value("step", std::int64_t{0}) >= step)
      break;
  }
  return bytes;
}

}  // namespace topknot

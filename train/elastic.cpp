#include "train/elastic.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>
#include <numeric>
#include <utility>

#include "compress/state.h"
#include "nn/base/check.h"
#include "nn/base/log.h"
#include "nn/base/program.h"
#include "nn/base/text.h"

namespace topknot {
namespace {

constexpr const char* kNoState = "no rank is left that has the run's state; train --resume goes on";

// The latest agreement of the ranks. Collective.
Agreement latest_agreement(Communicator& communicator, const Agreement& mine) {
  std::vector<std::byte> block(sizeof mine.step);
  std::memcpy(block.data(), &mine.step, sizeof mine.step);
  block.insert(block.end(), mine.flags.begin(), mine.flags.end());
  std::vector<std::vector<std::byte>> all;
  communicator.all_gather(block, all);
  Agreement latest{-1, {}};
  for (const auto& theirs : all) {
    TOPKNOT_CHECK(theirs.size() >= sizeof latest.step, "a damaged agreement block");
    std::int64_t step;
    std::memcpy(&step, theirs.data(), sizeof step);
    if (step > latest.step) latest = {step, {theirs.begin() + sizeof step, theirs.end()}};
  }
  return latest;
}

}  // namespace

bool peer_failed(const std::exception& error) {
  return dynamic_cast<const CollectiveError*>(&error) ||
         (dynamic_cast<const Interrupted*>(&error) && stop_signal() == 0);
}

bool leaves_alone(const RunInputs& inputs) {
  if (!inputs.rejoin.join || stop_signal() == 0) return false;
  if (!inputs.coordinated) return stop_passed_on_by() == 0;
  return stop_passed_on_by() != getpid() && stop_signal() != SIGINT;
}

std::vector<std::byte> residual_block(const RunState& state) {
  const auto residual = std::as_bytes(std::span(state.residual));
  std::vector<std::byte> block(residual.begin(), residual.end());
  block.push_back(std::byte{1});  // a method without one leaves too
  return block;
}

void take_residuals(const std::vector<std::vector<std::byte>>& all, int rank,
                    const std::vector<float>& weights, RunState& state) {
  for (std::size_t r = static_cast<std::size_t>(rank) + all.size() - 1;; --r) {
    const std::vector<std::byte>& theirs = all[r % all.size()];
    if (theirs.empty()) return;
    const float weight = weights[r % all.size()] / weights[static_cast<std::size_t>(rank)];
    TOPKNOT_CHECK(theirs.size() == sizeof(float) * state.residual.size() + 1, "a residual of another length");
    for (std::size_t i = 0; i < state.residual.size(); ++i) {
      float value;
      std::memcpy(&value, theirs.data() + sizeof value * i, sizeof value);
      state.residual[i] += weight * value;
    }
  }
}

void hand_over(Step& step, int rank, bool leaves, const std::vector<float>& weights) {
  RunState state;
  step.state(state, true);
  std::vector<std::vector<std::byte>> all;
  bool given = false;
  try {
    step.all_gather(leaves ? residual_block(state) : std::vector<std::byte>(), all);
    given = true;
    if (!leaves) {
      take_residuals(all, rank, weights, state);
      step.load_state(state);
    }
    step.all_gather({}, all);  // no rank that leaves ends the view before the others have it
  } catch (const Error&) {  // a rank that leaves does so; the others have it all, or go on as after a death
    if (!leaves && !given) throw;
  }
}

RunInMemory::RunInMemory(Step& step, UnreportedStep last_step, int ranks, double weight, std::int64_t first,
                         int leavers)
    : last(std::move(last_step)), share(weight), first_step(first), handed_over(leavers) {
  step.abandon();
  run.manifest.position = last.position;
  run.manifest.ranks = ranks;
  run.manifest.totals = last.totals;
  if (last.kept)
    state = *std::exchange(last.kept, std::nullopt);
  else
    step.state(state, true);
  config = step.effective_config();
  run.manifest.global_batch = global_batch(config);
  for (StepReport& report : last.reports) report.status.bad_rank = -1;  // it has another number, or is gone
}

Views::Views(Rejoin rejoin, Communicator& first, View joined)
    : rejoin_(std::move(rejoin)), current_(&first), view_(std::move(joined)), joins_(view_.number > 1) {
  if (joins_) {
    agreed_.step = -1;
    return;
  }
  view_.ranks.resize(static_cast<std::size_t>(first.size()));
  std::iota(view_.ranks.begin(), view_.ranks.end(), 0);
  told_ = view_.ranks;
}

bool Views::join_next(const Communicator& failed, const Agreement& mine) {
  if (&failed != current_) return true;
  const Agreement known = mine.step > agreed_.step ? mine : agreed_;
  for (;;) try {
      std::unique_ptr<Communicator> next = rejoin_.join(view_);
      if (!next) return false;
      set_log_rank(next->rank(), next->size());
      agreed_ = latest_agreement(*next, known);
      joined_.push_back(std::move(next));
      if (joined_.size() > 2) joined_.erase(joined_.begin());  // this trainer's, and the next one's
      current_ = joined_.back().get();
      return true;
    } catch (const Error& error) {
      if (!peer_failed(error)) throw;
      log_debug(fmt::format("view {} did not come about: {}", view_.number, error.what()));
    }
}

AgreementSource Views::agreement_source(const Communicator& used, const Agreement& mine) {
  return [this, &used, &mine](std::int64_t step) {
    return join_next(used, mine) && agreed_.step == step ? agreed_.flags : std::vector<std::byte>();
  };
}

// The lowest rank that has it sends it to those that join. What belongs to a rank alone is not sent.
void Views::share(std::optional<RunInMemory>& memory, const Config& config) {
  const std::byte has{memory.has_value()};
  std::vector<std::vector<std::byte>> all;
  current_->all_gather({&has, 1}, all);
  const std::vector<std::byte> none{std::byte{0}};
  const auto donor = std::ranges::find_if(all, [&](const auto& one) { return one != none; });
  if (donor == all.end()) throw Error(kNoState);
  if (std::ranges::count(all, none) == 0) return;
  const int from = static_cast<int>(donor - all.begin());
  // Visits everything that is sent, as it is on the donor and to be on the others.
  const auto each = [](auto& run, auto&& list) {
    list(run.config.exchange.collective), list(run.config.exchange.groups);
    list(run.state.model.weights), list(run.state.model.statistics);
    for (auto& buffer : run.state.optimizer) list(buffer);
    list(run.last.records), list(run.last.seconds), list(run.last.reports);
  };
  std::vector<std::byte> bytes;
  if (current_->rank() == from) {
    StateWriter out;
    out.put(memory->first_step);
    out.put(memory->state.optimizer.size());
    out.put_list(manifest_text(memory->run.manifest));
    each(*memory, [&](const auto& values) { out.put_list(values); });
    bytes = out.take();
  }
  std::uint64_t size = bytes.size();
  current_->broadcast(std::as_writable_bytes(std::span(&size, 1)), from);
  bytes.resize(size);
  current_->broadcast(bytes, from);
  if (memory) return;
  StateReader in(bytes);
  RunInMemory run;
  run.config = config;
  run.first_step = in.get<std::int64_t>();
  run.state.optimizer.resize(in.get<std::size_t>());
  const std::vector<char> text = in.get_list<char>();
  run.run.manifest = parse_manifest({text.begin(), text.end()}, "the run's state");
  each(run, [&](auto& values) {
    const auto sent = in.get_list<typename std::decay_t<decltype(values)>::value_type>();
    values.assign(sent.begin(), sent.end());
  });
  run.last.position = run.run.manifest.position, run.last.totals = run.run.manifest.totals;
  for (StepReport& report : run.last.reports) report.bytes_sent = report.bytes_received = 0;  // the donor's
  memory = std::move(run);
}

void Views::prepare(std::optional<RunInMemory>& memory, RunInputs& inputs) {
  if (std::exchange(joins_, false)) agreed_ = latest_agreement(*current_, agreed_);
  if (agreed_.step > 0) share(memory, inputs.config);
  const bool root = current_->rank() == 0;
  if (root && !inputs.folder.lock)
    inputs.folder.lock =
        std::make_shared<RunLock>(inputs.coordinated ? RunLock::of_lost_rank(inputs.folder.path)
                                                     : RunLock::of_parent(inputs.folder.path));
  if (agreed_.step < 0) throw Error(kNoState);
  if (!memory) return;
  const std::int64_t step = memory->last.position.step;
  TOPKNOT_CHECK(step == agreed_.step, "this rank has not made the step that the others have agreed on");
  inputs.config = memory->config;
  inputs.resume = true;  // no first weights are read
  memory->note += (memory->note.empty() ? "" : "; ") + news(memory->handed_over);
  if (root)
    memory->run.manifest.metrics_bytes =
        metrics_bytes_before(inputs.folder.metrics_jsonl(), step + 1 - std::ssize(memory->last.records));
}

std::string Views::news(int handed_over) {
  const auto listed = [](const std::vector<int>& ranks) {
    return fmt::format("{} {}", ranks.size() == 1 ? "rank" : "ranks", fmt::join(ranks, ", "));
  };
  const auto without = [](std::vector<int> ranks, const std::vector<int>& others) {
    std::erase_if(ranks, [&](int rank) { return std::ranges::count(others, rank) > 0; });
    return ranks;
  };
  const std::vector<int> gone = without(told_, view_.ranks);
  const std::vector<int> come = told_.empty() ? gone : without(view_.ranks, told_);
  told_ = view_.ranks;
  std::string text = fmt::format("view {}: ", view_.number);
  if (!gone.empty() && static_cast<int>(gone.size()) == handed_over)
    text += fmt::format("{} handed over what was not sent; ", listed(gone));
  else if (!gone.empty())
    text += fmt::format("{} gone, and with {} what was not sent; ",
                        listed(gone) + (gone.size() == 1 ? " is" : " are"), gone.size() == 1 ? "it" : "them");
  if (!come.empty()) text += listed(come) + (come.size() == 1 ? " joins; " : " join; ");
  return text + fmt::format("{} on after step {}",
                            listed(view_.ranks) + (view_.ranks.size() == 1 ? " goes" : " go"), agreed_.step);
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

#include "train/checkpoint/checkpointer.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <limits>
#include <span>
#include <system_error>
#include <utility>

#include "nn/base/check.h"
#include "nn/base/clock.h"
#include "nn/base/log.h"
#include "nn/base/memory.h"
#include "train/checks.h"

namespace topknot {
namespace {

// NaN is worse than any number.
double loss_of(const Evaluation& evaluation) {
  return std::isnan(evaluation.loss) ? std::numeric_limits<double>::infinity() : evaluation.loss;
}

}  // namespace

std::vector<std::int64_t> superseded(const std::vector<SavedCheckpoint>& saved, int keep) {
  const SavedCheckpoint* best = nullptr;
  for (const SavedCheckpoint& one : saved) {
    if (!one.evaluated) continue;
    const Evaluation &now = one.evaluation, &then = best ? best->evaluation : now;
    if (now.accuracy > then.accuracy || (now.accuracy == then.accuracy && loss_of(now) <= loss_of(then)))
      best = &one;
  }
  std::vector<std::int64_t> steps;
  for (std::size_t i = 0; i + static_cast<std::size_t>(keep) < saved.size(); ++i)
    if (&saved[i] != best) steps.push_back(saved[i].step);
  return steps;
}

Checkpointer::Checkpointer(CheckpointStore store, std::string metrics, Step& step, int rank, int ranks,
                           int keep, std::vector<SavedCheckpoint> saved, std::function<void()> check)
    : store_(std::move(store)),
      metrics_(std::move(metrics)),
      check_(std::move(check)),
      step_(step),
      rank_(rank),
      ranks_(ranks),
      keep_(keep),
      saved_(std::move(saved)) {
  store_.remove_partial();  // by each rank, for hosts that do not see rank 0's files; no rank writes yet
}

Checkpointer::~Checkpointer() {
  if (work_.valid()) work_.wait();
}

void Checkpointer::save(Manifest manifest) {
  finish();
  with_memory("a checkpoint's copy of the run's state", 0, [&] { complete_state_ = step_.state(state_); });
  manifest_ = std::move(manifest);
  manifest_.files.clear();
  phase_ = Phase::writing;
  start(&Checkpointer::write_files);
}

// A rank that can have no further thread does the work at once.
void Checkpointer::start(void (Checkpointer::*work)()) {
  try {
    work_ = std::async(std::launch::async, work, this);
  } catch (const std::system_error&) {
    work_ = std::async(std::launch::deferred, work, this);
    work_.wait();
  }
}

void Checkpointer::write_files() {
  if (complete_state_) complete_state_();
  const std::int64_t step = manifest_.position.step;
  files_.clear();
  if (rank_ == 0) {
    manifest_.parameter_checksum = checksum_hex(state_.model.weights);
    const Metadata metadata = {{"format", "pt"},
                               {"program", manifest_.program},
                               {"step", fmt::format("{}", step)},
                               {"model", manifest_.config["model.name"]},
                               {"parameter_checksum", manifest_.parameter_checksum}};
    files_.push_back(store_.write(step, kModelFile, model_tensors(step_.store(), state_.model), metadata));
    files_.push_back(store_.write(step, kOptimizerFile, optimizer_tensors(step_.store(), state_)));
  }
  files_.push_back(store_.write(step, rank_file(rank_), rank_tensors(step_.store(), state_)));
}

double Checkpointer::ready() const {
  const bool done = work_.valid() && work_.wait_for(std::chrono::seconds(0)) != std::future_status::timeout;
  return phase_ != Phase::idle && (done || !work_.valid()) ? 1 : 0;
}

// Whether it succeeded; a failure is logged.
bool Checkpointer::end_work() {
  if (!work_.valid()) return true;
  try {
    work_.get();
    return true;
  } catch (const std::exception& error) {
    log_warning(fmt::format("checkpoint of step {}: {}", manifest_.position.step, error.what()));
    return false;
  }
}

void Checkpointer::advance() {
  if (phase_ == Phase::writing)
    begin_publishing();
  else if (phase_ == Phase::publishing)
    end_publishing();
  else if (phase_ == Phase::published)
    phase_ = Phase::idle, start(&Checkpointer::delete_superseded);
}

void Checkpointer::begin_publishing() {
  const bool written = end_work();
  struct RankFile {
    std::uint64_t written = 0, bytes = 0, checksum = 0;
  } mine;
  if (written) mine = {1, files_.back().bytes, files_.back().checksum};
  std::vector<std::vector<std::byte>> all;
  step_.all_gather(std::as_bytes(std::span(&mine, 1)), all);
  std::vector<RankFile> of_ranks(all.size());
  for (std::size_t r = 0; r < all.size(); ++r) std::memcpy(&of_ranks[r], all[r].data(), sizeof(RankFile));
  const auto failures = std::ranges::count(of_ranks, std::uint64_t{0}, &RankFile::written);
  if (failures > 0) {
    if (rank_ == 0) {
      log_warning(fmt::format("the checkpoint of step {} is left out: {} of {} ranks could not write it",
                              manifest_.position.step, failures, ranks_));
      store_.remove_partial();
    }
    phase_ = Phase::idle, written_ = false;
    return;
  }
  files_.pop_back();
  for (int r = 0; r < ranks_; ++r) {
    const RankFile& file = of_ranks[static_cast<std::size_t>(r)];
    files_.push_back({rank_file(r), file.bytes, file.checksum});
  }
  manifest_.files = files_;
  const TrainingPosition& position = manifest_.position;
  std::vector<SavedCheckpoint> saved = saved_;
  std::erase_if(saved, [&](const SavedCheckpoint& s) { return s.step >= position.step; });
  saved.push_back({position.step, position.evaluated, position.evaluation});
  superseded_ = superseded(saved, keep_);
  phase_ = Phase::publishing;
  if (rank_ == 0) start(&Checkpointer::publish);
}

void Checkpointer::publish() {
  sync_file(metrics_);
  if (check_) check_();
  store_.publish(manifest_.position.step, manifest_);
}

void Checkpointer::delete_superseded() {
  for (const std::int64_t step : superseded_) store_.remove(step);
}

void Checkpointer::end_publishing() {
  const TrainingPosition& position = manifest_.position;
  const auto all_succeed = [&](bool mine) {
    double failures = mine ? 0 : 1;
    step_.all_reduce({&failures, 1});
    return failures == 0;
  };
  phase_ = Phase::idle;
  written_ = all_succeed(end_work());
  if (!written_) return;
  bool renamed = true;
  if (rank_ != 0) try {
      store_.publish_rank_files(position.step);
    } catch (const UserError& error) {
      log_warning(fmt::format("checkpoint of step {}: {}", position.step, error.what()));
      renamed = false;
    }
  written_ = all_succeed(renamed);  // if not, the earlier ones stay
  if (!written_) return;
  std::erase_if(saved_, [&](const SavedCheckpoint& s) {
    return s.step >= position.step ||
           std::find(superseded_.begin(), superseded_.end(), s.step) != superseded_.end();
  });
  saved_.push_back({position.step, position.evaluated, position.evaluation});
  phase_ = Phase::published;
  if (rank_ == 0) log_debug("checkpoint: " + store_.path(position.step));
}

void Checkpointer::evaluated(const TrainingPosition& position, std::uint64_t metrics_bytes) {
  if (saved_.empty() || saved_.back().step != position.step) return;
  saved_.back() = {position.step, true, position.evaluation};
  if (rank_ != 0) return;
  try {
    sync_file(metrics_);
    store_.evaluated(position.step, position, metrics_bytes);
  } catch (const UserError& error) {
    log_warning(fmt::format("checkpoint of step {}: {}", position.step, error.what()));
  }
}

// A rank whose disk is slower keeps the others in short calls, which show that it lives; in a long one they would give up.
bool Checkpointer::finish() {
  constexpr int kMinutes = 30;
  Patience patience(60.0 * kMinutes);
  while (phase_ != Phase::idle) {
    if (work_.valid()) work_.wait_for(std::chrono::milliseconds(300));
    double done = ready();
    step_.all_reduce({&done, 1});
    if (done == ranks_)
      advance();
    else if (patience.over())
      throw Error(fmt::format("the checkpoint of step {} was not written within {} minutes",
                              manifest_.position.step, kMinutes));
  }
  end_work();  // removes
  return written_;
}

}  // namespace topknot

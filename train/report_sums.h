#pragma once
// What the ranks tell each other when they report steps (train/trainer.cpp).

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <iterator>
#include <numeric>
#include <string>
#include <vector>

#include "nn/base/program.h"
#include "train/step.h"

namespace topknot {

// How many ranks have received each of kStopSignals.
struct SignalSums {
  std::array<double, std::size(kStopSignals)> of{};

  void add_own() {
    for (std::size_t i = 0; i < of.size(); ++i) of[i] += kStopSignals[i] == stop_signal();
  }
  double ranks() const { return std::accumulate(of.begin(), of.end(), 0.0); }
  int highest() const {
    int highest = 0;
    for (std::size_t i = 0; i < of.size(); ++i)
      if (of[i] > 0) highest = std::max(highest, kStopSignals[i]);
    return highest;
  }
};

// The sums over the ranks when they report steps: one message.
struct ReportSums {
  struct OfStep {
    double loss, bytes_sent, bytes_received, selected;
    double bad_parameter;  // 1 + its index, of the bad rank; of rank 0 if none is known to be bad
    // For how many ranks the step was bad: all, or with local steps those that left it out. And the sum of 1
    // + rank over the ranks that know it of themselves.
    double bad_ranks, bad_rank_sum;
    double bad_rank_count;  // of these ranks
  };
  std::vector<OfStep> steps;
  SignalSums signals;
  SignalSums leaving;    // signals to ranks of an elastic run that are to leave it alone
  double next_view = 0;  // above 0: the ranks are to go over to the next view

  static OfStep own(const StepReport& step, int rank, double weight) {
    return {step.loss * weight,
            static_cast<double>(step.bytes_sent),
            static_cast<double>(step.bytes_received),
            static_cast<double>(step.status.selected),
            rank == std::max(step.status.bad_rank, 0) ? step.bad_parameter + 1.0 : 0.0,
            step.committed() ? 0.0 : 1.0,
            rank == step.status.bad_rank ? rank + 1.0 : 0.0,
            rank == step.status.bad_rank ? 1.0 : 0.0};
  }

  // The rank that made a step bad for itself, its host or all; -1 if it is not known, or several.
  static int bad_rank(const OfStep& step, int ranks, int ranks_per_host) {
    const bool one = step.bad_ranks == 1 || step.bad_ranks == ranks || step.bad_ranks == ranks_per_host;
    return one && step.bad_rank_count == 1 ? static_cast<int>(step.bad_rank_sum) - 1 : -1;
  }

  double checkpoint_ready = 0;  // ranks that have done their part of a checkpoint
  double step_seconds = 0;
  double choose_again = 0;  // above 0: rank 0 asks for another choice of the method

  // Visits every number, in the message's order.
  void each(const auto& visit) {
    for (OfStep& step : steps)
      for (double OfStep::*number :
           {&OfStep::loss, &OfStep::bytes_sent, &OfStep::bytes_received, &OfStep::selected,
            &OfStep::bad_parameter, &OfStep::bad_ranks, &OfStep::bad_rank_sum, &OfStep::bad_rank_count})
        visit(step.*number);
    for (double& ranks : signals.of) visit(ranks);
    for (double& ranks : leaving.of) visit(ranks);
    visit(next_view);
    visit(checkpoint_ready);
    visit(step_seconds);
    visit(choose_again);
  }

  void all_reduce(Step& step) {
    std::vector<double> numbers;
    each([&](double number) { numbers.push_back(number); });
    step.all_reduce(numbers);
    auto next = numbers.begin();
    each([&](double& number) { number = *next++; });
  }
};

// Gives a step's record the ranks' means and what they share. Returns all ranks' bytes, for so many entries.
inline ByteCount complete(StepRecord& record, const StepReport& own, const ReportSums::OfStep& sum, int ranks,
                          std::size_t entries) {
  static_cast<StepSeconds&>(record) = own.times;
  record.loss = sum.loss / ranks, record.selected = sum.selected / ranks;
  record.threshold = own.status.threshold, record.skipped = sum.bad_ranks > 0;
  return {static_cast<std::uint64_t>(sum.bytes_sent), static_cast<std::uint64_t>(sum.bytes_received),
          static_cast<std::uint64_t>(ranks) * sizeof(float) * entries};
}

// How messages call a step that was skipped.
struct SkipText {
  // "skipped by all ranks"; " on rank 1, first in the gradient of fc.weight"; the same for a message of its own
  std::string who, where, place;

  SkipText(const ReportSums::OfStep& sum, int ranks, int ranks_per_host, const ParameterArena& arena) {
    const int bad_rank = ReportSums::bad_rank(sum, ranks, ranks_per_host);
    const bool by_all = sum.bad_ranks == ranks;  // else by those alone that could not make it
    const std::string one = bad_rank >= 0 ? fmt::format("rank {}", bad_rank) : "";
    where = by_all && bad_rank >= 0 ? " on " + one : "";
    if (const int bad = static_cast<int>(sum.bad_parameter) - 1; bad >= 0 && (by_all || bad_rank >= 0))
      where += ", first in the gradient of " + arena.parameters()[static_cast<std::size_t>(bad)]->name();
    who = by_all          ? "skipped by all ranks"
          : bad_rank >= 0 ? (sum.bad_ranks > 1 ? "left out by the host of " : "left out by ") + one
                          : fmt::format("left out by {} of {} ranks", sum.bad_ranks, ranks);
    place = by_all ? where : bad_rank >= 0 ? " on " + one + where : "";
  }
};

// The seconds of the reported steps, which took `total` on the host, and `each` there. A GPU has timed each of them. Of
// local steps some have a sync and most have none; the report belongs to the last.
inline std::vector<double> reported_seconds(const std::vector<StepReport>& reports,
                                            const std::vector<double>& each, double total) {
  std::vector<double> seconds;
  for (std::size_t i = 0; i < reports.size(); ++i)
    seconds.push_back(reports[i].seconds > 0 ? reports[i].seconds : each[i]);
  if (reports.back().seconds == 0)
    seconds.back() += std::max(0.0, total - std::accumulate(seconds.begin(), seconds.end(), 0.0));
  return seconds;
}

}  // namespace topknot

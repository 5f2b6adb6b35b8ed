#pragma once
// The times of a step on a GPU, from the marks that it left (DeviceTimes).

#include <cstring>
#include <vector>

#include "dist/exchange/cuda/device_exchange.h"
#include "nn/core/step.h"
#include "train/plan/plan.h"
#include "train/trace.h"

namespace topknot::cuda {

struct StepTimes {
  std::vector<StepTrace::Piece> pieces;  // data, forward, backward, clip, update
  std::vector<ExchangeSpan> spans;       // of the exchange

  // `clock`: two times per mark, as DeviceTimes::clock() had them after the step.
  StepTimes(const DeviceTimes& times, std::span<const DeviceTimes::Mark> marks, const std::uint64_t* clock) {
    for (std::size_t i = 0; i < marks.size(); ++i) {
      const auto begin = times.host_time(clock[2 * i]), end = times.host_time(clock[2 * i + 1]);
      if (marks[i].piece) {
        pieces.push_back({TraceRow::compute, marks[i].piece, begin, end});
      } else {
        spans.push_back(marks[i].span);
        spans.back().begin = begin, spans.back().end = end;
      }
    }
  }
  // Adds the times as the runner on a CPU measures them. backward_s is without encoding and waits.
  void add_to(StepSeconds& total) const {
    using Kind = ExchangeSpan::Kind;
    const auto seconds = [](const auto& span) {
      return std::chrono::duration<double>(span.end - span.begin).count();
    };
    DeviceTimes::Time backward_begin, backward_end;
    for (const StepTrace::Piece& piece : pieces) {
      const auto is = [&](const char* name) { return std::strcmp(piece.name, name) == 0; };
      if (is("data")) total.data_s += seconds(piece);
      if (is("forward")) total.forward_s += seconds(piece);
      if (is("update")) total.update_s += seconds(piece);
      if (!is("backward")) continue;
      total.backward_s += seconds(piece);
      backward_begin = piece.begin, backward_end = piece.end;  // the last one drives the exchange
    }
    for (const ExchangeSpan& span : spans) {
      double& piece = span.kind == Kind::encode        ? total.encode_s
                      : span.kind == Kind::communicate ? total.communicate_s
                      : span.kind == Kind::wait        ? total.exposed_s
                                                       : total.decode_s;
      piece += seconds(span);
      const bool computes = span.kind != Kind::communicate;
      if (computes && span.begin >= backward_begin && span.end <= backward_end)
        total.backward_s -= seconds(span);
    }
    total.makespan_s = measured_makespan(spans, backward_begin);
  }
};

// Whether each time is at least so many nanoseconds after the one before.
inline bool times_apart(std::span<const std::uint64_t> times, std::uint64_t nanoseconds) {
  for (std::size_t i = 1; i < times.size(); ++i)
    if (times[i] < times[i - 1] + nanoseconds) return false;
  return true;
}

}  // namespace topknot::cuda

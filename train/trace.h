#pragma once
// The spans of single steps, as a trace in the format that chrome://tracing and Perfetto (ui.perfetto.dev)
// open, one file per rank ("Trace Event Format", the complete events "X"). Five rows, on none of which two
// spans overlap: compute, encode, communicate, decode, wait.

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "dist/comm/communicator.h"
#include "dist/exchange/exchange.h"

namespace topknot {

enum class TraceRow { compute, encode, communicate, decode, wait };

// A training run's trace. Each rank writes trace_rankR.json into its own `folder`, which it makes if there is
// none; if that fails there is a warning and no trace. Does nothing without steps.
class StepTrace {
 public:
  using Time = std::chrono::steady_clock::time_point;

  // steps: train.profile_steps, how many, and after how many; the last ones if the run of `total` steps ends before.
  // `groups` must outlive it. `overlaps`: collectives run during the computation.
  StepTrace(const std::vector<int>& steps, std::int64_t total, const std::string& folder,
            const std::vector<Group>& groups, int rank, bool overlaps);
  // Writes the steps so far of a run that failed.
  ~StepTrace();
  StepTrace(const StepTrace&) = delete;
  StepTrace& operator=(const StepTrace&) = delete;

  // Whether the trace has this step. `step`: how many were done before.
  bool covers(std::int64_t step) const { return !done_ && step >= first_ && step - first_ < steps_; }
  void begin_step(std::int64_t step) { begin_step(step, std::chrono::steady_clock::now()); }
  // Ends the step. `spans`: the exchange's. Writes the file after the last step of the trace.
  void end_step(const std::vector<ExchangeSpan>& spans);
  // A whole step that ended a while ago, in place of begin_step(), Span and end_step().
  struct Piece {
    TraceRow row;
    const char* name;
    Time begin, end;
  };
  void add_step(std::int64_t step, const std::vector<Piece>& pieces, const std::vector<ExchangeSpan>& spans);
  // Writes the steps that there were; afterwards nothing is traced.
  void finish();

  // A span on a row, to the end of the scope. On `compute` the exchange's work, on its own rows, is cut out.
  class Span {
   public:
    Span(StepTrace& trace, TraceRow row, const char* name) : trace_(trace), row_(row), name_(name) {
      if (trace_.tracing_) begin_ = std::chrono::steady_clock::now();
    }
    ~Span() {
      if (trace_.tracing_) trace_.pieces_.push_back({row_, name_, begin_, std::chrono::steady_clock::now()});
    }
    Span(const Span&) = delete;
    Span& operator=(const Span&) = delete;

   private:
    StepTrace& trace_;
    TraceRow row_;
    const char* name_;
    Time begin_;
  };

 private:
  struct Event {
    TraceRow row;
    std::string name;
    std::int64_t step;  // 1 for the first
    Time begin, end;
  };
  void begin_step(std::int64_t step, Time now);
  std::string name_of(const ExchangeSpan& span) const;
  void add_around(const Piece& piece, const std::vector<ExchangeSpan>& spans);

  const std::int64_t steps_, first_;
  const std::string folder_;
  const int rank_;
  const bool overlaps_;
  const std::vector<Group>& groups_;
  std::int64_t step_ = 0;  // 1 in the first step of the run
  bool tracing_ = false;   // this step
  bool done_ = false;
  std::vector<Piece> pieces_;   // of this step
  std::optional<Time> origin_;  // when the first traced step began: time 0 of the trace
  std::vector<Event> events_;
};

}  // namespace topknot

#include "train/trace.h"

#include <fmt/format.h>

#include <algorithm>
#include <exception>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <utility>

#include "nn/base/log.h"
#include "nn/base/text.h"
#include "train/metrics/metrics.h"
#include "train/metrics/output_file.h"
#include "train/run_directory.h"

namespace topknot {
namespace {

using Json = nlohmann::ordered_json;
using Time = StepTrace::Time;

double microseconds(std::chrono::steady_clock::duration duration) {
  return std::chrono::duration<double, std::micro>(duration).count();
}

TraceRow row_of(ExchangeSpan::Kind kind) {
  return kind == ExchangeSpan::Kind::encode        ? TraceRow::encode
         : kind == ExchangeSpan::Kind::communicate ? TraceRow::communicate
         : kind == ExchangeSpan::Kind::wait        ? TraceRow::wait
                                                   : TraceRow::decode;
}

std::string metadata(const char* what, int rank, int row, const Json& arguments) {
  return Json{{"name", what}, {"ph", "M"}, {"pid", rank}, {"tid", row}, {"args", arguments}}.dump();
}

}  // namespace

StepTrace::StepTrace(const std::vector<int>& steps, std::int64_t total, const std::string& folder,
                     const std::vector<Group>& groups, int rank, bool overlaps)
    : steps_(steps.empty() ? 0 : steps[0]),
      first_(std::clamp<std::int64_t>(total - steps_, 0,
                                      steps.size() > 1 ? steps[1] : static_cast<std::int64_t>(kWarmUpSteps))),
      folder_(folder),
      rank_(rank),
      overlaps_(overlaps),
      groups_(groups) {}

StepTrace::~StepTrace() {
  // The rank may end because of another error, which is the one to report.
  try {
    finish();
  } catch (const std::exception& error) {
    log_warning(error.what());
  }
}

void StepTrace::begin_step(std::int64_t step, Time now) {
  tracing_ = covers(step);
  if (!tracing_) return;
  step_ = step + 1;
  pieces_.clear();
  if (!origin_) origin_ = now;
}

void StepTrace::add_step(std::int64_t step, const std::vector<Piece>& pieces,
                         const std::vector<ExchangeSpan>& spans) {
  if (pieces.empty()) return;
  begin_step(step, pieces.front().begin);
  pieces_ = pieces;
  end_step(spans);
}

void StepTrace::end_step(const std::vector<ExchangeSpan>& spans) {
  if (!tracing_) return;
  for (const Piece& piece : pieces_) add_around(piece, spans);
  for (const ExchangeSpan& span : spans) {
    const std::string name = name_of(span);
    events_.push_back({row_of(span.kind), name, step_, span.begin, span.end});
    // A collective that runs on the compute thread is what that thread waits for.
    if (!overlaps_ && span.kind == ExchangeSpan::Kind::communicate)
      events_.push_back({TraceRow::wait, name, step_, span.begin, span.end});
  }
  tracing_ = false;
  if (step_ == first_ + steps_) finish();
}

void StepTrace::finish() {
  if (done_ || !origin_) return;
  done_ = true;
  tracing_ = false;
  // Other hosts have no run directory, unless they share a file system with rank 0.
  std::error_code error;
  std::filesystem::create_directories(folder_, error);
  if (error)
    return log_warning(fmt::format("train.profile_steps: no trace of rank {}: {} cannot be created: {}",
                                   rank_, folder_, error.message()));
  std::string text = "{\"displayTimeUnit\":\"ms\",\"traceEvents\":[\n";
  text += metadata("process_name", rank_, 0, {{"name", fmt::format("rank {}", rank_)}});
  int row = 0;
  for (const char* name : {"compute", "encode", "communicate", "decode", "wait"}) {
    text += ",\n" + metadata("thread_name", rank_, row, {{"name", name}});
    // Viewers sort rows by name without this.
    text += ",\n" + metadata("thread_sort_index", rank_, row, {{"sort_index", row}});
    ++row;
  }
  for (const Event& event : std::exchange(events_, {})) {
    const Json json{{"name", event.name},
                    {"ph", "X"},
                    {"ts", microseconds(event.begin - *origin_)},
                    {"dur", microseconds(event.end - event.begin)},
                    {"pid", rank_},
                    {"tid", static_cast<int>(event.row)},
                    {"args", {{"step", event.step}}}};
    text += ",\n" + json.dump();
  }
  write_file(RunDirectory{folder_}.trace_json(rank_), text + "\n]}\n");
}

std::string StepTrace::name_of(const ExchangeSpan& span) const {
  if (span.kind == ExchangeSpan::Kind::commit) return "commit";
  if (span.group == ExchangeSpan::kAgreement) return "agreement";
  const Group& group = groups_.at(static_cast<std::size_t>(span.group));
  std::string name = fmt::format("group {}: {}", span.group, group.parameters.front()->name());
  if (group.parameters.size() > 1) name += fmt::format(" … +{}", group.parameters.size() - 1);
  name += ", " + format_bytes(4.0 * static_cast<double>(group.numel()));
  if (span.round < 0) name += ", inside the host";
  if (span.round > 0) name += fmt::format(", round {}", span.round + 1);
  return name;
}

void StepTrace::add_around(const Piece& piece, const std::vector<ExchangeSpan>& spans) {
  Time from = piece.begin;
  if (piece.row == TraceRow::compute) {
    std::vector<const ExchangeSpan*> inside;
    for (const ExchangeSpan& span : spans)
      if ((span.kind != ExchangeSpan::Kind::communicate || !overlaps_) && span.end > piece.begin &&
          span.begin < piece.end)
        inside.push_back(&span);
    std::sort(inside.begin(), inside.end(), [](auto* a, auto* b) { return a->begin < b->begin; });
    for (const ExchangeSpan* span : inside) {
      if (span->begin > from) events_.push_back({piece.row, piece.name, step_, from, span->begin});
      from = std::max(from, span->end);
    }
  }
  if (piece.end > from) events_.push_back({piece.row, piece.name, step_, from, piece.end});
}

}  // namespace topknot

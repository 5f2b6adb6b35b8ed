// The traces of single steps: valid JSON, a row for each kind of work, and nothing on a row overlaps.
#include "train/trace.h"

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <set>

#include "tests/train/small_run.h"
#include "train/metrics/output_file.h"

using namespace topknot;
using namespace topknot::testing;

namespace {

struct Event {
  std::string name;
  double begin = 0, end = 0;
  std::int64_t step = 0;
};

struct Trace {
  std::map<std::string, std::vector<Event>> rows;  // by the row's name, in time
  std::string process;
  double earliest = 1e300;

  std::vector<Event> of(const std::string& row, std::int64_t step, const std::string& name = "") const {
    std::vector<Event> found;
    for (const Event& event : rows.at(row))
      if (event.step == step && (name.empty() || event.name == name)) found.push_back(event);
    return found;
  }
};

Trace read_trace(const std::string& path, int rank) {
  std::ifstream stream(path);
  REQUIRE(stream);
  const auto json = nlohmann::json::parse(stream);
  Trace trace;
  std::map<int, std::string> names;
  for (const auto& event : json.at("traceEvents")) {
    CHECK(event.at("pid") == rank);
    if (event.at("ph") != "M") continue;
    if (event.at("name") == "process_name") trace.process = event.at("args").at("name");
    if (event.at("name") == "thread_name") {
      names[event.at("tid")] = event.at("args").at("name");
      trace.rows[event.at("args").at("name")];
    }
  }
  for (const auto& event : json.at("traceEvents")) {
    if (event.at("ph") != "X") continue;
    const double begin = event.at("ts"), seconds = event.at("dur");
    CHECK(seconds >= 0);
    trace.earliest = std::min(trace.earliest, begin);
    trace.rows.at(names.at(event.at("tid")))
        .push_back({event.at("name"), begin, begin + seconds, event.at("args").at("step")});
  }
  for (auto& [name, events] : trace.rows)
    std::sort(events.begin(), events.end(), [](auto& a, auto& b) { return a.begin < b.begin; });
  return trace;
}

std::vector<Trace> traces_of(const std::string& backend, int ranks, std::vector<std::string> overrides) {
  const TempFolder temp;
  overrides.push_back("dist.ranks=" + std::to_string(ranks));
  run_in_directory(small_run(temp, overrides), backend);
  std::vector<Trace> traces;
  for (int rank = 0; rank < ranks; ++rank)
    traces.push_back(read_trace(temp.at("run/trace_rank" + std::to_string(rank) + ".json"), rank));
  CHECK_FALSE(std::filesystem::exists(temp.at("run/trace_rank" + std::to_string(ranks) + ".json")));
  return traces;
}

constexpr double kRounding = 1e-3;  // microseconds: a double's decimals

}  // namespace

TEST_CASE("a run's trace has a file per rank, with all rows and no overlap on any of them") {
  for (const char* backend : {"threads", "gloo"}) {
    const auto traces = traces_of(backend, 2,
                                  {"compress.name=topk", "exchange.merge=none", "train.max_steps=9",
                                   "train.profile_steps=2", "train.threads=1"});
    for (std::size_t rank = 0; rank < traces.size(); ++rank) {
      const Trace& trace = traces[rank];
      CHECK(trace.process == "rank " + std::to_string(rank));
      REQUIRE(trace.rows.size() == 5);
      CHECK(trace.earliest >= 0);
      for (const auto& [name, events] : trace.rows) {
        INFO(backend << ", row " << name);
        std::set<std::int64_t> steps;
        for (std::size_t i = 0; i < events.size(); ++i) {
          steps.insert(events[i].step);
          if (i > 0) CHECK(events[i - 1].end <= events[i].begin + kRounding);
        }
        CHECK(steps == std::set<std::int64_t>{6, 7});  // after five of warm-up
      }
    }
  }
}

TEST_CASE("the groups of a traced step are encoded within the backward pass, then sent, then decoded") {
  for (const char* backend : {"threads", "gloo"}) {
    const auto traces = traces_of(backend, 2,
                                  {"compress.name=topk", "exchange.merge=none", "train.max_steps=7",
                                   "train.profile_steps=1", "train.threads=1"});
    const Trace& trace = traces[0];
    for (const char* name : {"data", "forward", "backward", "update"})
      CHECK(trace.of("compute", 6, name).size() >= 1);
    const auto backward = trace.of("compute", 6, "backward"), encode = trace.of("encode", 6);
    const auto update = trace.of("compute", 6, "update");
    REQUIRE(encode.size() == 4);  // two layers, weights and biases
    for (const Event& span : encode) {
      CHECK(span.name.find("group ") == 0);
      CHECK(span.begin + kRounding >= backward.front().begin);
      CHECK(span.end <= backward.back().end + kRounding);
      const auto sent = trace.of("communicate", 6, span.name), decoded = trace.of("decode", 6, span.name);
      REQUIRE(sent.size() == 1);
      REQUIRE(decoded.size() == 1);
      CHECK(sent[0].begin + kRounding >= span.end);
      CHECK(decoded[0].begin + kRounding >= sent[0].end);
    }
    CHECK(trace.of("communicate", 6, "agreement").size() == 1);
    REQUIRE(trace.of("decode", 6, "commit").size() == 1);
    CHECK(trace.of("decode", 6, "commit")[0].end <= update[0].begin + kRounding);
    // What runs on the compute thread never runs at the same time.
    std::vector<Event> thread;
    for (const char* row : {"compute", "encode", "decode", "wait"})
      for (const Event& event : trace.rows.at(row)) thread.push_back(event);
    std::sort(thread.begin(), thread.end(), [](auto& a, auto& b) { return a.begin < b.begin; });
    for (std::size_t i = 1; i < thread.size(); ++i) {
      INFO(backend << ": " << thread[i - 1].name << " and " << thread[i].name);
      CHECK(thread[i - 1].end <= thread[i].begin + kRounding);
    }
  }
}

TEST_CASE("a group's name says its first parameter, how many more, and its bytes") {
  const auto traces =
      traces_of("threads", 1, {"compress.name=dense", "train.max_steps=3", "train.profile_steps=2"});
  const auto encode = traces[0].of("encode", 2);
  REQUIRE(encode.size() == 1);
  CHECK(encode[0].name.find("group 0: ") == 0);
  CHECK(encode[0].name.find(" … +3, ") != std::string::npos);
  CHECK(traces[0].of("encode", 3).size() == 1);  // a short run is traced at its end
  CHECK(traces[0].of("encode", 1).empty());
}

TEST_CASE("a trace begins after train.profile_from steps, or where the run is too short for it at its end") {
  CHECK(Config().train.profile_from == static_cast<std::int64_t>(kWarmUpSteps));
  for (const std::int64_t from : {0, 2, 3, 90}) {
    const auto traces = traces_of("threads", 1,
                                  {"compress.name=dense", "train.max_steps=5", "train.profile_steps=2",
                                   "train.profile_from=" + std::to_string(from)});
    std::set<std::int64_t> steps;
    for (const Event& event : traces[0].rows.at("compute")) steps.insert(event.step);
    const std::int64_t first = std::min<std::int64_t>(from, 3) + 1;
    CHECK(steps == std::set<std::int64_t>{first, first + 1});
  }
}

TEST_CASE("a run that ends before its trace does leaves the steps that it made") {
  const auto traces =
      traces_of("threads", 2, {"compress.name=topk", "train.max_steps=3", "train.profile_steps=50"});
  for (const Trace& trace : traces)
    for (std::int64_t step = 1; step <= 3; ++step) CHECK_FALSE(trace.of("compute", step, "update").empty());
}

TEST_CASE("without train.profile_steps there is no trace") {
  const TempFolder temp;
  const LoadedConfig loaded = small_run(temp, {"train.max_steps=2"});
  const RunData data = load_data(loaded.config);
  const RunInputs inputs{loaded.config, data, create_run_directory(loaded, {}), true,
                         std::chrono::steady_clock::now()};
  run_ranks("threads", 1, [&](Communicator& communicator) { run_rank(inputs, communicator); });
  CHECK_FALSE(std::filesystem::exists(temp.at("run/trace_rank0.json")));
}

TEST_CASE("a run that replaces an earlier one removes its traces") {
  const TempFolder temp;
  create_run_directory(small_run(temp, {}), {});
  for (int rank = 0; rank < 3; ++rank) write_file(RunDirectory{temp.at("run")}.trace_json(rank), "{}");
  create_run_directory(small_run(temp, {}), {});
  for (int rank = 0; rank < 3; ++rank)
    CHECK_FALSE(std::filesystem::exists(RunDirectory{temp.at("run")}.trace_json(rank)));
}

TEST_CASE("a trace is complete where the rank fails on its way") {
  const TempFolder temp;
  const LoadedConfig loaded = small_run(temp, {"model.hidden=[4]"});
  const RunData data = load_data(loaded.config);
  const auto model = build_model(loaded.config, *data.train);
  const auto groups = cut_groups(model->store.arena(), false, "group", "all");
  run_ranks("threads", 1, [&](Communicator& communicator) {
    try {
      StepTrace trace({5, 4, 100}, temp.at("new"), groups, communicator.rank(), communicator.overlaps());
      for (std::int64_t step = 0; step < 7; ++step) {
        trace.begin_step(step);
        { const StepTrace::Span span(trace, TraceRow::compute, "forward"); }
        if (step == 6) throw Error("lost");
        trace.end_step({});
      }
    } catch (const Error&) {
    }
  });
  const Trace trace = read_trace(temp.at("new/trace_rank0.json"), 0);
  CHECK(trace.of("compute", 6, "forward").size() == 1);
  CHECK(trace.of("compute", 7).empty());
}

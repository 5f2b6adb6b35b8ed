// The records of rank 0 beside the metrics: raw gradients, distributions, and the bytes of a step.
#include "train/recorder.h"

#include <omp.h>

#include "nn/core/rng.h"
#include "tests/train/resumed_run.h"
#include "train/checkpoint/safetensors.h"
#include "train/evaluate.h"
#include "train/metrics/output_file.h"
#include "train/trace.h"

using namespace topknot;
using namespace topknot::testing;

namespace {

struct Recorded {
  std::string checksum;
  std::vector<std::size_t> shape;
  std::vector<float> values;
  Metrics metrics;
};

Recorded record(const std::vector<std::string>& overrides) {
  const TempFolder temp;
  const LoadedConfig loaded = small_run(temp, overrides);
  Recorded result;
  result.checksum = run_in_directory(loaded).parameter_checksum;
  result.metrics = metrics_of(temp);
  if (asks_for_steps(loaded.config.train.record_gradients)) {
    const GradientsReader reader(temp.at("run/gradients.safetensors"));
    result.shape = {reader.steps(), reader.size()};
    result.values.resize(reader.steps() * reader.size());
    reader.read(0, result.values);
  }
  return result;
}

// Leaves the gradient of rank 0's first step in the model, without trainer or exchange.
struct FirstGradient : Prepared {
  explicit FirstGradient(const Keys& keys) : Prepared(keys) {
    const Config& config = loaded.config;
    omp_set_num_threads(compute_threads(config));  // as the run: products may depend on it in the last bits
    Loader loader(*data.train, loader_options(config, *data.train, true, 0, config.dist.ranks));
    loader.start_epoch(0);
    Batch batch;
    REQUIRE(loader.next(batch));
    ForwardContext context;
    context.seed = config.seed;
    model->store.arena().mark_gradients_unwritten();
    backward(batch_loss(model->module->forward(Variable(batch.images), context), view_of(batch, {})));
  }
};

// Golden vectors: u_i = ((7919 i) mod 10007) / 10007 - 0.5, cubed times 8.
std::vector<float> cubic(double shift) {
  std::vector<float> x(10007);
  for (std::size_t i = 0; i < x.size(); ++i) {
    const double u = static_cast<double>(i * 7919 % 10007) / 10007 - 0.5;
    x[i] = static_cast<float>(8 * u * u * u + shift);
  }
  return x;
}

std::int64_t total(const std::vector<std::int64_t>& counts) {
  return std::accumulate(counts.begin(), counts.end(), std::int64_t{0});
}

const std::vector<std::string> kTopk{"compress.name=topk", "dist.ranks=2", "train.max_steps=6"};

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
  CHECK_FALSE(fs::exists(temp.at("run/trace_rank" + std::to_string(ranks) + ".json")));
  return traces;
}

constexpr double kRounding = 1e-3;  // microseconds: a double's decimals

}  // namespace

TEST_CASE("recorded gradients are rank 0's own, before clipping and compression, and change nothing") {
  const FirstGradient first(kTopk);
  const auto expected = first.model->store.arena().gradient(0, first.arena().size());
  for (const Keys& more : std::vector<Keys>{{},
                                            {"train.clip_local=0.01"},
                                            {"train.clip_local=0.01", "train.clip_local_scope=tensor"},
                                            {"compress.name=dense"}}) {
    INFO((more.empty() ? "topk" : more.back()));
    const auto keys = with(kTopk, more);
    const Recorded recorded = record(with(keys, {"train.record_gradients=2"}));
    REQUIRE(recorded.shape == std::vector<std::size_t>{2, expected.size()});
    CHECK(std::equal(expected.begin(), expected.end(), recorded.values.begin()));
    CHECK(recorded.checksum == record(keys).checksum);
  }
}

TEST_CASE("a row of gradients.safetensors has the parameters in the order that docs/run.md states") {
  const auto keys =
      with(kTopk, {"model.hidden=[8,6,3]", "model.freeze=hidden2", "train.max_steps=1", "dist.ranks=1"});
  const FirstGradient first(keys);
  std::vector<float> expected;
  for (const char* name : {"hidden1.weight",                   // 8 x 3072, may be compressed
                           "output.weight", "hidden3.weight",  // 10 x 3 and 3 x 6: no multiples of 4
                           "hidden1.bias",                     // 8, dense
                           "output.bias", "hidden3.bias"}) {   // 10 and 3
    const auto& parameters = first.model->store.parameters();
    const auto p = std::ranges::find_if(parameters, [&](const auto& one) { return one->name() == name; });
    REQUIRE(p != parameters.end());
    CHECK((*p)->offset() == expected.size());  // as --dry-run prints it
    expected.insert(expected.end(), (*p)->gradient(), (*p)->gradient() + (*p)->numel());
  }
  CHECK(record(with(keys, {"train.record_gradients=1"})).values == expected);
}

TEST_CASE("recording starts where train.record_gradients says and ends with the run") {
  const Recorded all = record(with(kTopk, {"train.record_gradients=6"}));
  const std::size_t d = all.shape.at(1);
  const Recorded middle = record(with(kTopk, {"train.record_gradients=[2,3]"}));
  REQUIRE(middle.shape == std::vector<std::size_t>{2, d});
  CHECK(std::equal(middle.values.begin(), middle.values.end(), all.values.begin() + 3 * d));
  const Recorded late = record(with(kTopk, {"train.record_gradients=[5,4]"}));
  CHECK(late.shape == std::vector<std::size_t>{2, d});
}

TEST_CASE("a resumed run leaves the recorded gradients as they are") {
  const Keys keys = with(kTopk, {"train.record_gradients=2", "train.stop_after=0"});
  const StoppedRun temp(keys, 5);
  const std::string file = temp.at("run/gradients.safetensors"), recorded = text_of(file);
  CHECK(recorded.size() > 2 * 4 * 70000);
  start(temp, keys, true);
  CHECK(text_of(file) == recorded);
}

TEST_CASE("a resumed run records gradients if the stopped one had not come to them, from the first on") {
  const TempFolder temp;
  const std::string file = temp.at("run/gradients.safetensors");
  const Keys keys = with(kTopk, {"train.record_gradients=[3,2]", "train.stop_after=0"});
  start(temp, keys, false);
  const std::string recorded = text_of(file);
  CHECK(GradientsReader(file).steps() == 3);
  start(temp, with(keys, {"train.stop_after=2"}), false);
  CHECK_FALSE(fs::exists(file));
  start(temp, keys, true);
  CHECK(text_of(file) == recorded);
  start(temp, with(keys, {"train.stop_after=3"}), false);
  CHECK(GradientsReader(file).steps() == 1);
  fs::remove(file);
  start(temp, keys, true);  // does not make the first recorded step again
  CHECK_FALSE(fs::exists(file));
}

TEST_CASE("a run with gradients that Topknot 0.1 recorded is resumed when they are moved away") {
  const Keys keys = with(kTopk, {"train.record_gradients=2", "train.stop_after=0"});
  const StoppedRun temp(keys, 5);
  temp.write("run/gradients.npy", {'x'});
  const std::string metrics = text_of(temp.at("run/metrics.jsonl"));
  CHECK(says(start_error(temp, keys),
             {temp.at("run/gradients.npy"), "Topknot 0.1", "gradients.safetensors", "move the old file"}));
  CHECK(text_of(temp.at("run/metrics.jsonl")) == metrics);
  fs::remove(temp.at("run/gradients.npy"));
  CHECK_NOTHROW(start(temp, keys, true));
}

TEST_CASE("the distribution is recorded every so many steps, over all groups as one vector") {
  for (const std::string merge : {"all", "none"}) {
    const Recorded recorded = record(with(kTopk, {"exchange.merge=" + merge, "train.distribution_every=2",
                                                  "compress.warmup=[]", "train.record_gradients=2"}));
    const auto& distributions = recorded.metrics.distributions;
    INFO(merge);
    REQUIRE(distributions.size() == 3);
    CHECK(distributions[0].step == 2);
    CHECK(distributions[2].step == 6);
    // Weights only: biases are sent dense.
    const DistributionRecord& first = distributions[0];
    CHECK(first.size < static_cast<std::int64_t>(recorded.shape[1]));
    CHECK(first.k == first.size / 100);
    CHECK(first.contraction > 0);
    CHECK(first.contraction < first.bound);
  }
}

TEST_CASE("a rank's download is the others' upload, and of a sum its own length") {
  const auto metrics = [](const std::string& method, const Keys& more) {
    return record(with({"compress.name=" + method, "compress.dense_1d=false", "train.max_steps=3"}, more))
        .metrics;
  };
  const Metrics blocks = metrics("topk", {"dist.ranks=4"});
  for (const StepRecord& step : blocks.steps) {
    CHECK(step.bytes_sent > 0);
    CHECK(step.bytes_received == 3 * step.bytes_sent);
    CHECK(step.bytes_ratio == step.bytes_dense / step.bytes_sent);
  }
  const EndRecord& end = blocks.end.value();
  CHECK(end.bytes_received == 3 * end.bytes_sent);
  CHECK(end.bytes_ratio == Approx(end.bytes_dense / end.bytes_sent));
  const StepRecord sum = metrics("dense", {"dist.ranks=4"}).steps.at(0);
  CHECK(sum.bytes_received == sum.bytes_dense);
  CHECK(sum.bytes_ratio == 1);
  CHECK(metrics("topk", {}).steps.at(0).bytes_received == 0);
}

TEST_CASE("moments and contraction of the golden vectors") {
  const DistributionRecord plain = distribution_of(cubic(0), 0.01);
  CHECK(plain.mean == Approx(-9.9930049e-05).epsilon(1e-4));
  CHECK(plain.deviation == Approx(0.37798337264).epsilon(1e-7));
  CHECK(plain.k == 100);
  CHECK(plain.contraction == Approx(0.932111452).epsilon(1e-6));
  CHECK(plain.bound == Approx(1 - 100.0 / 10007).epsilon(1e-12));
  CHECK(plain.bell_bound == Approx(plain.bound * plain.bound).epsilon(1e-12));
  const DistributionRecord shifted = distribution_of(cubic(0.5), 0.01);
  CHECK(shifted.mean == Approx(0.49990007).epsilon(1e-6));
  CHECK(shifted.deviation == Approx(0.377983373).epsilon(1e-6));
}

TEST_CASE("a few values, by hand; zeros, one element and density 1 have a record, a NaN has none") {
  const std::vector<float> u{1, -2, 3, -4};
  const DistributionRecord r = distribution_of(u, 0.25);
  CHECK(r.contraction == Approx(14.0 / 30));
  CHECK(r.median == -0.5);
  CHECK(r.laplace_scale == Approx(2.5));
  CHECK(r.deviation == Approx(std::sqrt(29.0 / 3)));
  const auto exponent = [&](int e) { return r.magnitudes[e - r.least_exponent]; };
  CHECK(exponent(0) == 1);
  CHECK(exponent(1) == 2);
  CHECK(exponent(2) == 1);
  CHECK(distribution_of(std::vector<float>(10, 0.0f), 0.1).contraction == 0);
  CHECK(distribution_of(std::vector<float>{2}, 0.001).contraction == 0);
  CHECK(distribution_of(std::vector<float>{1, 2, 3}, 1).contraction == 0);
  CHECK_THROWS_AS(distribution_of(std::vector<float>{1, NAN}, 0.1), Error);
}

TEST_CASE("every element is counted once in each histogram, those far out and zeros too") {
  std::vector<float> u(5000);
  const CounterRng rng(1, RngUse::test);
  for (std::size_t i = 0; i < u.size(); ++i) u[i] = i % 10 ? rng.normal(i) : 0.0f;
  u[3] = 1e3f, u[5] = 1e-30f, u[7] = -1e20f;
  const DistributionRecord r = distribution_of(u, 0.001);
  CHECK(r.below == 1);
  CHECK(total(r.histogram) + r.below + r.above == 5000);
  CHECK(r.zeros == 500);
  CHECK(total(r.magnitudes) + r.zeros == 5000);
  CHECK(r.histogram.size() == static_cast<std::size_t>(kHistogramBins));
}

TEST_CASE("a normal vector fills the bins as the normal distribution does, and keeps the bell's bound") {
  std::vector<float> u(200000);
  const CounterRng rng(2, RngUse::test);
  for (std::size_t i = 0; i < u.size(); ++i) u[i] = rng.normal(i);
  const DistributionRecord r = distribution_of(u, 0.001);
  const double width = 2 * kHistogramReach / kHistogramBins;
  // The middle bin holds |z| < width / 2.
  CHECK(static_cast<double>(r.histogram[kHistogramBins / 2]) / 200000 ==
        Approx(std::erf(width / 2 / std::sqrt(2.0))).epsilon(0.03));
  CHECK(r.contraction == Approx(0.98753).margin(0.001));
  CHECK(r.contraction < r.bell_bound);
}

TEST_CASE("equal magnitudes break the bell's bound and meet the other one") {
  const std::vector<float> u(1000, -0.5f);
  const DistributionRecord r = distribution_of(u, 0.1);
  CHECK(r.contraction == Approx(0.9).epsilon(1e-12));
  CHECK(r.contraction == Approx(r.bound).epsilon(1e-12));
  CHECK(r.contraction > r.bell_bound);
  CHECK(r.histogram[kHistogramBins / 2] == 1000);
}

TEST_CASE("a distribution reads back from the metrics as it was written") {
  const TempFolder temp;
  DistributionRecord record = distribution_of(cubic(0), 0.01);
  record.step = 7, record.epoch = 0.5;
  MetricsWriter(temp.at("m.jsonl")).write(record);
  const Metrics metrics = read_metrics(temp.at("m.jsonl"));
  REQUIRE(metrics.distributions.size() == 1);
  const DistributionRecord& back = metrics.distributions[0];
  CHECK(back.step == 7);
  CHECK(back.contraction == record.contraction);
  CHECK(back.laplace_scale == record.laplace_scale);
  CHECK(back.histogram == record.histogram);
  CHECK(back.magnitudes == record.magnitudes);
  CHECK(back.least_exponent == kLeastExponent);
}

TEST_CASE(
    "a run's trace has a file per rank; groups are encoded in the backward pass, then sent, then decoded") {
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

TEST_CASE(
    "a trace begins after the steps that train.profile_steps says, or where the run is too short for it at "
    "its end") {
  for (const std::int64_t from : {0, 2, 3, 90}) {
    const auto traces = traces_of(
        "threads", 1,
        {"compress.name=dense", "train.max_steps=5", "train.profile_steps=[2," + std::to_string(from) + "]"});
    std::set<std::int64_t> steps;
    for (const Event& event : traces[0].rows.at("compute")) steps.insert(event.step);
    const std::int64_t first = std::min<std::int64_t>(from, 3) + 1;
    CHECK(steps == std::set<std::int64_t>{first, first + 1});
  }
  // A run that ends before its trace does leaves the steps that it made; without train.profile_steps there is none.
  for (const Trace& trace :
       traces_of("threads", 2, {"compress.name=topk", "train.max_steps=3", "train.profile_steps=50"}))
    for (std::int64_t step = 1; step <= 3; ++step) CHECK_FALSE(trace.of("compute", step, "update").empty());
  const TempFolder temp;
  run_in_directory(small_run(temp, {"train.max_steps=2"}));
  CHECK_FALSE(fs::exists(temp.at("run/trace_rank0.json")));
}

TEST_CASE("a trace is complete where the rank fails on its way") {
  const TempFolder temp;
  const LoadedConfig loaded = small_run(temp, {"model.hidden=[4]"});
  const RunData data = load_data(loaded.config);
  const auto model = build_model(loaded.config, *data.train);
  const auto groups = cut_groups(model->store.arena(), false, "group", "all");
  run_ranks("threads", 1, [&](Communicator& communicator) {
    try {
      StepTrace trace({4, 5}, 100, temp.at("new"), groups, communicator.rank(), communicator.overlaps());
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

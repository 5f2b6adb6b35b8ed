// Recorded gradients through the exchange alone.
#include "lab/replay/replay.h"

#include <cmath>
#include <filesystem>
#include <limits>
#include <mutex>
#include <nlohmann/json.hpp>
#include <set>

#include "nn/base/text.h"
#include "tests/train/small_run.h"

using namespace topknot;
using namespace topknot::testing;

namespace {

constexpr std::int64_t kRecorded = 4;

// The folder of a short run that recorded.
struct Folder {
  TempFolder temp;
  std::string path = temp.at("run"), gradients = path + "/gradients.safetensors";
  std::size_t numel = 0;
  std::vector<float> values;  // [kRecorded, numel]

  Folder() {
    run_in_directory(small_run(temp, {"train.max_steps=6", "model.hidden=[5]", "data.batch_size=8",
                                      "train.record_gradients=[" + std::to_string(kRecorded) + ",2]"}));
    const GradientsReader reader(gradients);
    numel = reader.size();
    values.resize(reader.steps() * numel);
    reader.read(0, values);
  }
  // Replaces the recording.
  void write(std::size_t size, std::span<const float> rows) const {
    GradientsWriter writer(gradients, size);
    for (std::size_t at = 0; at < rows.size(); at += size) writer.append(rows.subspan(at, size));
    writer.close();
  }
};

Config config_of(const Recording& recording, std::vector<std::string> overrides) {
  LoadedConfig loaded = load_config("", overrides);
  throw_problems(loaded.problems);
  Config config = recording.config();
  config.compress = loaded.config.compress;
  config.exchange = loaded.config.exchange;
  return config;
}

// The mean over the ranks of what replay_row() gives them, in the recording's order.
std::vector<double> dense_mean(const Folder& folder, std::int64_t step, int ranks) {
  std::vector<double> mean(folder.numel);
  for (int r = 0; r < ranks; ++r) {
    const ReplayRow row = replay_row(step, r, ranks, kRecorded);
    for (std::size_t i = 0; i < folder.numel; ++i)
      mean[i] += static_cast<double>(row.scale) *
                 folder.values[static_cast<std::size_t>(row.row) * folder.numel + i] / ranks;
  }
  return mean;
}

ReplayResult replay(const Recording& recording, const Config& config, const ReplayOptions& options, int ranks,
                    const ReplayObserver& observer = {}) {
  std::vector<ReplayResult> results(static_cast<std::size_t>(ranks));
  run_ranks("threads", ranks, [&](Communicator& c) {
    results[static_cast<std::size_t>(c.rank())] = replay_rank(recording, config, options, c, observer);
  });
  for (const ReplayResult& other : results)
    CHECK(other.steps.back().step_s.largest == results[0].steps.back().step_s.largest);
  return results[0];
}

}  // namespace

TEST_CASE("a replayed dense step averages the ranks' recorded gradients") {
  const Folder folder;
  const Recording recording(folder.path);
  REQUIRE(recording.size() == folder.numel);
  REQUIRE(recording.steps() == kRecorded);
  for (const int ranks : {2, 3}) {
    ReplayOptions options;
    options.steps = 2;
    double worst = 0, largest = 0;
    const auto look = [&](std::int64_t step, Exchange& exchange, ParameterArena&) {
      const std::vector<double> mean = dense_mean(folder, step, ranks);
      for (const Group& group : exchange.groups()) {
        const auto average = exchange.averaged(group);
        for (std::size_t i = 0; i < group.numel(); ++i) {
          worst = std::max(worst, std::fabs(average[i] - mean[group.begin + i]));
          largest = std::max(largest, std::fabs(mean[group.begin + i]));
        }
      }
    };
    // One rank looks; the others' averages have the same bits.
    std::mutex once;
    std::int64_t looked = 0;
    const ReplayResult result =
        replay(recording, config_of(recording, {"exchange.merge=none"}), options, ranks,
               [&](std::int64_t step, Exchange& exchange, ParameterArena& arena) {
                 const std::lock_guard lock(once);
                 ++looked;
                 look(step, exchange, arena);
               });
    CHECK(largest > 0);
    CHECK(worst <= 1e-6 * largest);
    CHECK(looked == ranks * 7);
    REQUIRE(result.steps.size() == 2 + kWarmUpSteps);
    CHECK(result.groups == 4);  // two layers, weights and biases
    for (const ReplayStep& step : result.steps) {
      CHECK(step.bytes_sent.rank0 == 4.0 * static_cast<double>(folder.numel));
      CHECK(step.bytes_received.mean == 4.0 * static_cast<double>(folder.numel));
      CHECK(step.step_s.largest >= step.step_s.rank0);
      CHECK(step.step_s.rank0 >= step.step_s.least);
    }
  }
}

TEST_CASE("a replay may lay the model out in another way than the recorded run") {
  const Folder folder;
  const Recording recording(folder.path);
  // Everything is one compressed group, and everything is sent.
  const Config config = config_of(recording, {"compress.name=topk", "compress.density=1",
                                              "compress.dense_1d=false", "compress.memory=none"});
  const auto recorded = recording.model(recording.config());
  std::map<std::string, std::size_t> offsets;
  for (const Parameter* p : recorded->store.arena().parameters()) offsets[p->name()] = p->offset();
  bool moved = false;
  double worst = 0, largest = 0;
  ReplayOptions options;
  options.steps = 1;
  std::mutex once;
  const ReplayResult result = replay(
      recording, config, options, 2, [&](std::int64_t step, Exchange& exchange, ParameterArena& arena) {
        const std::lock_guard lock(once);
        const auto average = exchange.averaged(exchange.groups().at(0));
        const std::vector<double> mean = dense_mean(folder, step, 2);
        for (const Parameter* p : arena.parameters()) {
          const std::size_t recorded_at = offsets.at(p->name());
          moved = moved || p->offset() != recorded_at;
          for (std::size_t i = 0; i < p->numel(); ++i) {
            worst = std::max(worst, std::fabs(average[p->offset() + i] - mean[recorded_at + i]));
            largest = std::max(largest, std::fabs(mean[recorded_at + i]));
          }
        }
      });
  CHECK(result.groups == 1);
  CHECK(largest > 0);
  CHECK(worst <= 1e-6 * largest);
  CHECK(moved);
}

TEST_CASE("a replayed sparse step counts its bytes") {
  const Folder folder;
  const Recording recording(folder.path);
  const Config config =
      config_of(recording, {"compress.name=topk", "compress.density=0.01", "compress.dense_1d=false",
                            "compress.codec=raw", "compress.values=fp32"});
  ReplayOptions options;
  options.steps = 3;
  const ReplayResult result = replay(recording, config, options, 3);
  const double k = std::floor(0.01 * static_cast<double>(folder.numel));
  for (const ReplayStep& step : result.steps) {
    CHECK(step.selected.least == k);
    CHECK(step.selected.largest == k);
    // A position and a value of 4 bytes each, and a header.
    CHECK(step.bytes_sent.least >= 8 * k);
    CHECK(step.bytes_sent.largest <= 8 * k + 64);
    CHECK(step.bytes_received.rank0 == 2 * step.bytes_sent.rank0);
    CHECK(step.threshold > 0);
  }
}

TEST_CASE("ranks that meet before their collectives exchange the same, and need a queue beside them") {
  const Folder folder;
  const Recording recording(folder.path);
  const Config config =
      config_of(recording, {"compress.name=topk", "compress.density=0.05", "exchange.merge=none"});
  ReplayOptions options;
  options.steps = 1;
  options.meet = true;
  const auto average_of = [&](const ReplayOptions& how) {
    std::vector<float> average;
    run_ranks("gloo", 2, [&](Communicator& c) {
      const int rank = c.rank();
      replay_rank(recording, config, how, c, [&](std::int64_t, Exchange& exchange, ParameterArena&) {
        if (rank != 0) return;
        for (const Group& group : exchange.groups())
          average.insert(average.end(), exchange.averaged(group).begin(), exchange.averaged(group).end());
      });
    });
    return average;
  };
  ReplayOptions plain = options;
  plain.meet = false;
  const std::vector<float> met = average_of(options);
  CHECK(met.size() == 6 * folder.numel);
  CHECK(met == average_of(plain));
  const auto errors =
      errors_of_ranks("threads", 2, [&](Communicator& c) { replay_rank(recording, config, options, c); });
  CHECK(errors[0].find("--meet needs dist.backend=gloo") != std::string::npos);
}

TEST_CASE("ranks replay different steps, scaled by factors of mean 1") {
  for (const int ranks : {1, 2, 5, 16}) {
    double sum = 0;
    std::set<std::int64_t> rows;
    std::set<float> scales;
    for (int r = 0; r < ranks; ++r) {
      const ReplayRow row = replay_row(3, r, ranks, 16);
      CHECK(row.row == (3 * ranks + r) % 16);
      CHECK(row.scale > 0.5f);
      CHECK(row.scale < 1.5f);
      rows.insert(row.row);
      scales.insert(row.scale);
      sum += row.scale;
    }
    CHECK(rows.size() == static_cast<std::size_t>(ranks));
    CHECK(scales.size() == static_cast<std::size_t>(ranks));
    CHECK(sum / ranks == Approx(1.0).epsilon(1e-6));
  }
}

TEST_CASE("a replay leaves metrics as a run does, and its medians") {
  const Folder folder;
  const Recording recording(folder.path);
  ReplayReport report;
  report.recording = folder.path;
  report.recorded_steps = recording.steps();
  report.config = config_of(recording, {"compress.name=topk", "compress.density=0.1"});
  report.config.dist.ranks = 2;
  report.backend = "threads";
  report.options.steps = 3;
  const ReplayResult result = replay(recording, report.config, report.options, 2);
  const std::string out = folder.temp.at("out");
  std::filesystem::create_directory(out);
  write_replay(out, report, result);

  const Metrics metrics = read_metrics(out + "/metrics.jsonl");
  REQUIRE(metrics.steps.size() == 3 + kWarmUpSteps);
  double seconds = 0;
  for (std::size_t i = 0; i < metrics.steps.size(); ++i) {
    const StepRecord& record = metrics.steps[i];
    seconds += result.steps[i].step_s.rank0;
    CHECK(record.step == static_cast<std::int64_t>(i) + 1);
    CHECK(record.time_s == Approx(seconds));
    CHECK(record.density == 0.1);
    CHECK(record.bytes_sent == result.steps[i].bytes_sent.mean);
    CHECK(record.bytes_dense == 4.0 * static_cast<double>(folder.numel));
    CHECK(record.encode_s == result.steps[i].encode_s.rank0);
  }
  REQUIRE(metrics.end);
  CHECK(metrics.end->steps == 3 + static_cast<std::int64_t>(kWarmUpSteps));
  std::ifstream stream(out + "/bench.json");
  const auto json = nlohmann::json::parse(stream);
  CHECK(json["ranks"] == 2);
  CHECK(json["parameters"] == folder.numel);
  std::vector<double> sent;
  for (std::size_t i = kWarmUpSteps; i < result.steps.size(); ++i)
    sent.push_back(result.steps[i].bytes_sent.largest);
  CHECK(json["medians"]["bytes_sent"]["largest"] == quantile(sent, 0.5));
}

TEST_CASE("a recording that does not fit its model, or is damaged, is refused with its name") {
  const auto refused = [](const std::string& path, const char* words) {
    CHECK_THROWS_WITH(Recording(path), Catch::Contains(words) && Catch::Contains(path));
    CHECK_THROWS_AS(Recording(path), UserError);
  };
  const Folder folder;
  refused(folder.temp.at("absent"), "no such folder");
  std::filesystem::resize_file(folder.gradients, std::filesystem::file_size(folder.gradients) - 1);
  refused(folder.path, "gradients.safetensors");
  folder.write(folder.numel + 1, std::vector<float>(3 * (folder.numel + 1)));
  refused(folder.path, "parameters");
  folder.write(folder.numel, {});
  refused(folder.path, "[0, ");
  std::filesystem::remove(folder.gradients);
  refused(folder.path, "is missing");
  write_file(folder.path + "/gradients.npy", "");
  refused(folder.path, "Topknot 0.1 recorded");
}

TEST_CASE("a recorded gradient that is not finite ends the replay with the step that holds it") {
  Folder folder;
  folder.values[2 * folder.numel + 1] = std::numeric_limits<float>::quiet_NaN();
  folder.write(folder.numel, folder.values);
  const Recording recording(folder.path);
  const Config config = config_of(recording, {"compress.name=topk", "compress.dense_1d=false"});
  const auto errors =
      errors_of_ranks("threads", 2, [&](Communicator& c) { replay_rank(recording, config, {}, c); });
  // Rank 0 has step 2 in the second step of two ranks.
  CHECK(errors[0].find("recorded step 2 (from 0)") != std::string::npos);
  CHECK(errors[0] == errors[1]);
}

TEST_CASE("a replay refuses keys without effect") {
  for (const char* key : {"model.hidden=[7]", "data.batch_size=3", "train.epochs=2", "compress.warmup=[0.1]",
                          "output.dir=x", "compress.clip=1"})
    CHECK_THROWS_AS(check_replay_keys({key}), UserError);
  check_replay_keys({"compress.name=topk", "compress.clip_sigma=2", "exchange.merge=none", "dist.ranks=2"});
}

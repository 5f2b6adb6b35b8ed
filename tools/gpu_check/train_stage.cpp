#include <fmt/format.h>

#include <map>
#include <nlohmann/json.hpp>

#include "tools/gpu_check/stages.h"

namespace topknot::gpu_check {
namespace {

struct Workload {
  std::string model;
  int batch, size, classes, steps;
  double share;  // of the stage's time; the larger the network, the longer PyTorch compiles
};

const std::vector<Workload>& workloads() {
  static const std::vector<Workload> all{{"resnet20", 128, 32, 10, 400, 0.25},
                                         {"vgg16", 128, 32, 10, 200, 0.25},
                                         {"resnet50", 128, 224, 1000, 60, 0.5}};
  return all;
}

using Rates = std::map<std::string, std::pair<double, std::string>>;  // by precision: images/s, setting

// PyTorch's best in each precision, of what the script tries, as one result.
Rates peer_rates(const Options& options, const Workload& work, double seconds, Report& report) {
  Result result{"train", fmt::format("PyTorch, {}, batch {}", work.model, work.batch)};
  const std::string script = write_peer_script(options.out, "gpu_train.py");
  const auto text = [](auto number) { return std::to_string(number); };
  const Outcome outcome = run(
      {{options.python, script, "--model", work.model, "--batch", text(work.batch), "--size", text(work.size),
        "--classes", text(work.classes), "--steps", text(work.steps / 2), "--seconds", text(0.8 * seconds)}},
      seconds);
  result.seconds = outcome.seconds;
  Rates best;
  for (const std::string& line : lines_of(outcome.output)) {
    const auto record = nlohmann::json::parse(line, nullptr, false);
    try {
      const double rate = record.at("images_per_second");
      const std::string setting = record.at("setting"), precision = record.at("precision");
      result.figures.emplace_back("images/s " + setting, rate);
      result.note = "PyTorch " + record.value("torch", "?");
      if (auto& known = best[precision]; rate > known.first) known = {rate, setting};
    } catch (const nlohmann::json::exception&) {  // a line for people
    }
  }
  if (best.empty()) {
    result.status = Status::skipped;
    result.note = "no PyTorch figure: " + outcome.reason(options.python);
  } else if (outcome.timed_out) {
    result.note += "; not all settings were tried in the time";
  }
  report.add(std::move(result));
  return best;
}

std::vector<std::string> training(const Options& options, const Workload& work, const std::string& precision,
                                  const std::string& folder) {
  const auto text = [](int number) { return std::to_string(number); };
  return {options.bin + "/train",
          "model.name=" + work.model,
          "data.name=synthetic_images",
          "data.image_size=" + text(work.size),
          "data.classes=" + text(work.classes),
          "data.train_size=" + text(work.size > 64 ? 2560 : 8192),
          "data.test_size=" + text(work.batch),
          "data.batch_size=" + text(work.batch),
          "train.device=cuda",
          "train.precision=" + precision,
          "train.epochs=0",
          "train.max_steps=" + text(work.steps),
          "train.eval_every=0",
          "train.check_every=0",
          "train.algorithm_cache=none",
          "optimizer.lr=0.01",
          "output.dir=" + folder,
          "output.overwrite=true",
          "--quiet"};
}

Result measure(const Options& options, const Workload& work, const std::string& precision,
               const std::string& name, double seconds, const Rates& peers) {
  const std::string folder = fresh_run_directory(options.out, work.model + "-" + precision);
  const Outcome outcome = run({training(options, work, precision, folder)}, seconds);
  Result result{"train", name, Status::passed, outcome.seconds};
  const EndRecord end = end_of_run(folder);
  if (!outcome.ok()) return failure(std::move(result), outcome, outcome.reason("train"));
  if (!(end.step_p50_s > 0)) return failure(std::move(result), outcome, "the run's metrics have no end");
  const double rate = work.batch / end.step_p50_s;
  result.figures = {{"images/s", rate}};
  // PyTorch's fp32 is with TF32, which is its best without bf16.
  if (const auto peer = peers.find(precision == "bf16" ? "bf16" : "tf32"); peer != peers.end()) {
    result.figures.emplace_back("images/s of PyTorch", peer->second.first);
    result.figures.emplace_back("times", rate / peer->second.first);
    result.note = "PyTorch's best: " + peer->second.second;
  }
  return result;
}

}  // namespace

void run_train(const Options& options, Report& report) {
  const StageClock clock(options.seconds);
  const std::string train = options.bin + "/train";
  if (!is_program(train)) return skip_all("train", train + " is not there", report);
  double shares = 1;
  for (const Workload& work : workloads()) {
    const StageClock own(clock.left() * work.share / shares);
    shares -= work.share;
    const Rates peers = peer_rates(options, work, 0.6 * own.left(), report);
    int left = 3;
    for (const std::string precision : {"bf16", "tf32", "fp32"}) {
      const std::string name = fmt::format("{} {}, batch {}", work.model, precision, work.batch);
      if (clock.used_up())
        report.add({"train", name, Status::skipped, 0, {}, kUsedUp});
      else
        report.add(measure(options, work, precision, name, own.left() / left, peers));
      --left;
    }
  }
}

}  // namespace topknot::gpu_check

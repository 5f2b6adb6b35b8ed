#include <algorithm>
#include <fstream>
#include <nlohmann/json.hpp>

#include "train/gpu_check/peer_scripts.h"
#include "train/gpu_check/process.h"
#include "train/gpu_check/stages.h"

namespace topknot::gpu_check {
namespace {

struct Workload {
  std::string model;
  int batch, size, classes, steps;
};

const std::vector<Workload>& workloads() {
  static const std::vector<Workload> all{
      {"resnet20", 128, 32, 10, 400}, {"vgg16", 128, 32, 10, 200}, {"resnet50", 128, 224, 1000, 60}};
  return all;
}

double images_per_second(const std::string& folder) {
  std::ifstream lines(folder + "/metrics.jsonl");
  double rate = 0;
  for (std::string line; std::getline(lines, line);) {
    const auto record = nlohmann::json::parse(line, nullptr, false);
    if (record.is_object() && record.value("event", "") == "end")
      rate = record.value("images_per_second", 0.0);
  }
  return rate;
}

// PyTorch's best of what the script tries; 0 where there is none, and why.
double peer_rate(const Options& options, const Workload& work, double seconds, std::string& note) {
  const std::string script = write_peer_script(options.out, "gpu_train.py");
  const Outcome outcome =
      run({{options.python, script, "--model", work.model, "--batch", std::to_string(work.batch), "--size",
            std::to_string(work.size), "--classes", std::to_string(work.classes), "--steps",
            std::to_string(work.steps / 2), "--seconds", std::to_string(seconds)}},
          seconds + 15);
  double best = 0;
  for (const std::string& line : lines_of(outcome.output)) {
    const auto record = nlohmann::json::parse(line, nullptr, false);
    if (!record.is_object() || !record.contains("images_per_second")) continue;
    if (const double rate = record["images_per_second"]; rate > best) {
      best = rate;
      note = "PyTorch " + record.value("torch", "?") + ", " + record.value("setting", "?");
    }
  }
  if (best == 0)
    note = "no PyTorch figure: " + (outcome.found ? outcome.last_line() : options.python + " is not there");
  return best;
}

}  // namespace

void run_train(const Options& options, Report& report) {
  const std::string train = options.bin + "/train";
  if (!is_program(train)) {
    report.add({"train", "images a second", Status::skipped, 0, {}, train + " is not there"});
    return;
  }
  for (const Workload& work : workloads()) {
    std::string note;
    const double peer = peer_rate(options, work, 0.18 * options.seconds, note);
    for (const std::string precision : {"fp32", "tf32", "bf16"}) {
      const std::string folder = options.out + "/train-" + work.model + "-" + precision;
      const std::string size = std::to_string(work.size);
      const Outcome outcome =
          run({{train, "model.name=" + work.model, "data.name=synthetic_images", "data.image_size=" + size,
                "data.classes=" + std::to_string(work.classes),
                "data.train_size=" + std::to_string(work.size > 64 ? 512 : 8192), "data.test_size=128",
                "data.batch_size=" + std::to_string(work.batch), "train.device=cuda",
                "train.precision=" + precision, "train.epochs=0",
                "train.max_steps=" + std::to_string(work.steps), "train.eval_every=0", "optimizer.lr=0.01",
                "output.dir=" + folder, "output.overwrite=true", "--quiet"}},
              0.2 * options.seconds);
      Result result{"train", work.model + " " + precision + ", batch " + std::to_string(work.batch),
                    outcome.ok() ? Status::passed : Status::failed, outcome.seconds};
      const double rate = images_per_second(folder);
      if (!outcome.ok() || rate == 0) {
        result.status = Status::failed;
        result.note = outcome.timed_out ? "not done in its time" : outcome.last_line();
      } else {
        result.figures = {{"images/s", rate}};
        if (peer > 0)
          result.figures.insert(result.figures.end(),
                                {{"images/s of PyTorch", peer}, {"times", rate / peer}});
        result.note = note;
      }
      report.add(std::move(result));
    }
  }
}

}  // namespace topknot::gpu_check

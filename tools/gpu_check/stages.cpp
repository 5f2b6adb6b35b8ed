#include "tools/gpu_check/stages.h"

#include <filesystem>
#include <map>

#include "nn/base/check.h"

namespace topknot::gpu_check {

void skip_all(const std::string& stage, const std::string& reason, Report& report) {
  static const std::map<std::string, std::vector<std::string>> checks{
      {"tests",
       {"ops and compressors against the CPU", "the same under compute-sanitizer memcheck",
        "the same under compute-sanitizer racecheck", "the same under compute-sanitizer synccheck"}},
      {"nccl", {"every collective exact, 1, 2 and 4 ranks", "2 processes: the weights of 2 threads"}},
      {"kernels", {"selections against a device copy", "selections against torch.topk"}},
      {"train", {"images per second of resnet20, vgg16 and resnet50", "the same against PyTorch"}}};
  for (const std::string& check : checks.at(stage))
    report.add({stage, check, Status::skipped, 0, {}, reason});
}

Result failure(Result result, const Outcome& outcome, const std::string& note) {
  constexpr std::size_t kEnd = 4000;
  result.status = Status::failed;
  result.note = note;
  result.output =
      outcome.output.size() > kEnd ? outcome.output.substr(outcome.output.size() - kEnd) : outcome.output;
  return result;
}

std::string fresh_run_directory(const std::string& out, const std::string& name) {
  const std::string folder = out + "/runs/" + name;
  std::error_code error;
  std::filesystem::remove_all(folder, error);
  if (error) throw UserError(folder + " is of an earlier check and cannot be removed; remove it");
  return folder;
}

EndRecord end_of_run(const std::string& folder) {
  try {
    return read_metrics(folder + "/metrics.jsonl").end.value_or(EndRecord{});
  } catch (const UserError&) {  // the run wrote no metrics, or was killed while it did
    return {};
  }
}

}  // namespace topknot::gpu_check

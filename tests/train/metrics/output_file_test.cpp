// Files of a run directory that are written beside what they replace, and those that are no files.
#include <sys/stat.h>
#include <unistd.h>

#include "nn/base/file.h"
#include "tests/support/test.h"
#include "train/checkpoint/safetensors.h"
#include "train/metrics/metrics.h"
#include "train/metrics/output_file.h"
#include "train/metrics/run_config.h"

using namespace topknot;
namespace fs = std::filesystem;

namespace {

bool refused(const std::string& path, Replace replace, const char* why) {
  return user_error([&] { check_output(path, replace, "choose another name"); }, {path.c_str(), why});
}

bool allowed(const std::string& path, Replace replace) {
  return error_text([&] { check_output(path, replace, ""); }).empty();
}

}  // namespace

TEST_CASE("a file is written through no link, whatever stands beside it") {
  const TempFolder temp;
  temp.write("victim", {'m', 'y'});
  const std::string target = temp.at("table.csv");
  fs::create_symlink(temp.at("victim"), target + ".part-" + std::to_string(getpid()));
  write_file(target, "new");
  CHECK(text_of(target) == "new");
  CHECK(text_of(temp.at("victim")) == "my");

  const NewFile a = create_part_file(target), b = create_part_file(target);
  REQUIRE((a.fd.valid() && b.fd.valid()));
  CHECK(a.path != b.path);
  CHECK(a.path.starts_with(target + ".part-"));
  CHECK_FALSE(create_part_file(temp.at("absent/table.csv")).fd.valid());
}

TEST_CASE("a pipe, a device and a folder in place of a run's file are refused, and never waited for") {
  const TempFolder temp;
  const std::string pipe = temp.at("pipe");
  REQUIRE(mkfifo(pipe.c_str(), 0600) == 0);
  for (const auto& [path, kind] :
       {std::pair(pipe, "a named pipe"), std::pair(std::string("/dev/zero"), "a device"),
        std::pair(temp.str(), "a folder")}) {
    INFO(path);
    CHECK(user_error([&] { read_metrics(path); }, {path, kind}));
    CHECK(user_error([&] { RunConfig config(path); }, {path, kind}));
    CHECK(user_error([&] { GradientsReader reader(path); }, {path, kind}));
  }
}

TEST_CASE("nothing is written in the checkpoints of a run, by whatever name") {
  const TempFolder temp;
  const std::string step = "run/checkpoints/step-000000003/";
  temp.write("run/config.yaml", {});
  temp.write("run/environment.json", {});
  temp.write("project/config.yaml", {});  // not of a run
  temp.write(step + "manifest.json", {});
  temp.write(step + "model.safetensors", {'m'});
  fs::create_directory_symlink(temp.at("run/checkpoints"), temp.at("folder"));
  fs::create_symlink(temp.at(step + "model.safetensors"), temp.at("file"));
  fs::create_directories(temp.at("run/checkpoints/step-000000004.partial"));
  fs::copy(temp.at(step), temp.at("step-copy"));
  for (const std::string& path : std::vector<std::string>{
           step + "model.safetensors", step + "new", step + "sub/new", std::string("run/checkpoints/new"),
           std::string("run/checkpoints/step-000000004.partial/new"), "run/../" + step + "new",
           std::string("folder/new"), std::string("folder/step-000000003/model.safetensors"),
           std::string("file"), std::string("step-copy/new")})
    for (const Replace replace : {Replace::nothing, Replace::reports, Replace::all})
      CHECK(refused(temp.at(path), replace, "lies in the checkpoints of a run"));
  for (const std::string path : {"run/new", "new", "checkpoints/new", "project/checkpoints/new"})
    CHECK(allowed(temp.at(path), Replace::nothing));
}

TEST_CASE("a file that is there is replaced where that is asked for, and a report by a report") {
  const TempFolder temp;
  temp.write("run/config.yaml", {});
  for (const std::string name : {"old.html", "old.csv", "run/notes.csv", "metrics.csv"}) {
    temp.write(name, {'x'});
    CHECK(refused(temp.at(name), Replace::nothing, "exists already; choose another name"));
    CHECK(allowed(temp.at(name), Replace::reports));
    CHECK(allowed(temp.at(name), Replace::all));
  }
  for (const std::string name : {"m.safetensors", "g.npy", "m.pth"}) {
    CHECK(allowed(temp.at(name), Replace::reports));
    temp.write(name, {'x'});
    CHECK(refused(temp.at(name), Replace::reports, "exists already"));
    CHECK(allowed(temp.at(name), Replace::all));
  }
  fs::create_symlink(temp.at("g.npy"), temp.at("link.jsonl"));
  CHECK(refused(temp.at("link.jsonl"), Replace::reports, "exists already"));
  for (const char* path : {"-", "/dev/null"}) CHECK(allowed(path, Replace::nothing));
}

TEST_CASE("no writer replaces a configuration or a file of a run, whatever it may replace else") {
  const TempFolder temp;
  temp.write("run/config.yaml", {});
  temp.write("other", {'x'});
  for (const std::string name :
       {"config.yaml", "metrics.csv", "metrics.jsonl", "environment.json", "gradients.npy",
        "gradients.safetensors", "run.lock", "choices.json", "trace_rank3.json", "auto_profiles.json",
        "bench.json", "layer_density.json", "events.out.tfevents.1"}) {
    INFO(name);
    const std::string path = temp.at("run/" + name), link = temp.at("to_" + name);
    temp.write("run/" + name, {'x'});
    fs::create_symlink(path, link);
    for (const Replace replace : {Replace::nothing, Replace::reports, Replace::all})
      for (const std::string& to : {path, link}) CHECK(refused(to, replace, "a file of a run"));
    fs::remove(path);
    fs::create_symlink(temp.at("other"), path);
    if (name != "config.yaml") CHECK(refused(path, Replace::all, "a file of a run"));
    fs::remove(path);
    temp.write("run/config.yaml", {});
  }
  temp.write("metrics.csv", {'x'});  // beside no configuration
  CHECK(allowed(temp.at("metrics.csv"), Replace::reports));
}

// A run directory belongs to one run at a time, and only what a run wrote is ever replaced.
#include "train/run_directory.h"

#include <sys/stat.h>
#include <unistd.h>

#include "nn/base/file.h"
#include "tests/support/standard_error.h"
#include "tests/train/broken_sample.h"
#include "tests/train/made_up_text.h"
#include "tests/train/resumed_run.h"
#include "train/checkpoint/checkpoint.h"
#include "train/checkpoint/model_file.h"
#include "train/checkpoint/safetensors.h"
#include "train/metrics/metrics.h"
#include "train/metrics/output_file.h"
#include "train/metrics/run_config.h"

using namespace topknot;
using namespace topknot::testing;

namespace {

LoadedConfig config_of(const TempFolder& temp, bool overwrite) {
  auto loaded = load_config("", {"output.dir=" + temp.at("run")});
  loaded.config.output.overwrite = overwrite;
  return loaded;
}

// Every file of the run by its path, but for the lock.
std::map<std::string, std::string> files_of(const std::string& run) {
  std::map<std::string, std::string> files;
  for (const auto& entry : fs::recursive_directory_iterator(run))
    if (entry.is_regular_file() && entry.path().filename() != RunLock::kName)
      files[entry.path().string()] = text_of(entry.path().string());
  return files;
}

const Keys kKeys{"dist.ranks=2", "train.max_steps=12", "train.eval_every=0", "train.stop_after=0"};

bool output_refused(const std::string& path, Replace replace, const char* why) {
  return user_error([&] { check_output(path, replace, "choose another name"); }, {path.c_str(), why});
}

bool output_allowed(const std::string& path, Replace replace) {
  return error_text([&] { check_output(path, replace, ""); }).empty();
}

}  // namespace

TEST_CASE("a run directory is refused while a run holds it, by the name of its process, and free after it") {
  const TempFolder temp;
  const std::string me = "in use by process " + std::to_string(getpid()) + " on ";
  {
    const RunDirectory held = create_run_directory(config_of(temp, false), {});
    const RunDirectory copy = held;
    write_file(held.metrics_csv(), "precious");
    for (const bool overwrite : {false, true})
      CHECK_USER_ERROR(create_run_directory(config_of(temp, overwrite), {}), temp.at("run"), me);
    // Whoever found it free and came second to the lock.
    CHECK_USER_ERROR(RunLock second(temp.at("run")), temp.at("run"), me);
    CHECK(text_of(held.metrics_csv()) == "precious");
    CHECK(("in use by " + running_process(temp.at("run"))).find(me) == 0);
  }
  CHECK(running_process(temp.at("run")).empty());
  CHECK_USER_ERROR(create_run_directory(config_of(temp, false), {}), temp.at("run"), "never overwritten",
                   "output.overwrite");
  CHECK(text_of(temp.at("run/metrics.csv")) == "precious");
  CHECK_NOTHROW(create_run_directory(config_of(temp, true), {}));
}

TEST_CASE("the job token stands in no file of a run, and config.yaml says that there was one") {
  const TempFolder temp;
  const std::string token = "open-sesame";
  const LoadedConfig loaded =
      small_run(temp, {"dist.backend=gloo", "dist.ranks=2", "dist.token=" + token, "train.max_steps=2",
                       "train.profile_steps=1", "output.tensorboard=true"});
  const RunDirectory folder = create_run_directory(loaded, {"train", "dist.token=" + token, "seed=1"});
  const RunData data = load_data(loaded.config);
  const RunInputs inputs{loaded.config, data, folder, true, std::chrono::steady_clock::now()};
  run_ranks("gloo", 2, [&](Communicator& c) { run_rank(inputs, c); });
  export_model(folder.path, temp.at("m.safetensors"));
  int files = 0;
  for (const auto& entry : fs::recursive_directory_iterator(temp.str())) {
    if (!entry.is_regular_file()) continue;
    ++files;
    INFO(entry.path().string());
    CHECK(text_of(entry.path().string()).find(token) == std::string::npos);
  }
  CHECK(files >= 10);
  CHECK(says(text_of(folder.path + "/config.yaml"),
             {"  token: \"\"  # command line; the value is not written, give it again"}));
  CHECK(says(text_of(folder.path + "/environment.json"), {"\"dist.token=(not shown)\"", "\"seed=1\""}));
  CHECK(load_config(folder.path + "/config.yaml", {}).problems.empty());

  // One of an earlier version loses its token when the run goes on.
  std::string text = text_of(folder.path + "/config.yaml");
  const std::string empty = "  token: \"\"";
  write_file(folder.path + "/config.yaml", text.replace(text.find(empty), empty.size(), "  token: " + token));
  keep_config_effective(folder, loaded.config, loaded.origins);
  CHECK_FALSE(contains(text_of(folder.path + "/config.yaml"), token));
}

TEST_CASE("a refused resume changes no file of the run, whichever rank refuses") {
  const MadeUpText text(40);
  const Keys keys = {"data.name=text",   "data.root=" + text.root(), "data.train_size=0",
                     "data.test_size=0", "model.name=lstm_lm",       "model.width=8",
                     "model.layers=1",   "data.sequence_length=10",  "train.max_steps=6",
                     "dist.ranks=2",     "compress.name=topk"};
  const StoppedRun temp(keys, 3);
  const CheckpointStore store(temp.at("run/checkpoints"));
  fs::copy(store.path(3), store.path(4));  // damaged, and so to be set aside
  std::ofstream(store.path(4) + "/manifest.json") << "{}";
  temp.write("run/checkpoints/step-000000005.partial/left_over", {'x'});
  const auto refused = [&](const Keys& more, const char* words) {
    const auto before = files_of(temp.at("run"));
    CHECK(says(start_error(temp, with(keys, with(more, {"resume.data=accept", "train.log_every=7"}))),
               {words}));
    CHECK((files_of(temp.at("run")) == before));
  };
  const TempFolder other;
  fs::copy(text.root(), other.str(), fs::copy_options::recursive);
  std::ofstream(other.at("train.txt"), std::ios::app) << "one more word\n";
  refused({"data.root=" + other.str()}, "encoder.weight");
  refused({"optimizer.lr=0.5"}, "optimizer.lr: 0.5, was");
  // The file of rank 1 alone has other tensors, with the checksum that belongs to it.
  Manifest manifest = store.manifest(3);
  fs::copy_file(store.path(3) + "/" + kModelFile, store.path(3) + "/" + rank_file(1),
                fs::copy_options::overwrite_existing);
  const CheckpointFile model = file_of(manifest, kModelFile);
  for (CheckpointFile& file : manifest.files)
    if (file.name == rank_file(1)) file.bytes = model.bytes, file.checksum = model.checksum;
  std::ofstream(store.path(3) + "/manifest.json") << manifest_text(manifest);
  refused({}, "statistics.rnn");
}

TEST_CASE("overwriting a run removes nothing that the new run begins with") {
  const TempFolder temp;
  const RunDirectory run{create_run_directory(config_of(temp, false), {}).path};
  temp.write("run/metrics.jsonl", {'x'});
  temp.write("run/checkpoints/step-000000005/model.safetensors", {'x'});
  fs::create_symlink(temp.at("run/config.yaml"), temp.at("link.yaml"));
  for (const std::string& file : {temp.at("run/config.yaml"), temp.at("link.yaml")})
    CHECK_USER_ERROR(create_run_directory(config_of(temp, true), {"train", file}), "output.overwrite", file,
                     "begins with");
  LoadedConfig from_weights = config_of(temp, true);
  from_weights.config.model.init_from = temp.at("run/checkpoints/step-000000005/model.safetensors");
  CHECK_USER_ERROR(create_run_directory(from_weights, {}), "output.overwrite", "model.safetensors");
  CHECK(text_of(temp.at("run/metrics.jsonl")) == "x");
  CHECK(text_of(from_weights.config.model.init_from) == "x");
  CHECK_NOTHROW(create_run_directory(config_of(temp, true), {"train", "configs/other.yaml"}));
}

TEST_CASE("a resumed run of another length warns of a learning rate that jumps, unless a key keeps it") {
  const Keys keys = {"dist.ranks=2", "train.max_steps=20", "schedule.name=cosine", "optimizer.lr=0.05",
                     "train.stop_after=0"};
  const StoppedRun temp(keys, 19);
  const auto resumed = [&](const Keys& more, double& rate) {
    const RunCopy copy(temp);
    const StandardError errors;
    start(copy, with(keys, more), true);
    rate = metrics_of(copy).steps.at(19).lr;
    return errors.text();
  };
  double same = 0, longer = 0, kept = 0;
  const std::string jump = "the learning rate goes from ";
  CHECK_FALSE(says(resumed({}, same), {jump}));
  CHECK(says(resumed({"train.max_steps=100"}, longer),
             {jump, "0.00122 in step 19 to 0.0457 in the next", "has now 100 steps", "had 20",
              "schedule.decay_steps=20"}));
  CHECK(longer > 100 * same);
  CHECK_FALSE(says(resumed({"train.max_steps=100", "schedule.decay_steps=20"}, kept), {jump}));
  CHECK(kept == same);
  CHECK_FALSE(says(resumed({"train.max_steps=20"}, kept), {jump}));  // no other length
}

TEST_CASE("overwriting a run removes what a run writes, half files included, and nothing else") {
  const TempFolder temp;
  const RunDirectory run{create_run_directory(config_of(temp, false), {}).path};
  const std::vector<std::string> gone = {"metrics.jsonl",       "metrics.csv",
                                         "metrics.csv.part-77", "gradients.npy",
                                         "auto_profiles.json",  "gradients.safetensors",
                                         "trace_rank0.json",    "gradients.safetensors.part-4",
                                         "trace_rank12.json",   "exchange_profile.json.part-5",
                                         "bench.json",          "checkpoints/step-000000005/model"};
  const std::vector<std::string> kept = {"notes.txt",          "layer_density.json", "exchange_profile.json",
                                         "trace_rank.json",    "my-metrics.csv",     "metrics.csv.bak",
                                         "results/config.yaml"};
  for (const auto* names : {&gone, &kept})
    for (const std::string& name : *names) temp.write("run/" + name, {'x'});
  // With config.yaml, environment.json and the folder of the checkpoints.
  CHECK(run_files(run).size() == gone.size() + 3);
  create_run_directory(config_of(temp, true), {});
  for (const std::string& name : gone) CHECK_FALSE(fs::exists(temp.at("run/" + name)));
  CHECK_FALSE(fs::exists(run.checkpoints()));
  for (const std::string& name : kept) CHECK(text_of(temp.at("run/" + name)) == "x");

  // A user's files among the checkpoints stay.
  for (const char* name :
       {"step-000000005/a", "step-000000009.partial/a", "step-000000007.passed-over-2/a", "mine.pt"})
    temp.write(std::string("run/checkpoints/") + name, {'x'});
  create_run_directory(config_of(temp, true), {});
  CHECK(text_of(temp.at("run/checkpoints/mine.pt")) == "x");
  const fs::directory_iterator left(temp.at("run/checkpoints"));
  CHECK(std::distance(begin(left), end(left)) == 1);
}

TEST_CASE("a run that goes on removes what a killed start left half written, and nothing else") {
  const TempFolder temp;
  const std::string run = create_run_directory(config_of(temp, false), {}).path;
  const std::map<std::string, bool> stays = {{"metrics.csv.part-17", false},
                                             {"config.yaml.part-4294967295", false},
                                             {"gradients.safetensors.part-3", false},
                                             {"metrics.csv", true},
                                             {"notes.part-17", true},
                                             {"metrics.csv.part-final", true}};
  for (const auto& [name, kept] : stays) write_file(run + "/" + name, "x");
  open_run_directory(run);
  for (const auto& [name, kept] : stays) {
    INFO(name);
    CHECK(fs::exists(run + "/" + name) == kept);
  }
}

TEST_CASE("a folder that no run wrote is not overwritten, whatever its files are called") {
  const TempFolder temp;
  temp.write("run/config.yaml", {'m', 'y'});
  temp.write("run/notes.txt", {'x'});
  for (const char* name : {"config.yaml", "gradients.safetensors", "checkpoints"}) {
    fs::rename(temp.at("run/config.yaml"), temp.at("run/own"));
    fs::rename(temp.at("run/own"), temp.at(std::string("run/") + name));
    CHECK_USER_ERROR(create_run_directory(config_of(temp, true), {}), temp.at("run"), name, "no run");
    CHECK(text_of(temp.at(std::string("run/") + name)) == "my");
    CHECK_FALSE(fs::exists(temp.at("run/run.lock")));
    fs::rename(temp.at(std::string("run/") + name), temp.at("run/config.yaml"));
  }
  // Beside files that are in nobody's way a run may be made.
  fs::rename(temp.at("run/config.yaml"), temp.at("run/other.yaml"));
  CHECK_NOTHROW(create_run_directory(config_of(temp, true), {}));
  CHECK(text_of(temp.at("run/other.yaml")) == "my");
}

TEST_CASE("neither a lock nor a copied configuration makes a folder a run, and a half start does") {
  const TempFolder temp;
  create_run_directory(config_of(temp, false), {});
  const auto overwrite = [&] { create_run_directory(config_of(temp, true), {}); };
  temp.write("run/checkpoints/step-000000005/model", {'m', 'y'});
  fs::rename(temp.at("run/environment.json"), temp.at("environment.json"));
  CHECK(user_error(overwrite, {"no run wrote it"}));
  temp.write("run/environment.json", {'{', '}'});
  CHECK(user_error(overwrite, {"no run wrote it"}));
  fs::rename(temp.at("environment.json"), temp.at("run/environment.json"));
  fs::rename(temp.at("run/config.yaml"), temp.at("config.yaml"));
  temp.write("run/config.yaml", {'m', 'y'});
  CHECK(user_error(overwrite, {"no run wrote it"}));
  CHECK(text_of(temp.at("run/checkpoints/step-000000005/model")) == "my");
  fs::remove(temp.at("run/config.yaml"));  // a start that was killed before it wrote one
  CHECK_NOTHROW(overwrite());
  CHECK_FALSE(fs::exists(temp.at("run/checkpoints")));
  fs::remove(temp.at("run/config.yaml"));
  fs::rename(temp.at("run/environment.json"), temp.at("run/environment.json.part-7"));
  CHECK_NOTHROW(overwrite());
  CHECK_FALSE(fs::exists(temp.at("run/environment.json.part-7")));
}

TEST_CASE("what is no run's lock is neither followed nor written nor waited for") {
  const TempFolder temp;
  temp.write("victim", {'m', 'y'});
  fs::create_directory(temp.at("run"));
  const std::string lock = temp.at("run/run.lock");
  const auto refused = [&] {
    CHECK_USER_ERROR(create_run_directory(config_of(temp, true), {}), lock, "no lock of a run");
    CHECK_USER_ERROR(open_run_directory(temp.at("run")), lock, "no lock of a run");
    CHECK(running_process(temp.at("run")).empty());
    CHECK(text_of(temp.at("victim")) == "my");
    fs::remove(lock);
  };
  fs::create_symlink(temp.at("victim"), lock);
  refused();
  fs::create_symlink(temp.at("absent"), lock);
  refused();
  CHECK_FALSE(fs::exists(temp.at("absent")));
  fs::create_hard_link(temp.at("victim"), lock);
  refused();
  temp.write("empty", {});
  fs::create_hard_link(temp.at("empty"), lock);
  refused();
  REQUIRE(mkfifo(lock.c_str(), 0600) == 0);
  refused();
  fs::create_directory(lock);
  refused();
  // One that a run left, or died before it wrote it, or that a power failure left, is taken over.
  for (const std::string& content :
       {std::string("4194304 some host\n"), std::string(), std::string(20, '\0')}) {
    temp.write("run/run.lock", {content.begin(), content.end()});
    CHECK_NOTHROW(RunLock(temp.at("run")));
  }
}

TEST_CASE("a lock whose file was deleted or replaced is lost") {
  const TempFolder temp;
  const RunDirectory run = create_run_directory(config_of(temp, false), {});
  CHECK_NOTHROW(run.lock->check());
  fs::remove(temp.at("run/run.lock"));
  CHECK_USER_ERROR(run.lock->check(), temp.at("run/run.lock"), "is gone");
  const RunLock second(temp.at("run"));
  CHECK_USER_ERROR(run.lock->check(), temp.at("run/run.lock"), "is gone");
  CHECK_NOTHROW(second.check());
  // This process's parent holds none.
  CHECK_USER_ERROR(RunLock::of_parent(temp.at("run")), temp.at("run/run.lock"), "is gone");
}

TEST_CASE("metrics whose file was deleted, moved or replaced end with a message at the next line") {
  for (const char* how : {"deleted", "moved", "replaced"}) {
    INFO(how);
    const TempFolder temp;
    const RunDirectory run = create_run_directory(config_of(temp, false), {});
    MetricsWriter writer(run.metrics_jsonl());
    writer.write(StepRecord{});
    fs::rename(run.path, temp.at("elsewhere"));
    if (how[0] == 'd') fs::remove_all(temp.at("elsewhere"));
    if (how[0] == 'r') temp.write("run/metrics.jsonl", {});
    CHECK_USER_ERROR(writer.write(StepRecord{}), run.metrics_jsonl(), "is gone");
    CHECK_USER_ERROR(writer.bytes(), run.metrics_jsonl(), "is gone");
  }
}

TEST_CASE("status tells a finished run from one that stopped, failed or was killed") {
  const StoppedRun temp(kKeys, 5);
  CHECK(says(status_text(temp.at("run")), {"stopped by train.stop_after", "5 of 12", "images/s", "checkpoint",
                                           "step 5", "train --resume " + temp.at("run")}));
  const std::string metrics = temp.at("run/metrics.jsonl");
  const Metrics stopped = read_metrics(metrics);
  REQUIRE(stopped.stop);
  CHECK(text_of(temp.at("run/metrics.csv")).find("\n5,") != std::string::npos);
  CHECK(stopped.stop->step == 5);
  // A killed run has no `stop` record: that of an earlier start does not count.
  MetricsWriter(metrics).write(StartRecord{5, 12, 64, "2026-01-01T00:00:00Z", "", {}});
  CHECK(says(status_text(temp.at("run")), {"not running", "killed"}));
  start(temp, kKeys, true);
  CHECK(says(status_text(temp.at("run")), {"finished", "12 of 12", "after step 12: test loss", "step 12"}));
  CHECK(status_text(temp.at("run")).find("--resume") == std::string::npos);
  CHECK(read_metrics(metrics).starts.size() == 2);
}

TEST_CASE("status reads a run of topknot.torch, which lacks keys, epochs and a last step") {
  const TempFolder temp;
  fs::create_directory(temp.at("run"));
  std::ofstream(temp.at("run/config.yaml"))
      << "model:\n  name: Net\ncompress:\n  name: Own\ndist:\n  ranks: 2\n";
  std::ofstream(temp.at("run/metrics.jsonl"))
      << R"({"event":"start","rank":0,"step":0,"time":"2026-01-01T00:00:00Z","backend":"gloo"})"
      << "\n"
      << R"({"event":"step","rank":0,"step":1,"epoch":null,"loss":2.5,"images_per_second":64})"
      << "\n";
  CHECK(says(status_text(temp.at("run")),
             {": Net, Own, 2 ranks by gloo\n", "step        1, loss 2.5\n", "64 images/s"}));
}

TEST_CASE("status has the error that ended a run, the process of one that goes on, or that there is none") {
  const TempFolder temp, other;
  CHECK_FALSE(start_error(temp,
                          with(kKeys, {"data.name=broken_sample", "data.batch_size=2", "train.max_skips=1",
                                       "train.max_steps=40"}),
                          false)
                  .empty());
  CHECK(says(status_text(temp.at("run")), {"failed at", "training has diverged"}));
  CHECK(text_of(temp.at("run/metrics.csv")).find("step,epoch,") == 0);  // what there is, as a table too
  CHECK_ERROR(status_text(other.str()), "no run directory");
  const RunDirectory running = create_run_directory(small_run(other, kKeys), {});
  CHECK(
      says(status_text(running.path), {"running, process " + std::to_string(getpid()), "none was made yet"}));
  const char* const words[] = {"status", "a", "b"};
  CHECK_ERROR(status_command(3, words), "one run directory");
}

TEST_CASE("status of local steps has the speed of whole rounds") {
  const TempFolder temp;
  const RunDirectory folder =
      create_run_directory(small_run(temp, with(kKeys, {"exchange.every=30", "compress.name=topk"})), {});
  MetricsWriter metrics(folder.metrics_jsonl());
  metrics.write(StartRecord{0, 240, 64, "2026-01-01T00:00:00Z", "", {}});
  StepRecord step;
  for (step.step = 1; step.step <= 125;
       ++step.step) {  // a round takes 3 s: 29 steps of 0.01 s and one of 2.71 s
    const double seconds = step.step % 30 == 0 ? 2.71 : 0.01;
    step.time_s += seconds, step.images_per_second = 8 / seconds;
    metrics.write(step);
  }
  CHECK(says(status_text(folder.path), {"80 images/s, 0:1"}));
}

TEST_CASE("status counts a checkpoint's files alone and shows words of the files as they are, in one line") {
  const StoppedRun temp(kKeys, 5);
  fs::create_directory(temp.at("run/checkpoints/step-000000005/mine"));
  const std::string before = status_text(temp.at("run"));
  CHECK(before.find("PB") == std::string::npos);
  MetricsWriter(temp.at("run/metrics.jsonl"))
      .write(StopRecord{5, true, "a\nstate       finished\x1b[2J", "2026-01-01T00:00:00Z"});
  CHECK(says(status_text(temp.at("run")), {"failed at", "a\\nstate       finished\\x1b[2J"}));
}

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
    CHECK_USER_ERROR(read_metrics(path), path, kind);
    CHECK_USER_ERROR(RunConfig config(path), path, kind);
    CHECK_USER_ERROR(GradientsReader reader(path), path, kind);
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
      CHECK(output_refused(temp.at(path), replace, "lies in the checkpoints of a run"));
  for (const std::string path : {"run/new", "new", "checkpoints/new", "project/checkpoints/new"})
    CHECK(output_allowed(temp.at(path), Replace::nothing));
}

TEST_CASE("a file that is there is replaced where that is asked for, and a report by a report") {
  const TempFolder temp;
  temp.write("run/config.yaml", {});
  for (const std::string name : {"old.html", "old.csv", "run/notes.csv", "metrics.csv"}) {
    temp.write(name, {'x'});
    CHECK(output_refused(temp.at(name), Replace::nothing, "exists already; choose another name"));
    CHECK(output_allowed(temp.at(name), Replace::reports));
    CHECK(output_allowed(temp.at(name), Replace::all));
  }
  for (const std::string name : {"m.safetensors", "g.npy", "m.pth"}) {
    CHECK(output_allowed(temp.at(name), Replace::reports));
    temp.write(name, {'x'});
    CHECK(output_refused(temp.at(name), Replace::reports, "exists already"));
    CHECK(output_allowed(temp.at(name), Replace::all));
  }
  fs::create_symlink(temp.at("g.npy"), temp.at("link.jsonl"));
  CHECK(output_refused(temp.at("link.jsonl"), Replace::reports, "exists already"));
  for (const char* path : {"-", "/dev/null"}) CHECK(output_allowed(path, Replace::nothing));
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
      for (const std::string& to : {path, link}) CHECK(output_refused(to, replace, "a file of a run"));
    fs::remove(path);
    fs::create_symlink(temp.at("other"), path);
    if (name != "config.yaml") CHECK(output_refused(path, Replace::all, "a file of a run"));
    fs::remove(path);
    temp.write("run/config.yaml", {});
  }
  temp.write("metrics.csv", {'x'});  // beside no configuration
  CHECK(output_allowed(temp.at("metrics.csv"), Replace::reports));
}

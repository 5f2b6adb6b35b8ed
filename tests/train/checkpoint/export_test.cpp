#include "train/checkpoint/model_file.h"

#include <cstring>
#include <filesystem>
#include <fstream>

#include "tests/support/error_text.h"
#include "tests/support/files.h"
#include "tests/train/small_run.h"
#include "train/checkpoint/checkpoint.h"
#include "train/checks.h"

namespace topknot::testing {
namespace {

namespace fs = std::filesystem;

int command(std::vector<const char*> words) {
  words.insert(words.begin(), "export");
  return export_command(static_cast<int>(words.size()), words.data());
}

}  // namespace

TEST_CASE("an exported model has a checkpoint's bits, says what it is, and begins another run") {
  const TempFolder temp;
  const LoadedConfig loaded =
      small_run(temp, {"model.name=resnet20", "data.image_size=8", "data.train_size=32", "train.max_steps=6",
                       "train.checkpoint_keep=3", "train.eval_every=0.5", "model.freeze=stem"});
  const RunOutcome outcome = run_in_directory(loaded);
  const std::string run = temp.at("run"), to = temp.at("m.safetensors");
  const CheckpointStore store(run + "/checkpoints");
  REQUIRE(store.steps().size() >= 2);
  export_model(run, to);
  const SafetensorsFile file = SafetensorsFile::read(to);
  CHECK(file.metadata().at("format") == "pt");
  CHECK(file.metadata().at("model") == "resnet20");
  CHECK(file.metadata().at("step") == "6");
  CHECK(file.metadata().count("topknot") == 1);

  // The configuration in the file is the run's, as far as it describes the model.
  std::ofstream(temp.at("again.yaml")) << file.metadata().at("config");
  const LoadedConfig again = load_config(temp.at("again.yaml"), {});
  CHECK(again.problems.empty());
  CHECK(again.config.model.freeze == std::vector<std::string>{"stem"});
  CHECK(again.config.data.image_size == 8);
  CHECK(text_of(to).find(temp.str()) == std::string::npos);  // no path
  CHECK(file.metadata().at("config").find("output") == std::string::npos);

  LoadedConfig next = loaded;
  next.config.model.init_from = to;
  const auto model = build_model(next.config, *load_data(next.config).train);
  CHECK(checksum_hex(model->store.arena().host_weights()) == outcome.parameter_checksum);
  const TensorView& mean = *file.find("stem.bn.running_mean");
  CHECK(std::memcmp(mean.data.data(), model->store.buffers()[0]->values.data(), mean.data.size()) == 0);

  // Earlier steps, by number and by the checkpoint's directory.
  const std::int64_t first = store.steps().front();
  export_model(run, temp.at("a.safetensors"), first);
  CHECK(SafetensorsFile::read(temp.at("a.safetensors")).metadata().at("step") == std::to_string(first));
  export_model(store.path(first), temp.at("b.safetensors"));
  CHECK(text_of(temp.at("a.safetensors")) == text_of(temp.at("b.safetensors")));
  CHECK(text_of(temp.at("a.safetensors")) != text_of(to));
}

TEST_CASE("an export replaces a file where it is told to, and never one of a checkpoint") {
  const TempFolder temp;
  run_in_directory(small_run(temp, {"train.max_steps=2"}));
  const std::string run = temp.at("run"), to = temp.at("m.safetensors");
  const std::string model = CheckpointStore(run + "/checkpoints").path(2) + "/model.safetensors";
  const std::string before = text_of(model);
  fs::create_symlink(model, temp.at("link"));
  for (const std::string& path : {model, temp.at("link"), run + "/checkpoints/x.safetensors"})
    CHECK(user_error([&] { export_model(run, path, {}, true); },
                     {path.c_str(), "in the checkpoints of a run"}));
  CHECK(text_of(model) == before);
  std::ofstream(to) << "precious";
  CHECK(user_error([&] { export_model(run, to); }, {to.c_str(), "exists already", "--overwrite"}));
  CHECK(text_of(to) == "precious");
  CHECK(command({run.c_str(), "--to", to.c_str(), "--overwrite"}) == 0);
  CHECK(SafetensorsFile::read(to).metadata().at("step") == "2");
  // Another name of a checkpoint's file gets a file of its own.
  fs::remove(to);
  fs::create_hard_link(model, to);
  export_model(run, to, {}, true);
  CHECK(text_of(to) != before);
  CHECK(text_of(model) == before);
}

TEST_CASE("what cannot be exported is refused, and no file is left") {
  const TempFolder temp;
  run_in_directory(small_run(temp, {"train.max_steps=2"}));
  const std::string run = temp.at("run"), to = temp.at("m.safetensors");
  CHECK(user_error([&] { export_model(temp.at("no"), to); }, {temp.at("no"), "no checkpoint"}));
  CHECK(user_error([&] { export_model(run, to, 7); }, {run, "no checkpoint of step 7; there are 2"}));
  CHECK(user_error([&] { export_model(run, temp.at("no/m.safetensors")); },
                   {"no/m.safetensors", "No such file"}));
  CHECK(user_error([&] { command({}); }, {"RUN is missing", "train export RUN --to FILE"}));
  CHECK(user_error([&] { command({run.c_str()}); }, {"--to is missing"}));
  CHECK(user_error([&] { command({run.c_str(), "--too", "x"}); }, {"train export", "--too"}));
  const std::string one = CheckpointStore(run + "/checkpoints").path(2), copy = run + "/checkpoints/copy";
  CHECK(user_error([&] { export_model(one, to, 1); }, {one, "the checkpoint of step 2", "--step 1"}));
  fs::copy(one, copy);
  CHECK(user_error([&] { export_model(copy, to); }, {copy, "step-000001200"}));
  fs::remove_all(copy);
  const std::string model = one + "/model.safetensors";
  std::string bytes = text_of(model);
  bytes[bytes.size() - 1] ^= 1;
  std::ofstream(model, std::ios::binary) << bytes;
  CHECK(user_error([&] { export_model(run, to); }, {"model.safetensors"}));
  CHECK_FALSE(fs::exists(to));
}

}  // namespace topknot::testing

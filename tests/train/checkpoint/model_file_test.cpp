#include "train/checkpoint/model_file.h"

#include "nn/models/model.h"
#include "tests/train/model_copy.h"
#include "tests/train/small_run.h"
#include "train/checkpoint/checkpoint.h"
#include "train/checks.h"

namespace topknot::testing {
namespace {

struct Model {
  explicit Model(const std::string& name, std::int64_t outputs = 10, std::uint64_t seed = 1) {
    ModelOptions options;
    options.input = {3, 8, 8}, options.outputs = outputs, options.set("hidden", std::vector<int>{4});
    module = make_model(name, store, options);
    store.build([](const Parameter& p) { return p.shape().rank() > 1; }, seed);
  }
  ParameterStore store;
  ModulePtr module;
};

SafetensorsFile file_of(Model& model) {
  const ModelCopy copy = copy_model(model.store);
  return as_file(model_tensors(model.store, copy));
}

int command(std::vector<const char*> words) {
  words.insert(words.begin(), "export");
  return export_command(static_cast<int>(words.size()), words.data());
}

}  // namespace

TEST_CASE("a model's tensors are its parameters in plain order, then its statistics, by name") {
  Model model("resnet20");
  for (const auto& buffer : model.store.buffers())
    std::iota(buffer->values.begin(), buffer->values.end(), 0.25f);
  const SafetensorsFile file = file_of(model);
  const TensorView *stem = file.find("stem.conv.weight"), *mean = file.find("stem.bn.running_mean");
  REQUIRE(stem);
  REQUIRE(mean);
  CHECK(stem->shape == std::vector<std::int64_t>{16, 3, 3, 3});
  CHECK(stem->dtype == "F32");
  CHECK(std::memcmp(stem->data.data(), model.store.parameters()[0]->value(), stem->data.size()) == 0);
  CHECK(file.find("fc.weight")->shape == std::vector<std::int64_t>{10, 64});
  float third = 0;
  std::memcpy(&third, mean->data.data() + 8, 4);
  CHECK(third == 2.25f);
  CHECK(file.tensors().size() == model.store.parameters().size() + model.store.buffers().size());
}

TEST_CASE("a model that is loaded has the file's bits, parameters and statistics") {
  Model from("resnet20"), to("resnet20", 10, 2);
  from.store.buffers()[3]->values[5] = 0.125f;
  REQUIRE_FALSE((copy_model(from.store) == copy_model(to.store)));
  load_model(to.store, file_of(from));
  CHECK((copy_model(from.store) == copy_model(to.store)));
}

TEST_CASE("every tensor that does not fit a model is listed in one message, and nothing is changed") {
  Model small("mlp"), other("mlp", 7);
  const ModelCopy copy = copy_model(small.store);
  std::vector<TensorView> tensors = model_tensors(small.store, copy);
  tensors[0].name = "evil\x1b[31m";  // for hidden1.weight
  tensors[1].dtype = "I32";          // hidden1.bias
  const auto file = as_file(tensors);
  const ModelCopy before = copy_model(other.store);
  CHECK(user_error([&] { load_model(other.store, file); },
                   {"m.safetensors", "missing in the file:\n    hidden1.weight [4, 192]",
                    "not in the model:\n    \"evil\\u001b[31m\" [4, 192]",
                    "hidden1.bias: [4] I32 in the file, [4] F32 in the model",
                    "output.weight: [10, 4] F32 in the file, [7, 4] F32 in the model", "output.bias: [10]",
                    "model.reinit"}));
  CHECK((copy_model(other.store) == before));
}

TEST_CASE("one of several files with a model's weights is said to be that") {
  Model model("mlp");
  const ModelCopy copy = copy_model(model.store);
  std::vector<TensorView> some = model_tensors(model.store, copy);
  some.pop_back();
  const auto text = [&](const char* where) {
    return error_text([&] { load_model(model.store, as_file(some, where)); });
  };
  CHECK(says(text("d/model-00001-of-00012.safetensors"), {"one of 12 files", "max_shard_size"}));
  for (const char* whole : {"d/model-00001-of-00001.safetensors", "d/model.safetensors"})
    CHECK(text(whole).find("files that hold") == std::string::npos);
}

TEST_CASE("weights and statistics that are not finite are refused by name, with their number and the first") {
  Model from("resnet20"), to("resnet20", 10, 2);
  const ModelCopy before = copy_model(to.store);
  Parameter& fc = *from.store.parameters()[from.store.parameters().size() - 2];
  REQUIRE(fc.name() == "fc.weight");
  fc.value()[17] = std::numeric_limits<float>::quiet_NaN();
  fc.value()[639] = -std::numeric_limits<float>::infinity();
  Buffer& variance = *from.store.buffers()[1];
  variance.values[0] = std::numeric_limits<float>::infinity();
  CHECK(user_error([&] { load_model(to.store, file_of(from)); },
                   {"m.safetensors", "fc.weight: 2 of 640 values are NaN or infinite, the first at index 17",
                    (variance.name + ": 1 of 16 values is NaN or infinite, the first at index 0").c_str(),
                    "model.reinit"}));
  CHECK((copy_model(to.store) == before));
  CHECK_NOTHROW(load_model(to.store, file_of(from), {"fc.weight", variance.name}));
}

TEST_CASE("tensors that are to be initialised anew keep their values, whatever the file has") {
  Model ten("mlp"), seven("mlp", 7, 2), same("mlp", 10, 2);
  const ModelCopy before = copy_model(seven.store);
  load_model(seven.store, file_of(ten), {"output"});
  const auto weights = [](Model& model, std::size_t index) {
    const Parameter& p = *model.store.parameters()[index];
    return std::vector<float>(p.value(), p.value() + p.numel());
  };
  CHECK(weights(seven, 0) == weights(ten, 0));
  const Parameter& output = *seven.store.parameters()[2];
  CHECK(std::equal(output.value(), output.value() + output.numel(),
                   before.weights.begin() + static_cast<std::ptrdiff_t>(output.offset())));
  load_model(same.store, file_of(ten), {"out*.w*"});
  CHECK_FALSE(weights(same, 2) == weights(ten, 2));
  CHECK(weights(same, 3) == weights(ten, 3));
  // Without the part that is made anew, the file serves too.
  const ModelCopy copy = copy_model(ten.store);
  std::vector<TensorView> body = model_tensors(ten.store, copy);
  body.resize(2);
  load_model(seven.store, as_file(body), {"output"});
  CHECK(user_error([&] { load_model(ten.store, file_of(ten), {"fc"}); },
                   {"model.reinit", "'fc' matches nothing", "hidden1.weight, hidden1.bias, output.weight"}));
}

TEST_CASE("a pattern matches a name or what stands before one of its dots") {
  CHECK(matches_any({"fc"}, "fc.weight"));
  CHECK(matches_any({"fc.weight"}, "fc.weight"));
  CHECK(matches_any({"fc.*"}, "fc.weight"));
  CHECK(matches_any({"*"}, "stage1.block1.1.conv.weight"));
  CHECK(matches_any({"stage[12]"}, "stage1.block1.1.conv.weight"));
  CHECK(matches_any({"*.bn"}, "stage1.block1.1.bn.gamma"));
  CHECK_FALSE(matches_any({"f"}, "fc.weight"));
  CHECK_FALSE(matches_any({"weight"}, "fc.weight"));
  CHECK_FALSE(matches_any({"stage1"}, "stage10.block1"));
  CHECK_FALSE(matches_any({""}, "fc.weight"));
  CHECK(matches_any({"conv", "fc"}, "fc.weight"));
  CHECK_FALSE(matches_any({}, "fc.weight"));
}

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
  CHECK(again.config.data.get<int>(option::image_size) == 8);
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
  const std::string config = text_of(run + "/config.yaml");
  fs::create_symlink(run + "/config.yaml", temp.at("config.safetensors"));
  CHECK(user_error([&] { export_model(run, temp.at("config.safetensors"), {}, true); }, {"a file of a run"}));
  CHECK(user_error([&] { export_model(run, run + "/config.yaml", {}, true); }, {"a file of a run"}));
  CHECK(user_error([&] { export_model(run, temp.at("m.pth")); }, {"m.pth", "scripts/convert-pth"}));
  CHECK_FALSE(fs::exists(temp.at("m.pth")));
  CHECK(text_of(run + "/config.yaml") == config);
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
  const std::string run = temp.at("run"), to = temp.at("m.safetensors"), copy = run + "/checkpoints/copy",
                    one = CheckpointStore(run + "/checkpoints").path(2), model = one + "/model.safetensors";
  CHECK(user_error([&] { export_model(temp.at("no"), to); }, {temp.at("no"), "no checkpoint"}));
  CHECK(user_error([&] { export_model(run, to, 7); }, {run, "no checkpoint of step 7; there are 2"}));
  CHECK(user_error([&] { export_model(run, temp.at("no/m.safetensors")); },
                   {"no/m.safetensors", "No such file"}));
  CHECK(user_error([&] { command({}); }, {"RUN is missing", "train export RUN --to FILE"}));
  CHECK(user_error([&] { command({run.c_str()}); }, {"--to is missing"}));
  CHECK(user_error([&] { command({run.c_str(), "--too", "x"}); }, {"train export", "--too"}));
  CHECK(user_error([&] { export_model(one, to, 1); }, {one, "the checkpoint of step 2", "--step 1"}));
  fs::copy(one, copy);
  CHECK(user_error([&] { export_model(copy, to); }, {copy, "step-000001200"}));
  fs::remove_all(copy);
  std::string bytes = text_of(model);
  bytes.back() ^= 1;
  std::ofstream(model, std::ios::binary) << bytes;
  CHECK(user_error([&] { export_model(run, to); }, {"model.safetensors"}));
  CHECK_FALSE(fs::exists(to));
}

}  // namespace topknot::testing

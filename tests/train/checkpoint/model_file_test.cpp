#include "train/checkpoint/model_file.h"

#include "nn/models/model.h"
#include "tests/train/model_copy.h"
#include "tests/train/small_run.h"
#include "train/checkpoint/checkpoint.h"
#include "train/checkpoint/model_names.h"
#include "train/checks.h"

namespace topknot::testing {
namespace {

ModelOptions images(std::int64_t outputs = 10) {
  ModelOptions options;
  options.input = {3, 8, 8}, options.outputs = outputs, options.set("hidden", std::vector<int>{4});
  return options;
}
ModelOptions small(const std::string& name) {
  if (name != "gpt" && name != "llama") return images();
  ModelOptions options;
  options.input = {4, 1, 1}, options.outputs = 11;
  options.set("layers", 2), options.set("width", 8), options.set("heads", 4), options.set("context", 6);
  if (name == "llama") options.set("kv_heads", 2), options.set("feed_forward", 12);
  return options;
}
// As lab/torch-fixtures makes them.
ModelOptions of_fixture(const std::string& name) {
  ModelOptions options = small(name);
  options.input = {7, 1, 1}, options.outputs = 13, options.set("width", 16), options.set("context", 8);
  if (name == "llama") options.set("feed_forward", 24);
  options.dropout = 0;
  return options;
}

struct Model {
  explicit Model(const std::string& name, std::uint64_t seed = 1) : Model(name, small(name), seed) {}
  Model(const std::string& name, const ModelOptions& options, std::uint64_t seed = 1) {
    module = make_model(name, store, options);
    store.build([](const Parameter& p) { return p.shape().rank() > 1; }, seed);
  }
  ParameterStore store;
  ModulePtr module;
};

// A file's tensors in the order of their names, as transformers writes them.
std::vector<TensorView> sorted(std::vector<TensorView> tensors) {
  std::ranges::sort(tensors, {}, &TensorView::name);
  return tensors;
}

template <class T>
std::vector<T> elements(const TensorView& tensor) {
  std::vector<T> values(tensor.data.size() / sizeof(T));
  std::memcpy(values.data(), tensor.data.data(), tensor.data.size());
  return values;
}
std::vector<float> floats(const TensorView& tensor) {
  return elements<float>(tensor);
}

SafetensorsFile fixture(const std::string& name) {
  return SafetensorsFile::read(TOPKNOT_SOURCE_DIR "/tests/train/fixtures/" + name + ".safetensors");
}

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
  Model from("resnet20"), to("resnet20", 2);
  from.store.buffers()[3]->values[5] = 0.125f;
  REQUIRE_FALSE((copy_model(from.store) == copy_model(to.store)));
  load_model(to.store, file_of(from));
  CHECK((copy_model(from.store) == copy_model(to.store)));
}

TEST_CASE("every tensor that does not fit a model is listed in one message, and nothing is changed") {
  Model small("mlp"), other("mlp", images(7));
  const ModelCopy copy = copy_model(small.store);
  std::vector<TensorView> tensors = model_tensors(small.store, copy);
  tensors[0].name = "evil\x1b[31m";  // for hidden1.weight
  tensors[1].dtype = "I32";          // hidden1.bias
  const auto file = as_file(tensors);
  const ModelCopy before = copy_model(other.store);
  CHECK_USER_ERROR(
      load_model(other.store, file), "m.safetensors", "missing in the file:\n    hidden1.weight [4, 192]",
      "not in the model:\n    \"evil\\u001b[31m\" [4, 192]",
      "hidden1.bias: [4] I32 in the file, [4] F32 in the model",
      "output.weight: [10, 4] F32 in the file, [7, 4] F32 in the model", "output.bias: [10]", "model.reinit");
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
  Model from("resnet20"), to("resnet20", 2);
  const ModelCopy before = copy_model(to.store);
  Parameter& fc = *from.store.parameters()[from.store.parameters().size() - 2];
  REQUIRE(fc.name() == "fc.weight");
  fc.value()[17] = std::numeric_limits<float>::quiet_NaN();
  fc.value()[639] = -std::numeric_limits<float>::infinity();
  Buffer& variance = *from.store.buffers()[1];
  variance.values[0] = std::numeric_limits<float>::infinity();
  CHECK_USER_ERROR(load_model(to.store, file_of(from)), "m.safetensors",
                   "fc.weight: 2 of 640 values are NaN or infinite, the first at index 17",
                   variance.name + ": 1 of 16 values is NaN or infinite, the first at index 0",
                   "model.reinit");
  CHECK((copy_model(to.store) == before));
  CHECK_NOTHROW(load_model(to.store, file_of(from), {"fc.weight", variance.name}));
}

TEST_CASE("tensors that are to be initialised anew keep their values, whatever the file has") {
  Model ten("mlp"), seven("mlp", images(7), 2), same("mlp", 2);
  const ModelCopy before = copy_model(seven.store);
  load_model(seven.store, file_of(ten), {"output"});
  const auto weights = [](Model& model, std::size_t index) {
    const Parameter& p = *model.store.parameters()[index];
    return std::vector<float>(p.value(), p.value() + p.numel());
  };
  CHECK(weights(seven, 0) == weights(ten, 0));
  const Parameter& output = *seven.store.parameters()[2];
  CHECK(
      std::equal(output.value(), output.value() + output.numel(), before.weights.begin() + output.offset()));
  load_model(same.store, file_of(ten), {"out*.w*"});
  CHECK_FALSE(weights(same, 2) == weights(ten, 2));
  CHECK(weights(same, 3) == weights(ten, 3));
  // Without the part that is made anew, the file serves too.
  const ModelCopy copy = copy_model(ten.store);
  std::vector<TensorView> body = model_tensors(ten.store, copy);
  body.resize(2);
  load_model(seven.store, as_file(body), {"output"});
  CHECK_USER_ERROR(load_model(ten.store, file_of(ten), {"fc"}), "model.reinit", "'fc' matches nothing",
                   "hidden1.weight, hidden1.bias, output.weight");
}

TEST_CASE("a pattern matches a name or what stands before one of its dots") {
  for (const char* pattern : {"fc", "fc.weight", "fc.*", "*", "f[bc]"})
    CHECK(matches_any({pattern}, "fc.weight"));
  for (const char* pattern : {"f", "weight", "", "fc.w"}) CHECK_FALSE(matches_any({pattern}, "fc.weight"));
  for (const char* pattern : {"*", "stage[12]", "*.conv"})
    CHECK(matches_any({pattern}, "stage1.block1.1.conv.weight"));
  CHECK_FALSE(matches_any({"stage1"}, "stage10.block1"));
  CHECK(matches_any({"conv", "fc"}, "fc.weight"));
  CHECK_FALSE(matches_any({}, "fc.weight"));
}

TEST_CASE("an exported model has a checkpoint's bits, and says what it is") {
  const TempFolder temp;
  const LoadedConfig loaded =
      small_run(temp, {"model.name=resnet20", "data.image_size=8", "data.train_size=32", "train.max_steps=6",
                       "train.checkpoint_keep=3", "train.eval_every=0.5", "model.freeze=stem"});
  run_in_directory(loaded);
  const std::string run = temp.at("run"), to = temp.at("m.safetensors");
  const CheckpointStore store(run + "/checkpoints");
  REQUIRE(store.steps().size() >= 2);
  export_model(run, to);
  const SafetensorsFile file = SafetensorsFile::read(to);
  CHECK(file.metadata().at("format") == "pt");
  CHECK(file.metadata().at("model") == "resnet20");
  CHECK(file.metadata().at("step") == "6");
  CHECK(file.metadata().count("topknot") == 1);
  const SafetensorsFile saved = SafetensorsFile::read(store.path(6) + "/model.safetensors");
  CHECK(file.tensors().size() == saved.tensors().size());
  for (const TensorView& tensor : saved.tensors())
    CHECK(std::ranges::equal(file.find(tensor.name)->data, tensor.data));

  // The configuration in the file is the run's, as far as it describes the model.
  std::ofstream(temp.at("again.yaml")) << file.metadata().at("config");
  const LoadedConfig again = load_config(temp.at("again.yaml"), {});
  CHECK(again.problems.empty());
  CHECK(again.config.model.freeze == std::vector<std::string>{"stem"});
  CHECK(again.config.data.get<int>(option::image_size) == 8);
  CHECK(text_of(to).find(temp.str()) == std::string::npos);  // no path
  CHECK(file.metadata().at("config").find("output") == std::string::npos);

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
  CHECK_USER_ERROR(export_model(run, model, {}, true), model, "in the checkpoints of a run");
  CHECK_USER_ERROR(export_model(run, temp.at("m.pth")), "m.pth", "scripts/convert-pth");
  CHECK_FALSE(fs::exists(temp.at("m.pth")));
  std::ofstream(to) << "precious";
  CHECK_USER_ERROR(export_model(run, to), to, "exists already", "--overwrite");
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
  CHECK_USER_ERROR(export_model(temp.at("no"), to), temp.at("no"), "no checkpoint");
  CHECK_USER_ERROR(export_model(run, to, 7), run, "no checkpoint of step 7; there are 2");
  CHECK_USER_ERROR(export_model(run, temp.at("no/m.safetensors")), "no/m.safetensors", "No such file");
  CHECK_USER_ERROR(command({}), "RUN is missing", "train export RUN --to FILE");
  CHECK_USER_ERROR(command({run.c_str()}), "--to is missing");
  CHECK_USER_ERROR(command({run.c_str(), "--too", "x"}), "train export", "--too");
  CHECK_USER_ERROR(export_model(one, to, 1), one, "the checkpoint of step 2", "--step 1");
  fs::copy(one, copy);
  CHECK_USER_ERROR(export_model(copy, to), copy, "step-000001200");
  fs::remove_all(copy);
  std::string bytes = text_of(model);
  bytes.back() ^= 1;
  std::ofstream(model, std::ios::binary) << bytes;
  CHECK_USER_ERROR(export_model(run, to), "model.safetensors");
  CHECK_FALSE(fs::exists(to));
}

TEST_CASE("files of the transformers package: PyTorch's loss and gradients, and back bit for bit") {
  for (const std::string name : {"gpt", "llama"}) {
    const std::string theirs = name == "gpt" ? "gpt2" : "llama";
    INFO(theirs);
    Model model(name, of_fixture(name));
    const SafetensorsFile file = fixture(theirs), expected = fixture(theirs + "_loss");
    load_model(model.store, file);

    const TensorView& ids = *expected.find("ids");
    const std::vector<std::int64_t> tokens = elements<std::int64_t>(ids);
    const std::int64_t batch = ids.shape[0], length = ids.shape[1], steps = length - 1;
    std::vector<float> x;
    std::vector<std::int32_t> next;  // step by step
    for (std::int64_t b = 0; b < batch; ++b)
      for (std::int64_t t = 0; t < steps; ++t) x.push_back(static_cast<float>(tokens[b * length + t]));
    for (std::int64_t t = 0; t < steps; ++t)
      for (std::int64_t b = 0; b < batch; ++b)
        next.push_back(static_cast<std::int32_t>(tokens[b * length + t + 1]));
    const Variable loss = model.module->loss(Variable(Tensor::from(x, {batch, steps, 1, 1})), next, 0, {});
    CHECK(loss.value().data()[0] == Approx(elements<double>(*expected.find("loss"))[0]).epsilon(1e-6));

    backward(loss);
    REQUIRE(model.store.arena().zero_unwritten_gradients().empty());
    std::vector<TensorView> ours;
    for (const auto& p : model.store.parameters())
      ours.push_back(
          {p->name(), "F32", dimensions(p->shape()), std::as_bytes(std::span(p->gradient(), p->numel()))});
    const NamedTensors gradients = to_hugging_face(ours);
    CHECK(gradients.tensors.size() == file.tensors().size());
    for (const TensorView& gradient : gradients.tensors) {
      INFO(gradient.name);
      const TensorView* recorded = expected.find("gradient." + gradient.name);
      REQUIRE(recorded);
      CHECK(gradient.shape == recorded->shape);
      const std::vector<float> values = floats(gradient), wanted = floats(*recorded);
      REQUIRE(values.size() == wanted.size());
      for (std::size_t i = 0; i < wanted.size(); ++i)
        CHECK(values[i] == Approx(wanted[i]).epsilon(1e-5).margin(2e-6));
    }

    const ModelCopy copy = copy_model(model.store);
    const std::vector<TensorView> own = model_tensors(model.store, copy);
    const NamedTensors written = to_hugging_face(own);
    CHECK(written.tensors.size() == file.tensors().size());
    for (const TensorView& tensor : written.tensors) {
      INFO(tensor.name);
      const TensorView* read = file.find(tensor.name);
      REQUIRE(read);
      CHECK(tensor.shape == read->shape);
      CHECK(std::ranges::equal(tensor.data, read->data));
    }
  }
}

TEST_CASE("GPT-2's file is read without a prefix, with masks and a second head") {
  Model model("gpt"), to("gpt", 2), bare("gpt", 3), nano("gpt", 4);
  const ModelCopy copy = copy_model(model.store);
  const std::vector<TensorView> ours = model_tensors(model.store, copy);
  const NamedTensors theirs = to_hugging_face(ours);
  const std::vector<float> mask(36, 1.0f);
  const auto add_masks = [&](std::vector<TensorView> tensors) {
    tensors.push_back({"h.0.attn.bias", "F32", {1, 1, 6, 6}, std::as_bytes(std::span(mask))});
    tensors.push_back({"h.1.attn.masked_bias", "F32", {1}, std::as_bytes(std::span(mask).first(1))});
    return tensors;
  };
  std::vector<TensorView> without = theirs.tensors;
  for (TensorView& tensor : without) tensor.name = tensor.name.substr(std::string("transformer.").size());
  load_model(bare.store, as_file(sorted(add_masks(without))));
  CHECK(copy_model(bare.store).weights == copy.weights);

  // nanoGPT's: linear layers' order, and the tied head once more.
  std::vector<TensorView> linear = ours;
  for (TensorView& tensor : linear) tensor.name = "transformer." + tensor.name;
  linear.push_back({"lm_head.weight", "F32", {11, 8}, ours[0].data});
  load_model(nano.store, as_file(linear));
  CHECK(copy_model(nano.store).weights == copy.weights);

  linear.back().data = std::as_bytes(std::span(copy.weights).first(88));  // another head: the model has none
  CHECK_USER_ERROR(load_model(to.store, as_file(linear)), "not in the model", "lm_head.weight");
}

TEST_CASE("BF16 of a llama's file becomes F32") {
  Model model("llama"), to("llama", 2);
  const ModelCopy copy = copy_model(model.store);
  NamedTensors theirs = to_hugging_face(model_tensors(model.store, copy));
  std::deque<std::vector<std::byte>> halves;
  for (TensorView& tensor : theirs.tensors) {
    std::vector<std::byte>& half = halves.emplace_back();
    for (std::size_t i = 0; i < tensor.data.size(); i += 4)
      half.insert(half.end(), {tensor.data[i + 2], tensor.data[i + 3]});
    tensor.dtype = "BF16", tensor.data = half;
  }
  load_model(to.store, as_file(sorted(theirs.tensors)));
  std::vector<float> rounded = copy.weights;
  for (float& value : rounded) {
    std::uint32_t bits = 0;
    std::memcpy(&bits, &value, 4);
    bits &= 0xFFFF0000;
    std::memcpy(&value, &bits, 4);
  }
  CHECK(copy_model(to.store).weights == rounded);
}

TEST_CASE("a llama's file without one of the three projections is refused with the names that it lacks") {
  Model model("llama");
  const ModelCopy copy = copy_model(model.store);
  std::vector<TensorView> tensors = to_hugging_face(model_tensors(model.store, copy)).tensors;
  // As views of `copy`: nothing of llama's is moved on the way out.
  std::erase_if(tensors,
                [](const TensorView& t) { return t.name == "model.layers.0.self_attn.k_proj.weight"; });
  CHECK_USER_ERROR(load_model(model.store, as_file(tensors)), "missing in the file",
                   "layers.0.self_attn.qkv_proj.weight", "not in the model",
                   "layers.0.self_attn.q_proj.weight");
}

TEST_CASE("Hugging Face's names are for transformers; other models' tensors stay as they are") {
  Model model("mlp");
  const ModelCopy copy = copy_model(model.store);
  const std::vector<TensorView> tensors = model_tensors(model.store, copy);
  CHECK_USER_ERROR(to_hugging_face(tensors), "--names huggingface", "gpt", "llama");
  const NamedTensors same = from_hugging_face(tensors);
  REQUIRE(same.tensors.size() == tensors.size());
  CHECK(same.memory.empty());
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    CHECK(same.tensors[i].name == tensors[i].name);
    CHECK(same.tensors[i].data.data() == tensors[i].data.data());
  }
}

TEST_CASE("what wrappers of PyTorch add to names is taken off in any order, and no name is taken twice") {
  const auto wrapped = [](std::vector<TensorView> tensors, const std::string& before) {
    for (TensorView& tensor : tensors) tensor.name = before + tensor.name;
    return tensors;
  };
  for (const char* name : {"gpt", "llama", "lenet"}) {
    ModelOptions options = small(name);
    if (std::string(name) == "lenet") options.input = {1, 28, 28};
    Model from(name, options), to(name, options, 2);
    const ModelCopy copy = copy_model(from.store), before = copy_model(to.store);
    const std::vector<TensorView> own = model_tensors(from.store, copy);
    for (const char* prefix : {"_orig_mod.", "module.", "model.", "module._orig_mod.", "_orig_mod.module.",
                               "_forward_module.model._fsdp_wrapped_module."}) {
      INFO(name << " " << prefix);
      Model other(name, options, 3);
      load_model(other.store, as_file(wrapped(own, prefix)));
      CHECK(copy_model(other.store).weights == copy.weights);
      if (std::string(name) == "lenet") continue;
      Model theirs(name, options, 3);
      load_model(theirs.store, as_file(wrapped(to_hugging_face(own).tensors, prefix)));
      CHECK(copy_model(theirs.store).weights == copy.weights);
    }
    std::vector<TensorView> both = own;  // of two models in one file neither is chosen
    for (const TensorView& tensor : wrapped(own, "module.")) both.push_back(tensor);
    CHECK_USER_ERROR(load_model(to.store, as_file(both)), "not in the model", "module.");
    CHECK(copy_model(to.store).weights == before.weights);
  }
  const std::vector<TensorView> inner = {{"h.0._orig_mod.attn.weight", "F32", {0}, {}},
                                         {"model.own", "F32", {0}, {}}};
  const std::vector<std::string> known = {"model.own"};
  const std::vector<TensorView> found = without_wrappers(inner, known);
  CHECK(found[0].name == "h.0.attn.weight");
  CHECK(found[1].name == "model.own");
}

TEST_CASE("a config.json's fields as keys, and what no model here computes by its name") {
  const auto keys = [](const std::string& text) { return keys_from_hugging_face(text, "c.json"); };
  using Keys = std::map<std::string, std::string>;
  CHECK(keys(R"({"model_type":"gpt2","n_layer":12,"n_head":16,"n_inner":null,"layer_norm_epsilon":1e-06,
                 "activation_function":"gelu"})") == Keys{{"model.name", "gpt"},
                                                          {"model.layers", "12"},
                                                          {"model.heads", "16"},
                                                          {"model.norm_epsilon", "1e-06"},
                                                          {"model.gelu", "exact"}});
  const Keys gpt = keys(R"({"model_type":"gpt2"})");  // what transformers has without the fields
  CHECK(gpt.at("model.heads") == "12");
  CHECK(gpt.at("model.norm_epsilon") == "1e-05");
  CHECK(gpt.at("model.gelu") == "tanh");
  const Keys llama = keys(R"({"model_type":"llama","rope_scaling":null,"hidden_act":"silu"})");
  CHECK(llama.at("model.rope_base") == "10000");
  CHECK(llama.at("model.kv_heads") == "0");
  CHECK(llama.at("model.tied") == "false");
  CHECK(keys(R"({"model_type":"llama","rope_parameters":{"rope_theta":500000.0,"rope_type":"default"}})")
            .at("model.rope_base") == "500000.0");
  CHECK(keys(R"({"model_type":"mistral","max_position_embeddings":32768,"sliding_window":4096})")
            .at("model.context") == "4096");
  for (const auto& [text, what] :
       {std::pair{"[]", "no JSON object"},
        std::pair{R"({"model_type":"granite"})", "model_type is \"granite\""},
        std::pair{R"({"model_type":"gpt2","activation_function":"relu"})", "activation_function is \"relu\""},
        std::pair{R"({"model_type":"gpt2","scale_attn_weights":false})", "scale_attn_weights"},
        std::pair{R"({"model_type":"gpt2","scale_attn_by_inverse_layer_idx":true})", "inverse_layer"},
        std::pair{R"({"model_type":"llama","hidden_act":"gelu"})", "hidden_act"},
        std::pair{R"({"model_type":"llama","partial_rotary_factor":0.5})", "partial_rotary_factor"},
        std::pair{R"({"model_type":"llama","rope_scaling":{"type":"linear","factor":2}})",
                  "rope_scaling is \"linear\""},
        std::pair{R"({"model_type":"llama","rope_parameters":{"rope_type":"llama3"}})",
                  "rope_parameters is \"llama3\""}}) {
    INFO(text);
    CHECK_USER_ERROR(keys(text), "c.json", what);
  }
}

}  // namespace topknot::testing

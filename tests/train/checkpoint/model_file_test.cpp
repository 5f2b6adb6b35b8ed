#include "train/checkpoint/model_file.h"

#include <algorithm>
#include <cstring>
#include <limits>

#include "nn/models/model.h"
#include "tests/support/catch.h"
#include "tests/support/error_text.h"
#include "tests/support/files.h"
#include "tests/train/model_copy.h"

namespace topknot {
namespace {

struct Model {
  explicit Model(const std::string& name, std::int64_t outputs = 10, std::uint64_t seed = 1) {
    module = make_model(name, store, {.input = {3, 8, 8}, .outputs = outputs, .hidden = {4}});
    store.build([](const Parameter& p) { return p.shape().rank() > 1; }, seed);
  }
  ParameterStore store;
  ModulePtr module;
};

std::vector<std::byte> bytes_of(std::span<const TensorView> tensors) {
  std::vector<std::byte> bytes;
  write_safetensors(
      [&](std::span<const std::byte> part) { bytes.insert(bytes.end(), part.begin(), part.end()); }, tensors);
  return bytes;
}

SafetensorsFile file_of(Model& model) {
  const ModelCopy copy = copy_model(model.store);
  return SafetensorsFile::parse(bytes_of(model_tensors(model.store, copy)), "m.safetensors");
}

bool equal(const ModelCopy& a, const ModelCopy& b) {
  return a.weights == b.weights && a.statistics == b.statistics;
}

}  // namespace

TEST_CASE("a model's tensors are its parameters in plain order, then its statistics, by name") {
  Model model("resnet20");
  for (const auto& buffer : model.store.buffers())
    for (float& value : buffer->values) value = 0.25f + static_cast<float>(&value - buffer->values.data());
  const SafetensorsFile file = file_of(model);
  const TensorView* stem = file.find("stem.conv.weight");
  REQUIRE(stem);
  CHECK(stem->shape == std::vector<std::int64_t>{16, 3, 3, 3});
  CHECK(stem->dtype == "F32");
  CHECK(std::memcmp(stem->data.data(), model.store.parameters()[0]->value(), stem->data.size()) == 0);
  CHECK(file.find("fc.weight")->shape == std::vector<std::int64_t>{10, 64});
  const TensorView* mean = file.find("stem.bn.running_mean");
  REQUIRE(mean);
  float third = 0;
  std::memcpy(&third, mean->data.data() + 8, 4);
  CHECK(third == 2.25f);
  CHECK(file.tensors().size() == model.store.parameters().size() + model.store.buffers().size());
}

TEST_CASE("a model that is loaded has the file's bits, parameters and statistics") {
  Model from("resnet20"), to("resnet20", 10, 2);
  from.store.buffers()[3]->values[5] = 0.125f;
  REQUIRE_FALSE(equal(copy_model(from.store), copy_model(to.store)));
  load_model(to.store, file_of(from));
  CHECK(equal(copy_model(from.store), copy_model(to.store)));
}

TEST_CASE("every tensor that does not fit a model is listed in one message, and nothing is changed") {
  Model small("mlp"), other("mlp", 7);
  const ModelCopy copy = copy_model(small.store);
  std::vector<TensorView> tensors = model_tensors(small.store, copy);
  tensors[0].name = "evil\x1b[31m";  // for hidden1.weight
  tensors[1].dtype = "I32";          // hidden1.bias
  const auto file = SafetensorsFile::parse(bytes_of(tensors), "m.safetensors");
  const ModelCopy before = copy_model(other.store);
  CHECK(user_error([&] { load_model(other.store, file); },
                   {"m.safetensors", "missing in the file:\n    hidden1.weight [4, 192]",
                    "not in the model:\n    \"evil\\u001b[31m\" [4, 192]",
                    "hidden1.bias: [4] I32 in the file, [4] F32 in the model",
                    "output.weight: [10, 4] F32 in the file, [7, 4] F32 in the model", "output.bias: [10]",
                    "model.reinit"}));
  CHECK(equal(copy_model(other.store), before));
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
  CHECK(equal(copy_model(to.store), before));
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
  load_model(seven.store, SafetensorsFile::parse(bytes_of(body), "m.safetensors"), {"output"});
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

}  // namespace topknot

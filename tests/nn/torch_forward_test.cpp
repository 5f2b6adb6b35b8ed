// Each network computes what PyTorch's computes on the same weights and images: lab/torch-fixtures
// recorded it.
#include "nn/models/model.h"
#include "tests/support/files.h"
#include "tests/support/variables.h"

using namespace topknot;
using namespace topknot::testing;

namespace {

constexpr std::int64_t kOutputs = 10;
constexpr double kMostError = 1e-4;  // of the largest output
// Of a gradient's norm. Rounding turns some units of ReLU on or off, others on another CPU, and a batch of
// two has few.
constexpr double kMostGradientError = 0.05;

// The script's uniform(stream, count): numbers in [0, 1).
class FixtureNumbers {
 public:
  explicit FixtureNumbers(std::uint64_t stream) : at_(stream << 32) {}
  double next() {
    std::uint64_t z = ++at_ * 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    z ^= z >> 31;
    return double(z >> 40) / (1 << 24);
  }
  // `count` values of scale (2 u - 1) + shift.
  void fill(float* to, std::size_t count, double scale, double shift = 0) {
    for (std::size_t i = 0; i < count; ++i) to[i] = float(scale * (2 * next() - 1) + shift);
  }

 private:
  std::uint64_t at_;
};
constexpr std::uint64_t kRunningStream = 100000, kImageStream = 200000, kOutputGradientStream = 300000,
                        kProbeStream = 400000;

void fill_by_rule(ParameterStore& store) {
  for (std::size_t i = 0; i < store.parameters().size(); ++i) {
    const Parameter& p = *store.parameters()[i];
    const std::size_t n = p.numel();
    FixtureNumbers numbers(i);
    if (p.shape().rank() > 1)
      numbers.fill(p.value(), n, std::sqrt(4.5 * double(p.shape()[0]) / double(p.numel())));
    else if (p.name().ends_with(".gamma"))
      numbers.fill(p.value(), n, 0.25, 0.75);
    else if (p.name().ends_with(".beta"))
      numbers.fill(p.value(), n, 0.4, 0.4);
    else
      numbers.fill(p.value(), n, 0.2);
  }
  for (std::size_t i = 0; i < store.buffers().size(); ++i) {
    std::vector<float>& values = store.buffers()[i]->values;
    FixtureNumbers numbers(kRunningStream + i);
    if (i % 2 == 0)
      numbers.fill(values.data(), values.size(), 0.2);
    else
      numbers.fill(values.data(), values.size(), 0.25, 1);
  }
}

// A tensor of a safetensors file: the header's length in 8 bytes, the header, the data; all little-endian.
template <typename T>
std::vector<T> recorded(const std::string& name) {
  static const std::string file = text_of(TOPKNOT_SOURCE_DIR "/tests/nn/fixtures/torch_forward.safetensors");
  std::uint64_t length = 0;
  file.copy(reinterpret_cast<char*>(&length), sizeof length);
  const auto tensor = nlohmann::json::parse(file.substr(8, length)).at(name);
  REQUIRE(tensor.at("dtype") == (std::is_same_v<T, double> ? "F64" : "I64"));
  const std::size_t begin = tensor.at("data_offsets")[0], end = tensor.at("data_offsets")[1];
  std::vector<T> values((end - begin) / sizeof(T));
  REQUIRE(file.copy(reinterpret_cast<char*>(values.data()), end - begin, 8 + length + begin) == end - begin);
  return values;
}

// Of the sum of y by the rule's weights, for the recorded parameters: the norm, the sum by the rule's
// weights.
void check_gradients(ParameterStore& store, const Variable& y, const std::string& network) {
  std::vector<float> weights(std::size_t(y.value().numel()));
  FixtureNumbers(kOutputGradientStream).fill(weights.data(), weights.size(), 1);
  backward(weighted_sum(y, weights));
  const auto indices = recorded<std::int64_t>(network + ".gradient_index");
  const Array norms = recorded<double>(network + ".gradient_norm");
  const Array sums = recorded<double>(network + ".gradient_sum");
  const double largest = std::ranges::max(norms);
  for (std::size_t row = 0; row < indices.size(); ++row) {
    const auto index = std::size_t(indices[row]);
    const Parameter& p = *store.parameters().at(index);
    std::vector<float> probe(p.numel());
    FixtureNumbers(kProbeStream + index).fill(probe.data(), probe.size(), 1);
    double squares = 0, sum = 0;
    for (std::size_t i = 0; i < p.numel(); ++i) {
      squares += double(p.gradient()[i]) * p.gradient()[i];
      sum += double(p.gradient()[i]) * probe[i];
    }
    const double norm = norms.at(row);
    INFO("gradient of " << p.name() << ", norm " << norm);
    // What batch norm takes out again, a bias before it for one, has a gradient of rounding errors only.
    const double margin = kMostGradientError * std::max(norm, largest / 100);
    CHECK(std::sqrt(squares) == Approx(norm).margin(margin).epsilon(0));
    CHECK(sum == Approx(sums.at(row)).margin(margin).epsilon(0));
  }
}

void check_network(const std::string& name) {
  INFO(name);
  const auto size = recorded<std::int64_t>(name + ".input");
  const Shape input{size[0], size[1], size[2], size[3]};
  ModelOptions options;
  options.input = {size[1], size[2], size[3]};
  options.outputs = kOutputs;
  options.dropout = 0;
  options.batch = size[0];
  ParameterStore store;
  const ModulePtr model = make_model(name, store, options);
  store.build([](const Parameter&) { return true; }, 1);
  fill_by_rule(store);
  std::vector<float> images(std::size_t(input.numel()));
  FixtureNumbers numbers(kImageStream);
  if (model->reads_tokens())
    for (float& token : images) token = float(std::floor(kOutputs * numbers.next()));
  else
    numbers.fill(images.data(), images.size(), std::sqrt(3.0));
  for (const bool training : {false, true}) {
    store.reset_states();
    INFO((training ? "training" : "evaluation"));
    ForwardContext context;
    context.training = training;
    const Variable y = model->forward(Variable(Tensor::from(images, input)), context);
    const Array outputs = recorded<double>(name + (training ? ".training" : ".evaluation"));
    const double largest = std::ranges::max(reference::absolute(outputs));
    check_close("outputs", values_of(y), outputs, Array(outputs.size(), largest), kMostError);
    if (training) check_gradients(store, y, name);
  }
}

}  // namespace

TEST_CASE("lenet and the AlexNets compute what PyTorch's compute") {
  for (const char* name : {"lenet", "alexnet", "alexnet_grouped"}) check_network(name);
}

TEST_CASE("the VGG networks compute what PyTorch's compute") {
  for (const char* name : {"vgg16", "vgg16_bias", "vgg16_imagenet"}) check_network(name);
}

TEST_CASE("the residual networks of up to 50 layers compute what PyTorch's compute") {
  for (const char* name : {"resnet20", "resnet18", "resnet18_imagenet", "resnet34", "resnet50"})
    check_network(name);
}

TEST_CASE("resnet152 computes what PyTorch's computes") {
  check_network("resnet152");
}

TEST_CASE("squeezenet, mobilenet_v2, shufflenet_v2 and the EfficientNets compute what PyTorch's compute") {
  for (const char* name :
       {"squeezenet", "mobilenet_v2", "efficientnet_b0", "efficientnet_lite0", "shufflenet_v2"})
    check_network(name);
}

TEST_CASE("inception_v4 computes what PyTorch's computes") {
  check_network("inception_v4");
}

TEST_CASE("the recurrent networks compute what PyTorch's compute") {
  for (const char* name : {"lstm_lm", "deep_speech"}) check_network(name);
}

TEST_CASE("every model that is registered is compared with PyTorch's") {
  const std::vector<std::string> others{"linear", "mlp"};
  const std::vector<std::string> files{"gpt", "llama"};  // tests/train/checkpoint/model_names_test.cpp
  const std::vector<std::string> same_code{"resnet32", "resnet44", "resnet56", "resnet110"};  // as resnet20
  for (const std::string& name : models().names()) {
    INFO(name);
    const auto in = [&](const auto& list) { return std::find(list.begin(), list.end(), name) != list.end(); };
    CHECK((in(others) || in(files) || in(same_code) || recorded<std::int64_t>(name + ".input").size() == 4));
  }
}

#include <regex>

#include "nn/core/pass_cost.h"
#include "tests/support/built_model.h"
#include "tests/support/test.h"

using namespace topknot;
using namespace topknot::testing;

namespace {

struct Built : BuiltModel {
  Built(const std::string& name, const Shape& input, std::int64_t outputs = 10, std::uint64_t seed = 1)
      : BuiltModel(name, options(input, outputs), seed), shape(input) {}
  static ModelOptions options(const Shape& input, std::int64_t outputs) {
    ModelOptions o;
    o.input = input;
    o.outputs = outputs;
    return o;
  }
  Variable images(std::int64_t n, std::uint32_t stream = 1) const {
    const Shape batch{n, shape[0], shape[1], shape[2]};
    return Variable(Tensor::from(random_values(batch.numel(), stream), batch));
  }
  Variable loss(const Variable& x) {
    std::vector<std::int32_t> labels(std::size_t(x.shape()[0]));
    for (std::size_t i = 0; i < labels.size(); ++i) labels[i] = std::int32_t(i * 3 % 10);
    return softmax_cross_entropy(model->forward(x, {}), labels);
  }
  float loss_value(const Variable& x) { return loss(x).value().data()[0]; }
  void descend(float rate) {
    auto w = store.arena().weights();
    const auto g = store.arena().gradient(0, w.size());
    for (std::size_t i = 0; i < w.size(); ++i) w[i] -= rate * g[i];
  }

  Shape shape;
};

const Shape kCifar{3, 32, 32}, kMnist{1, 28, 28};

void check_slope(Built& b, const Variable& x, std::span<Parameter* const> parameters) {
  testing::check_slope(parameters, [&] { return b.loss_value(x); });
}

void check_each_slope(Built& b, const Variable& x) {
  backward(b.loss(x));
  CHECK(b.store.arena().zero_unwritten_gradients().empty());
  for (Parameter* const& p : b.store.arena().parameters()) check_slope(b, x, {&p, 1});
}

}  // namespace

TEST_CASE("models have the number of parameters that their papers and other libraries count") {
  const std::vector<std::tuple<std::string, Shape, std::size_t>> expected{
      {"linear", kMnist, 7850},       {"mlp", kMnist, 199210},      {"lenet", kMnist, 61706},
      {"lenet", kCifar, 83126},       {"resnet20", kCifar, 269722}, {"resnet32", kCifar, 464154},
      {"resnet44", kCifar, 658586},   {"resnet56", kCifar, 853018}, {"resnet110", kCifar, 1727962},
      {"resnet18", kCifar, 11173962}, {"vgg16", kCifar, 14724042},  {"vgg16_bias", kCifar, 14728266}};
  for (const auto& [name, input, count] : expected) {
    INFO(name);
    Built b(name, input);
    CHECK(b.store.arena().size() == count);
  }
}

TEST_CASE("resnet50 for ImageNet has the tensors that torchvision's has, 25,557,032 parameters") {
  ParameterStore store;
  make_model("resnet50", store, Built::options({3, 224, 224}, 1000));
  std::size_t sum = 0, convolutions = 0, vectors = 0;
  for (const auto& p : store.parameters()) {
    sum += p->numel();
    convolutions += p->shape().rank() == 4;
    vectors += p->shape().rank() == 1;
  }
  CHECK(sum == 25557032);
  CHECK(convolutions == 53);
  CHECK(vectors == 2 * 53 + 1);
  CHECK(store.parameters()[0]->shape() == Shape({64, 3, 7, 7}));
}

TEST_CASE("docs/models.md has every model, and its number of parameters") {
  std::ifstream page(std::string(TOPKNOT_SOURCE_DIR) + "/docs/models.md");
  std::set<std::string> left;
  for (const std::string& name : models().names()) left.insert(name);
  const std::regex row("\\| `(\\w+)` \\| ([0-9,]+) \\| (\\d+) x (\\d+) x (\\d+), (\\d+) \\| .*");
  std::smatch part;
  for (std::string line; std::getline(page, line);) {
    if (!std::regex_match(line, part, row)) continue;
    std::string count = part[2];
    std::erase(count, ',');
    const auto number = [&](std::size_t i) { return std::stoll(part[i]); };
    INFO(line);
    CHECK(std::to_string(
              parameters_of(part[1], Built::options({number(3), number(4), number(5)}, number(6)))) == count);
    CHECK(left.erase(part[1]) == 1);
  }
  INFO("not on the page: " << (left.empty() ? "" : *left.begin()));
  CHECK(left.empty());
}

TEST_CASE("an image of 224 x 224 takes the operations that torchvision counts") {
  const Threads scope(1);
  // Billions of multiply-adds, of convolutions and matrix products, in torchvision's table of models.
  for (const auto& [name, expected] : std::vector<std::pair<std::string, double>>{{"mobilenet_v2", 0.301},
                                                                                  {"shufflenet_v2", 0.145},
                                                                                  {"efficientnet_b0", 0.386},
                                                                                  {"squeezenet", 0.819}}) {
    Built b(name, {3, 224, 224}, 1000);
    const Variable x = b.images(1);
    PassCost cost;
    b.model->forward(x, evaluation());
    INFO(name);
    CHECK(cost.flops() / 2e9 == Approx(expected).margin(0.0005));
  }
}

TEST_CASE("every registered model gives one row of outputs per sample") {
  const Threads scope(1);
  // Images of the least size where that is more than 12 x 16.
  const std::map<std::string, Shape> sizes{
      {"vgg16", kCifar},         {"vgg16_bias", kCifar},           {"vgg16_imagenet", kCifar},
      {"alexnet", {3, 63, 64}},  {"alexnet_grouped", {3, 63, 64}}, {"squeezenet", {3, 21, 22}},
      {"mobilenet_v2", kCifar},  {"efficientnet_b0", {3, 32, 33}}, {"efficientnet_lite0", {3, 33, 32}},
      {"shufflenet_v2", kCifar}, {"inception_v4", {3, 75, 76}},    {"deep_speech", {1, 161, 9}}};
  for (const std::string& name : models().names()) {
    INFO(name);
    Built b(name, sizes.contains(name) ? sizes.at(name) : Shape{3, 12, 16}, 7);
    // The output layer's 7 rows, an embedding's 7 tokens.
    for (const auto& p : b.store.parameters())
      if (p->shape().rank() > 1 && p->shape()[0] == 7) CHECK_FALSE(p->hidden());
    if (b.model->reads_tokens() || b.model->output_frames(1) > 0) continue;  // tests of their own
    const Variable y = b.model->forward(b.images(2), evaluation());
    CHECK(y.shape() == Shape({2, 7}));
    CHECK_FALSE(y.requires_grad());
    for (float v : values_of(y)) CHECK(std::isfinite(v));
  }
}

TEST_CASE("models take odd image sizes where they say so, and refuse others with a user's error") {
  const Threads scope(1);
  for (const auto& [name, input] : std::vector<std::pair<std::string, Shape>>{{"resnet20", {3, 17, 9}},
                                                                              {"resnet20", {1, 28, 28}},
                                                                              {"resnet18", {3, 9, 11}},
                                                                              {"lenet", {3, 13, 15}},
                                                                              {"lenet", {1, 12, 12}}}) {
    INFO(name << " " << input.str());
    Built b(name, input);
    const Variable loss = b.loss(b.images(3));
    CHECK(std::isfinite(loss.value().data()[0]));
    CHECK_NOTHROW(backward(loss));
  }
  CHECK_THROWS_AS(Built("lenet", {1, 11, 12}), UserError);
  CHECK_THROWS_AS(Built("vgg16", {3, 28, 28}), UserError);
  CHECK_THROWS_AS(Built("resnet20", {3, 4, 4}), UserError);
  CHECK_THROWS_AS(Built("resnet20", {784}), UserError);
  const std::pair<const char*, const char*> least[] = {
      {"alexnet", "63x63"},      {"alexnet_grouped", "63x63"}, {"squeezenet", "21x21"},
      {"mobilenet_v2", "32x32"}, {"efficientnet_b0", "32x32"}, {"shufflenet_v2", "32x32"},
      {"inception_v4", "75x75"}};
  for (const auto& [name, size] : least)
    CHECK_THROWS_WITH(Built(name, {3, 20, 80}), Catch::Contains(size) && Catch::Contains("[3, 20, 80]"));
  CHECK_THROWS_WITH(Built("resnet21", kCifar), Catch::Contains("resnet20"));
}

TEST_CASE("a model's initial weights are those of its seed; convolutions have He's variance") {
  Built a("resnet20", kCifar, 10, 5), b("resnet20", kCifar, 10, 5), c("resnet20", kCifar, 10, 6);
  const auto sum = [](Built& m) { return parameter_checksum(m.store.arena().weights()); };
  CHECK(sum(a) == sum(b));
  CHECK(sum(a) != sum(c));
  for (const auto& p : a.store.parameters()) {
    if (p->shape().rank() != 4 || p->numel() < 5000) continue;
    double squares = 0;
    for (std::size_t i = 0; i < p->numel(); ++i) squares += p->value()[i] * p->value()[i];
    const double fan_in = double(p->shape()[1] * p->shape()[2] * p->shape()[3]);
    INFO(p->name());
    CHECK(squares / double(p->numel()) == Approx(2 / fan_in).epsilon(0.1));
  }
}

TEST_CASE("evaluation of a batch is that of its parts: batch norm takes no part of it from the batch") {
  const Threads scope(1);
  for (const char* name : {"resnet20", "lenet"}) {
    INFO(name);
    Built b(name, {3, 16, 16});
    for (int i = 0; i < 2; ++i) b.model->forward(b.images(8, 3), {});  // running statistics worth having
    const auto run = [&](std::int64_t begin, std::int64_t end) {
      const auto all = values_of(b.images(7));
      const std::vector<float> part(all.begin() + begin * 768, all.begin() + end * 768);
      return values_of(
          b.model->forward(Variable(Tensor::from(part, {end - begin, 3, 16, 16})), evaluation()));
    };
    const auto whole = run(0, 7);
    auto parts = run(0, 2);
    for (const auto& [begin, end] : {std::pair{2, 3}, std::pair{3, 7}}) {
      const auto more = run(begin, end);
      parts.insert(parts.end(), more.begin(), more.end());
    }
    check_close("outputs", parts, as_double(whole), Array(whole.size(), 1.0), 1e-5);
    CHECK((run(0, 7) == whole));  // and changes nothing
  }
}

TEST_CASE("the gradient of every parameter of resnet20, lenet and mlp is the loss's slope") {
  const Threads scope(1);
  for (const auto& [name, input] : std::vector<std::pair<std::string, Shape>>{
           {"resnet20", {3, 12, 12}}, {"lenet", kMnist}, {"mlp", {1, 8, 8}}}) {
    INFO(name);
    Built b(name, input);
    check_each_slope(b, b.images(6));
  }
}

TEST_CASE("the whole gradient of resnet18 is the loss's slope") {
  const Threads scope(1);
  Built b("resnet18", {3, 9, 9});
  const Variable x = b.images(6);
  backward(b.loss(x));
  CHECK(b.store.arena().zero_unwritten_gradients().empty());
  check_slope(b, x, b.store.arena().parameters());
}

TEST_CASE("the gradient of resnet50 is the loss's slope: stem, a bottleneck's 3x3, a shortcut") {
  const Threads scope(2);
  Built b("resnet50", {3, 33, 23});
  // Tamer than at the start, where float weights are too coarse for steps that short.
  for (const auto& p : b.store.parameters())
    if (p->name().ends_with(".3.bn.gamma")) std::fill_n(p->value(), p->numel(), 0.2f);
  const Variable x = b.images(4);
  backward(b.loss(x));
  CHECK(b.store.arena().zero_unwritten_gradients().empty());
  for (const char* name :
       {"stem.conv.weight", "stage2.block1.2.conv.weight", "stage4.block1.shortcut.bn.gamma"}) {
    Parameter* const p = &b.parameter(name);
    check_slope(b, x, {&p, 1});
  }
}

TEST_CASE("two identical trainings give the same bits, and the loss falls") {
  const Threads scope(2);
  for (const char* name : {"resnet20", "lenet"}) {
    INFO(name);
    Built a(name, {3, 16, 16}), b(name, {3, 16, 16});
    std::vector<float> losses[2];
    for (int step = 0; step < 4; ++step)
      for (Built* m : {&a, &b}) {
        m->store.arena().mark_gradients_unwritten();
        const Variable loss = m->loss(m->images(10));
        losses[m == &b].push_back(loss.value().data()[0]);
        backward(loss);
        m->descend(0.05f);
      }
    CHECK(losses[0] == losses[1]);
    CHECK(losses[0].back() < losses[0].front());
    CHECK(parameter_checksum(a.store.arena().weights()) == parameter_checksum(b.store.arena().weights()));
    for (std::size_t i = 0; i < a.store.buffers().size(); ++i)
      CHECK((a.store.buffers()[i]->values == b.store.buffers()[i]->values));
  }
}

TEST_CASE("a weight that is not a number shows in the loss: no step may pass for finite") {
  // lenet is left out: oneDNN's max pooling passes over a NaN in its window (nn/ops/ops.h).
  for (const char* name : {"mlp", "resnet20"}) {
    INFO(name);
    Built b(name, {1, 16, 16});
    b.store.parameters()[0]->value()[0] = std::numeric_limits<float>::quiet_NaN();
    CHECK(std::isnan(b.loss_value(b.images(4))));
  }
}

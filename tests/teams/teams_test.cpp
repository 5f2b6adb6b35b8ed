// Every op, compression method and optimizer in processes to which the environment gives another team of
// threads than they ask for: they have the bits that they have with such a team in a clean environment.
#include <fmt/format.h>
#include <omp.h>

#include <iostream>

#include "nn/base/checksum.h"
#include "nn/ops/kernels.h"
#include "optim/clip.h"
#include "optim/optimizer.h"
#include "tests/compress/every_method.h"
#include "tests/support/ctc_reference.h"
#include "tests/support/test.h"

using namespace topknot;
using namespace topknot::testing;

namespace {

void print(const std::string& name, const std::vector<std::vector<float>>& results) {
  Checksum sum;
  for (const auto& values : results) sum.update(std::as_bytes(std::span(values)));
  std::cout << "result " << sum.value() << ' ' << name << std::endl;
}

// Of an op: its value, and the gradients of its inputs.
void print(const std::string& name, const std::vector<const Leaf*>& inputs, const Variable& y) {
  const Variable wide = cast(y, DType::f32);
  backward(weighted_sum(wide, random_values(y.shape().numel(), 9)));
  std::vector<std::vector<float>> results{values_of(wide)};
  for (const Leaf* input : inputs) results.push_back(input->gradient());
  print(name, results);
}

struct RandomLeaf : Leaf {
  explicit RandomLeaf(const Shape& shape, std::uint32_t stream = 1)
      : Leaf(shape, random_values(shape.numel(), stream)) {}
};

void print_image_ops(DType type, Layout layout) {
  const auto form =
      std::string(layout == Layout::plain ? " plain" : " blocked") + (type == DType::f32 ? "" : " bf16");
  const auto in_form = [&](const Leaf& x) { return in_layout(cast(x.variable(), type), layout); };
  static constexpr PoolGeometry max{PoolKind::max, 3, 2, 1}, average{PoolKind::average, 2, 2, 0};
  static const std::vector<std::int32_t> frames{9, 0, 3, 7, 9, 1};
  const std::map<std::string, std::function<Variable(const Variable&)>> ops = {
      {"max pool", [](const Variable& x) { return pool(x, max); }},
      {"average pool", [](const Variable& x) { return pool(x, average); }},
      {"global_average_pool", [](const Variable& x) { return global_average_pool(x); }},
      {"local_response_norm", [](const Variable& x) { return local_response_norm(x); }},
      {"concat",
       [](const Variable& x) {
         return concat({x, relu(x)});
       }},
      {"slice_channels", [](const Variable& x) { return slice_channels(x, 16, 16); }},
      {"channel_shuffle", [](const Variable& x) { return channel_shuffle(x, 4); }},
      {"relu", [](const Variable& x) { return relu(x); }},
      {"relu6", [](const Variable& x) { return relu6(x); }},
      {"hardswish", [](const Variable& x) { return hardswish(x); }},
      {"sigmoid", [](const Variable& x) { return sigmoid(x); }},
      {"silu", [](const Variable& x) { return silu(x); }},
      {"gelu", [](const Variable& x) { return gelu(x); }},
      {"gelu_tanh", [](const Variable& x) { return gelu_tanh(x); }},
      {"add", [](const Variable& x) { return add(x, silu(x)); }},
      {"dropout", [](const Variable& x) { return dropout(x, 0.3f, CounterRng(1, RngUse::test)); }},
      {"flatten", [](const Variable& x) { return flatten(x); }},
      {"frames_to_rows", [](const Variable& x) { return frames_to_rows(x); }},
      {"mask_frames", [](const Variable& x) { return mask_frames(x, frames); }},
      {"pad_end", [](const Variable& x) { return pad_end(x, 1, 2); }},
      {"scale_channels",
       [](const Variable& x) { return scale_channels(x, sigmoid(global_average_pool(x))); }},
      {"subsample_and_pad", [](const Variable& x) { return subsample_and_pad(x, 64); }},
  };
  for (const auto& [name, op] : ops) {
    RandomLeaf x({6, 32, 11, 9});
    print(name + form, {&x}, op(in_form(x)));
  }
  RandomLeaf x({6, 32, 11, 9}), gamma({32}, 2), beta({32}, 3);
  Buffer mean{"mean", std::vector<float>(32)}, variance{"variance", std::vector<float>(32, 1.0f)};
  print("batch_norm" + form, {&x, &gamma, &beta},
        batch_norm(in_form(x), gamma.variable(), beta.variable(), {}, {&mean, &variance}, {true, true}));
}

void print_convolutions(DType type) {
  const struct {
    const char* name;
    Shape x;
    ConvGeometry g;
  } all[] = {
      {"a few channels", {6, 3, 12, 12}, {3, 16}},
      {"plain", {6, 6, 14, 14}, {6, 10, 5, 1, 0}},
      {"chunked", {6, 16, 9, 9}, {16, 32, 3, 2}},
      {"whole", {4, 128, 20, 20}, {128, 128, 3, 2}},
      {"by product", {2, 128, 8, 8}, {128, 128}},
      {"by winograd, narrow", {6, 32, 12, 12}, {32, 32}},
      {"by winograd, wide", {4, 128, 24, 24}, {128, 128}},
      {"pointwise", {6, 16, 9, 9}, {16, 10, 1, 1, 0}},
      {"pointwise, blocked", {6, 16, 9, 9}, {16, 32, 1, 1, 0}},
      {"depthwise", {6, 32, 9, 9}, {32, 32, 3, 1, 1, 32}},
  };
  for (const auto& [name, shape, g] : all) {
    const auto layout =
        g.in % channel_block() == 0 && g.out % channel_block() == 0 ? Layout::blocked : Layout::plain;
    const std::string form = std::string(", ") + name + (type == DType::f32 ? "" : " bf16");
    RandomLeaf x(shape), w(g.weight_shape(), 2), b({g.out}, 3), gamma({g.out}, 4);
    const auto input = [&] { return in_layout(cast(x.variable(), type), layout); };
    print("conv2d" + form, {&x, &w, &b}, conv2d(input(), w.variable(), b.variable(), g));
    for (Leaf* leaf : {&x, &w, &b}) leaf->clear();
    Buffer mean{"mean", std::vector<float>(g.out)}, variance(mean);
    print("conv_bn" + form, {&x, &w, &gamma, &b},
          conv_bn(input(), w.variable(), gamma.variable(), b.variable(), {}, g, {&mean, &variance},
                  {true, true}));
  }
}

void print_row_ops(DType type) {
  const std::string form = type == DType::f32 ? "" : " bf16";
  for (const auto& [rows, in, out] :
       {std::array<std::int64_t, 3>{64, 400, 120}, {4, 300, 200}, {300, 128, 64}}) {
    RandomLeaf x({rows, in}), w({out, in}, 2), b({out}, 3);
    print("linear of " + std::to_string(rows) + " rows" + form, {&x, &w, &b},
          linear(cast(x.variable(), type), w.variable(), b.variable()));
  }
  RandomLeaf normed({70, 100}), scale({100}, 2), shift({100}, 3);
  print("layer_norm" + form, {&normed, &scale, &shift},
        layer_norm(cast(normed.variable(), type), scale.variable(), shift.variable()));
  for (Leaf* leaf : {&normed, &scale}) leaf->clear();
  print("rms_norm" + form, {&normed, &scale}, rms_norm(cast(normed.variable(), type), scale.variable()));
  normed.clear();
  print("swiglu" + form, {&normed}, swiglu(cast(normed.variable(), type)));
  normed.clear();
  print("rope" + form, {&normed}, rope(cast(normed.variable(), type), 3, 1, 2));
  RandomLeaf x({20, 33}), input({200, 33}, 2), recurrent({200, 50}, 3), input_bias({200}, 4),
      recurrent_bias({200}, 5);
  print("lstm" + form, {&x, &input, &recurrent, &input_bias, &recurrent_bias},
        lstm(cast(x.variable(), type), 4,
             {input.variable(), recurrent.variable(), input_bias.variable(), recurrent_bias.variable()}, {}));
  for (const std::int64_t batch : {1, 5}) {  // fewer heads of keys than threads, and more
    RandomLeaf qkv({200, 4 * 24});
    print("attention of " + std::to_string(batch) + " sequences" + form, {&qkv},
          attention(cast(qkv.variable(), type), 2, 1, batch, true));
  }
  RandomLeaf logits({50, 10});
  std::vector<std::int32_t> labels;
  for (int i = 0; i < 50; ++i) labels.push_back(i % 10);
  print("softmax_cross_entropy" + form, {&logits},
        softmax_cross_entropy(cast(logits.variable(), type), labels, 0.1f));
}

void print_other_ops() {
  RandomLeaf weight({50, 70}), x({40, 70}, 2), taps({70, 5}, 3), y({40, 70}, 4);
  std::vector<float> ids;
  for (int i = 0; i < 40; ++i) ids.push_back(static_cast<float>(i * 7 % 50));
  print("embedding", {&weight}, embedding(Variable(Tensor::from(ids, {8, 5, 1, 1})), weight.variable()));
  print("lookahead", {&x, &taps}, lookahead(x.variable(), 4, taps.variable()));
  print("mean_squared_error", {&y},
        mean_squared_error(y.variable(), Tensor::from(random_values(2800, 5), {40, 70})));
  for (const CtcCase& one : ctc_cases()) {
    Leaf logits({one.frames * one.sequences(), one.classes}, one.logits());
    print("ctc_loss, " + one.name, {&logits}, ctc_loss(logits.variable(), one.targets(), one.blank));
  }
}

void print_methods() {
  constexpr std::size_t kNumel = 200000;
  for (const std::string& name : methods()) {
    GroupSpec group = whole_group(kNumel, 2);
    group.tensors = {{0, 500, 400}};
    SimulatedRanks ranks(options_for(name), group);
    for (int step = 0; step < 2; ++step) {
      for (std::size_t r = 0; r < ranks.size(); ++r) ranks[r].gradient = gradient_of(step, r, kNumel);
      ranks.step(step, 0.01);
      print("compress." + name, {{ranks[0].average.begin(), ranks[0].average.end()}, ranks[1].residual});
    }
  }
}

void print_optimizers() {
  constexpr std::int64_t kVector = 300000, kMatrix = 150 * 200, kNumel = kVector + kMatrix;
  for (const std::string& name : optimizers().names()) {
    ParameterStore store;
    const auto start = [](std::span<float> out, const CounterRng&) {
      const auto values = random_values(static_cast<std::int64_t>(out.size()), 1);
      std::copy(values.begin(), values.end(), out.begin());
    };
    store.add("filters", {1, 1, 1, 1}, start);
    store.add("matrix", {150, 200}, start);
    store.add("vector", {kVector - 2}, start);
    store.add("output", {1, 1}, start);
    store.build([](const Parameter&) { return true; }, 1);
    OptimizerOptions options;
    options.name = name, options.momentum = name == "sgd" ? 0.9 : 0;
    std::vector<float> gradient = random_values(kNumel, 2);
    scale(gradient, clip_factor(l2_norm(gradient), 1.0));
    make_optimizer(options, store.arena())->update(0, gradient, {0, 0.1});
    print("optimizer " + name, {gradient, {store.arena().weights().begin(), store.arena().weights().end()}});
  }
}

void print_all() {
  for (const DType type : {DType::f32, DType::bf16}) {
    if (type == DType::bf16 && !cpu_has_bfloat16()) break;
    for (const Layout layout : {Layout::plain, Layout::blocked}) print_image_ops(type, layout);
    print_convolutions(type);
    print_row_ops(type);
  }
  print_other_ops();
  print_methods();
  print_optimizers();
}

// The results by name of a process under these variables, which asks for so many threads.
std::map<std::string, std::string> results(const std::string& variables, int threads) {
  static const std::string program = std::filesystem::read_symlink("/proc/self/exe").string();
  const std::string command = fmt::format("env {} TEAM={} timeout 200 '{}' 'the results of every op' 2>&1",
                                          variables, threads, program);
  FILE* pipe = popen(command.c_str(), "r");
  REQUIRE(pipe);
  std::string output;
  for (int c; (c = std::fgetc(pipe)) != EOF;) output += static_cast<char>(c);
  INFO(output);
  CHECK(pclose(pipe) == 0);
  std::map<std::string, std::string> found;
  std::istringstream lines(output);
  for (std::string line, word, sum, name; std::getline(lines, line);)
    if (std::istringstream text(line);
        text >> word >> sum && word == "result" && std::getline(text >> std::ws, name))
      found[name] += sum + " ";
  CHECK(found.size() > 80);
  return found;
}

}  // namespace

TEST_CASE("the results of every op", "[.]") {
  const char* threads = std::getenv("TEAM");
  omp_set_num_threads(threads ? std::atoi(threads) : 1);
  if (!std::getenv("IN_A_REGION")) return print_all();
#pragma omp parallel num_threads(2)
#pragma omp single
  print_all();
}

TEST_CASE("every op, method and optimizer has its usual bits in any team that the environment gives") {
  std::map<int, std::map<std::string, std::string>> usual;
  for (const int threads : {1, 3, 4}) usual[threads] = results("", threads);
  const std::vector<std::pair<std::string, int>> settings = {
      {"OMP_THREAD_LIMIT=1", 1},
      {"OMP_THREAD_LIMIT=3", 3},
      {"OMP_MAX_ACTIVE_LEVELS=0", 1},
      {"OMP_DYNAMIC=true", 4},
      {"OMP_NUM_THREADS=1", 4},
      {"OMP_NESTED=true", 4},
      {"OMP_PROC_BIND=close OMP_PLACES=cores", 4},
      {"GOMP_CPU_AFFINITY=0", 4},
      {"OMP_SCHEDULE=dynamic,1 OMP_CANCELLATION=true OMP_WAIT_POLICY=passive", 4},
      {"IN_A_REGION=1", 1},
      {"IN_A_REGION=1 OMP_MAX_ACTIVE_LEVELS=2", 1},
  };
  for (const auto& [variables, team] : settings) {
    INFO(variables);
    for (const auto& [name, sums] : results(variables, 4)) {
      INFO(name);
      CHECK(usual[team][name] == sums);
    }
  }
}

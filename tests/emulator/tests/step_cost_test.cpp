// What a step costs beside its arithmetic: launches by method, and bytes that cross the bus.
#include <fmt/format.h>

#include <ostream>

#include "lab/gpu_timings/gpu_timings.h"
#include "nn/base/log.h"
#include "nn/core/cuda/trial.h"
#include "tests/cuda/compressor_ranks.h"
#include "tests/cuda/fixture.h"
#include "tests/emulator/tests/machine_settings.h"
#include "tests/support/standard_error.h"
#include "tests/train/made_up_text.h"
#include "tests/train/small_run.h"

namespace topknot {
namespace {

using namespace testing;

struct Launches {
  std::size_t encode = 0, decode = 0, commit = 0;
  bool operator==(const Launches&) const = default;
};

std::ostream& operator<<(std::ostream& out, const Launches& launches) {
  return out << launches.encode << ", " << launches.decode << ", " << launches.commit;
}

// Of one rank of two.
Launches launches(const CompressOptions& options, const GroupSpec& group = whole_group(20000, 2),
                  const cuda::ContextOptions& machine = {.deterministic = true},
                  const std::string& trial = "") {
  const OnGpu gpu(machine);
  cuda::Trial::force(trial);
  const std::size_t n = group.numel, ranks = std::size_t(group.ranks);
  const auto compressor = cuda::make_device_compressor(options, group);
  REQUIRE(compressor);
  const std::size_t bytes = compressor->reserve(0.01);
  const cuda::DeviceArray<float> gradient(n), residual(n), weights(ranks);
  const cuda::DeviceArray<StepParameters> step(1);
  const cuda::DeviceArray<StepStatus> status(1);
  const cuda::DeviceArray<std::byte> blocks(ranks * bytes);
  for (const auto& memory : {gradient, residual, weights})
    backend(gpu.device()).fill(memory.data(), memory.size(), 1.0f);
  TOPKNOT_CUDA(cudaMemsetAsync(step.data(), 0, step.bytes(), gpu.stream()));
  TOPKNOT_CUDA(cudaMemsetAsync(status.data(), 0, status.bytes(), gpu.stream()));
  std::size_t before = 0;
  const auto since = [&] {
    cuda::Context::current().synchronize();
    return emulator::counts().kernels - std::exchange(before, emulator::counts().kernels);
  };
  since();
  Launches made;
  const StepContext context{
      .weights = {weights.data(), ranks}, .parameters = step.data(), .status = status.data()};
  for (std::size_t rank = 0; rank < ranks; ++rank, made.encode = since()) {
    const Message message = compressor->encode({{gradient.data(), n}, {residual.data(), n}}, context);
    TOPKNOT_CUDA(cudaMemcpyAsync(blocks.data() + rank * bytes, message.gpu_block.data(), bytes,
                                 cudaMemcpyDeviceToDevice, gpu.stream()));
  }
  Round round;
  round.gpu_blocks = {blocks.data(), blocks.size()};
  compressor->decode(round);
  made.decode = since();
  compressor->commit({});
  made.commit = since();
  return made;
}

// What the emulator counts of a run on one GPU.
emulator::Counts counts_of(const Keys& keys) {
  const emulator::Settings settings;
  emulator::reset();
  train("threads", 1, with({"train.device=cuda", "train.eval_every=0", "train.check_every=0"}, keys));
  return emulator::counts();
}
std::string steps(int count) {
  return fmt::format("train.max_steps={}", count);
}
const Keys kPictures{"data.test_size=16", "data.train_size=160", "data.image_size=12", "model.hidden=[12]",
                     "compress.name=topk"};
const Keys kResnet{"model.name=resnet20", "data.batch_size=2", "data.image_size=8", "data.test_size=2",
                   "data.train_size=64"};
Keys gpt(const MadeUpText& text) {
  return {"model.name=gpt",           "model.width=16",    "model.heads=2",
          "model.layers=2",           "model.context=8",   "data.name=text",
          "data.root=" + text.root(), "data.batch_size=2", "data.sequence_length=8"};
}

// The table of lab/records/gpu_kernels.md.
TEST_CASE("a method's step is so many launches") {
  const emulator::Settings settings;
  struct Row {
    const char* name;
    Launches raw, rice;
  };
  for (const Row& row : {Row{"topk", {8, 1, 2}, {11, 6, 2}}, Row{"threshold", {8, 1, 1}, {11, 6, 1}},
                         Row{"gaussiank", {10, 1, 2}, {13, 6, 2}}, Row{"dgc", {21, 1, 1}, {24, 6, 1}},
                         Row{"regtopk", {13, 1, 2}, {16, 6, 2}}}) {
    INFO(row.name);
    CompressOptions options = options_of(row.name);
    if (std::string(row.name) == "threshold") options.set("threshold", 0.5);
    options.codec = "raw";
    CHECK(launches(options) == row.raw);
    options.codec = "rice";
    CHECK(launches(options) == row.rice);
  }
  CompressOptions topk = options_of("topk");
  for (const auto& [codec, expected] : {std::pair("raw", Launches{4, 1, 2}), {"rice", Launches{8, 6, 2}}}) {
    topk.codec = codec;
    CHECK(launches(topk, whole_group(20000, 2), {}, "topk=one block") == expected);
  }
  CHECK(launches(options_of("signsgd")) == Launches{3, 2, 1});
  CHECK(launches(options_of("qsgd")) == Launches{3, 3, 1});
}

TEST_CASE("topk keeps what its trial has chosen, by the range's length and k, for later processes") {
  const emulator::Settings settings;
  const TempFolder folder;
  CompressOptions options = options_of("topk");
  options.codec = "raw";
  const auto encode = [&](const GroupSpec& group) {
    return launches(options, group, {.algorithm_cache = folder.str()}).encode;
  };
  const GroupSpec one = whole_group(20000, 2);
  CHECK(encode({one.numel, {{0, 500}, {500, one.numel}}, 2}) == 8);
  CHECK(std::filesystem::is_empty(folder.str()));
  encode(one);
  const std::string file = std::filesystem::directory_iterator(folder.str())->path();
  CHECK(text_of(file).starts_with("trial of topk of 20000 entries, k 200 = "));
  for (const auto& [way, expected] : {std::pair("many blocks", 8u), {"one block", 4u}}) {
    std::ofstream(file) << "trial of topk of 20000 entries, k 200 = " << way << ";\n";
    CHECK(encode(one) == expected);
  }
  encode(whole_group(20001, 2));
  CHECK(contains(text_of(file), "trial of topk of 20001 entries"));
}

TEST_CASE("a method's step is as many launches for forty selection ranges as for one") {
  const emulator::Settings settings;
  GroupSpec forty{40 * 500, {}, 2};
  for (std::size_t begin = 0; begin < forty.numel; begin += 500)
    forty.segments.emplace_back(begin, begin + 500);
  for (const char* name : {"topk", "threshold", "gaussiank", "dgc", "regtopk"}) {
    INFO(name);
    CompressOptions options = options_of(name);
    if (std::string(name) == "threshold") options.set("threshold", 0.5);
    CHECK(launches(options, forty) == launches(options));
  }
}

TEST_CASE("batches that the loader makes cross the bus as bytes") {
  const auto uploaded = [](int count) {
    return counts_of(with(kPictures, {steps(count), "data.on_device=false", "data.batch_size=8"})).uploaded;
  };
  const std::size_t of_ten = uploaded(20) - uploaded(10);
  const std::size_t pictures = 10 * 8 * 3 * 12 * 12, labels = 10 * 8 * 4;
  CHECK(of_ten >= pictures + labels);
  CHECK(of_ten < pictures + labels + 10 * 512);  // and the parameters of the steps
}

TEST_CASE("a captured step copies nothing to the host: a kernel writes its outcome there") {
  const auto downloaded = [](int count) { return counts_of(with(kPictures, {steps(count)})).downloaded; };
  CHECK(downloaded(20) > 0);  // weights, and the marks of the first steps
  CHECK(downloaded(40) == downloaded(20));
}

// What a graph wrote to is the next step's, which runs without one.
TEST_CASE("a density's change takes no second step's memory") {
  const auto most = [](int batch, const std::string& warmup) {
    const std::size_t before = emulator::counts().bytes_in_use;
    return counts_of({"compress.name=topk", "compress.density=0.01", "compress.warmup=" + warmup, steps(6),
                      fmt::format("data.batch_size={}", batch), fmt::format("data.train_size={}", 3 * batch),
                      "data.test_size=8", "data.image_size=12", "data.on_device=false", "model.name=lenet"})
               .most_bytes_in_use -
           before;
  };
  most(512, "[]");  // chooses algorithms
  const std::size_t constant = most(512, "[]"), of_a_step = constant - most(16, "[]");
  CHECK(of_a_step > (8 << 20));
  CHECK(most(512, "[0.02]") < constant + of_a_step / 4);
}

// A gradient, two marks, and a step of topk, by many blocks or one: no launch of the host is in what is timed.
TEST_CASE("gpu_timings times steps within one graph") {
  const emulator::Settings settings;
  gpu_timings::measure({.seconds = 600, .smallest = 10, .largest = 10}, [](const auto&) {});
  const std::size_t encode = emulator::counts().graph_nodes / 12 - (1 + 2 + 1 + 2);
  CHECK((encode == 8 || encode == 4));
  CHECK(emulator::counts().graph_nodes == 12 * (1 + 2 + encode + 1 + 2));
}

// What a captured step is made of, beside its arithmetic. Behind the first ten steps, pieces have no marks.
TEST_CASE("a captured step has so many nodes, as the log says; behind the first ones none allocates") {
  const MadeUpText text;
  const auto cost = [](int count, const Keys& keys) {
    return counts_of(with(keys, {steps(count), "compress.name=topk"}));
  };
  struct Bound {
    Keys keys;
    std::size_t most, marks;
  };
  const Keys adamw = with(gpt(text), {"optimizer.name=adamw"});
  for (const auto& [keys, most, marks] :
       {Bound{kResnet, 201, 22}, Bound{with(kResnet, {"train.deterministic=true"}), 201, 22},
        Bound{adamw, 118, 16}, Bound{with(adamw, {"train.precision=bf16"}), 119, 16}}) {
    INFO(keys[0] << ", " << keys.back());
    cost(6, keys);  // chooses algorithms
    const StandardError errors;
    set_log_level(LogLevel::debug);
    const emulator::Counts marked = cost(6, keys);
    set_log_level(LogLevel::info);
    CHECK(contains(errors.text(), fmt::format("step 3: a graph of {} nodes\n", marked.graph_nodes)));
    const emulator::Counts few = cost(12, keys), many = cost(16, keys);
    CHECK(few.graph_nodes == many.graph_nodes);
    CHECK(few.graph_nodes <= most);
    CHECK(marked.graph_nodes == few.graph_nodes + marks);
    CHECK(few.allocations == many.allocations);
    CHECK(few.allocations == marked.allocations);  // the graphs share their memory
  }
}

TEST_CASE("a step makes its weights' bf16 copies once, in one launch, whatever its micro-batches") {
  const MadeUpText text;
  const auto nodes = [&](const std::string& precision, int accumulate) {
    return counts_of(with(gpt(text),
                          {steps(6), "train.step_times=false", "data.windows=random", "compress.name=dense",
                           "train.precision=" + precision, fmt::format("train.accumulate={}", accumulate)}))
        .graph_nodes;
  };
  for (const int accumulate : {1, 3}) CHECK(nodes("bf16", accumulate) == nodes("fp32", accumulate) + 1);
}

// One launch for the vectors' blocks, one for their sums, one to scale; after averaging the optimizer scales.
TEST_CASE("clipping is three launches, however many parameters a group has") {
  const Keys plain =
      with(kResnet, {steps(6), "train.step_times=false", "compress.name=dense", "exchange.merge=all"});
  const auto nodes = [&](const Keys& keys) { return counts_of(with(plain, keys)).graph_nodes; };
  nodes({});  // chooses algorithms
  const std::size_t without = nodes({});
  for (const Keys& keys : {Keys{"train.clip_global=1"},
                           {"train.clip_local=1"},
                           {"train.clip_local=1", "train.clip_local_scope=tensor"}})
    CHECK(nodes(keys) == without + 3);
}

}  // namespace
}  // namespace topknot

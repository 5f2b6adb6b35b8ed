// What a step costs beside its arithmetic: launches by method, and bytes that cross the bus.
#include <fmt/format.h>

#include <filesystem>
#include <fstream>
#include <ostream>
#include <utility>

#include "lab/gpu_timings/gpu_timings.h"
#include "nn/base/log.h"
#include "nn/core/cuda/trial.h"
#include "tests/cuda/compressor_ranks.h"
#include "tests/cuda/fixture.h"
#include "tests/emulator/machine.h"
#include "tests/emulator/tests/machine_settings.h"
#include "tests/support/files.h"
#include "tests/support/standard_error.h"
#include "tests/support/temp_folder.h"
#include "tests/support/text.h"
#include "tests/train/made_up_text.h"
#include "tests/train/small_run.h"

namespace topknot {
namespace {

using namespace topknot::testing;

struct Launches {
  std::size_t encode = 0, decode = 0, commit = 0;
  bool operator==(const Launches&) const = default;
};

std::ostream& operator<<(std::ostream& out, const Launches& launches) {
  return out << launches.encode << ", " << launches.decode << ", " << launches.commit;
}

// Of one rank of two.
Launches launches(const CompressOptions& options, const GroupSpec& group = testing::whole_group(20000, 2),
                  const cuda::ContextOptions& machine = {.deterministic = true},
                  const std::string& trial = "") {
  const OnGpu gpu(machine);
  cuda::Trial::force(trial);
  const std::size_t n = group.numel, ranks = static_cast<std::size_t>(group.ranks);
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
    return emulator::kernels_run() - std::exchange(before, emulator::kernels_run());
  };
  since();
  Launches made;
  StepContext context;
  context.weights = {weights.data(), ranks};
  context.parameters = step.data();
  context.status = status.data();
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
    CompressOptions options = testing::options_of(row.name);
    if (std::string(row.name) == "threshold") options.set("threshold", 0.5);
    options.codec = "raw";
    CHECK(launches(options) == row.raw);
    options.codec = "rice";
    CHECK(launches(options) == row.rice);
  }
  CompressOptions topk = testing::options_of("topk");
  for (const auto& [codec, expected] : {std::pair("raw", Launches{4, 1, 2}), {"rice", Launches{8, 6, 2}}}) {
    topk.codec = codec;
    CHECK(launches(topk, testing::whole_group(20000, 2), {}, "topk=one block") == expected);
  }
  CHECK(launches(testing::options_of("signsgd")) == Launches{3, 2, 1});
  CHECK(launches(testing::options_of("qsgd")) == Launches{3, 3, 1});
}

TEST_CASE("topk keeps what its trial has chosen, by the range's length and k, for later processes") {
  const emulator::Settings settings;
  const TempFolder folder;
  CompressOptions options = testing::options_of("topk");
  options.codec = "raw";
  const auto encode = [&](const GroupSpec& group) {
    return launches(options, group, {.algorithm_cache = folder.str()}).encode;
  };
  const GroupSpec one = testing::whole_group(20000, 2);
  CHECK(encode({one.numel, {{0, 500}, {500, one.numel}}, 2}) == 8);
  CHECK(std::filesystem::is_empty(folder.str()));
  encode(one);
  const std::string file = std::filesystem::directory_iterator(folder.str())->path();
  CHECK(text_of(file).starts_with("trial of topk of 20000 entries, k 200 = "));
  for (const auto& [way, expected] : {std::pair("many blocks", 8u), {"one block", 4u}}) {
    std::ofstream(file) << "trial of topk of 20000 entries, k 200 = " << way << ";\n";
    CHECK(encode(one) == expected);
  }
  encode(testing::whole_group(20001, 2));
  CHECK(contains(text_of(file), "trial of topk of 20001 entries"));
}

TEST_CASE("a method's step is as many launches for forty selection ranges as for one") {
  const emulator::Settings settings;
  GroupSpec forty{40 * 500, {}, 2};
  for (std::size_t begin = 0; begin < forty.numel; begin += 500)
    forty.segments.emplace_back(begin, begin + 500);
  for (const char* name : {"topk", "threshold", "gaussiank", "dgc", "regtopk"}) {
    INFO(name);
    CompressOptions options = testing::options_of(name);
    if (std::string(name) == "threshold") options.set("threshold", 0.5);
    CHECK(launches(options, forty) == launches(options));
  }
}

TEST_CASE("batches that the loader makes cross the bus as bytes") {
  const emulator::Gpus gpus(1);
  const auto uploaded = [](int steps) {
    emulator::reset();
    train("threads", 1,
          {"train.device=cuda", "compress.name=topk", "train.max_steps=" + std::to_string(steps),
           "data.on_device=false", "data.batch_size=8", "data.test_size=16", "data.train_size=160",
           "data.image_size=12", "model.hidden=[12]"});
    return emulator::bytes_uploaded();
  };
  const std::size_t of_ten = uploaded(20) - uploaded(10);
  const std::size_t pictures = 10 * 8 * 3 * 12 * 12, labels = 10 * 8 * 4;
  CHECK(of_ten >= pictures + labels);
  CHECK(of_ten < pictures + labels + 10 * 512);  // and the parameters of the steps
}

TEST_CASE("a captured step copies nothing to the host: a kernel writes its outcome there") {
  const emulator::Gpus gpus(1);
  const auto downloaded = [](int steps) {
    emulator::reset();
    train("threads", 1,
          {"train.device=cuda", "compress.name=topk", "train.max_steps=" + std::to_string(steps),
           "train.eval_every=0", "train.check_every=0", "data.test_size=16", "data.train_size=160",
           "data.image_size=12", "model.hidden=[12]"});
    return emulator::bytes_downloaded();
  };
  CHECK(downloaded(20) > 0);  // weights, and the marks of the first steps
  CHECK(downloaded(40) == downloaded(20));
}

// What a graph wrote to is the next step's, which runs without one.
TEST_CASE("a density's change takes no second step's memory") {
  const emulator::Gpus gpus(1);
  const auto most = [](int batch, const std::string& warmup) {
    emulator::reset();
    const std::size_t before = emulator::bytes_in_use();
    train("threads", 1,
          {"train.device=cuda", "compress.name=topk", "compress.density=0.01", "compress.warmup=" + warmup,
           "train.max_steps=6", "train.eval_every=0", fmt::format("data.batch_size={}", batch),
           fmt::format("data.train_size={}", 3 * batch), "data.test_size=8", "data.image_size=12",
           "data.on_device=false", "model.name=lenet"});
    return emulator::most_bytes_in_use() - before;
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
  const std::size_t encode = emulator::graph_nodes() / 12 - (1 + 2 + 1 + 2);
  CHECK((encode == 8 || encode == 4));
  CHECK(emulator::graph_nodes() == 12 * (1 + 2 + encode + 1 + 2));
}

// What a captured step is made of, beside its arithmetic. Behind the first ten steps, pieces have no marks.
TEST_CASE(
    "a captured step has so many nodes, as the log says, fewer without marks, and none allocates behind the "
    "first ones") {
  const emulator::Gpus gpus(1);
  struct Cost {
    std::size_t nodes, allocations;
  };
  const auto cost = [](int steps, const Keys& keys) {
    emulator::reset();
    train("threads", 1,
          with({"train.device=cuda", "compress.name=topk", "train.max_steps=" + std::to_string(steps),
                "train.eval_every=0", "train.check_every=0"},
               keys));
    return Cost{emulator::graph_nodes(), emulator::allocations()};
  };
  const MadeUpText text;
  const Keys resnet{"model.name=resnet20", "data.batch_size=2", "data.image_size=8", "data.test_size=2",
                    "data.train_size=64"};
  const Keys gpt{"model.name=gpt",           "model.width=16",    "model.heads=2",
                 "model.layers=2",           "model.context=8",   "data.name=text",
                 "data.root=" + text.root(), "data.batch_size=2", "data.sequence_length=8",
                 "optimizer.name=adamw"};
  struct Bound {
    Keys keys;
    std::size_t most, marks;
  };
  for (const auto& [keys, most, marks] :
       {Bound{resnet, 201, 22}, Bound{with(resnet, {"train.deterministic=true"}), 201, 22},
        Bound{gpt, 118, 16}, Bound{with(gpt, {"train.precision=bf16"}), 119, 16}}) {
    INFO(keys[0] << ", " << keys.back());
    cost(6, keys);  // chooses algorithms
    const testing::StandardError errors;
    set_log_level(LogLevel::debug);
    const Cost marked = cost(6, keys);
    set_log_level(LogLevel::info);
    CHECK(contains(errors.text(), fmt::format("step 3: a graph of {} nodes\n", marked.nodes)));
    const Cost few = cost(12, keys), many = cost(16, keys);
    CHECK(few.nodes == many.nodes);
    CHECK(few.nodes <= most);
    CHECK(marked.nodes == few.nodes + marks);
    CHECK(few.allocations == many.allocations);
    CHECK(few.allocations == marked.allocations);  // the graphs share their memory
  }
}

TEST_CASE("a step makes its weights' bf16 copies once, in one launch, whatever its micro-batches") {
  const emulator::Gpus gpus(1);
  const MadeUpText text;
  const auto nodes = [&](const std::string& precision, int accumulate) {
    emulator::reset();
    train("threads", 1,
          {"train.device=cuda", "train.max_steps=6", "train.eval_every=0", "train.check_every=0",
           "train.step_times=false", "model.name=gpt", "model.width=16", "model.heads=2", "model.layers=2",
           "model.context=8", "data.name=text", "data.root=" + text.root(), "data.batch_size=2",
           "data.sequence_length=8", "data.windows=random", "compress.name=dense",
           "train.precision=" + precision, "train.accumulate=" + std::to_string(accumulate)});
    return emulator::graph_nodes();
  };
  for (const int accumulate : {1, 3}) CHECK(nodes("bf16", accumulate) == nodes("fp32", accumulate) + 1);
}

// One launch for the vectors' blocks, one for their sums, one to scale; after averaging the optimizer scales.
TEST_CASE("clipping is three launches, however many parameters a group has") {
  const emulator::Gpus gpus(1);
  const auto nodes = [](const Keys& keys) {
    emulator::reset();
    train("threads", 1,
          with({"train.device=cuda", "train.max_steps=6", "train.eval_every=0", "train.check_every=0",
                "train.step_times=false", "model.name=resnet20", "data.batch_size=2", "data.image_size=8",
                "data.test_size=2", "data.train_size=64", "compress.name=dense", "exchange.merge=all"},
               keys));
    return emulator::graph_nodes();
  };
  nodes({});  // chooses algorithms
  const std::size_t plain = nodes({});
  CHECK(nodes({"train.clip_global=1"}) == plain + 3);
  CHECK(nodes({"train.clip_local=1", "train.clip_local_scope=tensor"}) == plain + 3);
  CHECK(nodes({"train.clip_local=1"}) == plain + 3);
}

}  // namespace
}  // namespace topknot

// Which of cuDNN's algorithms a convolution takes, and what happens where cuDNN fails.
#include "tests/emulator/tests/conv_machine.h"

namespace topknot {
namespace {

using cuda::Precision;
using reference::Conv;
using namespace testing;

const Conv kConv{2, 3, 6, 6, 4, 3, 1, 1};

// y, dx, dw and db of one convolution, whose input is used twice.
std::vector<std::vector<float>> step(DType type = DType::f32, const Conv& g = kConv) {
  const ConvGeometry geometry = g.geometry();
  const CaughtInput x(images(g, type));
  const GpuLeaf w = weight(g), b({g.out}, random_values(g.out, 3));
  const Variable y = conv2d(x.variable(), w.variable(), b.variable(), geometry),
                 z = conv2d(x.variable(), w.variable(), b.variable(), geometry);
  backward_from({{y, random_values(g.y_size(), 4)}, {z, random_values(g.y_size(), 5)}});
  return {values_of(y.value()), x.gradient(), w.gradient(), b.gradient()};
}

Precision precision_of(DType type) {
  return type == DType::bf16 ? Precision::bf16 : Precision::fp32;
}
auto step_alone(DType type, const Conv& g) {
  const OnGpu gpu(precision_of(type));
  return step(type, g);
}

// Runs of a step's three trials, with the emulator's three algorithms.
constexpr std::size_t kTrials = 3 * 3 * cuda::kTrialTimings;

// What a step of the current context runs.
std::vector<int> used(DType type = DType::f32, const Conv& g = kConv) {
  emulator::convolutions().used.clear();
  step(type, g);
  return emulator::convolutions().used;
}

}  // namespace

TEST_CASE("a convolution's algorithms are timed once for each shape, type and product") {
  const ConvMachine machine;
  OnGpu gpu(Precision::fp32, false);
  const auto runs = used();
  CHECK(runs.size() == kTrials + 6);
  CHECK(std::count(runs.begin(), runs.end(), 1) == kTrials / 3 + 6);  // the quickest
  CHECK(used() == std::vector<int>(6, 1));
  for (const Conv& another :
       {Conv{1, 3, 6, 6, 4, 3, 1, 1}, Conv{2, 4, 6, 6, 4, 3, 1, 1}, Conv{2, 4, 6, 6, 4, 3, 1, 1, 2},
        Conv{2, 4, 6, 6, 4, {3, 1}, 1, 1}, Conv{2, 4, 6, 6, 4, 3, {1, 2}, 1},
        Conv{2, 4, 6, 6, 4, 3, {2, 1}, 1}, Conv{2, 4, 6, 6, 4, 3, 1, {1, 0}}})
    CHECK(used(DType::f32, another).size() == kTrials + 6);
  const OnGpu bf16(Precision::bf16, false);
  for (const DType type : {DType::f32, DType::bf16})
    CHECK(used(type, {2, 8, 6, 6, 8, 3, 1, 1}).size() == kTrials + 6);
}

TEST_CASE("a convolution's choices are kept for later processes, by precision") {
  const ConvMachine machine;
  const TempFolder folder;
  auto& cudnn = emulator::convolutions();
  const auto process = [&](Precision precision = Precision::fp32, bool deterministic = false,
                           bool shared = false) {
    OnGpu gpu(precision, deterministic, shared, folder.str());
    return used(gpu.context().activation_type());
  };
  CHECK(process().size() == kTrials + 6);
  const std::string file = folder.at("emulated GPU, 4 multiprocessors, CUDA 13.0, cuDNN " +
                                     std::to_string(cudnnGetVersion()) + ".txt");
  const std::string kept = text_of(file);
  CHECK(kept.starts_with("trial of output of a convolution of [2, 3, 6, 6] with [4, 3, 3, 3], "));
  CHECK(contains(kept, ", fp32, precision 0 = algorithm 1, math type 3;\n"));
  CHECK(std::count(kept.begin(), kept.end(), '\n') == 3);

  // A trial would choose another one now.
  cudnn.algorithms = {{5, 3e4f, 64, true}, {0, 1e4f, 0, false}, {1, 2e4f, 4096, true}};
  CHECK(process() == std::vector<int>(3 + 6, 1));
  CHECK(process(Precision::tf32).back() == 0);
  CHECK(process(Precision::fp32, false, true).back() == 0);  // beside other ranks
  CHECK(process(Precision::fp32, true) == std::vector<int>(6, 5));

  // What this cuDNN does not name is timed anew.
  const std::string first = kept.substr(0, kept.find(" = "));
  std::ofstream(file) << first << " = algorithm 1, math type 0;\n" << kept.substr(kept.find('\n') + 1);
  const auto runs = process();
  CHECK(runs.size() == kTrials / 3 + 2 + 6);
  CHECK(std::count(runs.begin(), runs.end(), 0) == cuda::kTrialTimings + 2);
}

TEST_CASE("what was chosen with little memory, or where an algorithm failed, is not kept") {
  const ConvMachine machine;
  const TempFolder folder;
  auto& cudnn = emulator::convolutions();
  const auto last_used = [&](std::size_t memory = std::size_t{4} << 30) {
    OnGpu gpu(Precision::fp32, false, false, folder.str());
    emulator::machine().memory = emulator::counts().bytes_in_use + memory;
    return used().back();
  };
  cudnn.fails_to_run = 1;
  CHECK(last_used() == 0);
  CHECK(std::filesystem::is_empty(folder.str()));
  ConvMachine::clear();
  cudnn.algorithms = {{1, 1e4f, std::size_t{300} << 20, true}, {0, 4e4f, 0, true}};
  CHECK(last_used(std::size_t{64} << 20) == 0);
  CHECK(std::filesystem::is_empty(folder.str()));
  CHECK(last_used() == 1);
}

TEST_CASE("deterministic convolutions take cuDNN's first deterministic algorithm, and time nothing") {
  const ConvMachine machine;
  auto& cudnn = emulator::convolutions();
  cudnn.algorithms = {{0, 1e4f, 0, false}, {5, 3e4f, 64, true}, {1, 2e4f, 128, true}};
  OnGpu gpu(Precision::fp32, true);
  for (int i = 0; i < 2; ++i) CHECK(used() == std::vector<int>(6, 5));
  CHECK(cudnn.foretold == 3);
}

TEST_CASE("each precision asks cuDNN for its own arithmetic") {
  const ConvMachine machine;
  auto& cudnn = emulator::convolutions();
  const auto maths = [&](Precision precision) {
    OnGpu gpu(precision, false);
    cudnn.maths.clear();
    step(gpu.context().activation_type());
    CHECK(cudnn.maths == std::vector(cudnn.maths.size(), cudnn.maths[0]));
    return cudnn.maths[0];
  };
  CHECK(maths(Precision::fp32) == CUDNN_FMA_MATH);
  CHECK(maths(Precision::tf32) == CUDNN_TENSOR_OP_MATH);
  CHECK(maths(Precision::bf16) == CUDNN_TENSOR_OP_MATH);
  // TF32 under another name is not plain fp32, and what may be TF32 is timed without it.
  cudnn.algorithms = {{0, 1e4f, 0, true, CUDNN_TENSOR_OP_MATH}, {1, 2e4f, 0, true, CUDNN_FMA_MATH}};
  CHECK(maths(Precision::fp32) == CUDNN_FMA_MATH);
  CHECK(cudnn.used.back() == 1);
  cudnn.names_default = true;
  CHECK(maths(Precision::fp32) == CUDNN_FMA_MATH);
  CHECK(cudnn.used.back() == 0);
  // Tensor cores are not supported, the default is.
  cudnn.refuses_tensor_ops = true;
  CHECK(maths(Precision::tf32) == CUDNN_DEFAULT_MATH);
}

TEST_CASE("a convolution makes do with a smaller workspace where memory is short") {
  const ConvMachine machine;
  auto& cudnn = emulator::convolutions();
  cudnn.algorithms = {{1, 1e4f, std::size_t{300} << 20, true},
                      {2, 2e4f, std::size_t{8} << 20, true},
                      {3, 3e4f, std::size_t{9} << 20, true},
                      {0, 4e4f, 0, true}};
  for (const bool deterministic : {false, true})
    for (const auto& [megabytes, algorithm] : {std::pair(64, 2), std::pair(2, 0)}) {
      OnGpu gpu(Precision::fp32, deterministic);
      emulator::machine().memory = emulator::counts().bytes_in_use + (std::size_t(megabytes) << 20);
      step();
      CHECK(used() == std::vector<int>(6, algorithm));
      emulator::machine().memory = std::size_t{4} << 30;
    }
  // Above the bound an algorithm is not thought of.
  cudnn.algorithms = {{1, 1e4f, cuda::kConvWorkspaceLimit + 1, true}, {0, 4e4f, 0, true}};
  OnGpu gpu(Precision::fp32, true);
  CHECK(used() == std::vector<int>(6, 0));
}

TEST_CASE("an algorithm that was timed and then fails gives way to the next, but not within a capture") {
  const ConvMachine machine;
  auto& cudnn = emulator::convolutions();
  cudnn.algorithms = {{5, 3e4f, 64, true}, {0, 2e4f, 0, false}, {1, 1e4f, 4096, true}};
  OnGpu gpu(Precision::fp32, false);
  const auto expected = step();
  REQUIRE(used() == std::vector<int>(6, 1));
  cudnn.fails_to_run = 1;
  const GpuLeaf w = weight(kConv);
  const Tensor x = images(kConv);
  cuda::GraphMemory memory(gpu.pool());
  const auto record = [&] {
    const cuda::Graph graph(gpu.stream(), memory,
                            [&] { conv2d(Variable(x), w.variable(), {}, kConv.geometry()); });
  };
  CHECK(says(error_text(record), {"cudnnConvolutionForward", "rank 0"}));
  CHECK(step() == expected);
  CHECK(used() == std::vector<int>(6, 0));
  cudnn.fails_to_run = -1;
  CHECK(used() == std::vector<int>(6, 0));  // it is not tried again
}

TEST_CASE("a convolution that cannot add to its output is added up beside it") {
  const ConvMachine machine;
  OnGpu gpu;
  const auto expected = step();
  emulator::convolutions().refuses_to_add = true;
  CHECK(step() == expected);
}

TEST_CASE("a trial leaves alone what its product adds to") {
  const ConvMachine machine;
  const auto gradient = [&](bool deterministic) {
    OnGpu gpu(Precision::fp32, deterministic);
    const Conv strided{2, 3, 6, 6, 4, 3, 2, 1};
    const CaughtInput x(images(kConv));
    const GpuLeaf w = weight(kConv);
    backward_from(
        {{conv2d(x.variable(), w.variable(), {}, kConv.geometry()), random_values(kConv.y_size(), 4)},
         {conv2d(x.variable(), w.variable(), {}, strided.geometry()), random_values(strided.y_size(), 5)}});
    return std::pair(x.gradient(), w.gradient());
  };
  CHECK(gradient(false) == gradient(true));
}

TEST_CASE("no algorithm is looked for while a graph is captured, and a known shape is captured") {
  const ConvMachine machine;
  for (const bool deterministic : {false, true}) {
    OnGpu gpu(Precision::fp32, deterministic);
    const Conv& g = kConv;
    const ConvGeometry geometry = g.geometry();
    const Tensor x = images(g);
    const GpuLeaf w = weight(g);
    std::vector<Tensor> kept;
    const auto forward = [&] { kept.push_back(conv2d(Variable(x), w.variable(), {}, geometry).value()); };
    conv2d(Variable(images({3, 3, 6, 6, 4, 3, 1, 1})), w.variable(), {}, geometry);  // memory for it
    CHECK(says(emulator::error_in_capture(gpu.stream(), forward), {"[2, 3, 6, 6]", "capture", "run a step"}));
    forward(), forward();
    const auto expected = values_of(kept[0]);
    kept.pop_back();  // memory for the capture
    CapturedGraph captured(gpu.stream(), forward);
    REQUIRE(kept.size() == 2);
    captured.launch(gpu.stream());
    CHECK(values_of(kept[1]) == expected);
  }
}

TEST_CASE("a failing call of cuDNN or cuBLAS ends in one message that names it and the rank") {
  const Conv pointwise{2, 3, 6, 6, 4, 1, 1, 0};
  for (const char* call :
       {"cudnnSetTensor4dDescriptor", "cudnnSetFilter4dDescriptor", "cudnnSetConvolution2dDescriptor",
        "cudnnSetConvolutionGroupCount", "cudnnSetConvolutionMathType",
        "cudnnGetConvolutionForwardAlgorithm_v7", "cudnnGetConvolutionBackwardDataAlgorithm_v7",
        "cudnnGetConvolutionBackwardFilterAlgorithm_v7", "cudnnConvolutionForward",
        "cudnnConvolutionBackwardData", "cudnnConvolutionBackwardFilter", "cublasGemmEx"}) {
    const ConvMachine machine;
    OnGpu gpu(Precision::fp32, false);
    const bool cublas = std::string(call) == "cublasGemmEx";
    emulator::fail(call, cublas ? int(CUBLAS_STATUS_EXECUTION_FAILED) : int(CUDNN_STATUS_EXECUTION_FAILED));
    INFO(call);
    CHECK_THROWS_AS(step(DType::f32, cublas ? pointwise : kConv), cuda::CudaError);
    CHECK(says(error_text([&] { step(DType::f32, cublas ? pointwise : kConv); }), {call, "rank 0"}));
  }
}

TEST_CASE("channels that cuDNN does not take are widened with zeros") {
  const ConvMachine machine;
  auto& cudnn = emulator::convolutions();
  for (const DType type : {DType::f32, DType::bf16}) {
    // Of both, of x alone, of y alone.
    for (const Conv& g : {Conv{2, 3, 6, 6, 5, 3, 1, 1}, {2, 3, 6, 6, 8, 3, 1, 1}, {2, 8, 6, 6, 5, 3, 1, 1}}) {
      ConvMachine::clear();
      cudnn.bf16_channel_unit = 1;
      const auto expected = step_alone(type, g);
      ConvMachine::clear();
      cudnn.channel_unit = type == DType::bf16 ? 8 : 4;
      const OnGpu gpu(precision_of(type));
      const auto result = step(type, g);
      CHECK(cudnn.used.size() == 6);
      for (std::size_t part = 0; part < expected.size(); ++part)
        if (type == DType::bf16 && part == 1 && g.in != 8)  // added to beside cuDNN: rounded once more
          check_close("dx", result[part], as_double(expected[part]),
                      reference::Array(expected[part].size(), 16.0), 1.0 / 128);
        else
          CHECK(result[part] == expected[part]);
      const int asked = cudnn.foretold;
      step(type, g);
      CHECK(cudnn.foretold == asked);
    }
  }
}

TEST_CASE("what cuDNN does not do is computed by the definition, each product by itself") {
  const std::vector<DType> types{DType::f32, DType::bf16};
  const std::vector<Conv> convolutions{{2, 3, 6, 6, 5, 3, 1, 1}, {2, 6, 6, 6, 4, 3, {2, 1}, 1, 2}};
  const auto check = [](DType type, const auto& result, const auto& expected) {
    for (std::size_t part = 0; part < expected.size(); ++part)
      check_close("part " + std::to_string(part), result[part], as_double(expected[part]),
                  reference::Array(expected[part].size(), 30.0), type == DType::bf16 ? 8e-3 : 1e-6);
  };
  for (const DType type : types)
    for (const Conv& g : convolutions) {
      const ConvMachine machine;
      auto& cudnn = emulator::convolutions();
      cudnn.bf16_channel_unit = 1, cudnn.bf16_groups = true;
      const auto expected = step_alone(type, g);
      CHECK(cudnn.used.size() == 6);
      const auto used_with = [&](const std::string& refused) {
        INFO(refused << ", " << g.str());
        const OnGpu gpu(precision_of(type));
        if (!refused.empty()) emulator::fail(refused, CUDNN_STATUS_NOT_SUPPORTED);
        cudnn.used.clear();
        check(type, step(type, g), expected);
        const std::size_t first = cudnn.used.size();
        step(type, g);
        CHECK(cudnn.used.size() == 2 * first);
        ConvMachine::clear();
        return first;
      };
      ConvMachine::clear();
      cudnn.algorithms = {{0, 1.0f, 0, false}};  // none is deterministic
      CHECK(used_with("") == 0);
      cudnn.bf16_channel_unit = 1, cudnn.bf16_groups = true, cudnn.runs_nothing = true;
      CHECK(used_with("") == 0);
      for (const char* product : {"Forward", "BackwardData", "BackwardFilter"}) {
        cudnn.bf16_channel_unit = 1, cudnn.bf16_groups = true;
        CHECK(used_with("cudnnGetConvolution" + std::string(product) + "Algorithm_v7") == 4);
      }
      if (g.groups > 1 && type == DType::bf16) CHECK(used_with("") == 0);
    }
}

TEST_CASE("cuDNN is not asked for a gradient that is not wanted") {
  const ConvMachine machine;
  OnGpu gpu;
  emulator::fail("cudnnGetConvolutionBackwardDataAlgorithm_v7", CUDNN_STATUS_EXECUTION_FAILED);
  const Tensor images = testing::images(kConv);
  const GpuLeaf w = weight(kConv);
  backward_from(
      {{conv2d(Variable(images), w.variable(), {}, kConv.geometry()), random_values(kConv.y_size(), 4)}});
  CHECK(emulator::convolutions().used.size() == 2);
}

}  // namespace topknot

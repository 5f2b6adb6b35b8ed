// Which of cuDNN's algorithms a convolution takes, and what happens where cuDNN fails.
#include <filesystem>
#include <fstream>

#include "tests/emulator/tests/conv_machine.h"
#include "tests/support/error_text.h"
#include "tests/support/files.h"
#include "tests/support/temp_folder.h"
#include "tests/support/variables.h"

namespace topknot {
namespace {

using cuda::Precision;
using reference::Conv;
using testing::random_values;

using Machine = testing::ConvMachine;

const Conv kConv{2, 3, 6, 6, 4, 3, 1, 1};

// y, dx, dw and db of one convolution, whose input is used twice.
std::vector<std::vector<float>> step(DType type = DType::f32, const Conv& g = kConv) {
  const ConvGeometry geometry = g.geometry();
  const testing::CaughtInput x(testing::images(g, type));
  const testing::GpuLeaf w = testing::weight(g), b({g.out}, random_values(g.out, 3));
  const Variable y = conv2d(x.variable(), w.variable(), b.variable(), geometry),
                 z = conv2d(x.variable(), w.variable(), b.variable(), geometry);
  testing::backward_from({{y, random_values(g.y_size(), 4)}, {z, random_values(g.y_size(), 5)}});
  return {testing::values_of(y.value()), x.gradient(), w.gradient(), b.gradient()};
}

}  // namespace

TEST_CASE("a convolution's algorithms are timed once for each shape and product") {
  const Machine machine;
  auto& cudnn = emulator::convolutions();
  OnGpu gpu(Precision::fp32, false);
  const auto first = step();
  CHECK(cudnn.timed == 3 * cuda::kConvTimings);
  CHECK(cudnn.used == std::vector<int>(6, 1));  // the quickest, but for its first time
  CHECK(step() == first);
  CHECK(cudnn.timed == 3 * cuda::kConvTimings);
  {
    OnGpu another_rank(Precision::fp32, false);
    step();
    CHECK(cudnn.timed == 3 * cuda::kConvTimings);
  }
  int shapes = 1;
  for (const Conv& another :
       {Conv{1, 3, 6, 6, 4, 3, 1, 1}, Conv{2, 4, 6, 6, 4, 3, 1, 1}, Conv{2, 4, 6, 6, 4, 3, 1, 1, 2},
        Conv{2, 4, 6, 6, 4, {3, 1}, 1, 1}, Conv{2, 4, 6, 6, 4, 3, {1, 2}, 1},
        Conv{2, 4, 6, 6, 4, 3, {2, 1}, 1}, Conv{2, 4, 6, 6, 4, 3, 1, {1, 0}}}) {
    step(DType::f32, another);
    CHECK(cudnn.timed == 3 * cuda::kConvTimings * ++shapes);
  }
  cuda::forget_conv_algorithms();
  step();
  CHECK(cudnn.timed == 3 * cuda::kConvTimings * ++shapes);
}

TEST_CASE("timed algorithms of a convolution are kept for later processes, by precision") {
  const Machine machine;
  const TempFolder folder;
  auto& cudnn = emulator::convolutions();
  const auto process = [&](Precision precision = Precision::fp32, bool deterministic = false,
                           bool shared = false) {
    cuda::forget_conv_algorithms();
    cudnn.used.clear(), cudnn.timed = 0;
    OnGpu gpu(precision, deterministic, shared, folder.str());
    step(gpu.context().activation_type());
  };
  process();
  CHECK(cudnn.timed == 3 * cuda::kConvTimings);
  const std::string file = folder.at("emulated GPU, 4 multiprocessors, CUDA 13.0, cuDNN " +
                                     std::to_string(cudnnGetVersion()) + ".txt");
  const std::string kept = text_of(file);
  CHECK(
      kept.rfind(
          "the output of a convolution of [2, 3, 6, 6] with [4, 3, 3, 3], stride 1x1, padding 1x1, 1 groups, "
          "fp32, precision 0 = 1 3 4096 0 3 0 5 3 64;\n",
          0) == 0);
  CHECK(std::count(kept.begin(), kept.end(), '\n') == 3);

  // Timing would choose another one now; the spare one that needs no memory is known too.
  cudnn.algorithms = {{5, 3.0f, 64, true}, {0, 1.0f, 0, false}, {1, 2.0f, 4096, true}};
  process();
  CHECK(cudnn.timed == 0);
  CHECK(cudnn.used == std::vector<int>(6, 1));
  process(Precision::tf32);
  CHECK(cudnn.timed == 3 * cuda::kConvTimings);
  CHECK(cudnn.used == std::vector<int>(6, 0));
  process(Precision::fp32, false, true);  // beside other ranks
  CHECK(cudnn.used == std::vector<int>(6, 0));
  process(Precision::fp32, true);
  CHECK(cudnn.used == std::vector<int>(6, 5));

  // What this cuDNN does not do, needs more memory than is allowed, or never was a row is timed anew.
  const std::string first = kept.substr(0, kept.find(" = "));
  for (const char* row : {"7 3 4096", "1 0 4096 7 3 0", "1 2 4096", "1 4 4096", "1 -1 4096", "1 3", "",
                          "1 3 -1", "1 3 536870913", "1 x 4096", "99999999999999999999 3 0"}) {
    INFO(row);
    std::ofstream(file) << first << " = " << row << ";\n" << kept.substr(kept.find('\n') + 1);
    process();
    CHECK(cudnn.timed == cuda::kConvTimings);
    CHECK(std::count(cudnn.used.begin(), cudnn.used.end(), 0) == 2);
  }
}

TEST_CASE("what was timed with little memory, or foretold, is not kept") {
  const Machine machine;
  const TempFolder folder;
  auto& cudnn = emulator::convolutions();
  const auto kept = [&] {
    cuda::forget_conv_algorithms();
    const auto entries = std::filesystem::directory_iterator(folder.str());
    return std::distance(begin(entries), end(entries));
  };
  emulator::fail("cudnnFindConvolutionForwardAlgorithmEx", CUDNN_STATUS_EXECUTION_FAILED);
  emulator::fail("cudnnFindConvolutionBackwardDataAlgorithmEx", CUDNN_STATUS_EXECUTION_FAILED);
  emulator::fail("cudnnFindConvolutionBackwardFilterAlgorithmEx", CUDNN_STATUS_EXECUTION_FAILED);
  {
    OnGpu gpu(Precision::fp32, false, false, folder.str());
    step();
    CHECK(kept() == 0);
  }
  emulator::reset();
  cudnn.algorithms = {{1, 1.0f, std::size_t{300} << 20, true}, {0, 4.0f, 0, true}};
  OnGpu gpu(Precision::fp32, false, false, folder.str());
  emulator::machine().memory = emulator::bytes_in_use() + (std::size_t{64} << 20);
  step();
  CHECK(cudnn.used.back() == 0);
  CHECK(kept() == 0);
  emulator::machine().memory = std::size_t{4} << 30;
  step();
  CHECK(kept() == 1);
}

TEST_CASE("deterministic convolutions take cuDNN's first deterministic algorithm, and time nothing") {
  const Machine machine;
  auto& cudnn = emulator::convolutions();
  cudnn.algorithms = {{0, 1.0f, 0, false}, {5, 3.0f, 64, true}, {1, 2.0f, 128, true}};
  {
    OnGpu gpu(Precision::fp32, true);
    step(), step();
    CHECK(cudnn.timed == 0);
    CHECK(cudnn.foretold == 6);  // three channels: whether they have to be widened is asked too
    CHECK(cudnn.used == std::vector<int>(12, 5));
  }
  // What other options chose is theirs.
  cudnn.used.clear();
  OnGpu gpu(Precision::fp32, false);
  step();
  CHECK(cudnn.used == std::vector<int>(6, 0));
}

TEST_CASE("each precision asks cuDNN for its own arithmetic") {
  const Machine machine;
  auto& cudnn = emulator::convolutions();
  const auto maths = [&](Precision precision) {
    OnGpu gpu(precision);
    cudnn.maths.clear();
    step(gpu.context().activation_type());
    REQUIRE(cudnn.maths.size() == 6);
    CHECK(cudnn.maths == std::vector(6, cudnn.maths[0]));
    return cudnn.maths[0];
  };
  CHECK(maths(Precision::fp32) == CUDNN_FMA_MATH);
  CHECK(maths(Precision::tf32) == CUDNN_TENSOR_OP_MATH);
  CHECK(maths(Precision::bf16) == CUDNN_TENSOR_OP_MATH);
  // TF32 under another name is not plain fp32.
  cuda::forget_conv_algorithms();
  cudnn.algorithms = {{0, 1.0f, 0, true, CUDNN_TENSOR_OP_MATH}, {1, 2.0f, 0, true, CUDNN_FMA_MATH}};
  cudnn.used.clear();
  CHECK(maths(Precision::fp32) == CUDNN_FMA_MATH);
  CHECK(cudnn.used == std::vector<int>(6, 1));
}

TEST_CASE("a convolution makes do with a smaller workspace where memory is short") {
  const Machine machine;
  auto& cudnn = emulator::convolutions();
  cudnn.algorithms = {{1, 1.0f, std::size_t{300} << 20, true},
                      {2, 2.0f, std::size_t{8} << 20, true},
                      {3, 3.0f, std::size_t{9} << 20, true},
                      {0, 4.0f, 0, true}};
  for (const bool deterministic : {false, true}) {
    cuda::forget_conv_algorithms();
    OnGpu gpu(Precision::fp32, deterministic);
    emulator::machine().memory = emulator::bytes_in_use() + (std::size_t{64} << 20);
    cudnn.used.clear();
    const auto result = step();
    CHECK(cudnn.used == std::vector<int>(6, 2));
    // Memory that runs short later: the next in line.
    emulator::machine().memory = std::size_t{4} << 30;
    OnGpu another_rank(Precision::fp32, deterministic);
    gpu.pool()->release_cached();  // which a rank that is short would take
    emulator::machine().memory = emulator::bytes_in_use() + (std::size_t{2} << 20);
    cudnn.used.clear();
    CHECK(step() == result);
    CHECK(cudnn.used == std::vector<int>(6, 0));
    emulator::machine().memory = std::size_t{4} << 30;
  }
  // Above the bound an algorithm is not thought of.
  cuda::forget_conv_algorithms();
  cudnn.algorithms = {{1, 1.0f, cuda::kConvWorkspaceLimit + 1, true}, {0, 4.0f, 0, true}};
  cudnn.used.clear();
  OnGpu gpu(Precision::fp32, true);
  step();
  CHECK(cudnn.used == std::vector<int>(6, 0));
}

TEST_CASE("an algorithm that was timed and then fails gives way to the next, but not within a capture") {
  const Machine machine;
  auto& cudnn = emulator::convolutions();
  OnGpu gpu(Precision::fp32, false);
  const auto expected = step();
  REQUIRE(cudnn.used == std::vector<int>(6, 1));
  cudnn.fails_to_run = 1;
  const testing::GpuLeaf w = testing::weight(kConv);
  const Tensor x = testing::images(kConv);
  cuda::GraphMemory memory(gpu.pool());
  const auto record = [&] {
    const cuda::Graph graph(gpu.stream(), memory,
                            [&] { conv2d(Variable(x), w.variable(), {}, kConv.geometry()); });
  };
  CHECK(says(error_text(record), {"cudnnConvolutionForward", "rank 0"}));
  cudnn.used.clear();
  CHECK(step() == expected);
  CHECK(cudnn.used == std::vector<int>(6, 0));
  cudnn.used.clear(), cudnn.fails_to_run = -1;
  step();
  CHECK(cudnn.used == std::vector<int>(6, 0));  // it is not tried again
}

TEST_CASE("a convolution that cannot add to its output is added up beside it") {
  const Machine machine;
  OnGpu gpu;
  const auto expected = step();
  emulator::convolutions().refuses_to_add = true;
  CHECK(step() == expected);
}

TEST_CASE("no algorithm is looked for while a graph is captured, and a known shape is captured") {
  const Machine machine;
  for (const bool deterministic : {false, true}) {
    OnGpu gpu(Precision::fp32, deterministic);
    const Conv& g = kConv;
    const ConvGeometry geometry = g.geometry();
    const Tensor x = testing::images(g);
    const testing::GpuLeaf w = testing::weight(g);
    std::vector<Tensor> kept;
    const auto forward = [&] { kept.push_back(conv2d(Variable(x), w.variable(), {}, geometry).value()); };
    forward(), forward();
    const auto expected = testing::values_of(kept[0]);
    kept.pop_back();  // memory for the capture
    cuda::forget_conv_algorithms();
    CHECK(says(emulator::error_in_capture(gpu.stream(), forward), {"[2, 3, 6, 6]", "capture", "run a step"}));

    forward();
    kept.pop_back();
    testing::CapturedGraph captured(gpu.stream(), forward);
    REQUIRE(kept.size() == 2);
    captured.launch(gpu.stream());
    CHECK(testing::values_of(kept[1]) == expected);
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
    const Machine machine;
    OnGpu gpu(Precision::fp32, false);
    const bool cublas = std::string(call) == "cublasGemmEx";
    emulator::fail(call, cublas ? static_cast<int>(CUBLAS_STATUS_EXECUTION_FAILED)
                                : static_cast<int>(CUDNN_STATUS_EXECUTION_FAILED));
    INFO(call);
    CHECK_THROWS_AS(step(DType::f32, cublas ? pointwise : kConv), cuda::CudaError);
    CHECK(says(error_text([&] { step(DType::f32, cublas ? pointwise : kConv); }), {call, "rank 0"}));
  }
}

TEST_CASE("plain fp32 goes by no time that was taken with another arithmetic") {
  const Machine machine;
  auto& cudnn = emulator::convolutions();
  cudnn.algorithms = {{5, 3.0f, 64, true}, {0, 1.0f, 0, true}};
  cudnn.names_default = true;
  OnGpu gpu(Precision::fp32, false);
  step();
  CHECK(cudnn.timed > 0);
  CHECK(cudnn.used == std::vector<int>(6, 5));  // the heuristics' first
  CHECK(cudnn.maths == std::vector(6, CUDNN_FMA_MATH));
}

TEST_CASE("where cuDNN cannot time or does not know an arithmetic, the next choice stands") {
  const Machine machine;
  auto& cudnn = emulator::convolutions();
  std::vector<std::vector<float>> expected;
  {
    OnGpu gpu(Precision::tf32, false);
    expected = step();
  }
  for (const int code : {CUDNN_STATUS_EXECUTION_FAILED, CUDNN_STATUS_NOT_SUPPORTED})
    for (const char* product : {"Forward", "BackwardData", "BackwardFilter"}) {
      Machine::clear();
      OnGpu gpu(Precision::tf32, false);
      emulator::fail("cudnnFindConvolution" + std::string(product) + "AlgorithmEx", code);
      CHECK(step() == expected);
      CHECK(std::count(cudnn.used.begin(), cudnn.used.end(), 0) == 2);  // the heuristics' first
    }
  // Tensor cores not supported, the default is.
  Machine::clear();
  OnGpu gpu(Precision::tf32, false);
  cudnn.refuses_tensor_ops = true;
  CHECK(step() == expected);
  CHECK(cudnn.maths == std::vector(6, CUDNN_DEFAULT_MATH));
}

TEST_CASE("channels that cuDNN does not take are widened with zeros") {
  for (const DType type : {DType::f32, DType::bf16}) {
    const Machine machine;
    auto& cudnn = emulator::convolutions();
    OnGpu gpu(type == DType::bf16 ? Precision::bf16 : Precision::fp32);
    const int unit = type == DType::bf16 ? 8 : 4;
    // Of both, of x alone, of y alone.
    for (const Conv& g : {Conv{2, 3, 6, 6, 5, 3, 1, 1}, {2, 3, 6, 6, 8, 3, 1, 1}, {2, 8, 6, 6, 5, 3, 1, 1}}) {
      Machine::clear();
      cudnn.bf16_channel_unit = 1;
      const auto expected = step(type, g);
      Machine::clear();
      cudnn.channel_unit = unit;
      const auto result = step(type, g);
      CHECK(cudnn.used.size() == 6);
      for (std::size_t part = 0; part < expected.size(); ++part)
        if (type == DType::bf16 && part == 1 && g.in != 8)  // added to beside cuDNN: rounded once more
          testing::check_close("dx", result[part], testing::as_double(expected[part]),
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
      testing::check_close("part " + std::to_string(part), result[part], testing::as_double(expected[part]),
                           reference::Array(expected[part].size(), 30.0), type == DType::bf16 ? 8e-3 : 1e-6);
  };
  for (const DType type : types)
    for (const Conv& g : convolutions) {
      const Machine machine;
      auto& cudnn = emulator::convolutions();
      OnGpu gpu(type == DType::bf16 ? Precision::bf16 : Precision::fp32);
      cudnn.bf16_channel_unit = 1, cudnn.bf16_groups = true;
      const auto expected = step(type, g);
      CHECK(cudnn.used.size() == 6);
      const auto used_with = [&](const std::string& refused) {
        INFO(refused << ", " << g.str());
        if (!refused.empty()) emulator::fail(refused, CUDNN_STATUS_NOT_SUPPORTED);
        cudnn.used.clear();
        check(type, step(type, g), expected);
        const std::size_t first = cudnn.used.size();
        step(type, g);
        CHECK(cudnn.used.size() == 2 * first);
        Machine::clear();
        return first;
      };
      Machine::clear();
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
  const Machine machine;
  OnGpu gpu;
  emulator::fail("cudnnGetConvolutionBackwardDataAlgorithm_v7", CUDNN_STATUS_EXECUTION_FAILED);
  const Tensor images = testing::images(kConv);
  const testing::GpuLeaf w = testing::weight(kConv);
  testing::backward_from(
      {{conv2d(Variable(images), w.variable(), {}, kConv.geometry()), random_values(kConv.y_size(), 4)}});
  CHECK(emulator::convolutions().used.size() == 2);
}

}  // namespace topknot

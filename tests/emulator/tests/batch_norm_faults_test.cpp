// Batch norm and pooling where cuDNN's failures and captures are the test's to choose.
#include <cudnn.h>

#include "tests/cuda/batch_norm_probe.h"
#include "tests/emulator/tests/machine_settings.h"

namespace topknot {
namespace {

using namespace testing;
using cuda::BatchNormKind;

TEST_CASE("every method of batch norm is there where its conditions hold, and rejects where not") {
  const OnGpu gpu;
  const auto refused = [](BatchNormKind kind, const BatchNormSetup& s, DType type) {
    try {
      by_method(kind, BatchNormProbe(s, type));
      return false;
    } catch (const cuda::BatchNormUnsupported&) {
      return true;
    }
  };
  for (const BatchNormKind kind : {BatchNormKind::spatial, BatchNormKind::persistent})
    for (const DType type : {DType::f32, DType::bf16}) CHECK(!refused(kind, {2, 8, 3, 3, true, true}, type));
  for (const bool residual : {false, true})
    CHECK(!refused(BatchNormKind::fused, {2, 8, 3, 3, residual, true}, DType::bf16));
  CHECK(refused(BatchNormKind::fused, {2, 8, 3, 3, true, true}, DType::f32));
  CHECK(refused(BatchNormKind::fused, {2, 6, 3, 3, true, true}, DType::bf16));
  CHECK(refused(BatchNormKind::fused, {2, 8, 3, 3, true, false}, DType::bf16));
  CHECK(refused(BatchNormKind::spatial, {2, 8, 3, 3, true, true, false}, DType::f32));  // evaluation
  // Beside other kernels those whose blocks wait for each other could wait for ever.
  const OnGpu shared(cuda::Precision::fp32, true, true);
  for (const BatchNormKind kind : {BatchNormKind::persistent, BatchNormKind::fused})
    CHECK(refused(kind, {2, 8, 3, 3, true, true}, DType::bf16));
  CHECK(!refused(BatchNormKind::spatial, {2, 8, 3, 3, true, true}, DType::f32));
}

TEST_CASE("where cuDNN rejects a shape or fails while it is timed, the choice falls on the kernels") {
  const emulator::Settings settings;
  const BatchNormProbe p({3, 8, 4, 3, true, true}, DType::f32);
  BatchNormResult kernels;
  {
    const OnGpu gpu;
    kernels = by_op(p);
  }
  for (const int code : {CUDNN_STATUS_NOT_SUPPORTED, CUDNN_STATUS_BAD_PARAM, CUDNN_STATUS_NOT_SUPPORTED_SHAPE,
                         CUDNN_STATUS_EXECUTION_FAILED})
    for (const char* call :
         {"cudnnBatchNormalizationForwardTrainingEx", "cudnnBatchNormalizationBackwardEx"}) {
      emulator::fail(call, code);
      const OnGpu gpu(cuda::Precision::fp32, false);
      CHECK((by_op(p) == kernels));
      emulator::reset();
    }
}

TEST_CASE("the choice among batch norms is kept for later processes") {
  const emulator::Settings settings;
  const TempFolder folder;
  const BatchNormProbe p({3, 8, 4, 3, true, true}, DType::f32);
  const auto process = [&](bool shared = false) {
    const OnGpu gpu(cuda::Precision::fp32, false, shared, folder.str());
    return by_op(p);
  };
  process();
  const std::string file = std::filesystem::directory_iterator(folder.str())->path();
  const std::string key = "trial of batch norm of fp32 [3, 8, 4, 3], relu, residual";
  CHECK(text_of(file).rfind(key + " = ", 0) == 0);
  process(true);
  CHECK(contains(text_of(file), "\n" + key + ", shared = "));

  for (const BatchNormKind kind : {BatchNormKind::kernels, BatchNormKind::spatial}) {
    const std::string line = key + " = " + name_of(kind) + ";\n";
    std::ofstream(file) << line;
    const BatchNormResult kept = process();
    CHECK(text_of(file) == line);  // nothing else was tried and kept
    const OnGpu gpu;
    CHECK((kept == by_method(kind, p)));
  }
}

TEST_CASE("a failure of cuDNN in batch norm or pooling ends in one message with the call and the rank") {
  const emulator::Settings settings;
  const BatchNormProbe p({3, 8, 4, 3, true, true}, DType::f32);
  for (const char* call : {"cudnnBatchNormalizationForwardTrainingEx", "cudnnBatchNormalizationBackwardEx",
                           "cudnnDeriveBNTensorDescriptor"}) {
    const OnGpu gpu(cuda::Precision::fp32, false);
    emulator::fail(call, CUDNN_STATUS_EXECUTION_FAILED);
    CHECK(says(error_text([&] { by_method(BatchNormKind::spatial, p); }), {call, "rank 0"}));
    emulator::reset();
  }
  const OnGpu gpu;
  const auto pooled = [&] {
    const CaughtInput x(gpu_tensor(random_values(32, 1), {1, 2, 4, 4}, Layout::nhwc, DType::f32));
    backward_from({{pool(x.variable(), {PoolKind::max, 2, 2, 0}), std::vector<float>(8)}});
  };
  for (const char* call : {"cudnnSetPooling2dDescriptor", "cudnnPoolingForward", "cudnnPoolingBackward"}) {
    emulator::fail(call, CUDNN_STATUS_EXECUTION_FAILED);
    CHECK(says(error_text(pooled), {call, "rank 0"}));
    emulator::reset();
  }
}

TEST_CASE("bfloat16 that cuDNN does not pool is pooled as floats") {
  const emulator::Settings settings;
  const OnGpu gpu(cuda::Precision::bf16, false);
  const auto pooled = [&](PoolKind kind) {
    const CaughtInput x(gpu_tensor(random_values(96, 1), {2, 3, 4, 4}, Layout::nhwc, DType::bf16));
    const Variable y = pool(x.variable(), {kind, 2, 2, 0});
    CHECK(y.value().dtype() == DType::bf16);
    backward_from({{y, random_values(24, 2)}});
    return std::pair(values_of(y.value()), x.gradient());
  };
  for (const PoolKind kind : {PoolKind::max, PoolKind::average}) {
    const auto there = pooled(kind);
    emulator::fail("cudnnPoolingForward of bfloat16", CUDNN_STATUS_NOT_SUPPORTED);
    emulator::fail("cudnnPoolingBackward of bfloat16", CUDNN_STATUS_BAD_PARAM);
    const auto as_floats = pooled(kind);
    emulator::reset();
    CHECK(as_floats.first == there.first);
    CHECK(as_floats.second == there.second);
  }
}

TEST_CASE("max pooling takes cuDNN's deterministic algorithm if runs must repeat, else the quicker one") {
  const emulator::Settings settings;
  for (const bool deterministic : {false, true}) {
    const OnGpu gpu(cuda::Precision::fp32, deterministic);
    const auto pooled = [&](const char* without) {
      emulator::reset();
      emulator::fail(without, CUDNN_STATUS_EXECUTION_FAILED);
      return error_text([&] {
        pool(Variable(gpu_tensor(random_values(32, 1), {1, 2, 4, 4}, Layout::nhwc, DType::f32)),
             {PoolKind::max, 2, 2, 0});
      });
    };
    CHECK(pooled("CUDNN_POOLING_MAX").empty() == deterministic);
    CHECK(pooled("CUDNN_POOLING_MAX_DETERMINISTIC").empty() != deterministic);
  }
}

TEST_CASE("a method is never chosen while a graph is captured; one chosen before is used") {
  const OnGpu gpu(cuda::Precision::fp32, false);
  const BatchNormProbe p({3, 8, 4, 3, false, true}, DType::f32);
  RunningStatistics running(p);
  const Variable x(p.activation(p.x));
  const GpuLeaf gamma({8}, p.gamma), beta({8}, p.beta);
  Tensor y;
  const auto forward = [&] {
    y = batch_norm(x, gamma.variable(), beta.variable(), {}, running.state, {true, true}).value();
  };
  CHECK(says(emulator::error_in_capture(gpu.stream(), forward), {"batch_norm", "[3, 8, 4, 3]", "captured"}));
  forward();
  CapturedGraph captured(gpu.stream(), forward);
  captured.launch(gpu.stream());
  const auto f = p.formula(true);
  testing::check_close("y", values_of(y), f.y, f.y_scale, 2e-6);
}

TEST_CASE("parameters that cuDNN might not read are left to the kernels") {
  const OnGpu gpu(cuda::Precision::fp32, false);
  const BatchNormProbe p({3, 8, 4, 3, false, true}, DType::f32);
  BatchNormResult kernels;
  {
    const OnGpu deterministic;
    kernels = by_op(p);
  }
  by_op(p);  // the choice for aligned ones, which is not theirs
  std::vector<float> shifted{0};
  shifted.insert(shifted.end(), p.gamma.begin(), p.gamma.end());
  const DeviceVector<float> memory(shifted);
  RunningStatistics running(p);
  const GpuLeaf beta({8}, p.beta);
  const Variable gamma(Tensor::view(memory.data() + 1, {8}, gpu.device()));
  const Variable y =
      batch_norm(Variable(p.activation(p.x)), gamma, beta.variable(), {}, running.state, {true, true});
  CHECK(same_bits(values_of(y.value()), kernels.y));
}

}  // namespace
}  // namespace topknot

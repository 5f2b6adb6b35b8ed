// When a convolution's weight gradient is a plan's of cuDNN's graph API, and what happens where that fails.
#include "tests/emulator/tests/conv_machine.h"

namespace topknot {
namespace {

using cuda::Precision;
using emulator::kPlan;
using reference::Conv;
using namespace testing;

constexpr float kFast = 0, kSlow = 1e6f;  // milliseconds; the algorithms take 1e4 and more

struct PlansMachine : ConvMachine {
  PlansMachine() { clear(); }
  static emulator::ConvolutionMachine& clear() {
    ConvMachine::clear();
    emulator::convolutions().plans = {{65, kFast, 4096}};
    return emulator::convolutions();
  }
};

const Conv kPlanned{2, 8, 6, 6, 16, 3, 1, 1};

struct Bf16 : OnGpu {
  explicit Bf16(bool deterministic = false, const std::string& cache = "")
      : OnGpu({.precision = Precision::bf16,
               .deterministic = deterministic,
               .algorithm_cache = cache,
               .conv_plans = true}) {}
};

// dw of the current context's convolution, which is used once or twice.
std::vector<float> gradient(const Conv& g = kPlanned, int uses = 1) {
  const GpuLeaf w = weight(g);
  const auto dy = rounded_to(DType::bf16, random_values(g.y_size(), 4));
  const Variable x(images(g, DType::bf16));
  std::vector<std::pair<Variable, std::vector<float>>> all;
  for (int i = 0; i < uses; ++i) all.push_back({conv2d(x, w.variable(), {}, g.geometry()), dy});
  backward_from(all);
  return w.gradient();
}

// What computed the last weight gradient: the output comes first.
int last_used() {
  return emulator::convolutions().used.back();
}

// The largest error relative to the sum of absolute terms.
double error_of(const std::vector<float>& dw, const Conv& g, int uses) {
  const auto x = as_double(rounded_to(DType::bf16, random_values(g.x_size(), 1))),
             dy = as_double(rounded_to(DType::bf16, random_values(g.y_size(), 4)));
  const auto expected = reference::conv2d_weight_gradient(g, x, dy),
             scale = reference::conv2d_weight_gradient(g, reference::absolute(x), reference::absolute(dy));
  double most = 0;
  for (std::size_t i = 0; i < dw.size(); ++i)
    most = std::max(most, std::abs(dw[i] - uses * expected[i]) / (uses * scale[i]));
  return most;
}

}  // namespace

TEST_CASE("the faster of a plan in fp32 and an algorithm computes a convolution's weight gradient") {
  const PlansMachine machine;
  for (const Conv& g : {kPlanned, Conv{2, 8, 6, 6, 16, 1, 2, 0}})
    for (const int uses : {1, 2}) {
      INFO(g.str() << ", used " << uses);
      auto& cudnn = PlansMachine::clear();
      {
        const Bf16 gpu;
        CHECK(error_of(gradient(g, uses), g, uses) < 1e-6);
        CHECK(std::count(cudnn.used.begin(), cudnn.used.end(), kPlan + 65) == uses + cuda::kTrialTimings);
        CHECK(last_used() == kPlan + 65);
        CHECK(cudnn.compiled == 1);
      }
      const Bf16 gpu;
      cudnn.plans[0].time = kSlow;
      CHECK(error_of(gradient(g, uses), g, uses) > 1e-5);  // rounded to bfloat16
      CHECK(last_used() == 1);
    }
}

TEST_CASE("the fastest plan that compiles and runs is taken, and of the fallback's if there are none") {
  const PlansMachine machine;
  const auto chosen = [](std::vector<emulator::ConvolutionPlan> plans, int fails = -1) {
    auto& cudnn = PlansMachine::clear();
    cudnn.plans = std::move(plans);
    cudnn.plan_fails_to_run = fails;
    const Bf16 gpu;
    gradient();
    return last_used();
  };
  CHECK(chosen({{7, kSlow, 0}, {65, kFast, 64}}) == kPlan + 65);
  CHECK(chosen({{7, kFast, 0, false}, {65, kFast, 64}}) == kPlan + 65);
  CHECK(chosen({{7, kFast, 0}, {65, kFast, 64}}, 7) == kPlan + 65);
  CHECK(chosen({{7, kFast, cuda::kConvWorkspaceLimit + 1}}) == 1);
  CHECK(chosen({{7, kFast, 0, false}}) == 1);
  CHECK(chosen({{7, kFast, 0}}, 7) == 1);
  CHECK(chosen({{20, kFast, 0, true, CUDNN_HEUR_MODE_FALLBACK}}) == kPlan + 20);
  CHECK(chosen({{20, kFast, 0, true, CUDNN_HEUR_MODE_FALLBACK}, {7, 1e3f, 0}}) == kPlan + 7);
  CHECK(chosen({{7, kSlow, 0}, {8, kSlow, 0}, {65, kFast, 64}}) == 1);  // one too many
}

TEST_CASE("no plan is compiled without the key, in deterministic runs, for fp32, groups and odd channels") {
  const PlansMachine machine;
  auto& cudnn = emulator::convolutions();
  {
    const Bf16 gpu(true);
    gradient();
    CHECK(cudnn.used == std::vector{1, 1});
  }
  {
    const OnGpu gpu({.precision = Precision::bf16, .deterministic = false});
    gradient();
    CHECK(last_used() == 1);
  }
  {
    const OnGpu gpu({.precision = Precision::fp32, .deterministic = false, .conv_plans = true});
    const GpuLeaf w = weight(kPlanned);
    const Tensor x = images(kPlanned);
    backward_from(
        {{conv2d(Variable(x), w.variable(), {}, kPlanned.geometry()), random_values(kPlanned.y_size(), 4)}});
  }
  cudnn.bf16_channel_unit = 1, cudnn.bf16_groups = true;
  const Bf16 gpu;
  gradient({2, 4, 6, 6, 16, 3, 1, 1});
  gradient({2, 16, 6, 6, 16, 3, 1, 1, 2});
  CHECK(cudnn.compiled == 0);
}

TEST_CASE("a plan that was chosen is kept for later processes, as long as cuDNN names it") {
  const PlansMachine machine;
  const TempFolder folder;
  auto& cudnn = emulator::convolutions();
  const auto process = [&] {
    cudnn.used.clear(), cudnn.compiled = 0;
    const Bf16 gpu(false, folder.str());
    gradient();
    return last_used();
  };
  CHECK(process() == kPlan + 65);
  CHECK(contains(text_of(std::filesystem::directory_iterator(folder.str())->path()),
                 "bf16, precision 2, plans = plan 0, engine 65;\n"));

  cudnn.plans[0].time = kSlow;
  CHECK(process() == kPlan + 65);
  CHECK(cudnn.used.size() == 2 + 2);  // the choices' only
  CHECK(cudnn.compiled == 1);
  // Another engine in its place, one that does not compile, none, and one above the limit.
  for (const auto& plans : {std::vector<emulator::ConvolutionPlan>{{66, kSlow, 4096}},
                            {{65, kSlow, 4096, false}},
                            {},
                            {{65, kSlow, cuda::kConvWorkspaceLimit + 1}}}) {
    cudnn.plans = plans;
    CHECK(process() == 1);
  }
}

TEST_CASE("a plan that fails after its choice, or lacks memory, gives way to the next algorithm") {
  const PlansMachine machine;
  const TempFolder folder;
  auto& cudnn = emulator::convolutions();
  {
    const Bf16 gpu;
    gradient();
    cudnn.plan_fails_to_run = 65;
    gradient();
    CHECK(last_used() == 1);
    cudnn.plan_fails_to_run = -1;
    gradient();
    CHECK(last_used() == 1);  // it is not tried again
  }
  PlansMachine::clear();
  cudnn.plans[0].workspace = std::size_t{300} << 20;
  const Bf16 gpu(false, folder.str());
  emulator::machine().memory = emulator::counts().bytes_in_use + (std::size_t{64} << 20);
  gradient();
  CHECK(last_used() == 1);
  const std::string kept = text_of(std::filesystem::directory_iterator(folder.str())->path());
  CHECK(std::count(kept.begin(), kept.end(), '\n') == 1);  // the output's
}

TEST_CASE("a call of cuDNN's graph API that fails leaves the algorithms") {
  const PlansMachine machine;
  for (const char* call : {"cudnnBackendCreateDescriptor", "cudnnBackendSetAttribute", "cudnnBackendFinalize",
                           "cudnnBackendGetAttribute", "cudnnBackendExecute"})
    for (const int after : {0, 1, 3}) {
      INFO(call << ", after " << after);
      PlansMachine::clear();
      const Bf16 gpu;
      emulator::fail(call, CUDNN_STATUS_NOT_SUPPORTED_SUBLIBRARY_UNAVAILABLE, after);
      gradient();
      CHECK(last_used() == 1);
    }
}

TEST_CASE("a plan is captured, but not compiled in a capture") {
  const PlansMachine machine;
  Bf16 first;
  const auto expected = gradient();
  const auto capture = [&](OnGpu& gpu) {
    auto& convolution = cuda::Convolution::of(kPlanned.geometry(), {2, 8, 6, 6}, DType::bf16);
    const Tensor x = images(kPlanned, DType::bf16), dy = gpu_tensor(random_values(kPlanned.y_size(), 4),
                                                                    {2, 16, 6, 6}, Layout::nhwc, DType::bf16);
    const DeviceVector<float> dw(std::size_t(kPlanned.w_size()));
    gpu.context().workspace(4096);
    CapturedGraph graph(gpu.stream(), [&] {
      convolution.run(cuda::ConvProduct::weight_gradient, x.data(), dy.data(), false, dw.data());
    });
    graph.launch(gpu.stream());
    return dw.host();
  };
  CHECK(capture(first) == expected);
  CHECK(last_used() == kPlan + 65);
  Bf16 another_rank;
  CHECK(says(error_text([&] { capture(another_rank); }), {"weight's gradient", "capture", "run a step"}));
}

TEST_CASE("the emulator's descriptors of cuDNN's graph API refuse what cuDNN refuses") {
  const PlansMachine machine;
  const cuda::CudnnGraphDescriptor tensor(CUDNN_BACKEND_TENSOR_DESCRIPTOR),
      graph(CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR), operation(CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR),
      plan(CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR);
  const std::int64_t dims[] = {2, 8, 6, 6}, strides[] = {288, 1, 48, 8};
  const auto set = [&](cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type, std::int64_t count,
                       const void* data) {
    return int(cudnnBackendSetAttribute(tensor.get(), name, type, count, data));
  };
  const cudnnDataType_t type = CUDNN_DATA_FLOAT;
  const std::int64_t id = 1, aligned = 16, odd = 6;
  CHECK(set(CUDNN_ATTR_TENSOR_DATA_TYPE, CUDNN_TYPE_INT64, 1, &id) == CUDNN_STATUS_BAD_PARAM_ATTRIBUTE_TYPE);
  CHECK(set(CUDNN_ATTR_TENSOR_DATA_TYPE, CUDNN_TYPE_DATA_TYPE, 2, &type) == CUDNN_STATUS_BAD_PARAM);
  CHECK(set(CUDNN_ATTR_TENSOR_DATA_TYPE, CUDNN_TYPE_DATA_TYPE, 1, nullptr) == CUDNN_STATUS_BAD_PARAM);
  CHECK(set(CUDNN_ATTR_CONVOLUTION_COMP_TYPE, CUDNN_TYPE_DATA_TYPE, 1, &type) == CUDNN_STATUS_BAD_PARAM);
  CHECK(set(CUDNN_ATTR_TENSOR_DATA_TYPE, CUDNN_TYPE_DATA_TYPE, 1, &type) == CUDNN_STATUS_SUCCESS);
  CHECK(set(CUDNN_ATTR_TENSOR_DIMENSIONS, CUDNN_TYPE_INT64, 4, dims) == CUDNN_STATUS_SUCCESS);
  CHECK(set(CUDNN_ATTR_TENSOR_UNIQUE_ID, CUDNN_TYPE_INT64, 1, &id) == CUDNN_STATUS_SUCCESS);
  CHECK(cudnnBackendFinalize(tensor.get()) == CUDNN_STATUS_BAD_PARAM);  // no strides
  CHECK(set(CUDNN_ATTR_TENSOR_STRIDES, CUDNN_TYPE_INT64, 4, strides) == CUDNN_STATUS_SUCCESS);
  CHECK(set(CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, CUDNN_TYPE_INT64, 1, &odd) == CUDNN_STATUS_SUCCESS);
  CHECK(cudnnBackendFinalize(tensor.get()) == CUDNN_STATUS_BAD_PARAM);
  CHECK(set(CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, CUDNN_TYPE_INT64, 1, &aligned) == CUDNN_STATUS_SUCCESS);
  CHECK(cudnnBackendFinalize(tensor.get()) == CUDNN_STATUS_SUCCESS);
  CHECK(set(CUDNN_ATTR_TENSOR_UNIQUE_ID, CUDNN_TYPE_INT64, 1, &id) == CUDNN_STATUS_BAD_PARAM);
  CHECK(cudnnBackendFinalize(tensor.get()) == CUDNN_STATUS_BAD_PARAM);

  const cudnnBackendDescriptor_t raw = operation.get();
  CHECK(cudnnBackendSetAttribute(graph.get(), CUDNN_ATTR_OPERATIONGRAPH_OPS, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1,
                                 &raw) == CUDNN_STATUS_BAD_PARAM_NOT_FINALIZED);
  CHECK(cudnnBackendFinalize(plan.get()) == CUDNN_STATUS_BAD_PARAM_NOT_FINALIZED);
  std::int64_t count = 0, bytes = 0;
  CHECK(cudnnBackendGetAttribute(plan.get(), CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE, CUDNN_TYPE_INT64, 1,
                                 &count, &bytes) == CUDNN_STATUS_NOT_INITIALIZED);
}

}  // namespace topknot

// Time and bytes of each selection on the GPU, in steady state: error feedback with a new gradient in each
// step.
#include <nccl.h>

#include <algorithm>
#include <chrono>
#include <map>

#include "compress/cuda/device_compressor.h"
#include "lab/gpu_timings/gpu_timings.h"
#include "nn/base/check.h"
#include "nn/base/text.h"
#include "nn/core/cuda/context.h"
#include "nn/core/cuda/kernel_tools.h"
#include "nn/core/cuda/libraries.h"
#include "nn/core/cuda/pool.h"
#include "nn/core/device.h"

namespace topknot::gpu_timings {
namespace {

using namespace cuda;

constexpr double kDensity = 0.001;
constexpr int kWarmUp = 8;
constexpr int kTimed = 12;  // even: gradient and residual swap their memory in every step

// Mixes the bits of a number (the finaliser of MurmurHash3).
__device__ std::uint32_t mixed(std::uint32_t x) {
  x ^= x >> 16, x *= 0x85ebca6bu;
  x ^= x >> 13, x *= 0xc2b2ae35u;
  return x ^ x >> 16;
}

__global__ void __launch_bounds__(kThreads) fill_kernel(float* gradient, std::size_t n, std::uint32_t step) {
  await_previous();
  const std::size_t i = std::size_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= n) return;
  const std::uint32_t seed = mixed(static_cast<std::uint32_t>(i) ^ mixed(step));
  float sum = 0;  // of four uniform numbers: near enough to normal
  for (std::uint32_t j = 1; j <= 4; ++j)
    sum += static_cast<float>(mixed(seed + j * 0x9e3779b9u) >> 8) * 0x1p-24f;
  const float scale = exp2f(-6.64f * static_cast<float>(i * 20 / n) / 19.0f);
  gradient[i] = (sum - 2.0f) * scale;
}

// Nearly normal numbers, others in each step; 20 layers whose scales span two decades, as gradients have.
void fill_gradient(cudaStream_t stream, float* gradient, std::size_t n, std::uint32_t step) {
  if (n > 0) launch(fill_kernel, grid_for(n, kThreads), kThreads, stream, gradient, n, step);
}

// Bytes per element that encoding moves in steady state: gradient and residual read, their sum written;
// gaussiank reads the sum a second time; dgc reads and writes the velocity too.
const std::map<std::string, double>& bytes_of_methods() {
  static const std::map<std::string, double> all{
      {"topk", 12}, {"gaussiank", 16}, {"dgc", 20}, {"regtopk", 12}};
  return all;
}

// Milliseconds between the two marks of a step, by the GPU's clock: the median of kTimed steps that are one
// graph, so that no launch of the host's is waited for. `prepare` comes before a launch of the graph, of which
// there are two: the first warms up.
double median_ms(Context& context, const std::function<void()>& prepare,
                 const std::function<void(int step, const std::function<void()>& mark)>& record) {
  const cudaStream_t stream = context.stream();
  const DeviceArray<std::uint64_t> clock(2 * kTimed);
  GraphMemory memory(context.pool());
  const Graph graph(stream, memory, [&] {
    std::uint64_t* at = clock.data();
    for (int step = 0; step < kTimed; ++step) record(step, [&] { write_time(stream, at++); });
  });
  for (int launch = 0; launch < 2; ++launch) prepare(), graph.launch(stream);
  std::vector<std::uint64_t> times(2 * kTimed);
  TOPKNOT_CUDA(cudaMemcpyAsync(times.data(), clock.data(), clock.bytes(), cudaMemcpyDeviceToHost, stream));
  context.synchronize();
  std::vector<double> ms;
  for (std::size_t i = 0; i < times.size(); i += 2)
    ms.push_back(1e-6 * static_cast<double>(times[i + 1] - times[i]));
  return quantile(ms, 0.5);
}

// At least the clock's own step.
double without(double ms, double of_marks) {
  return std::max(ms - of_marks, 1e-6);
}

// What lies between two marks in a row, which every time includes: the second one's launch.
double mark_ms(Context& context) {
  return median_ms(
      context, [] {},
      [](int, const std::function<void()>& mark) {
        mark();
        mark();
      });
}

double copy_rate(Context& context, std::size_t n, float* from, float* to, double of_marks) {
  constexpr int kCopies = 8;  // between two marks: the clock is too coarse for a single small one
  const double ms = median_ms(
      context, [] {},
      [&](int, const std::function<void()>& mark) {
        mark();
        for (int i = 0; i < kCopies; ++i)
          TOPKNOT_CUDA(
              cudaMemcpyAsync(to, from, n * sizeof(float), cudaMemcpyDeviceToDevice, context.stream()));
        mark();
      });
  return kCopies * 8.0 * static_cast<double>(n) / (1e6 * without(ms, of_marks));  // GB/s
}

// Milliseconds that one encode takes, the gradient being in memory already.
double encode_ms(Context& context, const std::string& method, std::size_t n, float* a, float* b) {
  CompressOptions options;
  options.name = method;
  options.capacity = 2;
  options.momentum = method == "dgc" ? 0.9 : 0.0;
  GroupSpec group;
  group.numel = n;
  group.segments = {{0, n}};
  const auto compressor = make_device_compressor(options, group);
  TOPKNOT_CHECK(compressor, method + " has no kernels");
  compressor->reserve(kDensity);
  const cudaStream_t stream = context.stream();
  const DeviceArray<StepParameters> parameters(kTimed);
  const DeviceArray<StepStatus> status(kTimed);
  const DeviceArray<float> weights(1);
  const float one = 1;
  TOPKNOT_CUDA(cudaMemcpyAsync(weights.data(), &one, sizeof one, cudaMemcpyHostToDevice, stream));
  TOPKNOT_CUDA(cudaMemsetAsync(b, 0, n * sizeof(float), stream));
  const auto prepare = [&](int first) {
    std::vector<StepParameters> steps(kTimed);
    for (int i = 0; i < kTimed; ++i)
      steps[static_cast<std::size_t>(i)] = {.step = first + i, .density = kDensity};
    const std::vector<StepStatus> clear(kTimed);
    TOPKNOT_CUDA(
        cudaMemcpyAsync(parameters.data(), steps.data(), parameters.bytes(), cudaMemcpyHostToDevice, stream));
    TOPKNOT_CUDA(
        cudaMemcpyAsync(status.data(), clear.data(), status.bytes(), cudaMemcpyHostToDevice, stream));
  };
  const auto step = [&](int i, const std::function<void()>& mark) {
    StepContext here;
    here.weights = {weights.data(), 1};
    here.parameters = parameters.data() + i;
    here.status = status.data() + i;
    fill_gradient(stream, a, n, static_cast<std::uint32_t>(i));
    mark();
    const Message message = compressor->encode({{a, n}, {b, n}}, here);
    mark();
    Round round;
    round.gpu_blocks = message.gpu_block;
    compressor->decode(round);
    const std::span<float> average = compressor->commit({});
    if (average.data() == b) std::swap(a, b);  // what was the gradient's memory holds the residual
  };
  prepare(0);
  for (int i = 0; i < kWarmUp; ++i) step(i, [] {});
  context.synchronize();
  return median_ms(
      context, [&] { prepare(kWarmUp); }, step);
}

}  // namespace

void measure(const Options& options, const std::function<void(const Timing&)>& report) {
  const auto begin = std::chrono::steady_clock::now();
  const auto used_up = [&] {  // too little is left to begin anything
    const std::chrono::duration<double> spent = std::chrono::steady_clock::now() - begin;
    return options.seconds - spent.count() < 0.03 * options.seconds;
  };
  Context context({});
  const Context::Use use(context);
  const double of_marks = mark_ms(context);
  for (const std::size_t n : sizes_of(options)) {
    try {
      const DeviceArray<float> a(n), b(n);
      TOPKNOT_CUDA(cudaMemsetAsync(a.data(), 0, a.bytes(), context.stream()));
      const double copy = copy_rate(context, n, a.data(), b.data(), of_marks);
      report({"device copy", n, {{"GB/s", copy}}});
      for (const auto& [method, bytes] : bytes_of_methods()) {
        if (used_up()) {
          report({method, n, {}, kUsedUp});
          continue;
        }
        const double ms = without(encode_ms(context, method, n, a.data(), b.data()), of_marks);
        const double rate = bytes * static_cast<double>(n) / (1e6 * ms);
        report({method, n, {{"ms", ms}, {"GB/s", rate}, {"of a copy", rate / copy}}});
      }
    } catch (const OutOfMemory& error) {
      report({"selections", n, {}, error.what()});
    }
    context.pool()->release_cached();
  }
}

std::vector<std::pair<std::string, std::string>> describe_gpu() {
  cudaDeviceProp card{};
  TOPKNOT_CUDA(cudaGetDeviceProperties(&card, 0));
  int driver = 0, runtime = 0, nccl = 0;
  TOPKNOT_CUDA(cudaDriverGetVersion(&driver));
  TOPKNOT_CUDA(cudaRuntimeGetVersion(&runtime));
  ncclGetVersion(&nccl);
  return {{"card", card.name},
          {"compute capability", std::to_string(card.major) + "." + std::to_string(card.minor)},
          {"memory", std::to_string(card.totalGlobalMem >> 20) + " MiB"},
          {"CUDA of the driver", std::to_string(driver)},
          {"CUDA of this build", std::to_string(runtime)},
          {"cuDNN", std::to_string(cudnnGetVersion())},
          {"NCCL", std::to_string(nccl)},
          {"PCI bus", gpu_bus(0)}};
}

}  // namespace topknot::gpu_timings

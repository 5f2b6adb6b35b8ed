// Time and bytes of each selection on the GPU, in steady state: error feedback with a new gradient in each
// step.
#include <chrono>
#include <map>

#include "compress/cuda/device_compressor.h"
#include "nn/base/check.h"
#include "nn/base/text.h"
#include "nn/core/cuda/context.h"
#include "nn/core/cuda/kernel_tools.h"
#include "nn/core/cuda/libraries.h"
#include "nn/core/cuda/pool.h"
#include "tools/gpu_timings/gpu_timings.h"

namespace topknot::gpu_timings {
namespace {

using namespace cuda;

constexpr double kDensity = 0.001;
constexpr int kWarmUp = 8, kTimed = 11;

// Mixes the bits of a number (the finaliser of MurmurHash3).
__device__ std::uint32_t mixed(std::uint32_t x) {
  x ^= x >> 16, x *= 0x85ebca6bu;
  x ^= x >> 13, x *= 0xc2b2ae35u;
  return x ^ x >> 16;
}

__global__ void __launch_bounds__(kThreads) fill_kernel(float* gradient, std::size_t n, std::uint32_t step) {
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

double copy_rate(Context& context, std::size_t n, float* from, float* to) {
  std::vector<double> ms;
  for (int i = 0; i < kTimed; ++i) {
    Event begin(true), end(true);
    begin.record(context.stream());
    TOPKNOT_CUDA(cudaMemcpyAsync(to, from, n * sizeof(float), cudaMemcpyDeviceToDevice, context.stream()));
    end.record(context.stream());
    context.synchronize();
    ms.push_back(milliseconds_between(begin, end));
  }
  return 8.0 * static_cast<double>(n) / (1e6 * quantile(ms, 0.5));  // GB/s
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
  DeviceArray<StepParameters> parameters(1);
  DeviceArray<StepStatus> status(1);
  DeviceArray<float> weights(1);
  StepContext here;
  here.weights = {weights.data(), 1};
  here.parameters = parameters.data();
  here.status = status.data();
  StepParameters step;
  step.density = kDensity;
  const StepStatus clear;
  const float one = 1;
  TOPKNOT_CUDA(cudaMemcpyAsync(weights.data(), &one, sizeof one, cudaMemcpyHostToDevice, stream));
  TOPKNOT_CUDA(cudaMemsetAsync(b, 0, n * sizeof(float), stream));
  std::vector<double> ms;
  for (int i = 0; i < kWarmUp + kTimed; ++i) {
    step.step = i;
    TOPKNOT_CUDA(cudaMemcpyAsync(parameters.data(), &step, sizeof step, cudaMemcpyHostToDevice, stream));
    TOPKNOT_CUDA(cudaMemcpyAsync(status.data(), &clear, sizeof clear, cudaMemcpyHostToDevice, stream));
    fill_gradient(stream, a, n, static_cast<std::uint32_t>(i));
    Event begin(true), end(true);
    begin.record(stream);
    const Message message = compressor->encode({{a, n}, {b, n}}, here);
    end.record(stream);
    Round round;
    round.gpu_blocks = message.gpu_block;
    compressor->decode(round);
    const std::span<float> average = compressor->commit({});
    context.synchronize();
    if (average.data() == b) std::swap(a, b);  // what was the gradient's memory holds the residual
    if (i >= kWarmUp) ms.push_back(milliseconds_between(begin, end));
  }
  return quantile(ms, 0.5);
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
  for (const std::size_t n : sizes_of(options)) {
    try {
      const DeviceArray<float> a(n), b(n);
      TOPKNOT_CUDA(cudaMemsetAsync(a.data(), 0, a.bytes(), context.stream()));
      const double copy = copy_rate(context, n, a.data(), b.data());
      report({"device copy", n, {{"GB/s", copy}}});
      for (const auto& [method, bytes] : bytes_of_methods()) {
        if (used_up()) {
          report({method, n, {}, kUsedUp});
          continue;
        }
        const double ms = encode_ms(context, method, n, a.data(), b.data());
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
  int driver = 0, runtime = 0;
  TOPKNOT_CUDA(cudaDriverGetVersion(&driver));
  TOPKNOT_CUDA(cudaRuntimeGetVersion(&runtime));
  return {{"card", card.name},
          {"compute capability", std::to_string(card.major) + "." + std::to_string(card.minor)},
          {"memory", std::to_string(card.totalGlobalMem >> 20) + " MiB"},
          {"CUDA of the driver", std::to_string(driver)},
          {"CUDA of this build", std::to_string(runtime)},
          {"cuDNN", std::to_string(cudnnGetVersion())}};
}

}  // namespace topknot::gpu_timings

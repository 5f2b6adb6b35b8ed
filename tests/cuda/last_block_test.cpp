// Sums by a kernel's last block read what the other blocks have just written. No tool on a card watches accesses between
// blocks, so these tests repeat them.
#include "tests/cuda/batch_norm_probe.h"
#include "tests/cuda/compressor_ranks.h"

namespace topknot {
namespace {

using namespace testing;

// The CUDA emulator, which has other tests for this, is slow.
int repeats(int on_a_card) {
  cudaDeviceProp properties{};
  TOPKNOT_CUDA(cudaGetDeviceProperties(&properties, 0));
  return std::strstr(properties.name, "emulated") ? 3 : on_a_card;
}

TEST_CASE("batch norm by our kernels has the same bits, 2,000 times") {
  for (const DType type : {DType::f32, DType::bf16}) {
    const OnGpu gpu(type == DType::bf16 ? cuda::Precision::bf16 : cuda::Precision::fp32);
    const BatchNormProbe probe({32, 48, 9, 9, true, true}, type);
    const BatchNormResult first = by_method(cuda::BatchNormKind::kernels, probe);
    int others = 0;
    for (int i = 1; i < repeats(2000); ++i)
      others += !(by_method(cuda::BatchNormKind::kernels, probe) == first);
    CHECK(others == 0);
  }
}

TEST_CASE("selections and codecs have the CPU's bits, 500 times each") {
  const OnGpu gpu;
  const std::size_t n = 200'000;
  for (const char* method : kMethods)
    for (const char* codec : {"raw", "rice"}) {
      INFO(method << ", " << codec);
      CompressOptions options = options_of(method);
      options.codec = codec;
      BothRanks both(options, whole_group(n, 2), true);
      both.set_density(0.01);
      for (std::int64_t step = 0; step < repeats(500); ++step) {
        for (std::size_t r = 0; r < 2; ++r) both.gradient(r) = normal_gradient(0, r, n);
        both.step(step);
      }
    }
}

}  // namespace
}  // namespace topknot

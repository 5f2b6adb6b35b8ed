// libtopknot's compressors on a GPU, by the C interface: the averages, residuals and states of those on the CPU.
#include "nn/core/bfloat16.h"
#include "tests/cuda/device_vector.h"
#include "tests/cuda/fixture.h"
#include "tests/library/library_fixture.h"

namespace topknot {
namespace {

using namespace testing;

// The second goes uncompressed, and its bytes are no multiple of 16.
const std::vector<NamedShape> kTensors = {{"conv", {8, 3, 3, 3}}, {"bias", {63}}, {"linear", {96, 41}}};

// A program's own memory of the GPU, in its own context.
class GpuMemory {
 public:
  explicit GpuMemory(const Bytes& bytes) : bytes_(bytes) {}
  void* data() { return bytes_.data(); }
  Bytes bytes() const { return bytes_.host(); }
  static Bytes read(const void* data, std::size_t bytes) {
    return to_host(static_cast<const std::byte*>(data), bytes);
  }
  static void write(void* data, const Bytes& bytes) { to_device(static_cast<std::byte*>(data), bytes); }

 private:
  DeviceVector<std::byte> bytes_;
};

Bytes typed(const std::vector<float>& values, topknot_type type) {
  if (type == TOPKNOT_FLOAT32) return bytes_of(values);
  std::vector<std::uint16_t> narrow;
  for (const float value : values) {
    if (type == TOPKNOT_BFLOAT16)
      narrow.push_back(std::bit_cast<std::uint16_t>(to_bfloat16(value)));
    else  // halves of numbers from 1 to 2: sign, the exponent, ten bits of the mantissa
      narrow.push_back(std::uint16_t((value < 0 ? 0x8000 : 0) | 0x3C00 |
                                     (std::bit_cast<std::uint32_t>(value) >> 13 & 0x3FF)));
  }
  return bytes_of(narrow);
}

struct Case {
  std::string method;
  std::vector<std::string> keys;
};
const std::vector<Case> kCases = {{"topk", {}},
                                  {"topk", {"values=bf16", "codec=rice"}},
                                  {"topk", {"values=fp16", "dense_1d=false"}},
                                  {"topk", {"scope=model"}},
                                  {"gaussiank", {}},
                                  {"dgc", {"momentum=0.9", "nesterov=true"}},
                                  {"regtopk", {}},
                                  {"signsgd", {}},
                                  {"qsgd", {"seed=7"}},
                                  {"dense", {}}};

// The same ranks on both devices.
struct Ranks {
  std::vector<Handle> cpu, gpu;
  Ranks(const std::string& method, std::vector<std::string> keys, int ranks)
      : cpu(make_ranks(method, keys, ranks, kTensors)) {
    keys.push_back("device=cuda");
    gpu = make_ranks(method, keys, ranks, kTensors);
  }
  // A step, after which all averages and states are equal. `not_finite`: a NaN on the last rank.
  void compare(std::int64_t step, const RoundSettings& settings = {}, bool not_finite = false,
               const std::vector<std::int32_t>& which = {0, 1, 2}) {
    std::vector<std::vector<Bytes>> gradients(cpu.size());
    for (std::size_t r = 0; r < cpu.size(); ++r)
      for (std::size_t t = 0; t < kTensors.size(); ++t) {
        std::vector<float> gradient = gradient_of(step, r + t % 3, kTensors[t].numel());
        if (not_finite && r + 1 == cpu.size())
          gradient[gradient.size() / 2] = std::numeric_limits<float>::quiet_NaN();
        gradients[r].push_back(typed(gradient, settings.type));
      }
    const Outcome expected = exchange(cpu, which, step, settings, gradients);
    const Outcome found = exchange<GpuMemory>(gpu, which, step, settings, gradients);
    REQUIRE(found.state == expected.state);
    CHECK((found.averages == expected.averages));
    for (std::size_t r = 0; r < cpu.size(); ++r) CHECK((state_of(gpu[r].get()) == state_of(cpu[r].get())));
  }
};

}  // namespace

TEST_CASE("libtopknot on a GPU: averages, residuals and states are the CPU's") {
  const OnGpu program;
  for (const Case& method : kCases)
    for (const int ranks : {1, 3}) {
      INFO(method.method << " " << (method.keys.empty() ? "" : method.keys[0]) << ", ranks: " << ranks);
      std::vector<std::string> keys = method.keys;
      keys.push_back("density=0.02");
      Ranks both(method.method, keys, ranks);
      for (std::int64_t step = 0; step < 4; ++step)
        both.compare(step, {.density = step == 2 ? 0.1 : 0, .together = step % 2 == 1});
    }
}

TEST_CASE("libtopknot on a GPU: a step that is not finite or is discarded changes nothing") {
  const OnGpu program;
  for (const Case& method : kCases) {
    INFO(method.method << " " << (method.keys.empty() ? "" : method.keys[0]));
    std::vector<std::string> keys = method.keys;
    keys.push_back("density=0.02");
    Ranks both(method.method, keys, 2);
    both.compare(0);
    both.compare(1, {}, true);
    both.compare(1, {.commit = false});
    both.compare(1);
  }
}

TEST_CASE("libtopknot on a GPU: tensors in rounds of their own, of every type, scaled") {
  const OnGpu program;
  Ranks both("topk", {"density=0.05"}, 2);
  std::int64_t step = 0;
  for (const topknot_type type : {TOPKNOT_FLOAT32, TOPKNOT_BFLOAT16, TOPKNOT_FLOAT16})
    for (const std::vector<std::int32_t>& which :
         std::vector<std::vector<std::int32_t>>{{1}, {2, 0}, {2, 1, 0}})
      for (const double scale : {1.0, 0.375}) {
        INFO("type " << type << ", tensors " << which.size() << ", scale " << scale);
        both.compare(step++, {.type = type, .scale = scale}, false, which);
      }
}

TEST_CASE("libtopknot on a GPU: states pass to and from the CPU, steps are undone, residuals replaced") {
  const OnGpu program;
  const std::vector<std::string> keys = {"density=0.02", "momentum=0.9", "undo=true"};
  Ranks both("dgc", keys, 2), fresh("dgc", keys, 2);
  auto& [cpu, gpu] = both;
  for (std::int64_t step = 0; step < 3; ++step) both.compare(step);
  gpu = std::move(fresh.gpu);
  for (std::size_t r = 0; r < 2; ++r) {
    const std::vector<char> state = state_of(cpu[r].get());
    REQUIRE(topknot_load(gpu[r].get(), state.data(), state.size()) == TOPKNOT_OK);
  }
  both.compare(3);
  const std::vector<char> before = state_of(gpu[0].get());
  both.compare(4);
  for (std::size_t r = 0; r < 2; ++r) {
    REQUIRE(topknot_undo(gpu[r].get(), 4) == TOPKNOT_OK);
    REQUIRE(topknot_undo(cpu[r].get(), 4) == TOPKNOT_OK);
  }
  CHECK((state_of(gpu[0].get()) == before));
  const std::vector<float> owed = gradient_of(9, 1, kTensors[2].numel());
  std::vector<float> found(owed.size());
  int has = 0;
  for (const auto* ranks : {&cpu, &gpu})
    REQUIRE(topknot_set_residual((*ranks)[0].get(), 2, owed.data()) == TOPKNOT_OK);
  REQUIRE(topknot_residual(gpu[0].get(), 2, found.data(), &has) == TOPKNOT_OK);
  CHECK(has == 1);
  CHECK((found == owed));
  both.compare(4);
}

TEST_CASE("libtopknot on a GPU: ranks have weights") {
  const OnGpu program;
  Ranks both("topk", {"density=0.02"}, 2);
  const double weights[] = {1, 3};
  for (const auto* ranks : {&both.cpu, &both.gpu})
    for (const Handle& rank : *ranks) REQUIRE(topknot_set_weights(rank.get(), weights) == TOPKNOT_OK);
  for (std::int64_t step = 0; step < 2; ++step) both.compare(step);
}

TEST_CASE("libtopknot on a GPU: of two rounds under way one is not finite") {
  const OnGpu program;
  const Ranks one("topk", {}, 1);
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const DeviceVector<float> bad(std::vector<float>(kTensors[0].numel(), nan));
  const DeviceVector<float> good(gradient_of(0, 0, kTensors[2].numel()));
  topknot_round* const first = encoded(one.gpu[0], {}, {0}, {bad.data()});
  topknot_round* const second = encoded(one.gpu[0], {}, {2}, {good.data()});
  CHECK(decode_alone(first) == TOPKNOT_NOT_FINITE);
  CHECK(decode_alone(second) == TOPKNOT_DONE);
  topknot_discard(first);
  void* nowhere = nullptr;
  CHECK(topknot_commit(second, &nowhere, TOPKNOT_FLOAT32, 1) == TOPKNOT_OK);
}

TEST_CASE("libtopknot on a GPU: what it cannot do is refused") {
  const OnGpu program;
  const auto refusal = [](const std::string& method, const std::string& device) {
    return testing::refusal(method, {"device=" + device}, kTensors);
  };
  CHECK(refusal("powersgd", "cuda") ==
        "method 'powersgd' with these keys has no kernels for a GPU; remove key 'device', and give gradients "
        "in the host's memory");
  CHECK(refusal("topk", "gpu") == "key 'device' must be cpu, cuda, or cuda:N, not 'gpu'");
  CHECK(refusal("topk", "cuda:x") == "key 'device' must be cpu, cuda, or cuda:N, not 'cuda:x'");
  CHECK(refusal("topk", "cuda:99").rfind("GPU 99 was asked for, and there ", 0) == 0);
  CHECK(refusal("topk", "cuda:0") == "");

  const Ranks two("topk", {}, 2);
  const DeviceVector<float> gradient(std::vector<float>(kTensors[0].numel(), 1.0f));
  topknot_round* const round = encoded(two.gpu[0], {}, {0}, {gradient.data()});
  topknot_sent sent;
  CHECK(topknot_sent_of(round, 0, &sent) == TOPKNOT_INVALID);
  const topknot_message message = message_of(round);
  const void* blocks[] = {message.block, message.block};
  const std::size_t sizes[] = {message.block_bytes, message.block_bytes - 16};
  CHECK(topknot_decode(round, blocks, sizes) == TOPKNOT_INVALID);
  CHECK(std::string(topknot_error()).find("rank 1's message has ") == 0);
  topknot_discard(round);
}

}  // namespace topknot

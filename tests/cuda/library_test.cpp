// libtopknot's compressors on a GPU, by the C interface: the averages, residuals and states of those on the CPU.
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "nn/core/bfloat16.h"
#include "tests/cuda/device_vector.h"
#include "tests/cuda/fixture.h"
#include "tests/library/library_fixture.h"
#include "tests/support/catch.h"

namespace topknot {
namespace {

using namespace topknot::testing;

using Bytes = std::vector<std::byte>;

// The second goes uncompressed, and its bytes are no multiple of 16.
const std::vector<testing::Shape> kTensors = {{"conv", {8, 3, 3, 3}}, {"bias", {63}}, {"linear", {96, 41}}};

Handle make(const std::string& method, std::vector<std::string> keys, bool gpu, int rank, int ranks) {
  if (gpu) keys.push_back("device=cuda");
  return testing::make(method, keys, rank, ranks, kTensors);
}

std::vector<Handle> make_ranks(const std::string& method, const std::vector<std::string>& keys, bool gpu,
                               int ranks) {
  std::vector<Handle> all;
  for (int rank = 0; rank < ranks; ++rank) all.push_back(make(method, keys, gpu, rank, ranks));
  return all;
}

// A program's own memory, of the host or of the GPU, in its own context.
class ProgramMemory {
 public:
  ProgramMemory(bool gpu, const Bytes& bytes) : host_(bytes), device_(gpu ? bytes : Bytes()), gpu_(gpu) {}
  void* data() { return gpu_ ? device_.data() : host_.data(); }
  Bytes bytes() const { return gpu_ ? device_.host() : host_; }

 private:
  Bytes host_;
  DeviceVector<std::byte> device_;
  bool gpu_;
};

Bytes read(bool gpu, const void* data, std::size_t bytes) {
  const auto* from = static_cast<const std::byte*>(data);
  return gpu ? to_host(from, bytes) : Bytes(from, from + bytes);
}
void write(bool gpu, void* data, const Bytes& bytes) {
  if (gpu)
    to_device(static_cast<std::byte*>(data), bytes);
  else
    std::memcpy(data, bytes.data(), bytes.size());
}

template <class T>
Bytes bytes_of(const std::vector<T>& values) {
  const auto bytes = std::as_bytes(std::span(values));
  return Bytes(bytes.begin(), bytes.end());
}

Bytes typed(const std::vector<float>& values, topknot_type type) {
  if (type == TOPKNOT_FLOAT32) return bytes_of(values);
  std::vector<std::uint16_t> narrow;
  for (const float value : values) {
    if (type == TOPKNOT_BFLOAT16)
      narrow.push_back(std::bit_cast<std::uint16_t>(to_bfloat16(value)));
    else  // halves of numbers from 1 to 2: sign, the exponent, ten bits of the mantissa
      narrow.push_back(static_cast<std::uint16_t>((value < 0 ? 0x8000 : 0) | 0x3C00 |
                                                  (std::bit_cast<std::uint32_t>(value) >> 13 & 0x3FF)));
  }
  return bytes_of(narrow);
}

struct Exchanged {
  topknot_result state = TOPKNOT_OK;
  std::vector<Bytes> averages;  // rank after rank, each of its tensors
  bool operator==(const Exchanged&) const = default;
};

struct Settings {
  bool gpu = false;
  std::vector<std::int32_t> which = {0, 1, 2};
  topknot_type type = TOPKNOT_FLOAT32;
  double scale = 1, density = 0;
  bool commit = true;
  bool together = false;    // blocks lie one after the other, as an all-gather leaves them
  bool not_finite = false;  // a NaN on the last rank
};

Exchanged exchange(const std::vector<Handle>& ranks, std::int64_t number, const Settings& settings) {
  const bool gpu = settings.gpu;
  const topknot_step step{number, settings.density, 0.1};
  std::vector<topknot_round*> rounds(ranks.size());
  for (std::size_t r = 0; r < ranks.size(); ++r) {
    std::vector<ProgramMemory> gradients;
    for (const std::int32_t t : settings.which) {
      std::vector<float> g = gradient_of(number, r + static_cast<std::size_t>(t) % 3,
                                         kTensors[static_cast<std::size_t>(t)].numel());
      if (settings.not_finite && r + 1 == ranks.size())
        g[g.size() / 2] = std::numeric_limits<float>::quiet_NaN();
      gradients.emplace_back(gpu, typed(g, settings.type));
    }
    std::vector<const void*> from;
    for (ProgramMemory& gradient : gradients) from.push_back(gradient.data());
    if (topknot_encode(ranks[r].get(), &step, settings.which.data(), settings.which.size(), from.data(),
                       settings.type, settings.scale, &rounds[r]) != TOPKNOT_OK)
      FAIL(topknot_error());
  }
  std::vector<topknot_message> messages(ranks.size());
  for (std::size_t r = 0; r < ranks.size(); ++r)
    REQUIRE(topknot_message_of(rounds[r], &messages[r]) == TOPKNOT_OK);
  std::vector<ProgramMemory> copies;
  std::vector<const void*> blocks;
  std::vector<std::size_t> sizes;
  if (messages[0].sum) {
    REQUIRE(messages[0].sum_type == TOPKNOT_FLOAT32);
    std::vector<float> sum(messages[0].sum_count);
    for (std::size_t r = 0; r < ranks.size(); ++r) {
      const Bytes from = read(gpu, messages[r].sum, sum.size() * sizeof(float));
      std::vector<float> values(sum.size());
      std::memcpy(values.data(), from.data(), from.size());
      for (std::size_t i = 0; i < sum.size(); ++i) sum[i] = r == 0 ? values[i] : sum[i] + values[i];
    }
    for (const topknot_message& message : messages) write(gpu, message.sum, bytes_of(sum));
  } else if (settings.together) {
    Bytes all;
    for (const topknot_message& message : messages) {
      const Bytes block = read(gpu, message.block, message.block_bytes);
      all.insert(all.end(), block.begin(), block.end());
    }
    copies.emplace_back(gpu, all);
    const auto* at = static_cast<std::byte*>(copies[0].data());
    for (const topknot_message& message : messages) {
      blocks.push_back(at), sizes.push_back(message.block_bytes);
      at += message.block_bytes;
    }
  } else {
    for (const topknot_message& message : messages)
      copies.emplace_back(gpu, read(gpu, message.block, message.block_bytes));
    for (ProgramMemory& copy : copies) blocks.push_back(copy.data()), sizes.push_back(copy.bytes().size());
  }
  Exchanged result;
  for (std::size_t r = 0; r < ranks.size(); ++r) {
    const topknot_result state = topknot_decode(rounds[r], blocks.data(), sizes.data());
    if (state == TOPKNOT_INVALID || state == TOPKNOT_FAILED) FAIL(topknot_error());
    REQUIRE((r == 0 || state == result.state));
    result.state = state;
  }
  copies.clear();  // a program may use its memory again
  for (std::size_t r = 0; r < ranks.size(); ++r) {
    if (!settings.commit || result.state != TOPKNOT_DONE) {
      topknot_discard(rounds[r]);
      continue;
    }
    std::vector<ProgramMemory> averages;
    for (const std::int32_t t : settings.which) {
      const std::size_t width = settings.type == TOPKNOT_FLOAT32 ? 4 : 2;
      averages.emplace_back(gpu, Bytes(kTensors[static_cast<std::size_t>(t)].numel() * width));
    }
    std::vector<void*> to;
    for (ProgramMemory& average : averages) to.push_back(average.data());
    if (topknot_commit(rounds[r], to.data(), settings.type, settings.scale) != TOPKNOT_OK)
      FAIL(topknot_error());
    for (const ProgramMemory& average : averages) result.averages.push_back(average.bytes());
  }
  return result;
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

// All ranks' averages and states are equal between CPU and GPU.
void compare(const std::vector<Handle>& cpu, const std::vector<Handle>& gpu, std::int64_t step,
             Settings settings) {
  const Exchanged expected = exchange(cpu, step, settings);
  settings.gpu = true;
  const Exchanged found = exchange(gpu, step, settings);
  REQUIRE(found.state == expected.state);
  CHECK((found.averages == expected.averages));
  for (std::size_t r = 0; r < cpu.size(); ++r) CHECK((state_of(gpu[r].get()) == state_of(cpu[r].get())));
}

}  // namespace

TEST_CASE("libtopknot on a GPU: averages, residuals and states are the CPU's") {
  const OnGpu program;
  for (const Case& method : kCases)
    for (const int ranks : {1, 3}) {
      INFO(method.method << " " << (method.keys.empty() ? "" : method.keys[0]) << ", ranks: " << ranks);
      std::vector<std::string> keys = method.keys;
      keys.push_back("density=0.02");
      const std::vector<Handle> cpu = make_ranks(method.method, keys, false, ranks);
      const std::vector<Handle> gpu = make_ranks(method.method, keys, true, ranks);
      for (std::int64_t step = 0; step < 4; ++step)
        compare(cpu, gpu, step, {.density = step == 2 ? 0.1 : 0, .together = step % 2 == 1});
    }
}

TEST_CASE("libtopknot on a GPU: a step that is not finite or is discarded changes nothing") {
  const OnGpu program;
  for (const Case& method : kCases) {
    INFO(method.method << " " << (method.keys.empty() ? "" : method.keys[0]));
    std::vector<std::string> keys = method.keys;
    keys.push_back("density=0.02");
    const std::vector<Handle> cpu = make_ranks(method.method, keys, false, 2);
    const std::vector<Handle> gpu = make_ranks(method.method, keys, true, 2);
    compare(cpu, gpu, 0, {});
    compare(cpu, gpu, 1, {.not_finite = true});
    compare(cpu, gpu, 1, {.commit = false});
    compare(cpu, gpu, 1, {});
  }
}

TEST_CASE("libtopknot on a GPU: tensors in rounds of their own, of every type, scaled") {
  const OnGpu program;
  const std::vector<Handle> cpu = make_ranks("topk", {"density=0.05"}, false, 2);
  const std::vector<Handle> gpu = make_ranks("topk", {"density=0.05"}, true, 2);
  std::int64_t step = 0;
  for (const topknot_type type : {TOPKNOT_FLOAT32, TOPKNOT_BFLOAT16, TOPKNOT_FLOAT16})
    for (const std::vector<std::int32_t>& which :
         std::vector<std::vector<std::int32_t>>{{1}, {2, 0}, {2, 1, 0}})
      for (const double scale : {1.0, 0.375}) {
        INFO("type " << type << ", tensors " << which.size() << ", scale " << scale);
        compare(cpu, gpu, step++, {.which = which, .type = type, .scale = scale});
      }
}

TEST_CASE(
    "libtopknot on a GPU: states pass between it and the CPU, steps are undone, residuals are replaced") {
  const OnGpu program;
  const std::vector<std::string> keys = {"density=0.02", "momentum=0.9", "undo=true"};
  const std::vector<Handle> cpu = make_ranks("dgc", keys, false, 2);
  const std::vector<Handle> gpu = make_ranks("dgc", keys, true, 2);
  for (std::int64_t step = 0; step < 3; ++step) exchange(cpu, step, {});
  for (std::size_t r = 0; r < 2; ++r) {
    const std::vector<char> state = state_of(cpu[r].get());
    REQUIRE(topknot_load(gpu[r].get(), state.data(), state.size()) == TOPKNOT_OK);
  }
  compare(cpu, gpu, 3, {});
  const std::vector<char> before = state_of(gpu[0].get());
  compare(cpu, gpu, 4, {});
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
  compare(cpu, gpu, 4, {});
}

TEST_CASE("libtopknot on a GPU: ranks have weights") {
  const OnGpu program;
  const std::vector<Handle> cpu = make_ranks("topk", {"density=0.02"}, false, 2);
  const std::vector<Handle> gpu = make_ranks("topk", {"density=0.02"}, true, 2);
  const double weights[] = {1, 3};
  for (const auto* ranks : {&cpu, &gpu})
    for (const Handle& rank : *ranks) REQUIRE(topknot_set_weights(rank.get(), weights) == TOPKNOT_OK);
  for (std::int64_t step = 0; step < 2; ++step) compare(cpu, gpu, step, {});
}

TEST_CASE("libtopknot on a GPU: of two rounds under way one is not finite") {
  const OnGpu program;
  const Handle compressor = make("topk", {}, true, 0, 1);
  const float nan = std::numeric_limits<float>::quiet_NaN();
  ProgramMemory bad(true, bytes_of(std::vector<float>(kTensors[0].numel(), nan)));
  ProgramMemory good(true, bytes_of(gradient_of(0, 0, kTensors[2].numel())));
  const topknot_step step{0, 0, 0};
  const auto encode = [&](std::int32_t tensor, ProgramMemory& gradient) {
    const void* from = gradient.data();
    topknot_round* round = nullptr;
    REQUIRE(topknot_encode(compressor.get(), &step, &tensor, 1, &from, TOPKNOT_FLOAT32, 1, &round) ==
            TOPKNOT_OK);
    return round;
  };
  const auto decode = [](topknot_round* round) {
    topknot_message message;
    REQUIRE(topknot_message_of(round, &message) == TOPKNOT_OK);
    return topknot_decode(round, &message.block, &message.block_bytes);
  };
  topknot_round* const first = encode(0, bad);
  topknot_round* const second = encode(2, good);
  CHECK(decode(first) == TOPKNOT_NOT_FINITE);
  CHECK(decode(second) == TOPKNOT_DONE);
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

  const Handle compressor = make("topk", {}, true, 0, 2);
  ProgramMemory gradient(true, bytes_of(std::vector<float>(kTensors[0].numel(), 1.0f)));
  const void* from = gradient.data();
  const std::int32_t first = 0;
  const topknot_step step{0, 0, 0};
  topknot_round* round = nullptr;
  REQUIRE(topknot_encode(compressor.get(), &step, &first, 1, &from, TOPKNOT_FLOAT32, 1, &round) ==
          TOPKNOT_OK);
  topknot_sent sent;
  CHECK(topknot_sent_of(round, 0, &sent) == TOPKNOT_INVALID);
  topknot_message message;
  REQUIRE(topknot_message_of(round, &message) == TOPKNOT_OK);
  const void* blocks[] = {message.block, message.block};
  const std::size_t sizes[] = {message.block_bytes, message.block_bytes - 16};
  CHECK(topknot_decode(round, blocks, sizes) == TOPKNOT_INVALID);
  CHECK(std::string(topknot_error()).find("rank 1's message has ") == 0);
  topknot_discard(round);
}

}  // namespace topknot

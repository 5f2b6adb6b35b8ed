// Sums of bfloat16: the dense baseline in half the bytes.
#include <cmath>
#include <cstring>
#include <functional>

#include "tests/dist/ranks.h"
#include "tests/support/catch.h"

namespace topknot {
namespace {

using Value = std::function<float(int, std::size_t)>;

// What all ranks hold.
std::vector<float> sum_of(const std::string& backend, int ranks, std::size_t length, SumOrder order,
                          const Value& value) {
  std::vector<std::vector<BFloat16>> results(static_cast<std::size_t>(ranks));
  run_ranks(backend, ranks, [&](Communicator& c) {
    std::vector<BFloat16> data(length);
    for (std::size_t i = 0; i < length; ++i) data[i] = to_bfloat16(value(c.rank(), i));
    c.all_reduce(std::span<BFloat16>(data), order);
    results[static_cast<std::size_t>(c.rank())] = data;
  });
  for (const auto& result : results)
    if (length > 0 && std::memcmp(result.data(), results[0].data(), length * sizeof(BFloat16)) != 0)
      throw std::runtime_error("the ranks hold different sums");
  std::vector<float> sums(length);
  to_float(results[0].data(), length, sums.data());
  return sums;
}

float rough(int rank, std::size_t i) {
  return std::sin(static_cast<float>(rank * 77 + 1) * static_cast<float>(i + 3)) *
         static_cast<float>(i % 13 + 1);
}

}  // namespace

TEST_CASE("sums of small whole numbers in bfloat16 are exact in any order") {
  const auto value = [](int rank, std::size_t i) {
    return static_cast<float>((rank * 5 + static_cast<int>(i % 977)) % 31 - 15);
  };
  for (const std::string backend : {"threads", "gloo"})
    for (const int ranks : {1, 2, 3, 5, 8})
      for (const std::size_t length : {0, 1, 1000, 8193, 300007})
        for (const SumOrder order : {SumOrder::ranks, SumOrder::library}) {
          const std::vector<float> sums = sum_of(backend, ranks, length, order, value);
          bool exact = true;
          for (std::size_t i = 0; i < length; ++i) {
            float expected = 0;
            for (int r = 0; r < ranks; ++r) expected += value(r, i);
            exact = exact && sums[i] == expected;
          }
          INFO(backend << " " << ranks << " ranks, " << length);
          CHECK(exact);
        }
}

TEST_CASE("in the order of ranks, bfloat16 is added in floats and rounded once, the same on every backend") {
  for (const int ranks : {2, 3, 4}) {
    for (const std::size_t length : {1000, 20011}) {
      const std::vector<float> threads = sum_of("threads", ranks, length, SumOrder::ranks, rough);
      CHECK(threads == sum_of("gloo", ranks, length, SumOrder::ranks, rough));
      bool right = true;
      for (std::size_t i = 0; i < length; ++i) {
        float expected = to_float(to_bfloat16(rough(0, i)));
        for (int r = 1; r < ranks; ++r) expected += to_float(to_bfloat16(rough(r, i)));
        right = right && threads[i] == to_float(to_bfloat16(expected));
      }
      CHECK(right);
    }
  }
}

TEST_CASE("around the ring, bfloat16 loses at most one rounding per addition") {
  const int ranks = 4;
  const std::size_t length = 100003;
  const std::vector<float> sums = sum_of("gloo", ranks, length, SumOrder::library, rough);
  bool near = true;
  for (std::size_t i = 0; i < length; ++i) {
    double expected = 0, magnitudes = 0;
    for (int r = 0; r < ranks; ++r) {
      const double value = to_float(to_bfloat16(rough(r, i)));
      expected += value, magnitudes += std::fabs(value);
    }
    near = near && std::fabs(sums[i] - expected) <= ranks * magnitudes / 256;
  }
  CHECK(near);
}

}  // namespace topknot

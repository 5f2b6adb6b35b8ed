// exchange.collective=coded_sum: the bits of sums in rank order, on every backend, in fewer bytes.
#include "dist/sparse/coded_sum.h"

#include <bit>

#include "nn/base/check.h"
#include "tests/dist/exchange/exchange_fixture.h"

using namespace topknot;
using namespace topknot::testing;

namespace {

std::vector<float> values_of(int rank, std::size_t n) {
  std::vector<float> values(n);
  for (std::size_t i = 0; i < n; ++i)
    values[i] = i % 5 == 0 ? 0.0f : gradient_value(i % 7 == 0 ? 1 : 0, rank, i) * (i % 11 == 0 ? 1e4f : 1.0f);
  return values;
}
std::vector<BFloat16> narrow(const std::vector<float>& values) {
  std::vector<BFloat16> half(values.size());
  to_bfloat16(values.data(), values.size(), half.data());
  return half;
}

bool same(float a, float b) {
  return std::bit_cast<std::uint32_t>(a) == std::bit_cast<std::uint32_t>(b) ||
         (std::isnan(a) && std::isnan(b));
}
bool same(BFloat16 a, BFloat16 b) {
  return same(to_float(a), to_float(b));
}

// Compares both sums of this rank's `data`.
template <class T>
CodedSum::Bytes check_sum(Communicator& communicator, CodedSum& coded, std::vector<T> data) {
  std::vector<T> plain = data;
  communicator.all_reduce(std::span<T>(plain), SumOrder::ranks);
  const CodedSum::Bytes bytes = coded.sum(communicator, std::span<T>(data));
  const bool all = std::equal(plain.begin(), plain.end(), data.begin(), [](T a, T b) { return same(a, b); });
  if (!all) throw std::runtime_error("the coded sum has other bits");
  return bytes;
}

}  // namespace

TEST_CASE("a coded sum has the bits of a sum in rank order, on threads and gloo, for any length") {
  for (const char* backend : {"threads", "gloo"})
    for (int ranks = 1; ranks <= 4; ++ranks)
      for (const std::size_t n : {0u, 1u, 50u, 5000u, 70000u}) {
        INFO(backend << ", " << ranks << " ranks, " << n << " values");
        CHECK_NOTHROW(topknot::run_ranks(backend, ranks, [&](Communicator& communicator) {
          CodedSum coded;
          std::vector<float> values = values_of(communicator.rank(), n);
          check_sum(communicator, coded, values);
          check_sum(communicator, coded, narrow(values));
          // What is not finite passes through, wherever it is; sums overflow as they do.
          if (n > 40) {
            values[3] = std::numeric_limits<float>::infinity();
            values[n - 1] = communicator.rank() == 0 ? std::nanf("") : 1.0f;
            values[n / 2] = -0.0f;
            values[20] = std::numeric_limits<float>::max();
          }
          check_sum(communicator, coded, narrow(values));
          check_sum(communicator, coded, values);
        }));
      }
}

TEST_CASE("a coded sum says what each rank sends and receives, and one rank sends nothing") {
  constexpr std::size_t n = 40000;
  for (const int ranks : {1, 3}) {
    std::vector<CodedSum::Bytes> all(static_cast<std::size_t>(ranks));
    topknot::run_ranks("threads", ranks, [&](Communicator& communicator) {
      CodedSum coded;
      std::vector<float> values(n);
      for (std::size_t i = 0; i < n; ++i) values[i] = gradient_value(0, communicator.rank(), i);
      all[static_cast<std::size_t>(communicator.rank())] = check_sum(communicator, coded, values);
    });
    std::uint64_t sent = 0, received = 0;
    for (const auto& [from, to] : all) {
      if (ranks > 1) CHECK((from > 0 && static_cast<double>(from) < n * 4 / 1.15));
      if (ranks > 1) CHECK(to > from);  // the pieces of the other ranks' sums
      sent += from, received += to;
    }
    if (ranks == 1) CHECK((sent == 0 && received == 0));
    // Each piece counts on both ends, and a gathered sum once as sent.
    if (ranks == 3)
      CHECK(static_cast<double>(received) / static_cast<double>(sent) == Approx(4.0 / 3).epsilon(0.05));
  }
}

TEST_CASE("methods whose messages are sums end with the same averages by coded sums") {
  for (const std::string name : {"dense", "powersgd", "acpsgd"})
    for (const int per_host : {0, 2})
      for (const std::string values : {"", "bf16"}) {
        if (name == "dense" ? per_host > 0 : !values.empty()) continue;
        INFO(name << " " << values << ", hosts of " << per_host);
        RunPlan plan = plan_of(name, "none");
        plan.options.compress.values = values;
        plan.options.ranks_per_host = per_host;
        plan.options.ordered_sum = true;
        for (const char* backend : {"threads", "gloo", "link"}) {
          plan.options.collective = "all_gather";
          const auto plain = train<TinyModel>(plan, {}, backend);
          plan.options.collective = "coded_sum";
          const auto coded = train<TinyModel>(plan, {}, backend);
          for (std::size_t rank = 0; rank < plain.size(); ++rank) {
            CHECK(coded[rank].averages == plain[rank].averages);
            CHECK(coded[rank].residuals == plain[rank].residuals);
            if (per_host == 0 || rank % 2 == 0)  // else it talks to its host alone
              CHECK(coded[rank].results[0].bytes_sent != plain[rank].results[0].bytes_sent);
          }
        }
      }
}

TEST_CASE("coded sums of a method that sends blocks are one error") {
  for (const std::string name : {"topk", "qsgd", "signsgd", "terngrad"}) {
    ExchangeOptions options;
    options.compress.name = name;
    options.collective = "coded_sum";
    CHECK(says(refusal(options), {"compress.name: " + name, "exchange.collective", "all_gather"}));
  }
}

#include "dist/comm/communicator.h"

#include <atomic>
#include <cstring>

#include "tests/dist/ranks.h"
#include "tests/support/catch.h"

namespace topknot {
namespace {

const std::vector<std::string> kBackends = {"threads", "link", "gloo"};

std::vector<std::byte> block_of(int rank, std::size_t length) {
  std::vector<std::byte> block(length);
  for (std::size_t i = 0; i < length; ++i) block[i] = static_cast<std::byte>(rank * 31 + i * 7 + i / 251);
  return block;
}

// Small integers: their float sums are exact in any order.
float exact_value(int rank, std::size_t i) {
  return static_cast<float>((rank * 131 + i * 17) % 1009) - 500.0f;
}

// Sums of these depend on the order.
float rough_value(int rank, std::size_t i) {
  const auto mixed = static_cast<std::uint32_t>((i * 2654435761u) ^ (rank * 40503u + 977u));
  const float scale = static_cast<float>(1 << (mixed % 20));
  return (static_cast<float>(mixed >> 8) / 16777216.0f - 0.5f) * scale;
}

// Lengths on both sides of the borders between the ways that gloo takes: 4 kB messages, 8,192 floats, 1 MB
// segments.
const std::vector<std::size_t> counts = {0, 1, 7, 1000, 8192, 8193, 20011};

bool same_bits(const std::vector<std::vector<float>>& a, const std::vector<std::vector<float>>& b) {
  if (a.size() != b.size()) return false;
  for (std::size_t i = 0; i < a.size(); ++i)
    if (a[i].size() != b[i].size() ||
        (!a[i].empty() && std::memcmp(a[i].data(), b[i].data(), a[i].size() * sizeof(float)) != 0))
      return false;
  return true;
}

using Sums = std::vector<std::vector<float>>;  // one for each length

Sums reduce(const std::string& backend, int ranks, const std::vector<std::size_t>& lengths, SumOrder order,
            float (*value)(int, std::size_t)) {
  std::vector<Sums> results(ranks);
  run_ranks(backend, ranks, [&](Communicator& c) {
    for (const std::size_t length : lengths) {
      std::vector<float> data(length);
      for (std::size_t i = 0; i < length; ++i) data[i] = value(c.rank(), i);
      c.all_reduce(std::span<float>(data), order);
      results[c.rank()].push_back(data);
    }
  });
  for (const auto& result : results)
    if (!same_bits(result, results[0])) throw std::runtime_error("the ranks hold different sums");
  return results[0];
}

Sums sum_in_rank_order(int ranks, const std::vector<std::size_t>& lengths, float (*value)(int, std::size_t)) {
  Sums sums;
  for (const std::size_t length : lengths) {
    sums.emplace_back(length);
    for (std::size_t i = 0; i < length; ++i) {
      sums.back()[i] = value(0, i);
      for (int r = 1; r < ranks; ++r) sums.back()[i] += value(r, i);
    }
  }
  return sums;
}

}  // namespace

TEST_CASE("all_gather brings every rank's block, whatever its length") {
  for (const auto& backend : kBackends)
    for (int ranks = 1; ranks <= 8; ++ranks) {
      INFO(backend << " with " << ranks << " ranks");
      std::vector<int> wrong(ranks);
      run_ranks(backend, ranks, [&](Communicator& c) {
        std::vector<std::vector<std::byte>> all;
        for (int round = 0; round < 12; ++round) {
          const auto length = [&](int rank) -> std::size_t {
            switch ((rank + round) % 6) {
              case 0:
                return 0;
              case 1:
                return 1;
              case 2:
                return 4072;  // fills one message of gloo's to the brim
              case 3:
                return 4073;
              case 4:
                return 100 + 13 * rank;
              default:
                return 70001;
            }
          };
          const auto mine = block_of(c.rank(), length(c.rank()));
          c.all_gather(mine, all);
          if (all.size() != static_cast<std::size_t>(ranks)) ++wrong[c.rank()];
          for (int r = 0; r < ranks; ++r)
            if (all[r] != block_of(r, length(r))) ++wrong[c.rank()];
        }
      });
      CHECK(wrong == std::vector<int>(ranks, 0));
    }
}

TEST_CASE("all_reduce sums exactly with either order on every backend") {
  for (const auto& backend : kBackends)
    for (int ranks = 1; ranks <= 8; ++ranks)
      for (const auto order : {SumOrder::ranks, SumOrder::library}) {
        INFO(backend << ", " << ranks << " ranks");
        CHECK(reduce(backend, ranks, counts, order, exact_value) ==
              sum_in_rank_order(ranks, counts, exact_value));
      }
}

TEST_CASE("the ring sums exactly over several segments per chunk, equal on all ranks and in every run") {
  const std::vector<std::size_t> lengths = {3 * 262144 * 2 + 12345, 3 * 262144 + 1};
  CHECK(reduce("gloo", 3, lengths, SumOrder::library, exact_value) ==
        sum_in_rank_order(3, lengths, exact_value));
  CHECK(same_bits(reduce("gloo", 3, lengths, SumOrder::library, rough_value),
                  reduce("gloo", 3, lengths, SumOrder::library, rough_value)));
}

TEST_CASE("a sum in rank order has the same bits on threads, on gloo and in a plain loop") {
  for (const int ranks : {2, 3, 5, 8}) {
    INFO(ranks << " ranks");
    const Sums expected = sum_in_rank_order(ranks, counts, rough_value);
    CHECK(same_bits(reduce("threads", ranks, counts, SumOrder::ranks, rough_value), expected));
    CHECK(same_bits(reduce("gloo", ranks, counts, SumOrder::ranks, rough_value), expected));
  }
}

TEST_CASE("doubles are summed in rank order") {
  for (const auto& backend : kBackends)
    for (const std::size_t count : {3u, 9001u}) {
      INFO(backend << ", " << count);
      const auto value = [](int rank, std::size_t i) {
        return 0.1 * (rank + 1) + 1e-9 * static_cast<double>(i);
      };
      std::vector<double> expected(count);
      for (std::size_t i = 0; i < count; ++i) expected[i] = (value(0, i) + value(1, i)) + value(2, i);
      std::vector<std::vector<double>> results(3);
      run_ranks(backend, 3, [&](Communicator& c) {
        std::vector<double> data(count);
        for (std::size_t i = 0; i < count; ++i) data[i] = value(c.rank(), i);
        c.all_reduce(std::span<double>(data));
        results[c.rank()] = data;
      });
      for (const auto& result : results) CHECK(result == expected);
    }
}

TEST_CASE("broadcast brings the root's bytes to all") {
  for (const auto& backend : kBackends)
    for (int ranks = 1; ranks <= 8; ++ranks) {
      INFO(backend << " with " << ranks << " ranks");
      std::vector<int> wrong(ranks);
      run_ranks(backend, ranks, [&](Communicator& c) {
        for (int root = 0; root < ranks; ++root)
          for (const std::size_t length : {0u, 5u, 100000u}) {
            auto data = block_of(c.rank(), length);
            c.broadcast(data, root);
            if (data != block_of(root, length)) ++wrong[c.rank()];
          }
      });
      CHECK(wrong == std::vector<int>(ranks, 0));
    }
}

TEST_CASE("a barrier lets no rank through before all have come") {
  for (const auto& backend : kBackends) {
    std::atomic<int> come{0};
    std::vector<int> seen(4);
    run_ranks(backend, 4, [&](Communicator& c) {
      if (c.rank() == 2) std::this_thread::sleep_for(std::chrono::milliseconds(50));
      ++come;
      c.barrier();
      seen[c.rank()] = come;
    });
    CHECK(seen == std::vector<int>(4, 4));
  }
}

TEST_CASE("calls of different kinds follow each other without mixing, with call checks off too") {
  for (const bool check_calls : {false, true}) {
    std::vector<int> wrong(3);
    run_ranks("gloo", 3,
              [&](Communicator& c) {
                std::vector<std::vector<std::byte>> all;
                for (int round = 0; round < 30; ++round) {
                  std::vector<float> large(10000 + round, 1.0f), small(10, 2.0f);
                  c.all_reduce(std::span<float>(large), SumOrder::ranks);
                  c.all_gather(block_of(c.rank(), 5000 * (c.rank() + round) % 9000), all);
                  c.all_reduce(std::span<float>(small), SumOrder::library);
                  c.broadcast(std::as_writable_bytes(std::span(small)), round % 3);
                  c.all_reduce(std::span<float>(large), SumOrder::library);
                  c.barrier();
                  for (int r = 0; r < 3; ++r)
                    if (all[r] != block_of(r, 5000 * (r + round) % 9000)) ++wrong[c.rank()];
                  for (const float x : large)
                    if (x != 9.0f) ++wrong[c.rank()];
                  for (const float x : small)
                    if (x != 6.0f) ++wrong[c.rank()];
                }
              },
              {60, check_calls});
    CHECK(wrong == std::vector<int>(3, 0));
  }
}

TEST_CASE("ranks that disagree about the configuration all get the same message") {
  for (const auto& backend : kBackends) {
    run_ranks(backend, 3, [](Communicator& c) { check_same(c, "the configuration", "abc"); });
    const auto errors = errors_of_ranks(backend, 3, [](Communicator& c) {
      check_same(c, "the configuration", c.rank() == 2 ? "abd" : "abc");
    });
    CHECK(errors[0].find("disagree about the configuration: rank 0 has 'abc', rank 2 has 'abd'") !=
          std::string::npos);
    CHECK(errors[1] == errors[0]);
    CHECK(errors[2] == errors[0]);
  }
}

}  // namespace topknot

#include "dist/comm/communicator.h"

#include "tests/dist/ranks.h"
#include "tests/support/same_bits.h"

namespace topknot {
namespace {

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

using Value = std::function<float(int, std::size_t)>;
using Sums = std::vector<std::vector<float>>;  // one for each length

bool same_sums(const Sums& a, const Sums& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                    [](const auto& x, const auto& y) { return same_bits(x, y); });
}

// What all ranks hold after sums of T.
template <class T>
Sums reduce(const std::string& backend, int ranks, const std::vector<std::size_t>& lengths, SumOrder order,
            const Value& value) {
  std::vector<Sums> results(ranks);
  run_ranks(backend, ranks, [&](Communicator& c) {
    for (const std::size_t length : lengths) {
      std::vector<float> data(length);
      for (std::size_t i = 0; i < length; ++i) data[i] = value(c.rank(), i);
      if constexpr (std::is_same_v<T, float>) {
        c.all_reduce(std::span(data), order);
      } else {
        std::vector<T> narrow(length);
        to_bfloat16(data.data(), length, narrow.data());
        c.all_reduce(std::span(narrow), order);
        to_float(narrow.data(), length, data.data());
      }
      results[c.rank()].push_back(data);
    }
  });
  for (const auto& result : results)
    if (!same_sums(result, results[0])) throw std::runtime_error("the ranks hold different sums");
  return results[0];
}

Sums sum_in_rank_order(int ranks, const std::vector<std::size_t>& lengths, const Value& value) {
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

float narrowed(float value) {
  return to_float(to_bfloat16(value));
}
float narrow_rough_value(int rank, std::size_t i) {
  return narrowed(rough_value(rank, i));
}

// The sum over the ranks of `c` of what each brings.
float sum_of(Communicator& c, float mine, std::size_t length) {
  std::vector<float> data(length, mine);
  c.all_reduce(std::span<float>(data), SumOrder::ranks);
  return std::equal(data.begin() + 1, data.end(), data.begin()) ? data[0] : -1.0f;
}

}  // namespace

TEST_CASE("all_gather brings every rank's block, whatever its length") {
  for (const auto& backend : kBackends)
    for (int ranks = 1; ranks <= 8; ++ranks)
      check_ranks(backend, ranks, {}, [&](Communicator& c, const Expect& expect) {
        std::vector<std::vector<std::byte>> all;
        for (int round = 0; round < 12; ++round) {
          const auto length = [&](int rank) {
            // 4072 bytes fill one message of gloo's to the brim.
            const std::size_t lengths[] = {0, 1, 4072, 4073, 100 + 13u * static_cast<unsigned>(rank), 70001};
            return lengths[(rank + round) % 6];
          };
          c.all_gather(block_of(c.rank(), length(c.rank())), all);
          expect(all.size() == static_cast<std::size_t>(ranks), "a block of each rank");
          for (int r = 0; r < ranks; ++r) expect(all[r] == block_of(r, length(r)), "the blocks");
        }
      });
}

TEST_CASE("all_reduce sums exactly with either order on every backend, small whole numbers in bfloat16 too") {
  const std::vector<std::size_t> lengths = {0, 1, 1000, 8193, 300007};
  const auto small = [](int rank, std::size_t i) {
    return static_cast<float>((rank * 5 + static_cast<int>(i % 977)) % 31 - 15);
  };
  for (const auto& backend : kBackends)
    for (int ranks = 1; ranks <= 8; ++ranks)
      for (const auto order : {SumOrder::ranks, SumOrder::library}) {
        INFO(backend << ", " << ranks << " ranks");
        CHECK(reduce<float>(backend, ranks, counts, order, exact_value) ==
              sum_in_rank_order(ranks, counts, exact_value));
        CHECK((reduce<BFloat16>(backend, ranks, lengths, order, small) ==
               sum_in_rank_order(ranks, lengths, small)));
      }
}

TEST_CASE("the ring sums exactly over several segments per chunk, equal on all ranks and in every run") {
  const std::vector<std::size_t> lengths = {3 * 262144 * 2 + 12345, 3 * 262144 + 1};
  const auto sums = [&](const Value& value) {
    return reduce<float>("gloo", 3, lengths, SumOrder::library, value);
  };
  CHECK(sums(exact_value) == sum_in_rank_order(3, lengths, exact_value));
  CHECK(same_sums(sums(rough_value), sums(rough_value)));
}

TEST_CASE(
    "a sum in rank order has the same bits on every backend; bfloat16 is added in floats, rounded once") {
  for (const int ranks : {2, 3, 4, 5, 8}) {
    INFO(ranks << " ranks");
    const Sums expected = sum_in_rank_order(ranks, counts, rough_value);
    Sums narrow = sum_in_rank_order(ranks, counts, narrow_rough_value);
    for (auto& sums : narrow) std::ranges::transform(sums, sums.begin(), narrowed);
    for (const char* backend : {"threads", "gloo"}) {
      CHECK(same_sums(reduce<float>(backend, ranks, counts, SumOrder::ranks, rough_value), expected));
      CHECK((reduce<BFloat16>(backend, ranks, counts, SumOrder::ranks, rough_value) == narrow));
    }
  }
}

TEST_CASE("doubles are summed in rank order") {
  const auto value = [](int rank, std::size_t i) { return 0.1 * (rank + 1) + 1e-9 * static_cast<double>(i); };
  for (const auto& backend : kBackends)
    for (const std::size_t count : {3u, 9001u}) {
      std::vector<double> expected(count);
      for (std::size_t i = 0; i < count; ++i) expected[i] = (value(0, i) + value(1, i)) + value(2, i);
      check_ranks(backend, 3, {}, [&](Communicator& c, const Expect& expect) {
        std::vector<double> data(count);
        for (std::size_t i = 0; i < count; ++i) data[i] = value(c.rank(), i);
        sum_doubles(c, data);
        expect(data == expected, std::to_string(count) + " doubles");
      });
    }
}

TEST_CASE("broadcast brings the root's bytes to all") {
  for (const auto& backend : kBackends)
    for (int ranks = 1; ranks <= 8; ++ranks)
      check_ranks(backend, ranks, {}, [&](Communicator& c, const Expect& expect) {
        for (int root = 0; root < ranks; ++root)
          for (const std::size_t length : {0u, 5u, 100000u}) {
            auto data = block_of(c.rank(), length);
            c.broadcast(data, root);
            expect(data == block_of(root, length), std::to_string(length) + " bytes");
          }
      });
}

TEST_CASE("a barrier lets no rank through before all have come") {
  for (const auto& backend : kBackends) {
    std::atomic<int> come{0};
    check_ranks(backend, 4, {}, [&](Communicator& c, const Expect& expect) {
      if (c.rank() == 2) std::this_thread::sleep_for(std::chrono::milliseconds(50));
      ++come;
      c.barrier();
      expect(come == 4, "all have come");
    });
  }
}

TEST_CASE("ranks that disagree about the configuration all get the same message") {
  for (const auto& backend : kBackends) {
    run_ranks(backend, 3, [](Communicator& c) { check_same(c, "the configuration", "abc"); });
    const auto errors = errors_of_ranks(backend, 3, [](Communicator& c) {
      check_same(c, "the configuration", c.rank() == 2 ? "abd" : "abc");
    });
    CHECK(says(errors[0], {"disagree about the configuration: rank 0 has 'abc', rank 2 has 'abd'"}));
    CHECK(errors == std::vector<std::string>(3, errors[0]));
  }
}

TEST_CASE("around the ring, bfloat16 loses at most one rounding per addition") {
  constexpr int kRanks = 4;
  const auto sums = reduce<BFloat16>("gloo", kRanks, {100003}, SumOrder::library, rough_value)[0];
  bool near = true;
  for (std::size_t i = 0; i < sums.size(); ++i) {
    double expected = 0, magnitudes = 0;
    for (int r = 0; r < kRanks; ++r) {
      const double value = narrow_rough_value(r, i);
      expected += value, magnitudes += std::fabs(value);
    }
    near = near && std::fabs(sums[i] - expected) <= kRanks * magnitudes / 256;
  }
  CHECK(near);
}

TEST_CASE("a split joins the ranks of one color in their order, for any colors") {
  const std::vector<std::vector<int>> colorings = {
      {0}, {5, 5}, {1, 0}, {0, 1, 0, 1}, {7, -3, 7, 7, 2}, {0, 0, 1, 1, 2, 2}, {3, 3, 3, 3, 3, 3, 3}};
  for (const auto& backend : kBackends)
    for (const auto& colors : colorings) {
      const int ranks = static_cast<int>(colors.size());
      check_ranks(backend, ranks, {}, [&](Communicator& c, const Expect& expect) {
        const int me = c.rank();
        const auto part = c.split(colors[me]);
        const auto place = std::count(colors.begin(), colors.begin() + me, colors[me]);
        const auto members = std::count(colors.begin(), colors.end(), colors[me]);
        expect(part->rank() == place && part->size() == members, "place and size");
        expect(part->backend() == c.backend(), "the backend");
        float expected = 0;
        for (int r = 0; r < ranks; ++r) expected += colors[r] == colors[me] ? static_cast<float>(1 << r) : 0;
        for (const std::size_t length : {5u, 20000u})
          expect(sum_of(*part, static_cast<float>(1 << me), length) == expected, "the sum");
      });
    }
}

TEST_CASE("calls on a communicator, on its splits and on theirs follow each other without mixing") {
  for (const auto& backend : kBackends)
    check_ranks(backend, 6, {}, [](Communicator& c, const Expect& expect) {
      const int me = c.rank();
      const auto half = c.split(me / 3);          // 0 1 2 | 3 4 5
      const auto column = c.split(me % 3);        // 0 3 | 1 4 | 2 5
      const auto rest = half->split(me % 3 > 0);  // 0 | 1 2 | 3 | 4 5
      for (int round = 0; round < 10; ++round) {
        const std::size_t length = round % 2 == 0 ? 3 : 9001;
        const float mine = static_cast<float>(1 << me), shift = static_cast<float>(1 << (me / 3 * 3));
        expect(sum_of(*half, mine, length) == 7 * shift, "half");
        expect(sum_of(c, mine, length) == 63, "all");
        expect(sum_of(*rest, mine, length) == (me % 3 == 0 ? shift : 6 * shift), "a part of the half");
        expect(sum_of(*column, mine, length) == static_cast<float>(9 << (me % 3)), "a column");
      }
    });
}

TEST_CASE("a split outlives the communicator that it came from") {
  for (const auto& backend : kBackends) {
    std::vector<std::unique_ptr<Communicator>> parts(4);
    std::vector<float> sums(4);
    run_ranks(backend, 4, [&](Communicator& c) { parts[c.rank()] = c.split(c.rank() % 2); });
    testing::errors_of_threads(4, [&](int r) {
      sums[r] = sum_of(*parts[r], static_cast<float>(1 << r), 9000);
      parts[r].reset();
    });
    CHECK(sums == std::vector<float>{5, 10, 5, 10});
  }
}

TEST_CASE("abort ends the calls on splits, the rank's own and those of others") {
  for (const auto& backend : kBackends) {
    auto errors = errors_of_ranks(backend, 4, {600, false}, [&](Communicator& c) {
      const auto pair = c.split(c.rank() / 2), odd = c.split(c.rank() % 2);
      c.barrier();
      if (c.rank() == 3) throw std::runtime_error("no more memory");
      // 2 waits for 3; 1 for 3; 0 for 1, who never comes.
      (c.rank() == 1 ? *odd : *pair).barrier();
    });
    for (int r = 0; r < 3; ++r) CHECK(says(errors[r], {"rank " + std::to_string(r), "barrier"}));
    CHECK(errors[3] == "no more memory");

    errors = errors_of_ranks(backend, 2, {600, false}, [&](Communicator& c) {
      const auto part = c.split(0);
      c.barrier();
      if (c.rank() == 0) c.abort("the disk is full");
      part->barrier();
    });
    for (const auto& error : errors) CHECK(says(error, {"rank 0: the disk is full"}));
  }
}

TEST_CASE("a rank that ends inside a split's call, or does not come to a split, ends the others in time") {
  for (const auto& backend : kBackends) {
    const auto begin = std::chrono::steady_clock::now();
    auto errors = errors_of_ranks(backend, 4, {4.0, false}, [&](Communicator& c) {
      const auto part = c.split(c.rank() / 2);
      part->barrier();
      if (c.rank() == 1) return;  // without a word
      std::vector<float> data(20000);
      part->all_reduce(std::span<float>(data), SumOrder::ranks);
      c.barrier();
    });
    CHECK(std::chrono::steady_clock::now() - begin < std::chrono::seconds(20));
    CHECK(errors[1].empty());
    INFO(backend << ": " << errors[0] << " | " << errors[2] << " | " << errors[3]);
    for (const int r : {0, 2, 3}) CHECK_FALSE(errors[r].empty());
    CHECK(contains(errors[0], "all_reduce"));

    errors = errors_of_ranks(backend, 3, {1.0, false}, [&](Communicator& c) {
      c.barrier();
      if (c.rank() == 2) return std::this_thread::sleep_for(std::chrono::milliseconds(1500));
      c.split(0);
    });
    for (int r = 0; r < 2; ++r) CHECK(says(errors[r], {"split #2", "rank 2 did not come"}));
  }
}

}  // namespace topknot

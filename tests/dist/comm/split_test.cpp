// split(): groups of ranks beside the group that they came from.

#include <algorithm>
#include <chrono>

#include "tests/dist/ranks.h"
#include "tests/support/catch.h"
#include "tests/support/text.h"

namespace topknot {
namespace {

const std::vector<std::string> kBackends = {"threads", "link", "gloo"};

// The sum over the ranks of `c` of what each brings.
float sum_of(Communicator& c, float mine, std::size_t length) {
  std::vector<float> data(length, mine);
  c.all_reduce(std::span<float>(data), SumOrder::ranks);
  return std::equal(data.begin() + 1, data.end(), data.begin()) ? data[0] : -1.0f;
}

}  // namespace

TEST_CASE("a split joins the ranks of one color in their order, for any colors") {
  const std::vector<std::vector<int>> colorings = {
      {0}, {5, 5}, {1, 0}, {0, 1, 0, 1}, {7, -3, 7, 7, 2}, {0, 0, 1, 1, 2, 2}, {3, 3, 3, 3, 3, 3, 3}};
  for (const auto& backend : kBackends)
    for (const auto& colors : colorings) {
      const int ranks = static_cast<int>(colors.size());
      INFO(backend << " with " << ranks << " ranks");
      std::vector<int> wrong(ranks);
      run_ranks(backend, ranks, [&](Communicator& c) {
        const int me = c.rank();
        const auto part = c.split(colors[me]);
        const int place = static_cast<int>(std::count(colors.begin(), colors.begin() + me, colors[me]));
        const int members = static_cast<int>(std::count(colors.begin(), colors.end(), colors[me]));
        if (part->rank() != place || part->size() != members || part->backend() != c.backend()) ++wrong[me];
        float expected = 0;
        for (int r = 0; r < ranks; ++r) expected += colors[r] == colors[me] ? static_cast<float>(1 << r) : 0;
        for (const std::size_t length : {5u, 20000u})
          if (sum_of(*part, static_cast<float>(1 << me), length) != expected) ++wrong[me];
      });
      CHECK(wrong == std::vector<int>(ranks, 0));
    }
}

TEST_CASE("calls on a communicator, on its splits and on theirs follow each other without mixing") {
  for (const auto& backend : kBackends) {
    std::vector<int> wrong(6);
    run_ranks(backend, 6, [&](Communicator& c) {
      const int me = c.rank();
      const auto half = c.split(me / 3);          // 0 1 2 | 3 4 5
      const auto column = c.split(me % 3);        // 0 3 | 1 4 | 2 5
      const auto rest = half->split(me % 3 > 0);  // 0 | 1 2 | 3 | 4 5
      for (int round = 0; round < 10; ++round) {
        const std::size_t length = round % 2 == 0 ? 3 : 9001;
        const float mine = static_cast<float>(1 << me), shift = static_cast<float>(1 << (me / 3 * 3));
        if (sum_of(*half, mine, length) != 7 * shift) ++wrong[me];
        if (sum_of(c, mine, length) != 63) ++wrong[me];
        if (sum_of(*rest, mine, length) != (me % 3 == 0 ? shift : 6 * shift)) ++wrong[me];
        if (sum_of(*column, mine, length) != static_cast<float>(9 << (me % 3))) ++wrong[me];
      }
    });
    CHECK(wrong == std::vector<int>(6, 0));
  }
}

TEST_CASE("a split outlives the communicator that it came from") {
  for (const auto& backend : kBackends) {
    std::vector<std::unique_ptr<Communicator>> parts(4);
    std::vector<float> sums(4);
    const auto errors =
        errors_of_ranks(backend, 4, [&](Communicator& c) { parts[c.rank()] = c.split(c.rank() % 2); });
    CHECK(errors == std::vector<std::string>(4));
    std::vector<std::thread> threads;
    for (int r = 0; r < 4; ++r)
      threads.emplace_back([&, r] {
        sums[r] = sum_of(*parts[r], static_cast<float>(1 << r), 9000);
        parts[r].reset();
      });
    for (auto& thread : threads) thread.join();
    CHECK(sums == std::vector<float>{5, 10, 5, 10});
  }
}

TEST_CASE("abort ends the calls on splits, the rank's own and those of others") {
  for (const auto& backend : kBackends) {
    const auto errors = errors_of_ranks(backend, 4,
                                        [&](Communicator& c) {
                                          const auto pair = c.split(c.rank() / 2);
                                          const auto odd = c.split(c.rank() % 2);
                                          c.barrier();
                                          if (c.rank() == 3) throw std::runtime_error("no more memory");
                                          // 2 waits for 3; 1 for 3; 0 for 1, who never comes.
                                          (c.rank() == 1 ? *odd : *pair).barrier();
                                        },
                                        {600, false});
    for (int r = 0; r < 3; ++r) {
      INFO(backend << " " << r << ": " << errors[r]);
      CHECK(contains(errors[r], "rank " + std::to_string(r)));
      CHECK(contains(errors[r], "barrier"));
    }
    CHECK(errors[3] == "no more memory");
  }
}

TEST_CASE("aborting a communicator ends its splits") {
  for (const auto& backend : kBackends) {
    const auto errors = errors_of_ranks(backend, 2,
                                        [&](Communicator& c) {
                                          const auto part = c.split(0);
                                          c.barrier();
                                          if (c.rank() == 0) c.abort("the disk is full");
                                          part->barrier();
                                        },
                                        {600, false});
    for (const auto& error : errors) {
      INFO(backend << ": " << error);
      CHECK(contains(error, "rank 0: the disk is full"));
    }
  }
}

TEST_CASE("a rank that ends inside a split's call ends the others by the deadline") {
  for (const auto& backend : kBackends) {
    const auto begin = std::chrono::steady_clock::now();
    const auto errors = errors_of_ranks(backend, 4,
                                        [&](Communicator& c) {
                                          const auto part = c.split(c.rank() / 2);
                                          part->barrier();
                                          if (c.rank() == 1) return;  // without a word
                                          std::vector<float> data(20000);
                                          part->all_reduce(std::span<float>(data), SumOrder::ranks);
                                          c.barrier();
                                        },
                                        {4.0, false});
    CHECK(std::chrono::steady_clock::now() - begin < std::chrono::seconds(20));
    CHECK(errors[1].empty());
    for (const int r : {0, 2, 3}) {
      INFO(backend << " " << r << ": " << errors[r]);
      CHECK_FALSE(errors[r].empty());
    }
    CHECK(contains(errors[0], "all_reduce"));
  }
}

TEST_CASE("a rank that does not come to a split ends the others at the deadline") {
  for (const auto& backend : kBackends) {
    const auto errors =
        errors_of_ranks(backend, 3,
                        [&](Communicator& c) {
                          c.barrier();
                          if (c.rank() == 2)
                            return std::this_thread::sleep_for(std::chrono::milliseconds(1500));
                          c.split(0);
                        },
                        {1.0, false});
    for (int r = 0; r < 2; ++r) {
      INFO(backend << ": " << errors[r]);
      CHECK(contains(errors[r], "split #2"));
      CHECK(contains(errors[r], "rank 2 did not come"));
    }
  }
}

}  // namespace topknot

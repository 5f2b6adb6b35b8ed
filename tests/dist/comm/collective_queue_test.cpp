#include "dist/comm/collective_queue.h"

#include <atomic>

#include "tests/dist/ranks.h"
#include "tests/support/catch.h"

namespace topknot {
namespace {

// Counts its barriers; lets a test choose whether collectives overlap.
class LoneRank : public Communicator {
 public:
  explicit LoneRank(bool overlaps) : overlaps_(overlaps) {}
  int rank() const override { return 0; }
  int size() const override { return 1; }
  std::string backend() const override { return "lone"; }
  bool overlaps() const override { return overlaps_; }
  void all_gather(std::span<const std::byte>, std::vector<std::vector<std::byte>>&) override {}
  void all_reduce(std::span<float>, SumOrder) override {}
  void all_reduce(std::span<BFloat16>, SumOrder) override {}
  void all_reduce(std::span<double>) override {}
  void broadcast(std::span<std::byte>, int) override {}
  void all_to_all(std::span<const std::vector<std::byte>>, std::vector<std::vector<std::byte>>&) override {}
  void send_receive(int, std::span<const std::byte>, int, std::vector<std::byte>&) override {}
  void barrier() override { ++barriers; }
  std::unique_ptr<Communicator> split(int) override { return std::make_unique<LoneRank>(overlaps_); }
  void abort(const std::string&) noexcept override {}
  int barriers = 0;

 private:
  bool overlaps_;
};

}  // namespace

TEST_CASE("jobs run in the order of submission, whatever the order of waiting") {
  for (const bool overlaps : {false, true}) {
    LoneRank rank(overlaps);
    std::vector<int> order;
    CollectiveQueue queue(rank);
    std::vector<CollectiveQueue::Ticket> tickets;
    for (int i = 0; i < 20; ++i)
      tickets.push_back(queue.submit([&order, i](Communicator& c) {
        c.barrier();
        order.push_back(i);
      }));
    for (auto ticket = tickets.rbegin(); ticket != tickets.rend(); ++ticket) queue.wait(*ticket);
    CHECK(rank.barriers == 20);
    std::vector<int> expected(20);
    for (int i = 0; i < 20; ++i) expected[i] = i;
    CHECK(order == expected);
  }
}

TEST_CASE("with overlap jobs run on one other thread, without it on the caller's inside submit") {
  for (const bool overlaps : {false, true}) {
    LoneRank rank(overlaps);
    CollectiveQueue queue(rank);
    std::atomic<bool> ran{false};
    std::thread::id first, second;
    const auto a = queue.submit([&](Communicator&) {
      first = std::this_thread::get_id();
      ran = true;
    });
    if (!overlaps) CHECK(ran);
    queue.wait(a);
    queue.run([&](Communicator&) { second = std::this_thread::get_id(); });
    CHECK(first == second);
    CHECK((first == std::this_thread::get_id()) == !overlaps);
  }
}

TEST_CASE("after a failed job the later ones do not run and throw the same error") {
  for (const bool overlaps : {false, true}) {
    LoneRank rank(overlaps);
    CollectiveQueue queue(rank);
    const auto good = queue.submit([](Communicator& c) { c.barrier(); });
    const auto bad = queue.submit([](Communicator&) { throw CollectiveError("rank 3 died"); });
    const auto later = queue.submit([](Communicator& c) { c.barrier(); });
    CHECK_THROWS_WITH(queue.wait(later), "rank 3 died");
    CHECK_THROWS_WITH(queue.wait(bad), "rank 3 died");
    CHECK_THROWS_WITH(queue.run([](Communicator& c) { c.barrier(); }), "rank 3 died");
    CHECK_NOTHROW(queue.wait(good));
    CHECK(rank.barriers == 1);
  }
}

TEST_CASE("a collective that fails aborts the communicator at once, another error does not") {
  struct Noting : LoneRank {
    using LoneRank::LoneRank;
    void abort(const std::string& reason) noexcept override { aborted = reason; }
    std::string aborted;
  };
  for (const bool overlaps : {false, true}) {
    Noting collective(overlaps), other(overlaps);
    CollectiveQueue first(collective), second(other);
    CHECK_THROWS_AS(first.run([](Communicator&) { throw CollectiveError("the link broke"); }),
                    CollectiveError);
    CHECK(collective.aborted == "the link broke");
    CHECK_THROWS_AS(second.run([](Communicator&) { throw Error("no memory"); }), Error);
    CHECK(other.aborted.empty());
  }
}

TEST_CASE("times of jobs follow each other, and without overlap all of it was waited for") {
  for (const bool overlaps : {false, true}) {
    LoneRank rank(overlaps);
    CollectiveQueue queue(rank);
    const auto a =
        queue.submit([](Communicator&) { std::this_thread::sleep_for(std::chrono::milliseconds(2)); });
    const auto b = queue.submit([](Communicator&) {});
    const auto second = queue.wait(b);
    const auto first = queue.wait(a);
    CHECK(first.end > first.begin);
    CHECK(second.begin >= first.end);
    if (!overlaps) CHECK(first.waited == first.seconds());
    if (overlaps) CHECK(second.waited > 0);
  }
}

TEST_CASE("waiting for what was not submitted, or twice, is an error") {
  LoneRank rank(true);
  CollectiveQueue queue(rank);
  CHECK_THROWS_AS(queue.wait(1), Error);
  const auto ticket = queue.submit([](Communicator&) {});
  queue.wait(ticket);
  CHECK_THROWS_AS(queue.wait(ticket), Error);
}

TEST_CASE("queued jobs run before the queue ends, unless an exception is on its way") {
  LoneRank rank(true);
  {
    CollectiveQueue queue(rank);
    for (int i = 0; i < 5; ++i) queue.submit([](Communicator& c) { c.barrier(); });
  }
  CHECK(rank.barriers == 5);
  std::atomic<bool> started{false}, leaving{false};
  try {
    CollectiveQueue queue(rank);
    // The running job ends only when the exception is on its way, seen by a member of the unwinding scope.
    queue.submit([&](Communicator&) {
      started = true;
      while (!leaving) std::this_thread::yield();
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
    });
    queue.submit([](Communicator& c) { c.barrier(); });
    struct Leave {
      std::atomic<bool>& leaving;
      ~Leave() { leaving = true; }
    } leave{leaving};
    while (!started) std::this_thread::yield();
    throw std::runtime_error("out of memory");
  } catch (const std::runtime_error&) {
  }
  CHECK(rank.barriers == 5);
}

TEST_CASE("collectives beside the compute thread give the same sums as those inside it") {
  for (const char* backend : {"threads", "gloo"}) {
    std::vector<int> wrong(3);
    run_ranks(backend, 3, [&](Communicator& c) {
      CollectiveQueue queue(c);
      std::vector<std::vector<float>> groups(12);
      std::vector<CollectiveQueue::Ticket> tickets;
      for (std::size_t g = 0; g < groups.size(); ++g) {
        groups[g].assign(3000 * g + 1, static_cast<float>(c.rank() + 1) * static_cast<float>(g));
        tickets.push_back(queue.submit([&groups, g](Communicator& communicator) {
          communicator.all_reduce(std::span<float>(groups[g]), SumOrder::ranks);
        }));
      }
      for (std::size_t g = 0; g < groups.size(); ++g) {
        queue.wait(tickets[g]);
        for (const float x : groups[g])
          if (x != 6.0f * static_cast<float>(g)) ++wrong[c.rank()];
      }
    });
    CHECK(wrong == std::vector<int>(3, 0));
  }
}

TEST_CASE("a rank that dies while others' collectives run beside them ends their waits") {
  const auto errors = errors_of_ranks("gloo", 3,
                                      [](Communicator& c) {
                                        c.barrier();
                                        if (c.rank() == 2) throw std::runtime_error("disk full");
                                        CollectiveQueue queue(c);
                                        std::vector<float> data(50000);
                                        const auto ticket = queue.submit([&](Communicator& communicator) {
                                          communicator.all_reduce(std::span<float>(data), SumOrder::ranks);
                                        });
                                        queue.wait(ticket);
                                      },
                                      {600, false});
  for (const int r : {0, 1}) {
    INFO(errors[r]);
    CHECK(errors[r].find("rank 2: disk full") != std::string::npos);
  }
}

}  // namespace topknot

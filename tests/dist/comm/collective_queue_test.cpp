#include "dist/comm/collective_queue.h"

#include "nn/core/threads.h"
#include "tests/dist/ranks.h"

namespace topknot {
namespace {

using std::chrono::milliseconds;

// Counts its barriers; lets a test choose whether collectives overlap.
class LoneRank : public Communicator {
 public:
  explicit LoneRank(bool overlaps) : Communicator({0, 1, "lone", overlaps}) {}
  void all_gather(std::span<const std::byte>, std::vector<std::vector<std::byte>>&) override {}
  void all_reduce(std::span<float>, SumOrder) override {}
  void all_reduce(std::span<BFloat16>, SumOrder) override {}
  void broadcast(std::span<std::byte>, int) override {}
  void all_to_all(std::span<const std::vector<std::byte>>, std::vector<std::vector<std::byte>>&) override {}
  void send_receive(int, std::span<const std::byte>, int, std::vector<std::byte>&) override {}
  void barrier() override { ++barriers; }
  std::unique_ptr<Communicator> split(int) override { return std::make_unique<LoneRank>(overlaps()); }
  void abort(const std::string& reason) noexcept override { aborted = reason; }
  int barriers = 0;
  std::string aborted;
};

// A test with a queue whose collectives overlap, and with one whose do not.
void with_queues(const std::function<void(CollectiveQueue&, LoneRank&)>& test) {
  for (const bool overlaps : {false, true}) {
    INFO((overlaps ? "with overlap" : "without overlap"));
    LoneRank rank(overlaps);
    CollectiveQueue queue(rank);
    test(queue, rank);
  }
}

using Block = std::vector<std::byte>;
using Blocks = std::vector<Block>;

// What rank `from` sends to rank `to` in a round.
Block block_of(int from, int to, int round) {
  // 4064 bytes fill one message of gloo's to the brim.
  const std::size_t lengths[] = {0, 1, 4064, 4065, 100 + 13u * static_cast<unsigned>(to), 70001, 1 << 20};
  Block block(lengths[(from * 3 + to + round) % 7]);
  for (std::size_t i = 0; i < block.size(); ++i)
    block[i] = static_cast<std::byte>(from * 31 + to * 17 + round + i * 7 + i / 251);
  return block;
}

}  // namespace

TEST_CASE("jobs run in the order of submission, whatever the order of waiting") {
  with_queues([](CollectiveQueue& queue, LoneRank& rank) {
    std::vector<int> order, expected(20);
    std::iota(expected.begin(), expected.end(), 0);
    std::vector<CollectiveQueue::Ticket> tickets;
    for (const int i : expected)
      tickets.push_back(queue.submit([&order, i](Communicator& c) {
        c.barrier();
        order.push_back(i);
      }));
    for (auto ticket = tickets.rbegin(); ticket != tickets.rend(); ++ticket) queue.wait(*ticket);
    CHECK(rank.barriers == 20);
    CHECK(order == expected);
  });
}

TEST_CASE("with overlap jobs run on one other thread, which has no team, without it inside submit") {
  const int before = team_size(), settled = set_team_size(2);
  with_queues([&](CollectiveQueue& queue, LoneRank& rank) {
    std::atomic<bool> ran{false};
    std::thread::id first, second;
    const auto a = queue.submit([&](Communicator&) {
      first = std::this_thread::get_id();
      ran = true;
    });
    if (!rank.overlaps()) CHECK(ran);
    queue.wait(a);
    int team = 0;
    queue.run([&](Communicator&) { second = std::this_thread::get_id(), team = team_size(); });
    CHECK(first == second);
    CHECK((first == std::this_thread::get_id()) == !rank.overlaps());
    CHECK(team == (rank.overlaps() ? 1 : settled));
  });
  set_team_size(before);
}

TEST_CASE("after a failed job the later ones do not run and throw the same error") {
  with_queues([](CollectiveQueue& queue, LoneRank& rank) {
    const auto barrier = [](Communicator& c) { c.barrier(); };
    const auto good = queue.submit(barrier);
    const auto bad = queue.submit([](Communicator&) { throw CollectiveError("rank 3 died"); });
    const auto later = queue.submit(barrier);
    CHECK_THROWS_WITH(queue.wait(later), "rank 3 died");
    CHECK_THROWS_WITH(queue.wait(bad), "rank 3 died");
    CHECK_THROWS_WITH(queue.run(barrier), "rank 3 died");
    CHECK_NOTHROW(queue.wait(good));
    CHECK(rank.barriers == 1);
  });
}

TEST_CASE("a collective that fails aborts the communicator at once, another error does not") {
  with_queues([](CollectiveQueue& queue, LoneRank& rank) {
    CHECK_THROWS_AS(queue.run([](Communicator&) { throw CollectiveError("the link broke"); }),
                    CollectiveError);
    CHECK(rank.aborted == "the link broke");
  });
  with_queues([](CollectiveQueue& queue, LoneRank& rank) {
    CHECK_THROWS_AS(queue.run([](Communicator&) { throw Error("no memory"); }), Error);
    CHECK(rank.aborted.empty());
  });
}

TEST_CASE("times of jobs follow each other, and without overlap all of it was waited for") {
  with_queues([](CollectiveQueue& queue, LoneRank& rank) {
    const auto a = queue.submit([](Communicator&) { std::this_thread::sleep_for(milliseconds(2)); });
    const auto b = queue.submit([](Communicator&) {});
    const auto second = queue.wait(b), first = queue.wait(a);
    CHECK(first.end > first.begin);
    CHECK(second.begin >= first.end);
    CHECK((rank.overlaps() ? second.waited > 0 : first.waited == first.seconds()));
  });
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
      std::this_thread::sleep_for(milliseconds(50));
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

TEST_CASE("all_to_all brings each rank what the others made for it, whatever its length") {
  for (const auto& backend : kBackends)
    for (int ranks = 1; ranks <= 8; ++ranks)
      check_ranks(backend, ranks, {60, ranks % 3 == 0}, [&](Communicator& c, const Expect& expect) {
        for (int round = 0; round < 7; ++round) {
          Blocks mine, theirs, expected;
          for (int r = 0; r < ranks; ++r) mine.push_back(block_of(c.rank(), r, round));
          for (int r = 0; r < ranks; ++r) expected.push_back(block_of(r, c.rank(), round));
          c.all_to_all(mine, theirs);
          expect(theirs == expected, "round " + std::to_string(round));
        }
      });
}

TEST_CASE("send_receive carries a ring, a tree and single messages; a rank without a part counts the call") {
  for (const auto& backend : kBackends)
    for (int ranks = 2; ranks <= 8; ++ranks)
      check_ranks(backend, ranks, {60, ranks % 3 == 0}, [&](Communicator& c, const Expect& expect) {
        const int me = c.rank();
        Block theirs;
        for (int round = 0; round < 7; ++round) {
          const int right = (me + 1) % ranks, left = (me + ranks - 1) % ranks;
          c.send_receive(right, block_of(me, right, round), left, theirs);
          expect(theirs == block_of(left, me, round), "the ring");
          // Down a binomial tree to rank 0.
          for (int step = 1; step < ranks; step *= 2) {
            const bool sends = me % (2 * step) == step;
            const bool receives = me % (2 * step) == 0 && me + step < ranks;
            const int to = sends ? me - step : -1, from = receives ? me + step : -1;
            c.send_receive(to, sends ? block_of(me, to, round) : Block{}, from, theirs);
            expect(theirs == (receives ? block_of(from, me, round) : Block{}), "the tree");
          }
          // One message from the last rank to the first, with no answer.
          c.send_receive(me == ranks - 1 ? 0 : -1, block_of(me, 0, round), me == 0 ? ranks - 1 : -1, theirs);
          expect(theirs == (me == 0 ? block_of(ranks - 1, 0, round) : Block{}), "one message");
        }
      });
}

TEST_CASE("calls of every kind follow each other without mixing, with call checks off too") {
  for (const bool check_calls : {false, true})
    check_ranks("gloo", 5, {60, check_calls}, [](Communicator& c, const Expect& expect) {
      const int me = c.rank();
      Blocks all, theirs;
      Block one;
      for (int round = 0; round < 20; ++round) {
        const int a = round % 5, b = (round + 2) % 5;  // these two swap, the others go on at once
        const int partner = me == a ? b : me == b ? a : -1;
        c.send_receive(partner, block_of(me, partner, round), partner, one);
        std::vector<float> sum(9000 + round, 1.0f), small(10, 2.0f);
        c.all_reduce(std::span<float>(sum), SumOrder::ranks);
        c.all_gather(block_of(me, 0, round), all);
        c.all_reduce(std::span<float>(small), SumOrder::library);
        c.broadcast(std::as_writable_bytes(std::span(small)), round % 5);
        c.all_reduce(std::span<float>(sum), SumOrder::library);
        c.barrier();
        Blocks mine, gathered, sent;
        for (int r = 0; r < 5; ++r) {
          mine.push_back(block_of(me, r, round));
          gathered.push_back(block_of(r, 0, round));
          sent.push_back(block_of(r, me, round));
        }
        c.all_to_all(mine, theirs);
        if (partner >= 0) expect(one == block_of(partner, me, round), "send_receive");
        expect(sum == std::vector(sum.size(), 25.0f), "all_reduce");
        expect(small == std::vector(10, 10.0f), "all_reduce of a few, broadcast");
        expect(all == gathered, "all_gather");
        expect(theirs == sent, "all_to_all");
      }
    });
}

TEST_CASE("a send_receive of which the other rank does not know is an error on all ranks") {
  for (const auto& backend : kBackends)
    for (const bool sends : {true, false}) {
      INFO(backend << (sends ? ": a receiver expects nothing" : ": a sender does not send"));
      const auto errors = errors_of_ranks(backend, 3, [&](Communicator& c) {
        Block theirs;
        if (sends)
          c.send_receive(c.rank() == 2 ? 0 : -1, Block(10), -1, theirs);
        else
          c.send_receive(-1, {}, c.rank() == 1 ? 2 : -1, theirs);
      });
      for (const auto& error : errors)
        CHECK(says(error, {sends ? "rank 2 sends to rank 0, which expects no rank"
                                 : "rank 1 expects rank 2, which sends to no rank"}));
    }
}

TEST_CASE("without call checks an unexpected message shows in the next call, or ends at the deadline") {
  for (const std::size_t length : {10u, 100000u}) {
    const auto errors = errors_of_ranks("gloo", 3, {2.0, false}, [&](Communicator& c) {
      Block theirs;
      c.send_receive(c.rank() == 2 ? 0 : -1, Block(length), -1, theirs);
      c.barrier();
    });
    CHECK(says(errors[0], {"do not make the same calls: rank 0 is in barrier #2",
                           "rank 2 in send_receive #1 of " + std::to_string(length) + " bytes"}));
  }
  const auto errors = errors_of_ranks("gloo", 2, {1.0, false}, [&](Communicator& c) {
    Block theirs;
    if (c.rank() == 0) return c.send_receive(-1, {}, 1, theirs);
    std::this_thread::sleep_for(milliseconds(1500));
  });
  CHECK(says(errors[0], {"send_receive #1", "rank 1 did not come"}));
}

TEST_CASE("a rank that left out a send_receive in which it had no part is found in the next call") {
  const auto errors = errors_of_ranks("gloo", 3, {20, false}, [&](Communicator& c) {
    const int partner = 1 - c.rank();
    Block theirs;
    if (c.rank() < 2) c.send_receive(partner, Block(10), partner, theirs);
    c.barrier();
  });
  CHECK(says(errors[0], {"do not make the same calls: rank 0 is in barrier #2", "rank 2 in barrier #1"}));
}

}  // namespace topknot

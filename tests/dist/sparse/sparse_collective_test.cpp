// gTop-k and what both sparse collectives promise, on entries made for it.

#include "dist/sparse/sparse_collective.h"
#include "tests/dist/sparse/sparse_collective_fixture.h"

using namespace topknot;
using namespace topknot::testing;

namespace {

using Contributions = std::vector<SparseVector>;

struct Item {
  float value = 0;
  std::set<int> from;
};
using Node = std::map<std::uint32_t, Item>;

void cut_to(Node& node, std::size_t k) {
  std::vector<std::pair<std::uint32_t, Item>> items(node.begin(), node.end());
  std::stable_sort(items.begin(), items.end(), [](const auto& a, const auto& b) {
    return std::fabs(a.second.value) > std::fabs(b.second.value);
  });
  if (items.size() > k) items.resize(k);
  node = Node(items.begin(), items.end());
}

// The tree with the set of contributors written beside each value.
Node naive_tree(const Contributions& entries, std::size_t k) {
  const int ranks = static_cast<int>(entries.size());
  std::vector<Node> nodes(entries.size());
  for (int rank = 0; rank < ranks; ++rank) {
    for (std::size_t i = 0; i < entries[rank].indices.size(); ++i)
      nodes[rank][entries[rank].indices[i]] = {entries[rank].values[i], {rank}};
    cut_to(nodes[rank], k);
  }
  for (int reach = 1; reach < ranks; reach *= 2)
    for (int parent = 0; parent + reach < ranks; parent += 2 * reach) {
      for (const auto& [position, item] : nodes[parent + reach]) {
        nodes[parent][position].value += item.value;
        nodes[parent][position].from.insert(item.from.begin(), item.from.end());
      }
      cut_to(nodes[parent], k);
    }
  return nodes[0];
}

void check_same_on_all_ranks(const std::vector<SparseSum>& sums) {
  for (const SparseSum& sum : sums) {
    CHECK(sum.sum.finite);
    CHECK(sum.sum.indices == sums[0].sum.indices);
    CHECK(sum.sum.values == sums[0].sum.values);
    CHECK(std::is_sorted(sum.rejected.begin(), sum.rejected.end()));
  }
}

// What is in the sum and what went back is what came in, at every position: exact, for whole numbers.
void check_conserved(const Contributions& entries, const std::vector<SparseSum>& sums) {
  std::map<std::uint32_t, double> open;
  for (std::size_t rank = 0; rank < entries.size(); ++rank)
    for (std::size_t i = 0; i < entries[rank].indices.size(); ++i) {
      const std::uint32_t position = entries[rank].indices[i];
      const auto& rejected = sums[rank].rejected;
      if (!std::binary_search(rejected.begin(), rejected.end(), position))
        open[position] += static_cast<double>(entries[rank].values[i]);
    }
  const auto& sum = sums[0].sum;
  for (std::size_t i = 0; i < sum.indices.size(); ++i) {
    CHECK(open[sum.indices[i]] == static_cast<double>(sum.values[i]));
    open.erase(sum.indices[i]);
  }
  CHECK(open.empty());  // whatever was not rejected is in the sum
  for (std::size_t rank = 0; rank < entries.size(); ++rank)
    for (const std::uint32_t position : sums[rank].rejected)
      CHECK(std::binary_search(entries[rank].indices.begin(), entries[rank].indices.end(), position));
}

void check_tree(const Contributions& entries, const std::vector<SparseSum>& sums, std::size_t k) {
  const Node tree = naive_tree(entries, k);
  std::vector<std::uint32_t> positions;
  std::vector<float> values;
  for (const auto& [position, item] : tree) positions.push_back(position), values.push_back(item.value);
  CHECK(sums[0].sum.indices == positions);
  CHECK(sums[0].sum.values == values);
  for (std::size_t rank = 0; rank < entries.size(); ++rank) {
    std::vector<std::uint32_t> rejected;
    for (const std::uint32_t position : entries[rank].indices) {
      const auto it = tree.find(position);
      if (it == tree.end() || it->second.from.count(static_cast<int>(rank)) == 0)
        rejected.push_back(position);
    }
    CHECK(sums[rank].rejected == rejected);
  }
}

// Random, uneven, with and without ranks that have nothing.
std::vector<Contributions> workloads(int ranks, std::size_t numel) {
  std::vector<Contributions> result;
  for (std::uint32_t seed = 0; seed < 6; ++seed) {
    Contributions entries;
    for (int rank = 0; rank < ranks; ++rank) {
      double share = seed < 3 ? 0.3 : 0.1 * (rank % 5);      // uneven, every fifth rank empty
      const int bound = seed % 3 == 0 ? 3 : 1000;            // small: many ties
      if (seed == 5) share = rank + 1 == ranks ? 1.0 : 0.0;  // one rank has everything
      entries.push_back(whole_numbers(100 * seed + static_cast<std::uint32_t>(rank), numel, share, bound));
    }
    result.push_back(entries);
  }
  result.emplace_back(ranks);  // nothing at all
  Contributions shared(ranks), equal(ranks);
  for (int rank = 0; rank < ranks; ++rank) {
    shared[rank] = {true, {7}, {static_cast<float>(rank - 1)}};  // one position, by all ranks
    equal[rank] = {true, {2, 5, 11}, {2, rank % 2 == 0 ? 2.0f : -2.0f, -2}};
  }
  result.push_back(shared);
  result.push_back(equal);
  return result;
}

struct Saved {
  std::int64_t steps;
  double threshold;
  std::uint64_t k;
  std::vector<std::uint32_t> cuts;
};

Saved saved(const Fleet& fleet, std::size_t rank) {
  const auto bytes = fleet.state(rank);
  StateReader reader(bytes);
  Saved result;
  result.steps = reader.get<std::int64_t>();
  result.threshold = reader.get<double>();
  result.k = reader.get<std::uint64_t>();
  result.cuts = reader.get_list<std::uint32_t>();
  reader.finish();
  return result;
}

// The `count` largest of a normal vector whose spread falls from the first position to the last.
SparseVector largest_of_normal(std::uint32_t seed, std::size_t numel, std::size_t count) {
  const CounterRng rng(seed, RngUse::test, 1);
  std::vector<float> values(numel);
  std::vector<std::uint32_t> order(numel);
  for (std::size_t i = 0; i < numel; ++i) {
    values[i] =
        static_cast<float>(rng.normal(i)) * (2.0f - static_cast<float>(i) / static_cast<float>(numel));
    order[i] = static_cast<std::uint32_t>(i);
  }
  std::sort(order.begin(), order.end(),
            [&](auto a, auto b) { return std::fabs(values[a]) > std::fabs(values[b]); });
  SparseVector entries;
  entries.indices.assign(order.begin(), order.begin() + count);
  std::sort(entries.indices.begin(), entries.indices.end());
  for (const auto index : entries.indices) entries.values.push_back(values[index]);
  return entries;
}

std::vector<SparseVector> step_entries(std::uint32_t step, int ranks, std::size_t numel, std::size_t count) {
  std::vector<SparseVector> entries;
  for (int rank = 0; rank < ranks; ++rank)
    entries.push_back(largest_of_normal(step * 32 + static_cast<std::uint32_t>(rank), numel, count));
  return entries;
}

}  // namespace

TEST_CASE("gtopk keeps what a tree with each value's contributors keeps, and gives back the rest") {
  constexpr std::size_t kNumel = 40;
  for (int ranks = 1; ranks <= 16; ++ranks) {
    Fleet fleet("gtopk", ranks, kNumel, ranks % 2 == 0 ? "raw" : "auto");
    for (const Contributions& entries : workloads(ranks, kNumel))
      for (const std::size_t k : {std::size_t{0}, std::size_t{1}, std::size_t{5}, kNumel}) {
        INFO(ranks << " ranks, k " << k);
        const auto sums = fleet.sum(entries, k);
        check_same_on_all_ranks(sums);
        CHECK(sums[0].sum.indices.size() <= k);
        check_conserved(entries, sums);
        check_tree(entries, sums, k);
      }
  }
}

TEST_CASE("oktopk's sum holds every rank's value at each position it keeps, and gives back the rest") {
  constexpr std::size_t kNumel = 40;
  for (int ranks = 1; ranks <= 16; ++ranks)
    for (const Contributions& entries : workloads(ranks, kNumel))
      for (const std::size_t k : {std::size_t{0}, std::size_t{1}, std::size_t{5}, kNumel}) {
        INFO(ranks << " ranks, k " << k);
        Fleet fleet("oktopk", ranks, kNumel, ranks % 2 == 0 ? "raw" : "auto");
        const auto sums = fleet.sum(entries, k);
        check_same_on_all_ranks(sums);
        check_conserved(entries, sums);
        // The first step's threshold is exact: of the whole sum, the k largest and their equals.
        std::map<std::uint32_t, double> whole;
        for (const auto& mine : entries)
          for (std::size_t i = 0; i < mine.indices.size(); ++i)
            whole[mine.indices[i]] += static_cast<double>(mine.values[i]);
        std::vector<double> magnitudes;
        for (const auto& [position, value] : whole) magnitudes.push_back(std::fabs(value));
        std::sort(magnitudes.rbegin(), magnitudes.rend());
        const double least = k > 0 && magnitudes.size() >= k ? magnitudes[k - 1] : 0.0;
        SparseVector expected;
        for (const auto& [position, value] : whole)
          if (k > 0 && std::fabs(value) >= least) {
            expected.indices.push_back(position);
            expected.values.push_back(static_cast<float>(value));
          }
        CHECK(sums[0].sum.indices == expected.indices);
        CHECK(sums[0].sum.values == expected.values);
      }
}

TEST_CASE("an entry dropped midway returns to its rank; exact cancellation leaves a winner of value 0") {
  using Indices = std::vector<std::uint32_t>;
  const auto check = [](const Contributions& entries, std::size_t numel, float value,
                        const std::vector<Indices>& rejected) {
    Fleet fleet("gtopk", 4, numel);
    const auto sums = fleet.sum(entries, 1);
    CHECK(sums[3].sum.indices == Indices{0});
    CHECK(sums[3].sum.values == std::vector<float>{value});
    for (std::size_t rank = 0; rank < 4; ++rank) CHECK(sums[rank].rejected == rejected[rank]);
  };
  // At rank 0, rank 1's 3 at position 0 loses to the 5 at position 1; ranks 2 and 3 bring 9 at position 0.
  check({{true, {1}, {5}}, {true, {0}, {3}}, {true, {0}, {4}}, {true, {0}, {5}}}, 2, 9, {{1}, {0}, {}, {}});
  // Golden, step 0 of the trace in the exchange's test: all four cancel or lose.
  check({{true, {0}, {-5}}, {true, {1}, {-4}}, {true, {0}, {5}}, {true, {1}, {-5}}}, 4, 0,
        {{}, {1}, {}, {1}});
}

TEST_CASE("one rank's NaN, or a sum that overflows, is known to all ranks and leaves no entries") {
  const float most = std::numeric_limits<float>::max(), inf = std::numeric_limits<float>::infinity();
  for (const std::string name : {"gtopk", "oktopk"})
    for (const int ranks : {1, 2, 3, 5, 8})
      for (int fault = 0; fault < 3; ++fault)
        for (int bad = 0; bad < ranks; ++bad) {
          if (fault == 2 && ranks == 1) continue;
          Contributions entries;
          for (int rank = 0; rank < ranks; ++rank) entries.push_back(whole_numbers(rank, 30, 0.4, 9));
          if (fault == 0) entries[bad] = {false, {}, {}};
          if (fault == 1) entries[bad] = {true, {3}, {inf}};  // a weight took it over the top
          if (fault == 2) entries[bad] = entries[(bad + 1) % ranks] = {true, {4}, {most}};
          Fleet fleet(name, ranks, 30);
          const auto before = fleet.state(0);
          for (const SparseSum& sum : fleet.sum(entries, 4)) {
            INFO(name << " fault " << fault << " at " << bad << " of " << ranks);
            CHECK(!sum.sum.finite);
            CHECK((sum.sum.indices.empty() && sum.sum.values.empty() && sum.rejected.empty()));
          }
          fleet.discard();
          CHECK(fleet.state(0) == before);
        }
}

TEST_CASE("bytes sent by all ranks are bytes received where every message has one receiver") {
  // Up: 16 + 8 n bytes; down: 4 more for the empty list. Nothing is dropped.
  Contributions entries;
  for (std::uint32_t rank = 0; rank < 3; ++rank) entries.push_back({true, {rank}, {1}});
  Fleet fleet("gtopk", 3, 8);
  const auto sums = fleet.sum(entries, 8);
  const std::uint64_t one = 16 + 8, three = 4 + 16 + 3 * 8;
  CHECK((sums[0].bytes_sent == 2 * three && sums[0].bytes_received == 2 * one));
  CHECK((sums[1].bytes_sent == one && sums[1].bytes_received == three));
  CHECK((sums[2].bytes_sent == one && sums[2].bytes_received == three));
}

TEST_CASE("oktopk's volume does not grow with the ranks") {
  constexpr std::size_t kNumel = 20000, kCount = 400;
  for (const int ranks : {4, 8, 16}) {
    Fleet fleet("oktopk", ranks, kNumel);
    std::uint64_t received = 0;
    for (std::uint32_t step = 0; step < 3; ++step) {  // the third has neither cuts nor exact threshold
      Contributions entries;
      for (int rank = 0; rank < ranks; ++rank)
        entries.push_back(whole_numbers(step * 64 + static_cast<std::uint32_t>(rank), kNumel,
                                        static_cast<double>(kCount) / kNumel, 100000));
      const auto sums = fleet.sum_and_commit(entries, kCount);
      received = 0;
      for (const SparseSum& sum : sums) received = std::max(received, sum.bytes_received);
    }
    // The paper's bound, 6k words of 4 bytes, and two headers from each rank.
    CHECK(received < 6 * kCount * 4 + 2 * 16 * static_cast<std::uint64_t>(ranks));
  }
}

TEST_CASE("damaged messages of a sparse collective are errors") {
  const SparseVector mine{true, {1, 3}, {5, 6}};
  const auto* const code = &index_codecs().find("raw");
  const auto* const values = &value_codecs().find("fp32");
  // What rank 1 of two makes of rank 0's message on the way down.
  const auto refused = [&](const std::vector<std::uint32_t>& list, std::size_t cut) {
    auto block = write_block(mine, 8, *code, *values);
    std::vector<std::byte> message(4 * list.size());
    std::memcpy(message.data(), list.data(), message.size());
    message.insert(message.end(), block.begin(), block.end());
    message.resize(message.size() - cut);
    return errors_of_ranks("threads", 2, [&](Communicator& communicator) {
      std::vector<std::byte> theirs;
      SparseSum result;
      if (communicator.rank() == 0) {
        communicator.send_receive(-1, {}, 1, theirs);
        communicator.send_receive(1, message, -1, theirs);
      } else {
        collectives().find("gtopk").make({8, code})->sum(communicator, mine, 2, result);
      }
    })[1];
  };
  const std::string dropped = "dropped entries";
  for (const auto& list : {std::vector<std::uint32_t>{0}, {2, 0, 1}}) CHECK(refused(list, 0).empty());
  for (const auto& list : {std::vector<std::uint32_t>{1, 2}, {2, 1, 0}, {1000000}})
    CHECK(says(refused(list, 0), {dropped}));
  CHECK(says(refused({0}, 1), {"damaged"}));
  CHECK(says(refused({0}, 33), {dropped}));

  // The regions that another rank proposes.
  for (const std::vector<std::uint32_t>& cuts : {std::vector<std::uint32_t>{8}, {1, 2}}) {
    const auto errors = errors_of_ranks("threads", 2, [&](Communicator& communicator) {
      std::vector<std::vector<std::byte>> all;
      SparseSum result;
      if (communicator.rank() == 0)
        communicator.all_gather(std::as_bytes(std::span(cuts)), all);
      else
        collectives().find("oktopk").make({8, code})->sum(communicator, mine, 2, result);
    });
    CHECK(errors[1].find("cuts") != std::string::npos);
  }
}

TEST_CASE("oktopk's regions hold about as many selected positions each") {
  constexpr int kRanks = 5;
  constexpr std::size_t kNumel = 4000, kCount = 200;
  Fleet fleet("oktopk", kRanks, kNumel);
  const auto entries = step_entries(0, kRanks, kNumel, kCount);
  fleet.sum_and_commit(entries, kCount);
  const std::vector<std::uint32_t> cuts = saved(fleet, 0).cuts;
  REQUIRE(cuts.size() == kRanks - 1);
  for (int rank = 0; rank < kRanks; ++rank) CHECK(saved(fleet, rank).cuts == cuts);
  // The cuts are the averages of the ranks' own.
  for (std::size_t cut = 0; cut < cuts.size(); ++cut) {
    std::uint64_t sum = 0;
    for (const auto& mine : entries) sum += mine.indices[(cut + 1) * kCount / kRanks];
    CHECK(cuts[cut] == sum / kRanks);
  }
  for (std::size_t region = 0; region < kRanks; ++region) {
    const std::uint32_t begin = region == 0 ? 0 : cuts[region - 1];
    const std::uint32_t end = region == cuts.size() ? kNumel : cuts[region];
    std::size_t inside = 0;
    for (const auto& mine : entries)
      for (const auto index : mine.indices) inside += index >= begin && index < end;
    CHECK(std::fabs(static_cast<double>(inside) - kCount) < 0.15 * kCount);
  }
}

TEST_CASE("oktopk's regions move every 64 steps only, and ranks without entries have no weight") {
  Fleet fleet("oktopk", 2, 100);
  const SparseVector low{true, {0, 1, 2, 3}, {1, 1, 1, 1}}, high{true, {60, 70, 80, 90}, {1, 1, 1, 1}}, none;
  fleet.sum_and_commit({low, none}, 4);
  CHECK(saved(fleet, 1).cuts == std::vector<std::uint32_t>{2});
  for (int step = 1; step < 64; ++step) {
    fleet.sum_and_commit({high, high}, 4);
    CHECK(saved(fleet, 1).cuts == std::vector<std::uint32_t>{2});
  }
  fleet.sum_and_commit({high, high}, 4);
  CHECK(saved(fleet, 1).cuts == std::vector<std::uint32_t>{80});
  CHECK(saved(fleet, 0).steps == 65);

  Fleet empty("oktopk", 4, 100);
  empty.sum_and_commit(std::vector<SparseVector>(4), 4);
  CHECK(saved(empty, 3).cuts == std::vector<std::uint32_t>{25, 50, 75});
}

TEST_CASE("oktopk's threshold is exact every 32 steps, and follows the count by 1.008 between them") {
  Fleet fleet("oktopk", 1, 12);
  SparseVector few{true, {0, 1}, {9, 8}}, many;
  for (std::uint32_t i = 0; i < 12; ++i) many.indices.push_back(i), many.values.push_back(20.0f + i);
  double expected = 0;
  for (int step = 0; step < 40; ++step) {
    const bool crowded = step == 0 || step % 2 == 1;  // step 32 is not: two entries
    const std::size_t total = fleet.sum_and_commit({crowded ? many : few}, 6)[0].sum.indices.size();
    if (step == 0) expected = 26;  // the 6th of 31, 30, ...
    if (step == 32) expected = 0;  // fewer than k
    if (step == 33) expected = 26;
    std::size_t passed = 0;
    for (const float value : (crowded ? many : few).values) passed += value >= expected;
    CHECK(total == passed);
    if (total > 8) expected *= 1.008;
    if (total < 4) expected /= 1.008;
    CHECK(saved(fleet, 0).threshold == expected);
  }
  // Another k, as in a warm-up of the density: exact again.
  fleet.sum_and_commit({many}, 2);
  CHECK(saved(fleet, 0).threshold == 30);
  // Two thirds or four thirds of k = 6 entries leave it as it is; the first ones make it.
  Fleet steady("oktopk", 1, 12);
  for (const std::uint32_t count : {6u, 4u, 8u, 4u}) {
    SparseVector entries;
    for (std::uint32_t i = 0; i < count; ++i)
      entries.indices.push_back(i), entries.values.push_back(20.0f + i);
    CHECK(steady.sum_and_commit({entries}, 6)[0].sum.indices.size() == count);
    CHECK(saved(steady, 0).threshold == 20);
  }
}

TEST_CASE("over 200 steps of random entries oktopk keeps between a third of k and three times k") {
  constexpr std::size_t kNumel = 1500, kCount = 60;
  Fleet fleet("oktopk", 4, kNumel);
  for (std::uint32_t step = 0; step < 200; ++step) {
    const auto sums = fleet.sum_and_commit(step_entries(step, 4, kNumel, kCount), kCount);
    CHECK(3 * sums[0].sum.indices.size() >= kCount);
    CHECK(sums[0].sum.indices.size() <= 3 * kCount);
  }
}

TEST_CASE("a discarded step of oktopk leaves its state, and a saved state goes on as its original") {
  constexpr int kRanks = 3;
  Fleet fleet("oktopk", kRanks, 600), loaded("oktopk", kRanks, 600);
  for (std::uint32_t step = 0; step < 70; ++step) {
    const auto before = fleet.state(0);
    fleet.sum(step_entries(1000 + step, kRanks, 600, 45), 30);
    fleet.discard();
    CHECK(fleet.state(0) == before);
    if (step % 10 == 7)
      for (std::size_t rank = 0; rank < kRanks; ++rank) loaded.load(rank, fleet.state(rank));
    const auto entries = step_entries(step, kRanks, 600, 30);
    const auto sums = fleet.sum_and_commit(entries, 30);
    CHECK(fleet.state(0) != before);
    if (step < 7) continue;
    const auto again = loaded.sum_and_commit(entries, 30);
    CHECK(again[2].sum.indices == sums[2].sum.indices);
    CHECK(again[2].sum.values == sums[2].sum.values);
    CHECK(loaded.state(1) == fleet.state(1));
  }
}

TEST_CASE("oktopk validates a saved state") {
  Fleet fleet("oktopk", 2, 50);
  const auto bytes_of = [](double threshold, std::vector<std::uint32_t> cuts) {
    StateWriter writer;
    writer.put<std::int64_t>(3);
    writer.put(threshold);
    writer.put<std::uint64_t>(5);
    writer.put_list(cuts);
    return writer.take();
  };
  const auto good = bytes_of(0.5, {50});
  CHECK_NOTHROW(fleet.load(0, good));
  for (const auto& bad : {bytes_of(0.5, {51}),
                          bytes_of(0.5, {20, 10}),
                          bytes_of(-1, {20}),
                          bytes_of(std::nan(""), {20}),
                          {good.begin(), good.end() - 1}})
    CHECK_THROWS_AS(fleet.load(0, bad), Error);
}

#include "train/evaluate.h"

#include "tests/dist/ranks.h"
#include "tests/support/catch.h"

using namespace topknot;

TEST_CASE("running statistics become the ranks' mean, or rank 0's, or stay as they are") {
  using Values = std::vector<float>;
  for (const auto& [rule, expected] :
       {std::pair<std::string, std::vector<Values>>{"mean", {{2, 4}, {2, 4}, {2, 4}}},
        {"rank0", {{1, 2}, {1, 2}, {1, 2}}},
        {"local", {{1, 2}, {2, 4}, {3, 6}}}}) {
    std::vector<Values> values(3);
    run_ranks("threads", 3, [&](Communicator& communicator) {
      const auto rank = static_cast<std::size_t>(communicator.rank());
      ParameterStore store;
      store.add_buffer("mean", 1, static_cast<float>(rank + 1));
      store.add_buffer("variance", 1, static_cast<float>(2 * rank + 2));
      CollectiveQueue queue(communicator);
      synchronize_statistics(store, rule, queue, communicator);
      for (const auto& buffer : store.buffers()) values[rank].push_back(buffer->values[0]);
    });
    INFO(rule);
    CHECK(values == expected);
  }
}

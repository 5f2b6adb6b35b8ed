// train --check-network as a user runs it.
#include <sys/wait.h>

#include "tests/cli/command.h"
#include "tests/support/catch.h"
#include "tests/support/free_port.h"

using namespace topknot;

TEST_CASE("train --check-network has threads and processes talk, and shows ranks, collectives and sizes") {
  for (const std::string backend : {"threads", "gloo"}) {
    const Outcome check = train("--check-network train.device=cpu dist.ranks=3 dist.backend=" + backend);
    INFO(check.output);
    CHECK(check.code == 0);
    CHECK(check.has("3 ranks, dist.backend " + backend));
    for (const char* rank : {"\n    0  ", "\n    1  ", "\n    2  "}) CHECK(check.count(rank) == 1);
    CHECK(check.count("host, " + backend) == 6);
    CHECK(check.has("16777216"));
    CHECK(check.has("every value arrived as it should"));
  }
}

TEST_CASE("train --check-network says which rank did not come, and ends") {
  const std::string port = std::to_string(free_port() - 1);  // the ranks meet one above MASTER_PORT
  const Outcome check = run_command("RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=" + port + " " +
                                    TOPKNOT_BIN "/train --check-network dist.backend=gloo dist.timeout_s=1");
  INFO(check.output);
  CHECK(check.code == 1);
  CHECK(check.count("error: ") == 1);
  CHECK(check.has("rank 1 did not come to 127.0.0.1"));
}

TEST_CASE("nccl is refused clearly on the CPU, and where messages would have no fixed length") {
  const Outcome wrong = train("dist.backend=nccl train.device=cpu compress.name=gaussiank");
  INFO(wrong.output);
  CHECK(wrong.code == 2);
  CHECK(wrong.has("train.device: dist.backend=nccl"));
  CHECK(wrong.has("compress.capacity: must be given"));
  CHECK_FALSE(train("dist.backend=nccl train.device=cpu compress.name=topk").has("compress.capacity"));
}

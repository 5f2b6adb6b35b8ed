// Whole runs by NCCL, one GPU per rank: the weights of threads that share a card, with the whole step in a
// graph.
#include <nccl.h>

#include <optional>

#include "tests/emulator/tests/machine_settings.h"
#include "tests/train/resumed_run.h"

using namespace topknot;
using namespace topknot::testing;

namespace {

const Keys kSmall{"train.device=cuda",   "train.deterministic=true", "train.max_steps=8",
                  "train.check_every=4", "data.test_size=16",        "data.train_size=60",
                  "data.image_size=12",  "model.hidden=[12]"};

Run run_of(const std::string& backend, int ranks, const Keys& keys) {
  return train(backend == "threads" ? "threads" : "gloo", ranks,
               with(with(kSmall, keys), {"dist.backend=" + backend}), backend == "threads" ? 1 : ranks);
}

}  // namespace

TEST_CASE("nccl: processes train to the weights of threads on one card, with graphs or without") {
  const emulator::Gpus gpus(3);
  const std::vector<std::pair<int, Keys>> cases{{3, {"compress.name=topk"}},
                                                {2, {"compress.name=gaussiank", "compress.capacity=2"}},
                                                {3, {"compress.name=dgc", "compress.scope=tensor"}},
                                                {2, {"compress.name=regtopk", "exchange.merge=none"}},
                                                {2, {"compress.name=qsgd"}},
                                                {3, {"compress.name=signsgd", "compress.scope=tensor"}},
                                                {2, {"compress.name=dense", "dist.ordered_sum=true"}}};
  for (const auto& [ranks, keys] : cases) {
    INFO(keys.front());
    const auto weights = run_of("nccl", ranks, keys).checksums;
    CHECK(run_of("nccl", ranks, with(keys, {"train.graphs=false"})).checksums == weights);
    CHECK(run_of("threads", ranks, keys).checksums == weights);
  }
}

TEST_CASE("nccl: hosts of two ranks train to the same weights, over GPU or CPU, with graphs or without") {
  const emulator::Gpus gpus(4);
  for (const Keys& keys : {Keys{"compress.name=topk"}, Keys{"compress.name=dgc", "compress.scope=tensor"},
                           Keys{"compress.name=gaussiank", "compress.capacity=2", "exchange.merge=none"},
                           Keys{"compress.name=topk", "exchange.hierarchy=parts"},
                           Keys{"compress.name=dgc", "exchange.hierarchy=parts", "exchange.merge=none"}}) {
    INFO(keys.front() << keys.back());
    const Keys two = with(keys, {"exchange.ranks_per_host=2"});
    const auto weights = run_of("nccl", 4, two).checksums;
    CHECK(run_of("nccl", 4, with(two, {"train.graphs=false"})).checksums == weights);
    CHECK(run_of("threads", 4, two).checksums == weights);
    CHECK(run_of("gloo", 4, two).checksums == weights);   // staged
    CHECK(run_of("nccl", 4, keys).checksums != weights);  // without hosts
  }
}

TEST_CASE("nccl: a run whose NCCL refuses calls in graphs keeps them out of graphs, to the same weights") {
  for (const auto& [ranks, keys] :
       std::vector<std::pair<int, Keys>>{{2, {"compress.name=topk"}},
                                         {2, {"compress.name=dense", "dist.ordered_sum=true"}},
                                         {4, {"compress.name=topk", "exchange.ranks_per_host=2"}}}) {
    INFO(keys.front());
    const auto graphs_and_weights = [&, &ranks = ranks, &keys = keys](const char* graphs) {
      const Run run = run_of("nccl", ranks, with(keys, {std::string("train.graphs=") + graphs}));
      return std::pair(emulator::counts().most_graphs, run.checksums);
    };
    std::optional<emulator::Gpus> gpus(std::in_place, ranks);
    const auto none = graphs_and_weights("false");
    CHECK(none.first == 0);
    const auto parts = graphs_and_weights("parts");
    CHECK(parts.second == none.second);
    CHECK((parts.first > 0) == (ranks == 2));  // hosts of ranks encode between collectives
    gpus.emplace(ranks);
    emulator::fail("NCCL in a graph of rank 1", ncclUnhandledCudaError);
    const auto refused = graphs_and_weights("true");
    CHECK(refused.second == parts.second);
    CHECK(refused.first ==
          std::max<std::size_t>(parts.first, 1));  // the trial of a rank that refuses nothing
  }
}

TEST_CASE("nccl: a GPU that is lost during a run ends every rank, of every host, with one message") {
  for (const auto& [ranks, keys] :
       std::vector<std::pair<int, Keys>>{{2, {}}, {4, {"exchange.ranks_per_host=2"}}}) {
    const emulator::Gpus gpus(ranks);
    emulator::fail("cudaGraphLaunch", cudaErrorIllegalAddress, 6);
    const std::string text = error_text([&, &ranks = ranks, &keys = keys] {
      run_of("nccl", ranks, with(keys, {"compress.name=topk", "dist.timeout_s=5"}));
    });
    CHECK(says(text, {"rank "}));
  }
}

TEST_CASE("graphs of densities that are past are gone, since their buffers are") {
  const auto most = [](const std::string& densities) {
    const emulator::Gpus gpus(1);
    run_of("threads", 1, {"train.max_steps=40", "compress.name=topk", "compress.warmup=" + densities});
    return emulator::counts().most_graphs;
  };
  REQUIRE(most("[]") > 0);
  CHECK(most("[0.5,0.4,0.3,0.2]") == most("[]"));
}

TEST_CASE("nccl: blocks, threads and branches of graphs in the other order lead to the same weights") {
  const emulator::Gpus gpus(4);
  for (const auto& [ranks, keys] :
       std::vector<std::pair<int, Keys>>{{2, {"compress.name=topk"}},
                                         {2, {"compress.name=dgc"}},
                                         {4, {"compress.name=topk", "exchange.ranks_per_host=2"}},
                                         {4,
                                          {"compress.name=topk", "exchange.ranks_per_host=2",
                                           "exchange.hierarchy=parts", "exchange.merge=none"}},
                                         {4,
                                          {"compress.name=topk", "exchange.ranks_per_host=2",
                                           "exchange.merge=none", "compress.dense_1d=false"}}}) {
    const auto forwards = run_of("nccl", ranks, keys).checksums;
    emulator::machine().reverse = true;
    CHECK(run_of("nccl", ranks, keys).checksums == forwards);
    emulator::machine().reverse = false;
  }
}

TEST_CASE("nccl: dense gradients by the library's own sum, the same on all ranks") {
  const emulator::Gpus gpus(2);
  const Run run = run_of("nccl", 2, {"compress.name=dense"});  // which compares the ranks
  CHECK(run.test_loss == Approx(run_of("threads", 2, {"compress.name=dense"}).test_loss).epsilon(0.01));
}

TEST_CASE("a method without kernels goes through the CPU under nccl, to the same weights") {
  const emulator::Gpus gpus(2);
  const Keys keys{"compress.name=powersgd"};
  CHECK(run_of("nccl", 2, keys).checksums == run_of("threads", 2, keys).checksums);
}

TEST_CASE("nccl: a run that stops and is resumed ends with the bits of one that does not stop") {
  const emulator::Gpus gpus(4);
  const auto check = [](const Keys& of_method, int ranks) {
    INFO(of_method.front() << ", " << ranks << " ranks");
    const Keys keys = with(with(kSmall, of_method), {"train.stop_after=0", "dist.backend=nccl",
                                                     "dist.ranks=" + std::to_string(ranks)});
    check_same(whole(keys, "gloo", ranks), stopped_and_resumed(keys, 5, "gloo", ranks));
  };
  for (const char* method : {"dense", "topk", "dgc", "regtopk"}) check(keys_of_method(method), 2);
  check(with(keys_of_method("dgc"), {"exchange.ranks_per_host=2", "exchange.hierarchy=parts"}), 4);
}

// Ranks that are threads of one process and share a GPU.
#include "tests/cuda/device_collectives.h"
#include "train/network_check.h"

namespace topknot {
namespace {

constexpr auto kMake = &cuda::make_device_threads;

TEST_CASE("threads on a GPU: sums are the host's bit for bit, any ranks and lengths") {
  const std::array<std::size_t, 6> lengths{1, 15, 16, 17, 1000, 4099};
  for (const int ranks : {1, 2, 3, 4, 5, 6, 7, 8}) {
    INFO(ranks << " ranks");
    CHECK(wrong_sum<float>(kMake, ranks, lengths) == -1);
    CHECK(wrong_sum<BFloat16>(kMake, ranks, lengths) == -1);
  }
  CHECK(wrong_sum<float>(kMake, 3, lengths, 1) == -1);  // not aligned for wide loads
  CHECK(wrong_sum<BFloat16>(kMake, 3, lengths, 1) == -1);
}

TEST_CASE("threads on a GPU: blocks of any length are gathered and broadcast") {
  for (const int ranks : {1, 2, 5})
    for (const std::size_t bytes : {0, 1, 4, 63, 1024, 5000}) {
      INFO(ranks << " ranks, " << bytes << " bytes");
      CHECK(gathers_and_broadcasts(kMake, ranks, bytes));
    }
}

TEST_CASE("threads on a GPU: memory may be filled anew right after a call, fifty times in a row") {
  for (const int ranks : {2, 3, 8}) {
    INFO(ranks << " ranks");
    CHECK(wrong_round<float>(kMake, ranks, 333) == -1);
  }
  CHECK(wrong_round<BFloat16>(kMake, 4, 128) == -1);
}

TEST_CASE("threads on a GPU: ranks that make different calls, or give up, end all with one error") {
  const auto different = errors_of_device_ranks(kMake, 3, [](DeviceRank& rank) {
    const cuda::DeviceArray<float> data(64);
    rank.device.all_reduce(DType::f32, data.data(), rank.rank() == 2 ? 32 : 64, SumOrder::ranks,
                           rank.stream());
  });
  for (const auto& error : different)
    CHECK(says(error, {"do not make the same calls", "all_reduce of 64 floats", "all_reduce of 32 floats"}));

  const auto gone = errors_of_device_ranks(kMake, 3, [](DeviceRank& rank) {
    const cuda::DeviceArray<float> data(64);
    rank.device.all_reduce(DType::f32, data.data(), 64, SumOrder::ranks, rank.stream());
    if (rank.rank() == 1) throw Error("the disk is full");
    rank.device.all_reduce(DType::f32, data.data(), 64, SumOrder::ranks, rank.stream());
  });
  for (const auto& error : gone) CHECK(says(error, {"the disk is full"}));
}

TEST_CASE("threads on a GPU: after an abort every call throws") {
  const auto errors = errors_of_device_ranks(kMake, 2, [](DeviceRank& rank) {
    const cuda::DeviceArray<float> data(64);
    if (rank.rank() == 0) rank.device.abort("enough");
    rank.device.all_reduce(DType::f32, data.data(), 64, SumOrder::ranks, rank.stream());
  });
  for (const auto& error : errors) CHECK(says(error, {"enough"}));
}

TEST_CASE("ranks that share a GPU check what they send each other there") {
  std::vector<std::vector<NetworkRow>> rows(2);
  run_ranks("threads", 2,
            [&](Communicator& host) { rows[std::size_t(host.rank())] = check_gpu_path(host, 0, 60); });
  for (const auto& mine : rows) {
    REQUIRE(mine.size() == 6);
    CHECK(mine[0].over == "GPU, threads");
    CHECK(mine[5].bytes == 1 << 24);
  }
  CHECK(gpu_count() >= 1);
  CHECK(gpu_name(0).find("0: ") == 0);
}

}  // namespace
}  // namespace topknot

// The worked examples of docs/extending.md: their files, compiled in, and the page that links to them.
#include "tests/dist/sparse/sparse_collective_fixture.h"
#include "tests/train/small_run.h"

using namespace topknot;

TEST_CASE("the example model and the example compressor are found by name and train together") {
  CHECK(models().contains("wide_net"));
  CHECK(compressors().contains("cyclic"));

  const testing::Run run =
      testing::train("threads", 2,
                     {"model.name=wide_net", "compress.name=cyclic", "compress.density=0.1",
                      "compress.phase=3", "compress.warmup=[]", "data.batch_size=32", "train.max_steps=12",
                      "train.epochs=2", "optimizer.lr=0.05"});
  CHECK(run.test_loss < 3.0);
}

TEST_CASE("the example's own key is a key like any other") {
  REQUIRE(find_key("compress.phase"));
  CHECK(load_config("", {"compress.phase=2"}).problems.empty());
  CHECK(load_config("", {"compress.phase=-1"}).problems.size() == 1);
  CHECK(load_config("", {"compress.phase=two"}).problems.size() == 1);
  const LoadedConfig given = load_config("", {"compress.name=cyclic", "compress.phase=2"});
  CHECK(dump_yaml(given.config).find("  phase: 2") != std::string::npos);
  CHECK(unused_keys(given).empty());
  CHECK(
      unused_keys(load_config("", {"compress.name=topk", "compress.phase=2"})) ==
      std::vector<std::string>{"compress.phase is for cyclic and changes nothing here (compress.name=topk)"});
  CHECK(list_text("compressors").find("compress.phase=0: steps by which the cycle is shifted") !=
        std::string::npos);
}

TEST_CASE("docs/extending.md links to every example file") {
  const std::filesystem::path docs = TOPKNOT_SOURCE_DIR "/docs";
  const std::string page = text_of((docs / "extending.md").string());
  int files = 0;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(docs / "examples")) {
    const std::string extension = entry.path().extension().string();
    if (extension != ".cpp" && extension != ".cu") continue;  // the other programs are docs/pytorch.md's
    INFO(entry.path());
    CHECK(contains(page, "](" + entry.path().lexically_relative(docs).generic_string() + ")"));
    ++files;
  }
  CHECK(files > 0);
}

TEST_CASE("the example collective adds every entry exactly, with the same bits on every rank") {
  constexpr std::size_t numel = 60;
  for (const char* backend : {"threads", "gloo"})
    for (int ranks = 1; ranks <= 5; ++ranks) {
      INFO(backend << ", " << ranks << " ranks");
      testing::Fleet fleet("chain", ranks, numel, "auto");
      fleet.backend = backend;
      std::vector<SparseVector> entries;
      std::map<std::uint32_t, float> whole;
      for (int r = 0; r < ranks; ++r) {
        entries.push_back(
            testing::whole_numbers(static_cast<std::uint32_t>(r), numel, r == 1 ? 0.0 : 0.3, 1000));
        for (std::size_t i = 0; i < entries.back().indices.size(); ++i)
          whole[entries.back().indices[i]] += entries.back().values[i];
      }
      std::vector<std::uint32_t> positions;
      std::vector<float> values;
      for (const auto& [position, value] : whole) positions.push_back(position), values.push_back(value);
      for (const SparseSum& result : fleet.sum(entries, 5)) {
        CHECK(result.sum.finite);
        CHECK(result.sum.indices == positions);
        CHECK(result.sum.values == values);
        CHECK(result.rejected.empty());
        CHECK((result.bytes_sent > 0) == (ranks > 1));
      }
      entries[0] = {false, {}, {}};
      for (const SparseSum& result : fleet.sum(entries, 5)) {
        CHECK_FALSE(result.sum.finite);
        CHECK(result.sum.indices.empty());
      }
    }
}

TEST_CASE(
    "a run takes the example collective by its name: ranks agree, threads equal gloo, auto may choose it") {
  const std::vector<std::string> keys{"compress.name=topk", "exchange.collective=chain", "train.max_steps=8"};
  CHECK(testing::train("threads", 3, keys).checksums == testing::train("gloo", 3, keys).checksums);
  CHECK(load_config("", {"exchange.collective=chain"}).problems.empty());
  // Where only starting a message costs time, and every further one at the same time, two short hops win.
  CHECK(cheapest_collective({1e-6, 0, 1}, 3, 10, 8) == "chain");
  CHECK(cheapest_collective({60e-6, 1e-8, 1e-6}, 16, 1000, 8) != "chain");
}

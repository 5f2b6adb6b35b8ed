// The worked examples of docs/extending.md: their files, compiled into this program, and the page that links
// to them.
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

// A run goes on with the data that it was trained with.
#include <fmt/format.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "nn/base/checksum.h"
#include "tests/data/picture_folder.h"
#include "tests/support/error_text.h"
#include "tests/support/files.h"
#include "tests/train/made_up_text.h"
#include "tests/train/resumed_run.h"
#include "train/checkpoint/resume.h"

using namespace topknot;
using namespace topknot::testing;
namespace fs = std::filesystem;

namespace {

Keys text_keys(const std::string& root) {
  return {"data.name=text",    "data.root=" + root,  "data.train_size=0",      "data.test_size=0",
          "data.batch_size=4", "model.name=lstm_lm", "model.width=8",          "model.layers=1",
          "train.max_steps=6", "train.threads=1",    "data.sequence_length=10"};
}

// The folder with the words of a line of train.txt in reverse order.
void reverse_line(const std::string& root, std::size_t number) {
  std::istringstream in(text_of(root + "/train.txt"));
  std::string text;
  std::size_t at = 0;
  for (std::string line; std::getline(in, line); ++at) {
    if (at == number) {
      std::istringstream words(line);
      line.clear();
      for (std::string word; words >> word;) line = word + (line.empty() ? "" : " ") + line;
    }
    text += line + "\n";
  }
  std::ofstream(root + "/train.txt") << text;
}

std::string stopped_with(const TempFolder& temp, const Keys& keys) {
  start(temp, with(keys, {"train.stop_after=3"}), false);
  return temp.at("run");
}

}  // namespace

TEST_CASE(
    "a run does not go on with another text: both checksums are named, and resume.data=accept overrides") {
  const MadeUpText text(40);
  const Keys keys = text_keys(text.root());
  const TempFolder temp;
  const std::string run = stopped_with(temp, keys);
  const Manifest manifest = CheckpointStore(run + "/checkpoints").manifest(3);
  const std::string vocabulary = "the checksum of the vocabulary or the classes' names";
  const std::string then = manifest.data.at(vocabulary);
  reverse_line(text.root(), 0);
  const DataFingerprint now = data_fingerprint(load_data(small_run(temp, keys).config));
  REQUIRE(now.at(vocabulary) != then);
  const auto resume = [&] { start(temp, with(keys, {"train.stop_after=1"}), true); };
  CHECK(says(error_text(resume),
             {vocabulary.c_str(), now.at(vocabulary).c_str(), then.c_str(), "resume.data=accept"}));
  CHECK(user_error(
      [&] {
        check_resumable(CheckpointStore(run + "/checkpoints"), load_resumed_config(run, keys).config, now);
      },
      {then.c_str()}));
  start(temp, with(keys, {"train.stop_after=1", "resume.data=accept"}), true);
  CHECK(text_of(run + "/config.yaml").find("accept") == std::string::npos);
  resume();  // the new checkpoint is of these data
  reverse_line(text.root(), 30);
  CHECK(says(error_text(resume), {"the checksum of training samples: ", ", was "}));
}

TEST_CASE("data that lie in another folder are the same data") {
  const MadeUpText text(40);
  const Keys keys = text_keys(text.root());
  const TempFolder temp, moved;
  stopped_with(temp, keys);
  fs::copy(text.root(), moved.str(), fs::copy_options::recursive);
  const Ended resumed{start(temp, with(keys, {"data.root=" + moved.str()}), true).parameter_checksum,
                      read_metrics(temp.at("run/metrics.jsonl"))};
  check_same(whole(keys), resumed);
}

TEST_CASE("a run does not go on with pictures whose classes, names, sizes or contents are others") {
  const std::vector<std::pair<const char*, std::function<void(const PictureFolder&)>>> changes = {
      {"the classes' names",
       [](const PictureFolder& folder) {
         for (const char* split : {"train/", "val/"})
           fs::rename(folder.at(split + std::string("classb")), folder.at(split + std::string("classbb")));
       }},
      {"the checksum of test samples",
       [](const PictureFolder& folder) {
         fs::rename(folder.at("val/classa/v0.PPM"), folder.at("val/classa/v00.PPM"));
       }},
      {"the checksum of training samples",
       [](const PictureFolder& folder) { folder.write("train/classa/p0.ppm", pnm_picture(40, 30, 3)); }},
      {"the number of test samples",
       [](const PictureFolder& folder) { folder.write("val/classa/v9.PPM", pnm_picture(40, 30, 3)); }}};
  for (const auto& [what, change] : changes) {
    INFO(what);
    const PictureFolder folder;
    const Keys keys = {"data.name=image_folder", "data.root=" + folder.str(), "data.image_size=8",
                       "data.train_size=0",      "data.test_size=0",          "train.max_steps=6"};
    const TempFolder temp;
    stopped_with(temp, keys);
    change(folder);
    CHECK(says(error_text([&] { start(temp, keys, true); }), {what, "resume.data=accept"}));
  }
}

TEST_CASE("the sizes of all files count, also of those whose content is not read") {
  const TempFolder folder;
  for (const char* split : {"train", "val"})
    for (const char* name : {"a", "b"})
      for (int i = 0; i < 600; ++i)
        folder.write(std::string(split) + "/" + name + "/" + std::to_string(10000 + i) + ".ppm", {1, 2});
  DatasetOptions options;
  options.root = folder.str();
  const auto sum = [&] { return data_checksum(*make_dataset("image_folder", options, Split::train)); };
  const std::uint64_t before = sum();
  folder.write("train/a/10001.ppm", {1, 3});  // of 1200 files every fourth is read
  CHECK(sum() == before);
  folder.write("train/a/10001.ppm", {1, 2, 3});
  CHECK(sum() != before);
}

TEST_CASE("a checkpoint that does not say of which data goes on") {
  const TempFolder temp;
  const Keys keys = {"train.max_steps=6"};
  const std::string run = stopped_with(temp, keys);
  const std::string path = CheckpointStore(run + "/checkpoints").path(3) + "/manifest.json";
  nlohmann::ordered_json body = nlohmann::ordered_json::parse(text_of(path)).at("manifest");
  REQUIRE(body.erase("data") == 1);
  const std::string text = body.dump();
  Checksum checksum;
  checksum.update(std::as_bytes(std::span(text)));
  std::ofstream(path) << fmt::format(R"({{"checksum":"{:016x}","manifest":{}}})", checksum.value(), text)
                      << "\n";
  const Ended resumed{start(temp, keys, true).parameter_checksum, read_metrics(temp.at("run/metrics.jsonl"))};
  check_same(whole(keys), resumed);
}

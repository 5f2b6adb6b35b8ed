// Training on pictures that are read as they are needed.
#include "tests/data/picture_folder.h"
#include "tests/support/error_text.h"
#include "tests/support/standard_error.h"
#include "tests/train/small_run.h"
#include "train/checks.h"

namespace topknot::testing {
namespace {

Keys keys_of(const PictureFolder& folder, const Keys& more = {}) {
  Keys keys{"data.name=image_folder", "data.root=" + folder.str(), "data.image_size=12",
            "data.train_size=0",      "data.test_size=0",          "data.batch_size=2",
            "train.max_steps=8",      "compress.name=topk"};
  keys.insert(keys.end(), more.begin(), more.end());
  return keys;
}

}  // namespace

TEST_CASE(
    "a run on a folder of pictures has the same bits over threads and gloo, with any number of workers") {
  const PictureFolder folder;
  const auto checksums = train("threads", 2, keys_of(folder)).checksums;
  CHECK(train("gloo", 2, keys_of(folder)).checksums == checksums);
  for (const char* workers : {"data.workers=0", "data.workers=3"})
    CHECK(train("threads", 2, keys_of(folder, {workers})).checksums == checksums);
  CHECK(train("threads", 2, keys_of(folder, {"data.augment=false"})).checksums != checksums);
}

TEST_CASE("a damaged picture ends a run above data.max_bad_files and is passed over below") {
  const PictureFolder folder;
  folder.write("train/classb/p1.ppm", {'P', '6'});
  CHECK(says(error_text([&] { train("threads", 1, keys_of(folder)); }),
             {"training picture", "train/classb/p1.ppm", "data.max_bad_files=1"}));
  CHECK(train("threads", 2, keys_of(folder, {"data.max_bad_files=1"})).metrics.steps.size() == 8);
}

TEST_CASE("the start of a run says how many samples and classes there are, and once what is not read") {
  const PictureFolder folder;
  folder.write("train/classa/x.webp", {1});
  const StandardError errors;
  train("threads", 2, keys_of(folder));
  const std::string text = errors.text(), warning = "not read: *.webp (1)";
  CHECK(says(text, {"on image_folder (12 training and 6 test samples, 3 classes), 2 ranks by", warning}));
  CHECK(text.find(warning) == text.rfind(warning));
}

TEST_CASE("ranks with other pictures notice it before the first step") {
  const PictureFolder folder, other;
  other.write("val/classa/v0.PPM", pnm_picture(9, 9, 9));
  const TempFolder temp;
  std::vector<RunData> data;
  for (const PictureFolder* root : {&folder, &other})
    data.push_back(load_data(small_run(temp, keys_of(*root)).config));
  std::vector<std::string> messages(2);
  run_ranks("threads", 2, [&](Communicator& communicator) {
    const auto rank = static_cast<std::size_t>(communicator.rank());
    messages[rank] =
        error_text<UserError>([&] { check_same_data(communicator, data_fingerprint(data[rank])); });
  });
  for (const std::string& message : messages) {
    CHECK(message.find("the checksum of test samples is") != std::string::npos);
    CHECK(message.find("training") == std::string::npos);
  }
}

}  // namespace topknot::testing

// Pictures in a folder per class: what is read, how it is cropped, what becomes of damaged files and wrong
// folders.

#include "data/loader.h"
#include "nn/core/rng.h"
#include "tests/data/picture_folder.h"
#include "tests/support/standard_error.h"

using namespace topknot;
using topknot::testing::StandardError;
using Bytes = std::vector<std::uint8_t>;
using Folder = PictureFolder;

namespace {

DatasetOptions options_of(const TempFolder& folder, int size = 16) {
  DatasetOptions options;
  options.root = folder.str();
  options.set("image_size", size);
  return options;
}

std::unique_ptr<Dataset> open(const DatasetOptions& options, Split split = Split::train) {
  return make_dataset("image_folder", options, split);
}

// The blue of the picture that stands for the sample, and the files that were damaged.
int blue_of(const Dataset& data, std::int64_t index, std::vector<DamagedFile>* damaged = nullptr) {
  Bytes pixels(data.sample_shape().numel());
  std::vector<DamagedFile> unused;
  data.decode(index, nullptr, pixels.data(), damaged ? *damaged : unused);
  return pixels.back();
}

// The sample's pixels, where every file can be read.
Bytes decoded(const Dataset& data, std::int64_t index = 0, const CounterRng* random = nullptr) {
  Bytes pixels(data.sample_shape().numel());
  std::vector<DamagedFile> damaged;
  data.decode(index, random, pixels.data(), damaged);
  return pixels;
}

LoaderOptions loader_options(int workers, bool train = true, int max_bad_files = 0) {
  LoaderOptions options;
  options.batch_size = 3, options.seed = 9, options.workers = workers, options.max_bad_files = max_bad_files;
  options.augment = options.train = train;
  return options;
}

std::vector<float> values_of_epoch(const Dataset& data, const LoaderOptions& options, std::int64_t epoch) {
  Loader loader(data, options);
  loader.start_epoch(epoch);
  std::vector<float> values;
  for (Batch batch; loader.next(batch);) {
    const auto images = batch.images.to_vector();
    values.insert(values.end(), images.begin(), images.end());
    for (const auto label : batch.labels) values.push_back(static_cast<float>(label));
  }
  return values;
}

}  // namespace

TEST_CASE("classes and files are in the order of their names, and a part takes of every class") {
  const Folder folder;
  folder.write("train/classa/notes.txt", {1, 2, 3});
  folder.write("train/classa/.hidden.ppm", {1, 2, 3});
  folder.write("train/README", {1});
  const auto train = open(options_of(folder));
  CHECK(open(options_of(folder), Split::test)->warnings().empty());
  CHECK(train->size() == 12);
  CHECK(train->classes() == 3);
  CHECK(train->sample_shape() == Shape{3, 16, 16});
  std::vector<int> labels, blues;
  for (int i = 0; i < 12; ++i) labels.push_back(train->label(i)), blues.push_back(blue_of(*train, i));
  CHECK(labels == std::vector<int>{0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 2});
  CHECK(blues == std::vector<int>{100, 110, 120, 60, 70, 80, 90, 10, 20, 30, 40, 50});
  CHECK(open(options_of(folder), Split::test)->size() == 6);
  DatasetOptions four = options_of(folder);
  four.train_size = 4;
  const auto some = open(four);
  CHECK(some->size() == 4);
  CHECK(std::vector<int>{blue_of(*some, 0), blue_of(*some, 1), blue_of(*some, 2), blue_of(*some, 3)} ==
        std::vector<int>{100, 60, 90, 30});
  CHECK(some->label(3) == 2);
}

TEST_CASE("what lies among the pictures and is not read is counted by its kind") {
  const Folder folder;
  for (const char* name :
       {"classa/a.webp", "classa/b.WEBP", "classb/c.tif", "classb/deep/d.ppm", "classc/more/e.ppm",
        "classc/more/f.ppm", "classb/README", "classb/.hidden", "g.ppm", "LICENSE"})
    folder.write(std::string("val/") + name, pnm_picture(20, 20, 1));
  fs::create_symlink("loop", folder.at("val/classb/loop"));  // leads to itself
  CHECK(open(options_of(folder))->warnings().empty());
  const auto warnings = open(options_of(folder), Split::test)->warnings();
  REQUIRE(warnings.size() == 1);
  CHECK(says(warnings[0], {"val",
                           "not read: *.tif (1), *.webp (2), files without an ending (2), folders in the "
                           "folders of the classes (2), pictures outside the folders of the classes (1)"}));
  const Folder none;
  fs::remove_all(none.at("train/classa"));
  none.write("train/classa/a.webp", {1});
  CHECK_USER_ERROR(open(options_of(none)), "no pictures", "'classa'", "*.webp (1)");
  none.write("train/classa/b.png/c.ppm", pnm_picture(20, 20, 1));
  CHECK_USER_ERROR(blue_of(*open(options_of(none)), 0), "b.png", "it is a folder, not a regular file");
}

// torchvision's CenterCrop begins at int(round((resized - side) / 2)), and Python rounds halves to even.
TEST_CASE("the centre of a picture begins where torchvision's does, for every remainder, and is its middle") {
  for (int resize = 16; resize < 24; ++resize) {
    const TempFolder folder;
    for (const char* name : {"train/a/1.ppm", "train/b/1.ppm", "val/a/1.ppm", "val/b/1.ppm"})
      folder.write(name, pnm_picture(resize, resize, 1));
    DatasetOptions options = options_of(folder);
    options.set("resize", resize);
    const Bytes pixels = decoded(*open(options));
    const int first[] = {0, 0, 1, 2, 2, 2, 3, 4};  // of (0 .. 7) / 2
    INFO("of " << resize);
    CHECK(pixels[0] == 4 * first[resize - 16]);
    CHECK(pixels[256] == 4 * first[resize - 16]);
  }
  // Resized, this one is 2,457,600,000 pixels wide.
  const Folder folder;
  folder.write("train/classa/a.ppm", pnm_picture(600000, 1, 5));
  DatasetOptions options = options_of(folder);
  options.set("resize", 4096);
  const Bytes pixels = decoded(*open(options));
  for (std::size_t i = 0; i < 256; ++i) {
    CHECK(pixels[i] >= (4 * 299999) % 256);
    CHECK(pixels[i] <= (4 * 300000) % 256);
  }
}

TEST_CASE("without augmentation a sample is the centre of the picture with its shorter side resized") {
  const Folder folder;
  DatasetOptions options = options_of(folder);
  options.set("resize", 20);
  const auto data = open(options, Split::test);
  const Bytes pixels = decoded(*data);  // 30 x 40 becomes 20 x 26, of which 16 x 16 from (2, 5) on
  for (int y = 0; y < 16; ++y)
    for (int x = 0; x < 16; ++x) {
      const double at_x = (x + 2 + 0.5) * 30 / 20 - 0.5, at_y = (y + 5 + 0.5) * 40 / 26 - 0.5;
      CHECK(std::abs(pixels[y * 16 + x] - 4 * at_x) <= 1);
      CHECK(std::abs(pixels[256 + y * 16 + x] - 4 * at_y) <= 1);
    }
  std::vector<float> sample(pixels.size());
  data->get(0, sample.data());
  CHECK(sample[100] == pixels[100] / 255.0f);
  options.set("resize", 15);
  CHECK_USER_ERROR(open(options), "data.resize: 15", "data.image_size (16)");
  options.set("resize", 0);
  options.set("image_size", 0);
  CHECK(open(options)->sample_shape() == Shape{3, 224, 224});
}

TEST_CASE("a random crop has 8 % to all of the area and is 3:4 to 4:3, half of them mirrored") {
  const Folder folder;
  const auto data = open(options_of(folder));
  int mirrored = 0;
  double least = 1, most = 0;
  for (std::uint32_t draw = 0; draw < 400; ++draw) {
    const CounterRng random(1, RngUse::augment, draw, 3);
    const Bytes pixels = decoded(*data, 3, &random);
    const int left = pixels[16 * 8], right = pixels[16 * 8 + 15], top = pixels[256 + 8],
              bottom = pixels[256 + 15 * 16 + 8];
    mirrored += left > right;
    // 15 steps of a sixteenth each lie between the first centre and the last, less what the edges take.
    const double width = std::abs(right - left) / 4.0 * 16 / 15, height = (bottom - top) / 4.0 * 16 / 15;
    const double area = width * height / (40 * 30);
    least = std::min(least, area), most = std::max(most, area);
    CHECK(area > 0.05);
    CHECK(width / height > 0.6);
    CHECK(width / height < 1.65);
  }
  CHECK(mirrored > 150);
  CHECK(mirrored < 250);
  CHECK(least < 0.15);
  CHECK(most > 0.8);

  // One too long for any crop is cut in its centre: 3 x 2 pixels from column 28 on.
  folder.write("train/classa/a.ppm", pnm_picture(60, 2, 5));
  const CounterRng random(1, RngUse::augment, 0, 0);
  const Bytes pixels = decoded(*open(options_of(folder)), 0, &random);
  CHECK(*std::min_element(pixels.begin(), pixels.begin() + 256) == 4 * 28);
  CHECK(*std::max_element(pixels.begin(), pixels.begin() + 256) == 4 * 30);
}

TEST_CASE("batches of a set on demand are the same for any number of workers, and differ by epoch and seed") {
  const Folder folder;
  const auto data = open(options_of(folder));
  const auto first = values_of_epoch(*data, loader_options(0), 0);
  for (const int workers : {1, 3}) CHECK(values_of_epoch(*data, loader_options(workers), 0) == first);
  CHECK(values_of_epoch(*data, loader_options(0), 1) != first);
  LoaderOptions other = loader_options(0);
  other.seed = 10;
  CHECK(values_of_epoch(*data, other, 0) != first);

  // Each sample of an epoch has a crop of its own.
  const Transform transform(*data, true, 9);
  std::vector<float> one(3 * 256), two(one.size());
  std::vector<DamagedFile> damaged;
  transform.apply(0, 0, one.data(), damaged);
  transform.apply(1, 0, two.data(), damaged);  // the same picture but for its blue
  CHECK_FALSE(std::equal(one.begin(), one.begin() + 512, two.begin()));
}

TEST_CASE("a batch of a set on demand has ImageNet's mean 0 and deviation 1, or the given ones") {
  const Folder folder;
  DatasetOptions options = options_of(folder);
  const auto check_batch = [&](const std::vector<double>& mean, const std::vector<double>& std) {
    const auto data = open(options, Split::test);
    const auto values = values_of_epoch(*data, loader_options(1, false), 0);
    std::vector<float> sample(3 * 256);
    data->get(0, sample.data());
    for (std::size_t c = 0; c < 3; ++c)
      CHECK(values[256 * c + 5] == Approx((sample[256 * c + 5] - mean[c]) / std[c]));
  };
  check_batch({0.485, 0.456, 0.406}, {0.229, 0.224, 0.225});
  options.set("mean", std::vector<double>{0.5});
  check_batch({0.5, 0.5, 0.5}, {0.229, 0.224, 0.225});
  options.set("std", std::vector<double>{0.25, 0.5, 1});
  check_batch({0.5, 0.5, 0.5}, {0.25, 0.5, 1});
  options.set("mean", std::vector<double>{0.1, 0.2});
  CHECK_USER_ERROR(open(options), "data.mean: 2 numbers", "one, or three");
}

TEST_CASE("the next picture of its class stands in for a damaged one, the first for the last") {
  const Folder folder;
  folder.write("train/classa/p0.ppm", {'P', '6', ' ', '9'});
  folder.write("train/classa/p2.ppm", {});
  const auto data = open(options_of(folder));
  std::vector<DamagedFile> damaged;
  CHECK(blue_of(*data, 0, &damaged) == 110);
  REQUIRE(damaged.size() == 1);
  CHECK(damaged[0].file == 0);
  CHECK(damaged[0].what.find("train/classa/p0.ppm': it is") != std::string::npos);
  CHECK(blue_of(*data, 1, &damaged) == 110);
  CHECK(damaged.size() == 1);
  CHECK(blue_of(*data, 2, &damaged) == 110);  // by way of the first
  CHECK(damaged.size() == 3);
  std::vector<float> sample(3 * 256);
  CHECK_USER_ERROR(data->get(0, sample.data()), "train/classa/p0.ppm");
  folder.write("train/classa/p1.ppm", {});
  CHECK_USER_ERROR(blue_of(*data, 0), "classa", "not one picture", "p0.ppm");
}

TEST_CASE("damaged files count once, in the order of the batches, and end the run above data.max_bad_files") {
  const Folder folder;
  folder.write("val/classa/v0.PPM", {});
  folder.write("val/classb/v1.PPM", {});
  const auto data = open(options_of(folder), Split::test);
  for (const int workers : {0, 2}) {
    Loader most(*data, loader_options(workers, false, 2));
    std::string warnings;
    {
      const StandardError standard_error;
      for (int epoch = 0; epoch < 3; ++epoch) {
        most.start_epoch(epoch);
        Batch batch;
        REQUIRE(most.next(batch));
        REQUIRE(most.next(batch));
      }
      warnings = standard_error.text();
    }
    INFO(warnings);
    CHECK(std::count(warnings.begin(), warnings.end(), '\n') == 2);
    CHECK(warnings.find("bad file 2 of data.max_bad_files=2") != std::string::npos);
    Loader one(*data, loader_options(workers, false, 1));
    one.start_epoch(0);
    Batch batch;
    REQUIRE(one.next(batch));  // v0 of classa
    for (int again = 0; again < 2; ++again)
      CHECK_USER_ERROR(one.next(batch), "test picture", "val/classb/v1.PPM", "empty", "data.max_bad_files=2");
    Loader none(*data, loader_options(workers, false, 0));
    none.start_epoch(0);
    CHECK_USER_ERROR(none.next(batch), "val/classa/v0.PPM", "data.max_bad_files=1");
  }
}

TEST_CASE("the checksum of a set on demand tells names, order and some contents, and needs no decoding") {
  const Folder folder;
  const auto sum = [&] { return data_checksum(*open(options_of(folder))); };
  const auto first = sum();
  CHECK(sum() == first);
  folder.write("train/classa/p0.ppm", {1, 2, 3});
  const auto changed = sum();
  CHECK(changed != first);
  fs::rename(folder.at("train/classa/p0.ppm"), folder.at("train/classa/q0.ppm"));
  CHECK(sum() != changed);
  const auto names = [&] { return open(options_of(folder))->class_names_checksum(); };
  const std::uint64_t before = names();
  for (const char* split : {"train/", "val/"})
    fs::rename(folder.at(split + std::string("classb")), folder.at(split + std::string("classbb")));
  CHECK(names() != before);
}

TEST_CASE("folders that are no such set are refused with one message each") {
  const auto refused = [](const TempFolder& folder, std::initializer_list<std::string> words) {
    return user_error([&] { open(options_of(folder)); }, words);
  };
  DatasetOptions nowhere;
  CHECK_USER_ERROR(open(nowhere), "data.root", "is not set", "fetch-data imagenette");
  TempFolder bare;
  CHECK(refused(bare, {"there is no folder", "/train'", "a folder per class"}));
  bare.write("train/a/x.ppm", pnm_picture(4, 4, 1));
  CHECK(refused(bare, {"/val'"}));
  bare.write("val/ILSVRC2012_val_00000001.JPEG", {1});
  CHECK(refused(bare, {"has no folders", "folders of their classes", "valprep.sh"}));
  bare.write("val/a/x.ppm", pnm_picture(4, 4, 1));
  CHECK(refused(bare, {"one class only", "'a'"}));
  const Folder folder;
  folder.write("train/classd/x.ppm", pnm_picture(4, 4, 1));
  folder.write("val/classe/x.ppm", pnm_picture(4, 4, 1));
  CHECK(refused(folder, {"in train/ alone: 'classd'; in val/ alone: 'classe'"}));
  const Folder empty;
  fs::create_directories(empty.at("train/classd"));
  fs::create_directories(empty.at("val/classd"));
  CHECK(refused(empty, {"no pictures", "'classd' of", "/train'"}));
  DatasetOptions many = options_of(Folder());
  many.train_size = 13;
  CHECK_THROWS_AS(open(many), UserError);
}

// Pictures in a folder per class, as ImageNet and Imagenette are unpacked: root/train/CLASS/*.JPEG,
// root/val/CLASS/*.JPEG. Only names are kept: samples are read, decoded, cropped and resized on demand.
//
// Training: a crop of random area and shape, resized, mirrored with probability one half (Szegedy et al.,
// "Going Deeper with Convolutions", 2015, section 6; the numbers are those of torchvision's
// RandomResizedCrop). Else: the shorter side resized, then the crop in the centre.
#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <cmath>
#include <filesystem>
#include <map>
#include <set>

#include "data/dataset.h"
#include "data/image.h"
#include "nn/base/checksum.h"
#include "nn/base/memory.h"
#include "nn/base/text.h"
#include "nn/core/rng.h"

namespace topknot {
namespace {

namespace fs = std::filesystem;

constexpr int kUsualSide = 224, kUsualResize = 256;  // of ImageNet
constexpr int kShown = 3;                            // names in a message
constexpr std::int64_t kFilesInChecksum = 256, kSizesInChecksum = 16384;

std::string extension_of(const std::string& name) {
  std::string kind = fs::path(name).extension().string();
  for (char& c : kind) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  return kind;
}

bool names_a_picture(const std::string& name) {
  static const std::set<std::string> kinds = {".bmp", ".jpeg", ".jpg", ".pbm",
                                              ".pgm", ".png",  ".pnm", ".ppm"};
  return kinds.count(extension_of(name)) > 0;
}

// How many entries of folders are not read, by what they are.
using Ignored = std::map<std::string, std::int64_t>;

// The folders in `folder`, or the pictures, in the order of their names: the same on every machine.
std::vector<std::string> entries(const fs::path& folder, bool folders, Ignored& ignored) {
  std::vector<std::string> names;
  try {
    for (const fs::directory_entry& entry : fs::directory_iterator(folder)) {
      std::string name = entry.path().filename().string();
      if (name.starts_with('.')) continue;
      const bool picture = names_a_picture(name);
      std::error_code error;  // of a link in circles, or where we may not go
      if (folders ? entry.is_directory() : picture)
        names.push_back(std::move(name));
      else if (folders && picture)
        ++ignored["pictures outside the folders of the classes"];
      else if (!folders)
        ++ignored[entry.is_directory(error)    ? "folders in the folders of the classes"
                  : extension_of(name).empty() ? "files without an ending"
                                               : "*" + printable(extension_of(name), 20)];
    }
  } catch (const fs::filesystem_error& error) {
    throw UserError(
        fmt::format("data.root: '{}' cannot be read: {}", folder.string(), error.code().message()));
  }
  std::sort(names.begin(), names.end());
  return names;
}

// "*.webp (12), folders in the folders of the classes (1)"
std::string counts_of(const Ignored& ignored) {
  std::string text;
  for (const auto& [what, count] : ignored)
    text += fmt::format("{}{} ({})", text.empty() ? "" : ", ", what, count);
  return text;
}

std::string some_of(const std::vector<std::string>& names) {
  const std::size_t shown = std::min<std::size_t>(names.size(), kShown);
  std::string text;
  for (std::size_t i = 0; i < shown; ++i) text += (i ? ", '" : "'") + names[i] + "'";
  return names.size() > shown ? fmt::format("{} and {} more", text, names.size() - shown) : text;
}

// The folders of the classes in root/split.
std::vector<std::string> class_names(const std::string& root, const char* split, Ignored& ignored) {
  const fs::path folder = fs::path(root) / split;
  std::error_code absent;
  if (root.empty() || !fs::is_directory(folder, absent))
    throw UserError(fmt::format(
        "data.root: {}: image_folder needs root/train and root/val with a folder per class in each; "
        "`scripts/fetch-data imagenette --to DIR` brings a small one, then give data.root=DIR",
        root.empty() ? "is not set" : fmt::format("there is no folder '{}'", folder.string())));
  std::vector<std::string> names = entries(folder, true, ignored);
  if (!names.empty()) return names;
  const bool flat = !entries(folder, false, ignored).empty();
  throw UserError(
      fmt::format("data.root: '{}' has no folders: image_folder needs one per class{}", folder.string(),
                  flat ? "; move the pictures that lie there into the folders of their classes (for "
                         "ImageNet's validation set there are scripts by the name of valprep.sh)"
                       : ""));
}

void check_same_classes(const std::string& root, const std::vector<std::string>& train,
                        const std::vector<std::string>& val) {
  if (train == val) return;
  const auto only = [](const std::vector<std::string>& a, const std::vector<std::string>& b) {
    std::vector<std::string> names;
    std::set_difference(a.begin(), a.end(), b.begin(), b.end(), std::back_inserter(names));
    return names.empty() ? "none" : some_of(names);
  };
  throw UserError(
      fmt::format("data.root: '{}': train/ and val/ must have folders of the same names, which are the "
                  "classes; in train/ alone: {}; in val/ alone: {}",
                  root, only(train, val), only(val, train)));
}

// RandomResizedCrop: of 8 % to 100 % of the area, width / height from 3/4 to 4/3, even in its logarithm;
// after ten attempts that do not fit, the largest of such a shape in the centre.
PixelRect random_crop(const ImageSize& size, const CounterRng& random) {
  constexpr int kAttempts = 10;
  constexpr double kLeastArea = 0.08, kWidest = 4.0 / 3;
  const auto rect = [](int left, int top, int width, int height) {
    return PixelRect{left, top, left + width, top + height};
  };
  const double width = size.width, height = size.height;
  for (std::uint64_t attempt = 0; attempt < kAttempts; ++attempt) {
    const std::uint64_t at = 4 * attempt;
    const double area = width * height * (kLeastArea + (1 - kLeastArea) * random.uniform(at)),
                 shape = std::exp((2 * random.uniform(at + 1) - 1) * std::log(kWidest));
    const auto w = static_cast<int>(std::lround(std::sqrt(area * shape))),
               h = static_cast<int>(std::lround(std::sqrt(area / shape)));
    if (w < 1 || h < 1 || w > size.width || h > size.height) continue;
    return rect(static_cast<int>(random.below(at + 2, static_cast<std::uint32_t>(size.width - w + 1))),
                static_cast<int>(random.below(at + 3, static_cast<std::uint32_t>(size.height - h + 1))), w,
                h);
  }
  const double shape = std::clamp(width / height, 1 / kWidest, kWidest);
  const int w = std::min(size.width, static_cast<int>(std::lround(height * shape))),
            h = std::min(size.height, static_cast<int>(std::lround(width / shape)));
  return rect((size.width - w) / 2, (size.height - h) / 2, w, h);
}
constexpr std::uint64_t kFlipNumber = 40;  // after those of ten attempts

// Which part of the picture at its full size becomes the sample when its shorter side is resized to `resize`.
PixelBox centre_box(const ImageSize& size, int resize, int side) {
  const int shorter = std::min(size.width, size.height);
  const auto range = [&](int length) {
    // Whole pixels of the resized picture; a long and thin one has more than an int holds.
    const std::int64_t to = std::int64_t{resize} * length / shorter;
    const double first = std::nearbyint(static_cast<double>(to - side) / 2),
                 step = static_cast<double>(length) / static_cast<double>(to);
    return std::pair{first * step, (first + side) * step};
  };
  const auto [left, right] = range(size.width);
  const auto [top, bottom] = range(size.height);
  return {left, top, right, bottom};
}

// The pixels that resample() looks at for a box inside the picture.
PixelRect around(const PixelBox& box, const ImageSize& size, int side) {
  const double x = std::max(1.0, (box.right - box.left) / side) + 1,
               y = std::max(1.0, (box.bottom - box.top) / side) + 1;
  return {std::max(0, static_cast<int>(box.left - x)), std::max(0, static_cast<int>(box.top - y)),
          std::min(size.width, static_cast<int>(std::ceil(box.right + x))),
          std::min(size.height, static_cast<int>(std::ceil(box.bottom + y)))};
}

// The greatest reduction after which the box still has a pixel for each of the sample.
int shrink_of(const PixelBox& box, int side) {
  int shrink = 8;
  while (shrink > 1 && std::min(box.right - box.left, box.bottom - box.top) < shrink * side) shrink /= 2;
  return shrink;
}

std::vector<float> per_channel(const char* key, const std::vector<double>& given,
                               std::vector<float> imagenet) {
  if (given.empty()) return imagenet;
  if (given.size() != 1 && given.size() != 3)
    throw UserError(
        fmt::format("{}: {} numbers; give one, or three for red, green and blue", key, given.size()));
  std::vector<float> values(given.begin(), given.end());
  if (values.size() == 1) values.resize(3, values[0]);
  return values;
}

const Option kResize{
    "resize", 0,
    "pixels of the shorter side in evaluation, before the centre is cut out; 0: 256/224 of data.image_size",
    0, 4096};
const Option kMean{"mean", std::vector<double>(),
                   "what is taken from each channel (or from all, one number), whose pixels are 0 to 1; []: "
                   "0.485, 0.456, 0.406, ImageNet's",
                   0, 1};
const Option kStd{"std",
                  std::vector<double>(),
                  "what each channel is divided by then; []: 0.229, 0.224, 0.225, ImageNet's",
                  0,
                  10,
                  true};

class ImageFolder final : public Dataset {
 public:
  ImageFolder(const DatasetOptions& options, Split split)
      : side_(options.get<int>(option::image_size)), resize_(options.get<int>(kResize)) {
    if (side_ == 0) side_ = kUsualSide;
    if (resize_ == 0) resize_ = static_cast<int>(std::lround(double{kUsualResize} / kUsualSide * side_));
    if (resize_ < side_)
      throw UserError(
          fmt::format("data.resize: {} is less than data.image_size ({}), which is cut out of it; give at "
                      "least that, or 0",
                      resize_, side_));
    mean_ = per_channel("data.mean", options.get<std::vector<double>>(kMean), {0.485f, 0.456f, 0.406f});
    std_ = per_channel("data.std", options.get<std::vector<double>>(kStd), {0.229f, 0.224f, 0.225f});
    Ignored ignored, elsewhere;
    const bool training = split == Split::train;
    const auto train = class_names(options.root, "train", training ? ignored : elsewhere),
               val = class_names(options.root, "val", training ? elsewhere : ignored);
    check_same_classes(options.root, train, val);
    if (train.size() < 2)
      throw UserError(fmt::format("data.root: '{}' has one class only, '{}'; classification needs two",
                                  options.root, train.front()));
    folder_ = (fs::path(options.root) / (training ? "train" : "val")).string();
    classes_ = train;
    std::vector<std::string> empty;
    for (const std::string& name : classes_) {
      first_.push_back(static_cast<std::int64_t>(ends_.size()));
      for (const std::string& file : entries(fs::path(folder_) / name, false, ignored)) {
        names_ += file;
        ends_.push_back(names_.size());
      }
      if (first_.back() == static_cast<std::int64_t>(ends_.size())) empty.push_back(name);
    }
    if (!empty.empty())
      throw UserError(
          fmt::format("data.root: no pictures (.jpg, .jpeg, .png, .bmp, .ppm, ...) in {} of '{}'{}",
                      some_of(empty), folder_, ignored.empty() ? "" : "; not read: " + counts_of(ignored)));
    if (!ignored.empty())
      warning_ =
          fmt::format("data.root: '{}': JPEG, PNG, BMP and PNM in a folder per class are read; not read: {}",
                      folder_, counts_of(ignored));
    first_.push_back(static_cast<std::int64_t>(ends_.size()));
    size_ = limited_size(options, split, first_.back());
  }

  const std::string& name() const override { return name_; }
  std::int64_t size() const override { return size_; }
  Shape sample_shape() const override { return {3, side_, side_}; }
  int classes() const override { return static_cast<int>(classes_.size()); }
  std::int32_t label(std::int64_t index) const override { return class_of(file_of(index)); }
  std::vector<float> channel_mean() const override { return mean_; }
  std::vector<float> channel_std() const override { return std_; }
  bool augment_helps() const override { return true; }
  std::vector<std::string> warnings() const override {
    return warning_.empty() ? std::vector<std::string>() : std::vector{warning_};
  }

  bool on_demand() const override { return true; }
  void decode(std::int64_t index, const CounterRng* random, std::uint8_t* pixels,
              std::vector<DamagedFile>& damaged) const override {
    const std::int64_t file = file_of(index);
    const auto label = static_cast<std::size_t>(class_of(file));
    const std::int64_t first = first_[label], count = first_[label + 1] - first;
    for (std::int64_t next = 0; next < count; ++next) {
      const std::int64_t tried = first + (file - first + next) % count;
      try {
        return decode_file(tried, random, pixels);
      } catch (const OutOfMemory&) {
        throw;
      } catch (const UserError& error) {
        damaged.push_back({tried, fmt::format("picture '{}': {}", path(tried), error.what())});
      }
    }
    throw UserError(fmt::format("data.root: not one picture of '{}' can be read, the first: {}",
                                (fs::path(folder_) / classes_[label]).string(), damaged.front().what));
  }

  bool add_to(Checksum& checksum) const override {
    const auto add = [&](const auto& bytes) { checksum.update(std::as_bytes(std::span(bytes))); };
    add(first_), add(ends_), add(names_);
    const std::int64_t files = first_.back(), step = std::max<std::int64_t>(1, files / kFilesInChecksum);
    // Each size is a message to a file server: ImageNet's would take minutes.
    std::vector<std::uintmax_t> sizes;
    std::error_code error;
    for (std::int64_t i = 0, most = std::min(files, kSizesInChecksum); i < most; ++i)
      sizes.push_back(fs::file_size(path(i * files / most), error));
    add(sizes);
    for (std::int64_t file = 0; file < files; file += step) try {
        add(read_file(path(file)));
      } catch (const UserError&) {  // a loader says so when it needs the file
      }
    return true;
  }
  std::uint64_t class_names_checksum() const override {
    Checksum checksum;
    for (const std::string& name : classes_)  // with the zero at the end, which no name has
      checksum.update(std::as_bytes(std::span(name.c_str(), name.size() + 1)));
    return checksum.value();
  }

 private:
  // A set that has a part of the files takes evenly spaced ones: they are in the order of their classes.
  std::int64_t file_of(std::int64_t index) const { return index * first_.back() / size_; }
  std::int32_t class_of(std::int64_t file) const {
    return static_cast<std::int32_t>(std::upper_bound(first_.begin(), first_.end(), file) - first_.begin() -
                                     1);
  }
  std::string path(std::int64_t file) const {
    const auto i = static_cast<std::size_t>(file);
    const std::size_t begin = i == 0 ? 0 : ends_[i - 1];
    return (fs::path(folder_) / classes_[static_cast<std::size_t>(class_of(file))] /
            names_.substr(begin, ends_[i] - begin))
        .string();
  }

  void decode_file(std::int64_t file, const CounterRng* random, std::uint8_t* pixels) const {
    const std::vector<std::uint8_t> bytes = read_file(path(file));
    const ImageSize size = image_size(bytes);
    PixelBox box;
    PixelRect rect;
    if (random) {  // a crop's edge is the end of the picture
      rect = random_crop(size, *random);
      box = {double(rect.left), double(rect.top), double(rect.right), double(rect.bottom)};
    } else {
      box = centre_box(size, resize_, side_);
      rect = around(box, size, side_);
    }
    resample(decode_image(bytes, rect, shrink_of(box, side_)), box, side_,
             random && random->below(kFlipNumber, 2) == 1, pixels);
  }

  const std::string name_ = "image_folder";
  int side_, resize_;
  std::vector<float> mean_, std_;
  std::string folder_;
  std::vector<std::string> classes_;
  std::vector<std::int64_t> first_;  // file of each class, and the number of files
  std::string names_;                // of all files, one after the other: ImageNet has 1.28 million
  std::vector<std::size_t> ends_;
  std::int64_t size_ = 0;
  std::string warning_;
};

const bool image_folder_registered = add_dataset<ImageFolder>(
    "image_folder",
    "pictures in a folder per class (ImageNet, Imagenette), read as they are needed; needs data.root",
    {option::image_size, kResize, kMean, kStd, option::max_bad_files});

}  // namespace
}  // namespace topknot

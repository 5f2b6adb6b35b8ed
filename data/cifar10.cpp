// CIFAR-10, binary version: Krizhevsky, "Learning multiple layers of features from tiny images", 2009. A
// record is 3073 bytes: the label, then 1024 bytes each of red, green and blue, rows first. 10000 a file.
#include <fmt/format.h>

#include "data/dataset.h"
#include "nn/base/memory.h"

namespace topknot {
namespace {

constexpr std::int64_t kPixels = 3 * 32 * 32;
constexpr std::int64_t kRecord = 1 + kPixels;
constexpr std::int64_t kRecordsPerFile = 10000;

void append_file(const std::string& folder, const std::string& name, std::vector<std::uint8_t>& records) {
  const std::string path = find_data_file("cifar10", folder, {name});
  const std::vector<std::uint8_t> content = read_file(path);
  const auto size = static_cast<std::int64_t>(content.size());
  if (size != kRecord * kRecordsPerFile)
    throw UserError(fmt::format(
        "damaged CIFAR-10 file '{}': {} bytes, expected {} (10000 records of 3073); {}{}", path, size,
        kRecord * kRecordsPerFile, size < kRecord * kRecordsPerFile ? "it is truncated" : "it is too long",
        fetch_hint("cifar10", folder)));
  for (std::int64_t i = 0; i < kRecordsPerFile; ++i)
    if (const int label = content[static_cast<std::size_t>(i * kRecord)]; label > 9)
      throw UserError(
          fmt::format("damaged CIFAR-10 file '{}': record {} (from 0) has label {}, labels are 0 to 9{}",
                      path, i, label, fetch_hint("cifar10", folder)));
  records.insert(records.end(), content.begin(), content.end());
}

class Cifar10 final : public Dataset {
 public:
  Cifar10(const DatasetOptions& options, Split split) {
    std::vector<std::string> names;
    if (split == Split::train)
      for (int i = 1; i <= 5; ++i) names.push_back(fmt::format("data_batch_{}.bin", i));
    else
      names.push_back("test_batch.bin");
    const std::string folder =
        find_data_folder("cifar10", options.root, {"cifar-10-batches-bin"}, {names.front()});
    const std::size_t size = names.size() * static_cast<std::size_t>(kRecord * kRecordsPerFile);
    with_memory("the pictures of cifar10", static_cast<double>(size), [&] { records_.reserve(size); });
    for (const auto& name : names) append_file(folder, name, records_);
    size_ = limited_size(options, split, static_cast<std::int64_t>(names.size()) * kRecordsPerFile);
  }

  const std::string& name() const override { return name_; }
  std::int64_t size() const override { return size_; }
  Shape sample_shape() const override { return {3, 32, 32}; }
  int classes() const override { return 10; }
  const std::uint8_t* bytes(std::int64_t index) const override {
    return records_.data() + index * kRecord + 1;
  }
  std::int32_t label(std::int64_t index) const override {
    return records_[static_cast<std::size_t>(index * kRecord)];
  }
  std::vector<float> channel_mean() const override { return {0.4914f, 0.4822f, 0.4465f}; }
  std::vector<float> channel_std() const override { return {0.2470f, 0.2435f, 0.2616f}; }
  bool augment_helps() const override { return true; }

 private:
  const std::string name_ = "cifar10";
  std::vector<std::uint8_t> records_;
  std::int64_t size_ = 0;
};

const bool cifar10_registered =
    add_dataset<Cifar10>("cifar10", "60000 colour pictures of 32 x 32 in 10 classes; needs data.root");

}  // namespace
}  // namespace topknot

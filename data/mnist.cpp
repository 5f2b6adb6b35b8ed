// MNIST in the IDX format: LeCun, Cortes, Burges, "The MNIST database of handwritten digits". A header of
// big-endian 32-bit numbers (magic, then one length per dimension), then the bytes. Files are read gzipped or
// plain; sets of the same format and sizes (Fashion-MNIST) work too.
#include <fmt/format.h>

#include "data/dataset.h"

namespace topknot {
namespace {

constexpr std::int64_t kMnistSide = 28;
constexpr std::uint32_t kImagesMagic = 0x00000803, kLabelsMagic = 0x00000801;

struct Idx {
  std::string path;
  std::vector<std::int64_t> dims;
  std::vector<std::uint8_t> content;  // header included
  std::size_t header = 0;             // bytes
};

std::uint32_t big_endian(const std::uint8_t* p) {
  return std::uint32_t{p[0]} << 24 | std::uint32_t{p[1]} << 16 | std::uint32_t{p[2]} << 8 |
         std::uint32_t{p[3]};
}

Idx read_idx(const std::string& folder, const std::string& name, std::uint32_t magic) {
  Idx idx;
  idx.path = find_data_file("mnist", folder, {name + ".gz", name});
  const std::string hint = fetch_hint("mnist", folder);
  idx.content = idx.path.ends_with(".gz") ? read_gzip(idx.path, hint) : read_file(idx.path);
  const std::size_t rank = magic & 0xff;
  idx.header = 4 + 4 * rank;
  const std::string damaged = "damaged MNIST file '" + idx.path + "': ";
  if (idx.content.size() < idx.header) throw UserError(damaged + "it ends within the header" + hint);
  if (const std::uint32_t found = big_endian(idx.content.data()); found != magic)
    throw UserError(fmt::format("{}its IDX magic number is {}, expected {}{}", damaged, found, magic, hint));
  const auto payload = static_cast<std::int64_t>(idx.content.size() - idx.header);
  std::int64_t expected = 1;
  bool plausible = true;
  for (std::size_t i = 0; i < rank; ++i) {
    idx.dims.push_back(big_endian(idx.content.data() + 4 + 4 * i));
    // A product that could overflow cannot be a file's size either.
    plausible = plausible && idx.dims.back() > 0 && expected <= payload;
    if (plausible) expected *= idx.dims.back();
  }
  if (!plausible || expected != payload)
    throw UserError(
        fmt::format("{}its header does not fit the {} bytes that follow{}", damaged, payload, hint));
  return idx;
}

class Mnist final : public Dataset {
 public:
  Mnist(const DatasetOptions& options, Split split) {
    const std::string prefix = split == Split::train ? "train" : "t10k";
    const std::string images = prefix + "-images-idx3-ubyte", labels = prefix + "-labels-idx1-ubyte";
    const std::string folder =
        find_data_folder("mnist", options.root, {"mnist", "MNIST/raw"}, {images + ".gz", images});
    images_ = read_idx(folder, images, kImagesMagic);
    labels_ = read_idx(folder, labels, kLabelsMagic);
    const std::string hint = fetch_hint("mnist", folder);
    if (images_.dims[1] != kMnistSide || images_.dims[2] != kMnistSide)
      throw UserError(
          fmt::format("MNIST file '{}': its pictures are {} x {}, and mnist reads those of {} x {}{}",
                      images_.path, images_.dims[1], images_.dims[2], kMnistSide, kMnistSide, hint));
    if (images_.dims[0] != labels_.dims[0])
      throw UserError(
          fmt::format("MNIST files do not belong together: '{}' has {} images, '{}' has {} labels{}",
                      images_.path, images_.dims[0], labels_.path, labels_.dims[0], hint));
    for (std::size_t i = labels_.header; i < labels_.content.size(); ++i)
      if (labels_.content[i] > 9)
        throw UserError(
            fmt::format("damaged MNIST file '{}': record {} (from 0) has label {}, labels are 0 to 9{}",
                        labels_.path, i - labels_.header, labels_.content[i], hint));
    size_ = limited_size(options, split, images_.dims[0]);
  }

  const std::string& name() const override { return name_; }
  std::int64_t size() const override { return size_; }
  Shape sample_shape() const override { return {1, kMnistSide, kMnistSide}; }
  int classes() const override { return 10; }
  const std::uint8_t* bytes(std::int64_t index) const override {
    return images_.content.data() + images_.header + index * kMnistSide * kMnistSide;
  }
  std::int32_t label(std::int64_t index) const override {
    return labels_.content[labels_.header + static_cast<std::size_t>(index)];
  }
  std::vector<float> channel_mean() const override { return {0.1307f}; }
  std::vector<float> channel_std() const override { return {0.3081f}; }

 private:
  const std::string name_ = "mnist";
  Idx images_, labels_;
  std::int64_t size_ = 0;
};

const bool mnist_registered =
    add_dataset<Mnist>("mnist", "70000 handwritten digits, grey, 28 x 28, in 10 classes; needs data.root");

}  // namespace
}  // namespace topknot

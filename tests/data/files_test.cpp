// CIFAR-10 and MNIST files: good ones, damaged ones, missing ones.
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>
#include <zlib.h>

#include "data/dataset.h"
#include "data/speech.h"
#include "tests/support/test.h"

using namespace topknot;
using Bytes = std::vector<std::uint8_t>;

namespace {

constexpr std::size_t kRecord = 3073;

// 10000 records: record i has label i mod 10, and pixel p is (i + p) mod 256.
Bytes cifar_file() {
  Bytes content(10000 * kRecord);
  for (std::size_t i = 0; i < 10000; ++i) {
    content[i * kRecord] = static_cast<std::uint8_t>(i % 10);
    for (std::size_t p = 0; p < 3072; ++p) content[i * kRecord + 1 + p] = static_cast<std::uint8_t>(i + p);
  }
  return content;
}

std::unique_ptr<Dataset> open(const std::string& name, const std::string& root, Split split = Split::test) {
  DatasetOptions options;
  options.root = root;
  return make_dataset(name, options, split);
}

Bytes idx(std::uint32_t magic, const std::vector<std::uint32_t>& dims, std::size_t payload) {
  Bytes content;
  const auto put = [&](std::uint32_t v) {
    for (int shift = 24; shift >= 0; shift -= 8) content.push_back(static_cast<std::uint8_t>(v >> shift));
  };
  put(magic);
  for (const auto d : dims) put(d);
  for (std::size_t i = 0; i < payload; ++i) content.push_back(static_cast<std::uint8_t>(i % 10));
  return content;
}

Bytes gzip(const TempFolder& folder, const Bytes& content) {
  const std::string path = folder.at("scratch.gz");
  gzFile file = gzopen(path.c_str(), "wb");
  REQUIRE(gzwrite(file, content.data(), static_cast<unsigned>(content.size())) ==
          static_cast<int>(content.size()));
  REQUIRE(gzclose(file) == Z_OK);
  std::ifstream in(path, std::ios::binary);
  return Bytes(std::istreambuf_iterator<char>(in), {});
}

const std::string kImages = "t10k-images-idx3-ubyte", kLabels = "t10k-labels-idx1-ubyte";

}  // namespace

TEST_CASE("CIFAR-10 is read from the folder or its cifar-10-batches-bin") {
  const TempFolder folder;
  Bytes content = cifar_file();
  folder.write("cifar-10-batches-bin/test_batch.bin", content);
  const auto test = open("cifar10", folder.str());
  CHECK(test->size() == 10000);
  CHECK(test->classes() == 10);
  CHECK(test->sample_shape() == Shape{3, 32, 32});
  CHECK(test->label(1234) == 4);
  CHECK(test->bytes(1234)[3071] == (1234 + 3071) % 256);
  std::vector<float> sample(3072);
  test->get(255, sample.data());
  CHECK(sample[0] == 1.0f);
  CHECK(sample[1] == 0.0f);
  CHECK(sample[52] == 51 / 255.0f);
  CHECK(open("cifar10", folder.at("cifar-10-batches-bin"))->label(9) == 9);
}

TEST_CASE("CIFAR-10 training data is the five files in order, or as many samples as asked for") {
  const TempFolder folder;
  Bytes content = cifar_file();
  for (int file = 1; file <= 5; ++file) {
    content[1] = static_cast<std::uint8_t>(100 + file);  // first pixel of the first record
    folder.write("data_batch_" + std::to_string(file) + ".bin", content);
  }
  const auto train = open("cifar10", folder.str(), Split::train);
  CHECK(train->size() == 50000);
  for (int file = 1; file <= 5; ++file) CHECK(train->bytes((file - 1) * 10000)[0] == 100 + file);
  CHECK(train->augment_helps());

  DatasetOptions options;
  options.root = folder.str();
  options.train_size = 7;
  CHECK(make_dataset("cifar10", options, Split::train)->size() == 7);
  options.train_size = 50001;
  CHECK_USER_ERROR(make_dataset("cifar10", options, Split::train), "data.train_size");
}

TEST_CASE("a damaged CIFAR-10 file is refused with its name and place") {
  const TempFolder folder;
  const auto refused = [&](const Bytes& content, const std::string& why) {
    folder.write("test_batch.bin", content);
    CHECK_USER_ERROR(open("cifar10", folder.str()), "test_batch.bin", why);
  };
  Bytes content = cifar_file();
  content[777 * kRecord] = 10;
  refused(content, "record 777 (from 0) has label 10");
  content[777 * kRecord] = 7;
  content.push_back(0);
  refused(content, "too long");
  content.resize(9999 * kRecord);  // whole records, one too few
  refused(content, "truncated");
  content.resize(5 * kRecord + 17);
  refused(content, "truncated");
  refused({}, "truncated");
}

TEST_CASE("missing data names the file looked for and the command that brings it") {
  const TempFolder folder;
  CHECK_USER_ERROR(open("cifar10", ""), "data.root", "scripts/fetch-data cifar10");
  CHECK_USER_ERROR(open("cifar10", folder.at("none")), "no such folder");
  CHECK_USER_ERROR(open("cifar10", folder.str()), "test_batch.bin",
                   "scripts/fetch-data cifar10 --to " + folder.str());
  CHECK_USER_ERROR(open("mnist", folder.str()), kImages, "scripts/fetch-data mnist");
  folder.write(kImages, idx(0x803, {2, 4, 4}, 32));
  CHECK_USER_ERROR(open("mnist", folder.str()), kLabels);
  CHECK_USER_ERROR(open("cifar", folder.str()), "did you mean 'cifar10'");
}

TEST_CASE("MNIST is read plain and gzipped alike") {
  const TempFolder plain, packed;
  const Bytes images = idx(0x803, {3, 28, 28}, 3 * 784), labels = idx(0x801, {3}, 3);
  plain.write(kImages, images);
  plain.write(kLabels, labels);
  packed.write(kImages + ".gz", gzip(packed, images));
  packed.write(kLabels + ".gz", gzip(packed, labels));
  for (const auto* folder : {&plain, &packed}) {
    const auto test = open("mnist", folder->str());
    CHECK(test->size() == 3);
    CHECK(test->sample_shape() == Shape{1, 28, 28});
    CHECK(test->label(2) == 2);
    CHECK(test->bytes(1)[4] == 8);
    CHECK_FALSE(test->augment_helps());
    std::vector<float> sample(784);
    test->get(2, sample.data());
    CHECK(sample[1] == 9 / 255.0f);
  }
}

TEST_CASE("damaged or mismatched MNIST files are refused with the reason") {
  const TempFolder folder;
  const Bytes images = idx(0x803, {3, 28, 28}, 3 * 784), labels = idx(0x801, {3}, 3);
  folder.write(kImages, images);
  const auto refused = [&](const Bytes& wrong, const std::string& why) {
    folder.write(kLabels, wrong);
    CHECK_USER_ERROR(open("mnist", folder.str()), why);
  };
  refused(idx(0x802, {3}, 3), "magic");
  refused(idx(0x801, {4}, 4), "3 images");
  refused(idx(0x801, {4}, 3), "header does not fit");
  refused(idx(0x801, {0}, 0), "header does not fit");
  refused({0, 0, 8}, "within the header");
  Bytes wrong = labels;
  wrong[8 + 1] = 10;
  refused(wrong, "record 1 (from 0) has label 10");
  folder.write(kLabels, labels);
  CHECK(open("mnist", folder.str())->size() == 3);
  folder.write(kImages, idx(0x803, {3, 14, 56}, 3 * 784));
  CHECK_USER_ERROR(open("mnist", folder.str()), kImages, "14 x 56", "28 x 28");
  folder.write(kImages, idx(0x803, {0xffffffff, 0xffffffff, 0xffffffff}, 48));
  CHECK_USER_ERROR(open("mnist", folder.str()), "header does not fit");
}

TEST_CASE("a corrupt gzip file is refused, whichever way it is corrupt") {
  const TempFolder folder;
  folder.write(kLabels, idx(0x801, {30}, 30));
  const Bytes good = gzip(folder, idx(0x803, {30, 28, 28}, 30 * 784));
  const auto refused = [&](const Bytes& wrong, const std::string& why) {
    folder.write(kImages + ".gz", wrong);
    CHECK_USER_ERROR(open("mnist", folder.str()), "corrupt gzip", why);
  };
  Bytes wrong = good;
  wrong[wrong.size() - 8] ^= 1;  // the checksum
  refused(wrong, kImages);
  wrong = good;
  wrong[20] ^= 0xff;
  refused(wrong, kImages);
  wrong = good;
  wrong.resize(wrong.size() / 2);
  refused(wrong, "cut short");
  refused(idx(0x803, {30, 28, 28}, 30 * 784), "no gzip header");
  folder.write(kImages + ".gz", good);
  CHECK(open("mnist", folder.str())->size() == 30);
}

// Opening the pipe would wait for a writer that never comes.
TEST_CASE("a named pipe, a socket, a device and a folder are refused in place of a file, by every reader") {
  const TempFolder folder;
  const auto make_pipe = [](const std::string& path) { return mkfifo(path.c_str(), 0600) == 0; };
  const auto make_socket = [](const std::string& path) {
    const int socket = ::socket(AF_UNIX, SOCK_STREAM, 0);
    sockaddr_un address{AF_UNIX, {}};
    path.copy(address.sun_path, sizeof address.sun_path - 1);
    const bool made = bind(socket, reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0;
    return close(socket) == 0 && made;
  };
  const auto link_device = [](const std::string& path) { return symlink("/dev/zero", path.c_str()) == 0; };
  const auto make_folder = [](const std::string& path) { return mkdir(path.c_str(), 0700) == 0; };
  const auto refused = [&](auto make, const std::string& kind) {
    const auto at = [&](const std::string& name, const auto& read) {
      const std::string path = folder.at(name);
      REQUIRE(make(path));
      CHECK_USER_ERROR(read(), "'" + path + "': it is " + kind + ", not a regular file");
      std::filesystem::remove(path);
    };
    at("a.png", [&] { read_file(folder.at("a.png")); });
    at("a.gz", [&] { read_gzip(folder.at("a.gz"), ""); });
    at("a.wav", [&] { recording_samples(folder.at("a.wav")); });
    at("a.flac", [&] { read_recording(folder.at("a.flac")); });
    at("train.tsv", [&] { open("speech", folder.str(), Split::train); });
    at("train.txt", [&] { open("text", folder.str(), Split::train); });
    at("test_batch.bin", [&] { open("cifar10", folder.str()); });
    at(kImages, [&] { open("mnist", folder.str()); });
  };
  refused(make_pipe, "a named pipe");
  refused(make_socket, "a socket");
  refused(link_device, "a device");
  refused(make_folder, "a folder");
}

TEST_CASE("the real CIFAR-10 and MNIST are read whole") {
  const char* root = std::getenv("TOPKNOT_DATA");
  if (!root) {
    WARN("skipped: TOPKNOT_DATA does not name a folder with cifar10/ and mnist/");
    return;
  }
  const auto train = open("cifar10", std::string(root) + "/cifar10", Split::train);
  REQUIRE(train->size() == 50000);
  // The means that the loader normalises by are those of the files.
  std::vector<int> classes(10);
  std::vector<double> sum(3), squares(3);
  for (std::int64_t i = 0; i < train->size(); ++i) {
    ++classes[train->label(i)];
    for (int p = 0; p < 3072; ++p) {
      const double x = train->bytes(i)[p] / 255.0;
      sum[p / 1024] += x;
      squares[p / 1024] += x * x;
    }
  }
  CHECK(classes == std::vector<int>(10, 5000));
  for (std::size_t c = 0; c < 3; ++c) {
    const double mean = sum[c] / 51.2e6;
    CHECK(mean == Approx(train->channel_mean()[c]).epsilon(1e-3));
    CHECK(std::sqrt(squares[c] / 51.2e6 - mean * mean) == Approx(train->channel_std()[c]).epsilon(1e-3));
  }
  CHECK(open("cifar10", std::string(root) + "/cifar10")->size() == 10000);
  CHECK(open("mnist", std::string(root) + "/mnist", Split::train)->size() == 60000);
  CHECK(open("mnist", std::string(root) + "/mnist")->size() == 10000);
}

// Files of data sets, and their pictures.
#include <algorithm>
#include <cstring>
#include <fstream>
#include <vector>

#include "data/dataset.h"
#include "data/image.h"
#include "nn/base/check.h"
#include "tests/fuzz/inputs/input_target.h"

namespace topknot::fuzz {
namespace {

// What a loader takes of a data set, for some of its samples.
void use(const Dataset& data) {
  expect(data.size() > 0, "a data set without samples");
  const auto numel = std::size_t(data.sample_shape().numel());
  std::vector<float> sample(numel);
  for (const std::int64_t index : {std::int64_t{0}, data.size() / 2, data.size() - 1}) {
    data.get(index, sample.data());
    expect(data.label(index) >= 0 && data.label(index) < data.classes(), "a label outside the classes");
    for (const float value : sample) expect(value >= 0 && value <= 1, "a pixel outside [0, 1]");
  }
}

// A whole file takes 30 MB, so the input describes one: the length in bytes (u32; 0: as it should be), then
// places (u32) and the bytes there in an otherwise empty file.
void cifar10(Bytes input) {
  constexpr std::uint32_t kSize = 30'730'000;
  static const Scratch scratch;
  const std::string path = scratch.write("test_batch.bin", {});
  std::uint32_t size = 0, place = 0;
  if (input.size() >= sizeof size) std::memcpy(&size, input.data(), sizeof size);
  size %= 2 * kSize;
  std::filesystem::resize_file(path, size == 0 ? kSize : size);
  std::fstream file(path, std::ios::binary | std::ios::in | std::ios::out);
  for (std::size_t at = sizeof size; at + sizeof place < input.size(); at += sizeof place + 1) {
    std::memcpy(&place, input.data() + at, sizeof place);
    file.seekp(place % (2 * kSize));
    file.put(char(input[at + sizeof place]));
  }
  file.close();
  DatasetOptions options;
  options.root = scratch.path("");
  use(*make_dataset("cifar10", options, Split::test));
}

// MNIST's two files: a byte whose bits say which of them is gzipped, the length of the first (u16), both
// contents.
void idx(Bytes input) {
  if (input.size() < 3) return;
  static const Scratch scratch;
  const auto packed = std::to_integer<unsigned>(input[0]);
  std::uint16_t length = 0;
  std::memcpy(&length, input.data() + 1, sizeof length);
  input = input.subspan(3);
  const std::size_t cut = std::min<std::size_t>(length, input.size());
  const auto put = [&](std::string name, bool gzipped, Bytes content) {
    scratch.remove(name + (gzipped ? "" : ".gz"));
    scratch.write(name + (gzipped ? ".gz" : ""), content);
  };
  put("t10k-images-idx3-ubyte", packed & 1, input.first(cut));
  put("t10k-labels-idx1-ubyte", packed & 2, input.subspan(cut));
  DatasetOptions options;
  options.root = scratch.path("");
  use(*make_dataset("mnist", options, Split::test));
}

// Windows of three tokens, each next one the label of the one before.
void use_stream(const Dataset& data) {
  expect(data.size() > 0, "a text without a window");
  for (std::int64_t index = 0; index < data.size(); ++index) {
    float window[3];
    data.get(index, window);
    for (int t = 0; t < 3; ++t) {
      expect(window[t] >= 0 && window[t] < float(data.classes()), "a token outside the vocabulary");
      expect(t == 0 || std::int32_t(window[t]) == data.label(index + t - 1),
             "a label that is not the next token");
    }
  }
}

// A training file and, after the first byte 0, a validation file.
void use_text(Bytes input, const std::string& tokens) {
  static const Scratch scratch;
  const auto cut = std::size_t(std::find(input.begin(), input.end(), std::byte{0}) - input.begin());
  scratch.write("train.txt", input.first(cut));
  scratch.write("valid.txt", input.subspan(std::min(cut + 1, input.size())));
  DatasetOptions options;
  options.root = scratch.path("");
  options.set("tokens", tokens);
  options.set("sequence_length", 3);
  for (const Split split : {Split::train, Split::test}) use_stream(*make_dataset("text", options, split));
}
void text(Bytes input) {
  use_text(input, "word");
}
void text_char(Bytes input) {
  use_text(input, "char");
}

void token_file(Bytes input) {
  static const Scratch scratch;
  scratch.write("train.bin", input);
  DatasetOptions options;
  options.root = scratch.path("");
  options.set("vocabulary", 1000);
  options.set("sequence_length", 3);
  use_stream(*make_dataset("tokens", options, Split::train));
}

// A manifest, whose length (u16) comes first, and the recording a.wav.
void speech(Bytes input) {
  if (input.size() < 2) return;
  static const Scratch scratch;
  std::uint16_t length = 0;
  std::memcpy(&length, input.data(), sizeof length);
  input = input.subspan(sizeof length);
  const std::size_t cut = std::min<std::size_t>(length, input.size());
  scratch.write("train.tsv", input.first(cut));
  scratch.write("a.wav", input.subspan(cut));
  DatasetOptions options;
  options.root = scratch.path("");
  const auto data = make_dataset("speech", options, Split::train);
  const std::int64_t frames = data->frames(0);
  for (const std::int32_t label : data->transcript(0))
    expect(label > 0 && label < data->classes(), "a label outside the alphabet");
  if (frames > 10'000) return;
  std::vector<float> spectrogram(std::size_t(data->sample_shape()[1] * frames));
  data->get_frames(0, spectrogram.data(), frames);
}

// A byte for the reduction, two for the part that is wanted; then the file.
void image(Bytes input) {
  constexpr std::size_t kHead = 3;
  if (input.size() < kHead) return;
  const auto head = [&](std::size_t i) { return std::to_integer<int>(input[i]); };
  const FileBytes file{reinterpret_cast<const std::uint8_t*>(input.data()) + kHead, input.size() - kHead};
  const ImageSize size = image_size(file);
  const auto part = [](int byte, int length) {  // not empty
    const int first = int(std::int64_t{byte % 16} * length / 16);
    return std::pair{first, std::min(length, first + 1 + int(std::int64_t{byte / 16} * length / 15))};
  };
  const auto [left, right] = part(head(1), size.width);
  const auto [top, bottom] = part(head(2), size.height);
  const PixelRect rect{left, top, right, bottom};
  const Picture picture = decode_image(file, rect, 1 << (head(0) & 3));
  expect(picture.width >= 1 && picture.height >= 1, "a picture without pixels");
  constexpr int kSide = 7;
  std::vector<std::uint8_t> out(3 * kSide * kSide);
  resample(picture, {double(left), double(top), double(right), double(bottom)}, kSide, false, out.data());
}

const bool added = [] {
  input_targets().add("cifar10", "CIFAR-10's binary file", cifar10);
  input_targets().add("speech", "a manifest of recordings, and a recording", speech);
  input_targets().add("idx", "MNIST's IDX files, plain or gzipped", idx);
  input_targets().add("text", "texts by words", text);
  input_targets().add("text_char", "texts by characters", text_char);
  input_targets().add("tokens", "token files of nanoGPT and llm.c", token_file);
  input_targets().add("image", "a picture: JPEG, PNG, BMP, PNM", image);
  return true;
}();

}  // namespace
}  // namespace topknot::fuzz

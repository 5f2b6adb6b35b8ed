#include <fstream>
#include <limits>
#include <set>

#include "data/loader.h"
#include "data/recording.h"
#include "data/transcript.h"
#include "tests/data/made_up_speech.h"
#include "tests/support/catch.h"
#include "tests/support/error_text.h"
#include "tests/support/files.h"
#include "tests/support/standard_error.h"

using namespace topknot;

namespace {

std::unique_ptr<Dataset> speech(const std::string& root, Split split = Split::train, int max_bad_files = 0) {
  DatasetOptions options;
  options.root = root;
  options.max_bad_files = max_bad_files;
  return make_dataset("speech", options, split);
}

}  // namespace

TEST_CASE("recordings come shortest first, with their frames and transcripts") {
  const MadeUpSpeech made(9, 3);
  const auto data = speech(made.root());
  REQUIRE(data->size() == 9);
  CHECK(speech(made.root(), Split::test)->size() == 3);
  CHECK(data->task() == Task::transcription);
  CHECK(data->classes() == 29);
  for (std::int64_t i = 0; i < data->size(); ++i) {
    if (i > 0) CHECK(data->frames(i) >= data->frames(i - 1));
    const auto letters = static_cast<std::int64_t>(data->transcript(i).size());
    CHECK(data->frames(i) == 1 + letters * 12);
    for (const std::int32_t label : data->transcript(i)) CHECK((label >= 2 && label <= 4));  // A, B, C
  }
  CHECK(data_checksum(*data) == data_checksum(*speech(made.root())));
  CHECK(data_checksum(*data) != data_checksum(*speech(made.root(), Split::test)));
}

TEST_CASE("batches of recordings are padded with zeros and know their lengths, for any number of workers") {
  const MadeUpSpeech made(10, 3);
  const auto data = speech(made.root());
  LoaderOptions options;
  options.batch = 2, options.ranks = 2;
  std::set<std::int64_t> seen;
  for (int rank = 0; rank < 2; ++rank)
    for (const int workers : {0, 3}) {
      options.rank = rank, options.workers = workers;
      Loader loader(*data, options);
      REQUIRE(loader.steps_per_epoch() == 2);
      loader.start_epoch(3);
      for (Batch batch; loader.next(batch);) {
        REQUIRE(batch.size() == 2);
        REQUIRE(batch.frames.size() == 2);
        CHECK(batch.losses() == 2);
        const std::int64_t longest = std::max(batch.frames[0], batch.frames[1]);
        CHECK(batch.images.shape() == Shape({2, 1, 161, longest}));
        for (std::size_t i = 0; i < 2; ++i) {
          const std::int64_t index = batch.indices[i];
          if (workers == 0) CHECK(seen.insert(index).second);
          REQUIRE(batch.frames[i] == data->frames(index));
          std::vector<float> alone(static_cast<std::size_t>(161 * data->frames(index)));
          data->get_frames(index, alone.data(), data->frames(index));
          bool same = true;
          for (std::int64_t k = 0; k < 161; ++k)
            for (std::int64_t t = 0; t < longest; ++t)
              same &= batch.images.data()[(static_cast<std::int64_t>(i) * 161 + k) * longest + t] ==
                      (t < data->frames(index) ? alone[static_cast<std::size_t>(k * data->frames(index) + t)]
                                               : 0);
          CHECK(same);
          const std::size_t width = batch.labels.size() / 2;
          const auto said = data->transcript(index);
          REQUIRE(batch.lengths[i] == static_cast<std::int32_t>(said.size()));
          CHECK(std::equal(said.begin(), said.end(),
                           batch.labels.begin() + static_cast<std::ptrdiff_t>(i * width)));
        }
      }
    }
  CHECK(seen.size() == 8);
}

TEST_CASE("a manifest that does not fit is refused with its line") {
  const MadeUpSpeech made(1, 1);
  const auto refused = [&](const std::string& line, const std::string& why) {
    std::ofstream(made.at("train.tsv")) << "train0.wav\tA\n" << line << '\n';
    CHECK(user_error([&] { speech(made.root()); }, {"train.tsv:2: ", why}));
  };
  refused("train0.wav A", "a tab");
  refused("absent.wav\tA", "absent.wav");
  refused("train0.wav\t", "empty transcript");
  refused("train0.wav\tR2D2", "'2'");
  made.write_wav("stereo.wav", std::vector<float>(3200), 2);
  refused("stereo.wav\tA", "2 channels");
  made.write_wav("short.wav", std::vector<float>(100));
  refused("short.wav\tA", "100 samples");
  std::ofstream(made.at("train.tsv")) << "\n";
  CHECK(user_error([&] { speech(made.root()); }, {"train.tsv", "names no recording that can be read"}));
  CHECK(user_error([&] { speech("/nowhere"); }, {"data.root", "scripts/fetch-data an4"}));

  // Cut after the run has begun.
  std::ofstream(made.at("train.tsv")) << "train0.wav\tA\n";
  const auto data = speech(made.root());
  made.write_wav("train0.wav", std::vector<float>(1000));
  std::vector<float> out(static_cast<std::size_t>(161 * data->frames(0)));
  CHECK(user_error([&] { data->get_frames(0, out.data(), data->frames(0)); }, {"train0.wav", "has changed"}));
}

TEST_CASE("a manifest's ends of lines, its last newline and a byte order mark change nothing") {
  const MadeUpSpeech made(3, 1);
  const std::uint64_t expected = data_checksum(*speech(made.root()));
  const std::string plain = text_of(made.at("train.tsv"));
  std::string windows;
  for (const char c : plain + "\n") windows += c == '\n' ? "\r\n" : std::string(1, c);
  for (const std::string& text : {"\xef\xbb\xbf" + plain, windows, "\xef\xbb\xbf\r\n" + windows,
                                  plain.substr(0, plain.size() - 1), windows.substr(0, windows.size() - 4)}) {
    std::ofstream(made.at("train.tsv"), std::ios::binary) << text;
    CHECK(data_checksum(*speech(made.root())) == expected);
  }
  std::ofstream(made.at("train.tsv"), std::ios::binary) << std::string("t\0r\0", 4);
  CHECK(user_error([&] { speech(made.root()); }, {"train.tsv", "no text"}));
}

TEST_CASE("recordings whose headers are damaged are left out up to data.max_bad_files, and named") {
  const MadeUpSpeech made(9, 3);
  const auto whole = speech(made.root());
  for (const char* name : {"train2.wav", "train5.wav"})
    std::filesystem::resize_file(made.at(name), std::filesystem::file_size(made.at(name)) - 2);
  CHECK(user_error([&] { speech(made.root(), Split::train, 1); },
                   {"train.tsv:6: ", "train5.wav", "cut short", "data.max_bad_files=2"}));
  const auto data = speech(made.root(), Split::train, 2);
  REQUIRE(data->warnings().size() == 2);
  CHECK(says(data->warnings()[0],
             {"train.tsv:3: ", "train2.wav", "it is left out (bad file 1 of data.max_bad_files=2)"}));
  CHECK(says(data->warnings()[1], {"train.tsv:6: ", "train5.wav", "(bad file 2 of"}));
  CHECK(data->size() == 7);
  CHECK(data->left_out() == 2);
  CHECK(data_checksum(*data) != data_checksum(*whole));
}

TEST_CASE("for a recording that is damaged inside, the next in length stands in with its own transcript") {
  const MadeUpSpeech made(6, 1);
  const auto data = speech(made.root(), Split::train, 1);
  const std::string file = data->where(2);
  std::vector<float> samples = read_recording(file);
  samples[50] = std::numeric_limits<float>::quiet_NaN();
  made.write_wav(std::filesystem::path(file).filename(), samples, 1, SF_FORMAT_WAV | SF_FORMAT_FLOAT);
  LoaderOptions options;
  options.batch = 6;
  for (const int workers : {0, 2}) {
    options.workers = workers;
    options.max_bad_files = 1;
    Loader loader(*data, options);
    loader.start_epoch(0);
    Batch batch;
    const testing::StandardError errors;
    REQUIRE(loader.next(batch));
    CHECK(says(errors.text(), {"training recording '" + file + "'", "sample 50", "stands in"}));
    CHECK(batch.indices == std::vector<std::int64_t>{0, 1, 3, 3, 4, 5});
    const auto width = static_cast<std::ptrdiff_t>(batch.labels.size() / 6);
    CHECK(std::equal(batch.labels.begin() + 2 * width, batch.labels.begin() + 3 * width,
                     batch.labels.begin() + 3 * width));
    CHECK(batch.frames[2] == data->frames(3));
    CHECK(batch.lengths[2] == batch.lengths[3]);
    const std::int64_t numel = batch.images.numel() / 6;
    CHECK(std::equal(batch.images.data() + 2 * numel, batch.images.data() + 3 * numel,
                     batch.images.data() + 3 * numel));
    options.max_bad_files = 0;
    Loader strict(*data, options);
    strict.start_epoch(0);
    CHECK(user_error([&] { strict.next(batch); }, {file, "sample 50", "data.max_bad_files=1"}));
  }
}

TEST_CASE("recordings left out and damaged inside are counted together") {
  const MadeUpSpeech made(6, 1);
  std::filesystem::resize_file(made.at("train0.wav"), 100);
  const auto data = speech(made.root(), Split::train, 1);
  REQUIRE(data->size() == 5);
  made.write_wav(std::filesystem::path(data->where(4)).filename(), std::vector<float>(1000));
  LoaderOptions options;
  options.batch = 5;
  options.max_bad_files = 1;
  Loader loader(*data, options);
  loader.start_epoch(0);
  Batch batch;
  CHECK(user_error([&] { loader.next(batch); }, {data->where(4), "has changed", "data.max_bad_files=2"}));
}

#include <sndfile.h>
#include <complex>
#include <numbers>

#include "data/loader.h"
#include "data/speech.h"
#include "tests/data/made_up_speech.h"
#include "tests/support/standard_error.h"

using namespace topknot;

namespace {

std::unique_ptr<Dataset> speech(const std::string& root, Split split = Split::train, int max_bad_files = 0) {
  DatasetOptions options;
  options.root = root;
  options.set("max_bad_files", max_bad_files);
  return make_dataset("speech", options, split);
}

// By the definition, in double: bin k of frame t at [k * frames + t].
std::vector<double> plain_spectrogram(const std::vector<float>& x) {
  const auto n = static_cast<std::int64_t>(x.size());
  const std::int64_t frames = 1 + n / 160;
  std::vector<double> out(161 * frames);
  double mean = 0, variance = 0;
  for (std::int64_t t = 0; t < frames; ++t)
    for (std::int64_t k = 0; k < 161; ++k) {
      std::complex<double> sum = 0;
      for (std::int64_t i = 0; i < 320; ++i) {
        std::int64_t at = 160 * t - 160 + i;
        at = at < 0 ? -at : at > n - 1 ? 2 * n - 2 - at : at;
        const double window = 0.54 - 0.46 * std::cos(2 * std::numbers::pi * static_cast<double>(i) / 319);
        sum += window * x[at] * std::polar(1.0, -2 * std::numbers::pi * static_cast<double>(i * k) / 320);
      }
      out[k * frames + t] = std::log(1 + std::abs(sum));
    }
  for (const double v : out) mean += v / static_cast<double>(out.size());
  for (const double v : out) variance += (v - mean) * (v - mean) / static_cast<double>(out.size() - 1);
  for (double& v : out) v = (v - mean) / std::sqrt(variance);
  return out;
}

std::vector<float> tone(std::size_t n) {
  std::vector<float> x(n);
  for (std::size_t i = 0; i < n; ++i) x[i] = 0.5f * std::sin(0.1f * static_cast<float>(i));
  return x;
}

std::string written(const TempFolder& temp, const std::string& name, int format, int rate = kSampleRate,
                    int channels = 1, const std::vector<float>& x = tone(1000)) {
  SF_INFO info{};
  info.samplerate = rate, info.channels = channels, info.format = format;
  SNDFILE* file = sf_open(temp.at(name).c_str(), SFM_WRITE, &info);
  REQUIRE(file);
  sf_write_float(file, x.data(), static_cast<sf_count_t>(x.size()));
  sf_close(file);
  return temp.at(name);
}

void patch(const std::string& path, std::streamoff at, const std::string& bytes) {
  std::fstream file(path, std::ios::binary | std::ios::in | std::ios::out);
  file.seekp(at).write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  REQUIRE(file.good());
}

void shorten(const std::string& path, std::uintmax_t by) {
  fs::resize_file(path, fs::file_size(path) - by);
}

std::string chunk(const std::string& name, const std::string& content) {
  std::string text = name;
  for (const int shift : {0, 8, 16, 24}) text += static_cast<char>(content.size() >> shift & 0xff);
  return text + content + std::string(content.size() % 2, '\0');
}

// A WAV file of so coded samples, 16,000 a second, with these chunks after the one of the format.
std::string wav(const TempFolder& temp, char coding, char bytes, const std::string& chunks) {
  const std::string format = {coding, 0, 1, 0, '\x80', 0x3e, 0, 0, 0, 0, 0, 0, bytes, 0, char(8 * bytes), 0};
  std::ofstream(temp.at("made.wav"), std::ios::binary)
      << chunk("RIFF", "WAVE" + chunk("fmt ", format) + chunks);
  return temp.at("made.wav");
}

bool is_refused(const std::string& path, const std::string& why) {
  return user_error([&] { read_recording(path); }, {"recording '" + path + "'", why});
}

constexpr int kWav16 = SF_FORMAT_WAV | SF_FORMAT_PCM_16, kFlac16 = SF_FORMAT_FLAC | SF_FORMAT_PCM_16,
              kSphere16 = SF_FORMAT_NIST | SF_FORMAT_PCM_16;

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
  options.batch_size = 2, options.ranks = 2;
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
          std::vector<float> alone(161 * data->frames(index));
          data->get_frames(index, alone.data(), data->frames(index));
          bool same = true;
          for (std::int64_t k = 0; k < 161; ++k)
            for (std::int64_t t = 0; t < longest; ++t)
              same &= batch.images.data()[(static_cast<std::int64_t>(i) * 161 + k) * longest + t] ==
                      (t < data->frames(index) ? alone[k * data->frames(index) + t] : 0);
          CHECK(same);
          const std::size_t width = batch.labels.size() / 2;
          const auto said = data->transcript(index);
          REQUIRE(batch.lengths[i] == static_cast<std::int32_t>(said.size()));
          CHECK(std::equal(said.begin(), said.end(), batch.labels.begin() + i * width));
        }
      }
    }
  CHECK(seen.size() == 8);
}

TEST_CASE("a manifest that does not fit is refused with its line") {
  const MadeUpSpeech made(1, 1);
  const auto refused = [&](const std::string& line, const std::string& why) {
    std::ofstream(made.at("train.tsv")) << "train0.wav\tA\n" << line << '\n';
    CHECK_USER_ERROR(speech(made.root()), "train.tsv:2: ", why);
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
  CHECK_USER_ERROR(speech(made.root()), "train.tsv", "names no recording that can be read");
  CHECK_USER_ERROR(speech("/nowhere"), "data.root", "scripts/fetch-data an4");

  // Cut after the run has begun.
  std::ofstream(made.at("train.tsv")) << "train0.wav\tA\n";
  const auto data = speech(made.root());
  made.write_wav("train0.wav", std::vector<float>(1000));
  std::vector<float> out(161 * data->frames(0));
  CHECK_USER_ERROR(data->get_frames(0, out.data(), data->frames(0)), "train0.wav", "has changed");
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
  CHECK_USER_ERROR(speech(made.root()), "train.tsv", "no text");
}

TEST_CASE("recordings whose headers are damaged are left out up to data.max_bad_files, and named") {
  const MadeUpSpeech made(9, 3);
  const auto whole = speech(made.root());
  for (const char* name : {"train2.wav", "train5.wav"})
    fs::resize_file(made.at(name), fs::file_size(made.at(name)) - 2);
  CHECK_USER_ERROR(speech(made.root(), Split::train, 1), "train.tsv:6: ", "train5.wav", "cut short",
                   "data.max_bad_files=2");
  const auto data = speech(made.root(), Split::train, 2);
  REQUIRE(data->warnings().size() == 2);
  CHECK(says(data->warnings()[0],
             {"train.tsv:3: ", "train2.wav", "it is left out (bad file 1 of data.max_bad_files=2)"}));
  CHECK(says(data->warnings()[1], {"train.tsv:6: ", "train5.wav", "(bad file 2 of"}));
  CHECK(data->size() == 7);
  CHECK(data->left_out() == 2);
  CHECK(data_checksum(*data) != data_checksum(*whole));

  // Those that are damaged inside count with them.
  const MadeUpSpeech other(6, 1);
  fs::resize_file(other.at("train0.wav"), 100);
  const auto five = speech(other.root(), Split::train, 1);
  REQUIRE(five->size() == 5);
  other.write_wav(fs::path(five->where(4)).filename(), std::vector<float>(1000));
  LoaderOptions options;
  options.batch_size = 5, options.max_bad_files = 1;
  Loader loader(*five, options);
  loader.start_epoch(0);
  Batch batch;
  CHECK_USER_ERROR(loader.next(batch), five->where(4), "has changed", "data.max_bad_files=2");
}

TEST_CASE("for a recording that is damaged inside, the next in length stands in with its own transcript") {
  const MadeUpSpeech made(6, 1);
  const auto data = speech(made.root(), Split::train, 1);
  const std::string file = data->where(2);
  std::vector<float> samples = read_recording(file);
  samples[50] = std::numeric_limits<float>::quiet_NaN();
  made.write_wav(fs::path(file).filename(), samples, 1, SF_FORMAT_WAV | SF_FORMAT_FLOAT);
  LoaderOptions options;
  options.batch_size = 6;
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
    CHECK_USER_ERROR(strict.next(batch), file, "sample 50", "data.max_bad_files=1");
  }
}

TEST_CASE("a transcript becomes labels and text again; other characters are refused") {
  CHECK((encode_transcript("A'B Z") == std::vector<std::int32_t>{2, 1, 3, 28, 27}));
  CHECK(decode_transcript(encode_transcript("  don't \t stop ")) == "DON'T STOP");
  CHECK(encode_transcript("").empty());
  CHECK_USER_ERROR(encode_transcript("ROOM 3"), "'3'");
  CHECK_USER_ERROR(encode_transcript("A_B"), "'_'");
  CHECK_USER_ERROR(encode_transcript("caf\xc3\xa9"), "byte 195");
}

TEST_CASE("the best path collapses equal neighbours but for a blank between; errors are edit distances") {
  CHECK((collapse_path(std::vector<std::int32_t>{0, 2, 2, 0, 2, 3, 3, 0, 0}) ==
         std::vector<std::int32_t>{2, 2, 3}));
  CHECK(collapse_path(std::vector<std::int32_t>{0, 0}).empty());
  using Errors = std::vector<std::int64_t>;  // of words and characters, each with how many were said
  for (const auto& [heard, said, expected] : std::vector<std::tuple<const char*, const char*, Errors>>{
           {"YES", "YES", {0, 1, 0, 3}},
           {"", "GO ON", {2, 2, 4, 4}},
           {"KITTEN ON", "SITTING", {2, 1, 4, 7}},  // a word replaced, one too many
           {"A C", "A B C", {1, 3, 1, 3}},
           {"AB", "A B", {2, 2, 0, 2}}}) {
    const TranscriptErrors e = transcript_errors(heard, said);
    INFO(said);
    CHECK(Errors{e.word_errors, e.words, e.character_errors, e.characters} == expected);
  }
}

TEST_CASE("a log spectrogram is that of the definition, also where its rows are padded") {
  for (const std::size_t n : {161u, 320u, 1601u, 3999u}) {
    std::vector<float> x(n);
    for (std::size_t i = 0; i < n; ++i) {
      const auto s = static_cast<double>(i);
      x[i] = static_cast<float>(0.4 * std::sin(s * 0.3) + 0.2 * std::sin(s * s * 1e-4) + 0.01);
    }
    const auto expected = plain_spectrogram(x);
    const std::int64_t frames = spectrogram_frames(static_cast<std::int64_t>(n)), stride = frames + 3;
    std::vector<float> out(kSpectrumBins * stride, -7.0f);
    log_spectrogram(x, out.data(), stride);
    INFO(n << " samples");
    double worst = 0;
    for (std::int64_t k = 0; k < kSpectrumBins; ++k) {
      for (std::int64_t t = 0; t < frames; ++t)
        worst = std::max(worst, std::abs(out[k * stride + t] - expected[k * frames + t]));
      CHECK(out[k * stride + frames] == -7.0f);
    }
    CHECK(worst < 2e-5);
  }
  // That of silence is zero, and that of what is no sound is not.
  std::vector<float> samples(800), out(kSpectrumBins * 6, 1.0f);
  log_spectrogram(samples, out.data(), 6);
  CHECK(out == std::vector<float>(out.size(), 0.0f));
  samples.assign(800, 0.1f);
  samples[400] = std::numeric_limits<float>::quiet_NaN();
  log_spectrogram(samples, out.data(), 6);
  CHECK(std::isnan(out[0]));
}

TEST_CASE("recordings in WAV, FLAC and SPHERE, in mu-law and A-law, give their samples") {
  const TempFolder temp;
  const std::vector<float> x = tone(1000);
  for (const int kind : {SF_FORMAT_WAV, SF_FORMAT_FLAC, SF_FORMAT_NIST}) {
    const std::string path = written(temp, "tone", kind | SF_FORMAT_PCM_16);
    CHECK(recording_samples(path) == 1000);
    const std::vector<float> got = read_recording(path);
    REQUIRE(got.size() == x.size());
    for (std::size_t i = 0; i < x.size(); ++i) CHECK(got[i] == Approx(x[i]).margin(1e-4));
  }
  // Mu-law and A-law: bytes and values of ITU-T G.711.
  const auto law = [&](char coding, const std::string& bytes) {
    std::vector<float> values = read_recording(wav(temp, coding, 1, chunk("data", bytes)));
    for (float& value : values) value *= 32768.0f;
    return values;
  };
  CHECK(law(7, {'\x00', '\x80', '\xff', '\x7f', '\xf0'}) == std::vector<float>{-32124, 32124, 0, 0, 120});
  CHECK(law(6, {'\xd5', '\x55', '\xaa', '\x2a'}) == std::vector<float>{8, -8, 32256, -32256});
}

TEST_CASE("a recording that does not fit is refused by name, with the reason") {
  const TempFolder temp;
  CHECK_USER_ERROR(read_recording(temp.at("absent.wav")), "absent.wav", "No such file");
  CHECK(is_refused(written(temp, "stereo.wav", kWav16, kSampleRate, 2), "2 channels"));
  CHECK(is_refused(written(temp, "slow.wav", kWav16, 8000), "8000 samples per second"));
  CHECK(is_refused(written(temp, "coarse.wav", SF_FORMAT_WAV | SF_FORMAT_PCM_U8), "8 bits"));
  const std::string endless = written(temp, "endless.wav", kWav16);
  const std::uint32_t bytes = 2 * (3600u * 16000u + 1), header = 44;
  fs::resize_file(endless, header + bytes);  // a hole
  patch(endless, header - 4, {reinterpret_cast<const char*>(&bytes), sizeof bytes});
  CHECK(is_refused(endless, "57600001 samples are more than an hour"));
  std::ofstream(temp.at("text.wav")) << "no sound";
  CHECK(is_refused(temp.at("text.wav"), "no WAV, FLAC or SPHERE"));
  std::ofstream(temp.at("empty.wav"));
  CHECK(is_refused(temp.at("empty.wav"), "it is empty"));
  const std::string cut = written(temp, "cut.flac", kFlac16);
  fs::resize_file(cut, fs::file_size(cut) / 2);
  CHECK(is_refused(cut, ""));
}

TEST_CASE("a recording with fewer samples than promised is refused, by the header where that can be") {
  const TempFolder temp;
  for (const int kind :
       {kWav16, SF_FORMAT_WAVEX | SF_FORMAT_PCM_24, SF_FORMAT_WAV | SF_FORMAT_FLOAT, kWav16 | SF_ENDIAN_BIG,
        SF_FORMAT_WAV | SF_FORMAT_ULAW, kSphere16, kSphere16 | SF_ENDIAN_BIG})
    for (const std::uintmax_t missing : {1, 2, 500}) {
      const std::string path = written(temp, "cut", kind, kSampleRate, 1, tone(1001));
      REQUIRE(recording_samples(path) == 1001);
      const bool padded =
          (kind & SF_FORMAT_SUBMASK) == SF_FORMAT_ULAW || kind == (SF_FORMAT_WAVEX | SF_FORMAT_PCM_24);
      shorten(path, missing + (padded ? 1 : 0));
      INFO(kind << " without " << missing);
      CHECK(is_refused(path, "cut short"));
      CHECK_USER_ERROR(recording_samples(path), path, "cut short");
    }
  for (const std::uintmax_t missing : {1, 100, 2000}) {
    const std::string path = written(temp, "cut.flac", kFlac16, kSampleRate, 1, tone(40000));
    shorten(path, missing);
    CHECK(recording_samples(path) == 40000);
    CHECK(is_refused(path, "cut short"));
  }
  const std::string damaged = written(temp, "damaged.flac", kFlac16, kSampleRate, 1, tone(40000));
  patch(damaged, static_cast<std::streamoff>(fs::file_size(damaged) / 2), "\x55\xaa\x55");
  CHECK(is_refused(damaged, "damaged"));
}

TEST_CASE("a recording whose header does not know its length is read to the end of the file") {
  const TempFolder temp;
  const std::string path = written(temp, "pipe", kWav16);
  for (const char* length : {"\xff\xff\xff\xff", "\x00\xf0\xff\x7f"}) {
    patch(path, 40, std::string(length, 4));
    CHECK(recording_samples(path) == 1000);
    CHECK(read_recording(path).size() == 1000);
  }
  const std::string flac = written(temp, "pipe.flac", kFlac16);
  patch(flac, 22, std::string(4, '\0'));
  CHECK(recording_samples(flac) == 1000);
  CHECK(read_recording(flac).size() == 1000);
  shorten(flac, 1);
  CHECK(is_refused(flac, "cut short or damaged"));
  const std::string sphere = written(temp, "pipe.sph", kSphere16);
  for (const char* line : {"sample_count -i 0000\n", "sample_guess -i 1000\n"}) {
    const auto at = static_cast<std::streamoff>(text_of(sphere).find("sample_count -i 1000\n"));
    patch(sphere, at, line);
    CHECK(recording_samples(sphere) == 1000);
    patch(sphere, at, "sample_count -i 1000\n");
  }
  REQUIRE(text_of(sphere).starts_with("NIST_1A\n   1024\n"));
  for (const std::string& length : {std::string("9000000"), std::string(40, '6')}) {
    patch(sphere, 8, length + "\n");
    CHECK(is_refused(sphere, "damaged: a header of"));
  }
}

TEST_CASE("what is behind a recording's samples is no part of it") {
  const TempFolder temp;
  const std::string path =
      wav(temp, 1, 2, chunk("LIST", "odd") + chunk("data", std::string(800, 1)) + chunk("LIST", "INFO"));
  CHECK(read_recording(path).size() == 400);
  const std::string filled = written(temp, "filled.wav", kWav16);
  std::ofstream(filled, std::ios::binary | std::ios::app) << std::string(1 << 16, '\0');
  CHECK(read_recording(filled) == read_recording(written(temp, "exact.wav", kWav16)));
  const std::string tagged = written(temp, "tagged.wav", kWav16);
  std::ofstream many(tagged, std::ios::binary | std::ios::app);
  for (int i = 0; i < 2000; ++i) many << chunk("junk", "");
  many.close();
  CHECK(read_recording(tagged).size() == 1000);
  const std::string sphere = written(temp, "long.sph", kSphere16);
  std::ofstream(sphere, std::ios::binary | std::ios::app) << std::string(600, 'x');
  CHECK(recording_samples(sphere) == 1000);
  CHECK(read_recording(sphere).size() == 1000);
}

TEST_CASE("WAV files with 64-bit lengths, and recordings behind an ID3 tag, are read and checked") {
  const TempFolder temp;
  const std::string large = written(temp, "large.wav", SF_FORMAT_RF64 | SF_FORMAT_PCM_16);
  REQUIRE(text_of(large).starts_with("RF64"));
  CHECK(read_recording(large).size() == 1000);
  shorten(large, 100);
  CHECK(is_refused(large, "cut short"));
  const std::string plain = text_of(written(temp, "plain.wav", kWav16)),
                    tag = std::string("ID3\x04\0\0\0\0\x01\x02", 10) + std::string(130, 'x');
  const std::string tagged = temp.at("tagged.wav");
  std::ofstream(tagged, std::ios::binary) << tag << plain;
  CHECK(read_recording(tagged) == read_recording(temp.at("plain.wav")));
  shorten(tagged, 100);
  CHECK(is_refused(tagged, "cut short"));
}

TEST_CASE("the header of a SPHERE file is read by words, and as long as it says") {
  const TempFolder temp;
  const std::string path = written(temp, "a.sph", kSphere16);
  const auto line = text_of(path).find("sample_count -i 1000\n");
  std::string text = text_of(path);
  text.replace(line, 21, "sample_count  -i 1000\n").erase(1023, 1);
  std::ofstream(path, std::ios::binary) << text;
  REQUIRE(read_recording(path).size() == 1000);
  shorten(path, 100);
  CHECK(is_refused(path, "cut short: 950 of 1000 samples"));

  std::string longer = text_of(written(temp, "b.sph", kSphere16));
  longer.insert(1024, 1024, ' ').replace(8, 7, "   2048");
  const auto count = longer.find("sample_count -i 1000\n");
  longer.replace(count, 21, "utterance_id -s4 abc\n");
  longer.replace(longer.find("end_head\n"), 9, std::string(9, ' '))
      .replace(1500, 31, "\nsample_count -i 1000\nend_head\n");
  std::ofstream(temp.at("b.sph"), std::ios::binary) << longer;
  CHECK(read_recording(temp.at("b.sph")).size() == 1000);
  shorten(temp.at("b.sph"), 100);
  CHECK(is_refused(temp.at("b.sph"), "cut short: 950 of 1000 samples"));
}

TEST_CASE("a sample that is not finite, or louder than any unit allows, is refused with its place") {
  const TempFolder temp;
  const auto with = [&](float value) {
    std::vector<float> x(1000, 0.25f);
    x[123] = value;
    return written(temp, "float.wav", SF_FORMAT_WAV | SF_FORMAT_FLOAT, kSampleRate, 1, x);
  };
  for (const float value : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(),
                            -std::numeric_limits<float>::infinity(), 1e30f, -32769.0f})
    CHECK(is_refused(with(value), "sample 123 (from 0)"));
  for (const float value : {1.5f, -32768.0f}) CHECK(read_recording(with(value))[123] == value);
}

TEST_CASE("a recording that libsndfile would read wrongly or not at all is refused with what is wrong") {
  const TempFolder temp;
  const std::string some = chunk("data", std::string(800, 1));
  CHECK(is_refused(wav(temp, 1, 2, some + some), "two data chunks"));
  CHECK(is_refused(wav(temp, 1, 2, some + chunk("LIST", "odd") + some), "two data chunks"));
  CHECK(is_refused(wav(temp, 1, 2, chunk("LIST", "INFO")), "without a data chunk"));
  std::string many;
  for (int i = 0; i < 1000; ++i) many += chunk("junk", "");
  CHECK(is_refused(wav(temp, 1, 2, many + some), "no data among its first 1000 chunks"));
  CHECK(is_refused(written(temp, "a.wav", SF_FORMAT_WAV | SF_FORMAT_IMA_ADPCM), "IMA ADPCM, and PCM"));
  CHECK(is_refused(written(temp, "a.aiff", SF_FORMAT_AIFF | SF_FORMAT_PCM_16), "no WAV, FLAC or SPHERE"));
  const std::string sphere = written(temp, "a.sph", kSphere16);
  patch(sphere, static_cast<std::streamoff>(text_of(sphere).find("sample_count -i 1000")),
        "sample_count -i -100");
  CHECK(is_refused(sphere, "sample_count"));
  patch(sphere, 8, "9999999");
  CHECK(is_refused(sphere, "a header of 9999999 bytes"));
}

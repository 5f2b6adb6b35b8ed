#include "data/recording.h"

#include <sndfile.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <limits>

#include "data/spectrogram.h"
#include "tests/support/catch.h"
#include "tests/support/error_text.h"
#include "tests/support/files.h"
#include "tests/support/temp_folder.h"

using namespace topknot;

namespace {

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
  std::filesystem::resize_file(path, std::filesystem::file_size(path) - by);
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

TEST_CASE("recordings in WAV, FLAC and SPHERE give their samples") {
  const TempFolder temp;
  const std::vector<float> x = tone(1000);
  for (const int kind : {SF_FORMAT_WAV, SF_FORMAT_FLAC, SF_FORMAT_NIST}) {
    const std::string path = written(temp, "tone", kind | SF_FORMAT_PCM_16);
    CHECK(recording_samples(path) == 1000);
    const std::vector<float> got = read_recording(path);
    REQUIRE(got.size() == x.size());
    for (std::size_t i = 0; i < x.size(); ++i) CHECK(got[i] == Approx(x[i]).margin(1e-4));
  }
}

TEST_CASE("a recording that does not fit is refused by name, with the reason") {
  const TempFolder temp;
  const auto refused = [&](const std::string& path, const std::string& why) {
    CHECK(user_error([&] { read_recording(path); }, {"recording '" + path + "'", why}));
  };
  CHECK(user_error([&] { read_recording(temp.at("absent.wav")); }, {"absent.wav", "No such file"}));
  refused(written(temp, "stereo.wav", SF_FORMAT_WAV | SF_FORMAT_PCM_16, kSampleRate, 2), "2 channels");
  refused(written(temp, "slow.wav", SF_FORMAT_WAV | SF_FORMAT_PCM_16, 8000), "8000 samples per second");
  refused(written(temp, "coarse.wav", SF_FORMAT_WAV | SF_FORMAT_PCM_U8), "8 bits");
  const std::string endless = written(temp, "endless.wav", SF_FORMAT_WAV | SF_FORMAT_PCM_16);
  const std::uint32_t bytes = 2 * (3600u * 16000u + 1), header = 44;
  std::filesystem::resize_file(endless, header + bytes);  // a hole
  std::fstream patch(endless, std::ios::binary | std::ios::in | std::ios::out);
  patch.seekp(header - 4).write(reinterpret_cast<const char*>(&bytes), sizeof bytes);
  patch.close();
  refused(endless, "57600001 samples are more than an hour");
  std::ofstream(temp.at("text.wav")) << "no sound";
  refused(temp.at("text.wav"), "no WAV, FLAC or SPHERE");
  std::ofstream(temp.at("empty.wav"));
  refused(temp.at("empty.wav"), "it is empty");
  const std::string cut = written(temp, "cut.flac", SF_FORMAT_FLAC | SF_FORMAT_PCM_16);
  std::filesystem::resize_file(cut, std::filesystem::file_size(cut) / 2);
  refused(cut, "");
}

TEST_CASE(
    "a recording with fewer samples than its header promises is refused, by the header where that can be") {
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
      CHECK(user_error([&] { recording_samples(path); }, {path, "cut short"}));
    }
  for (const std::uintmax_t missing : {1, 100, 2000}) {
    const std::string path = written(temp, "cut.flac", kFlac16, kSampleRate, 1, tone(40000));
    shorten(path, missing);
    CHECK(recording_samples(path) == 40000);
    CHECK(is_refused(path, "cut short"));
  }
  const std::string damaged = written(temp, "damaged.flac", kFlac16, kSampleRate, 1, tone(40000));
  patch(damaged, static_cast<std::streamoff>(std::filesystem::file_size(damaged) / 2), "\x55\xaa\x55");
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
  for (const std::string length : {std::string("9000000"), std::string(40, '6')}) {
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

TEST_CASE("mu-law and A-law of 16,000 samples per second are read") {
  const TempFolder temp;
  // Bytes and values of ITU-T G.711.
  const std::vector<float> mu =
      read_recording(wav(temp, 7, 1, chunk("data", {'\x00', '\x80', '\xff', '\x7f', '\xf0'})));
  CHECK(mu == std::vector<float>{-32124 / 32768.0f, 32124 / 32768.0f, 0, 0, 120 / 32768.0f});
  const std::vector<float> a =
      read_recording(wav(temp, 6, 1, chunk("data", {'\xd5', '\x55', '\xaa', '\x2a'})));
  CHECK(a == std::vector<float>{8 / 32768.0f, -8 / 32768.0f, 32256 / 32768.0f, -32256 / 32768.0f});
}

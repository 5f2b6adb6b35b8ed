#include "data/recording.h"

#include <sndfile.h>

#include <cmath>
#include <filesystem>
#include <fstream>

#include "data/spectrogram.h"
#include "tests/support/catch.h"
#include "tests/support/error_text.h"
#include "tests/support/temp_folder.h"

using namespace topknot;

namespace {

std::vector<float> tone(std::size_t n) {
  std::vector<float> x(n);
  for (std::size_t i = 0; i < n; ++i) x[i] = 0.5f * std::sin(0.1f * static_cast<float>(i));
  return x;
}

std::string written(const TempFolder& temp, const std::string& name, int format, int rate = kSampleRate,
                    int channels = 1) {
  SF_INFO info{};
  info.samplerate = rate, info.channels = channels, info.format = format;
  SNDFILE* file = sf_open(temp.at(name).c_str(), SFM_WRITE, &info);
  REQUIRE(file);
  const std::vector<float> x = tone(1000);
  sf_write_float(file, x.data(), static_cast<sf_count_t>(x.size()));
  sf_close(file);
  return temp.at(name);
}

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
  refused(temp.at("text.wav"), "");
  const std::string cut = written(temp, "cut.flac", SF_FORMAT_FLAC | SF_FORMAT_PCM_16);
  std::filesystem::resize_file(cut, std::filesystem::file_size(cut) / 2);
  refused(cut, "");
}

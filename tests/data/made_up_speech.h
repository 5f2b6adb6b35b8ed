#pragma once
// Recordings that are none: a tone for each letter, and the letters as their transcript.

#include <sndfile.h>

#include "data/speech.h"
#include "tests/support/test.h"

namespace topknot {

class MadeUpSpeech {
 public:
  // Recordings of 1 to `most` letters of A, B and C, 0.12 s each.
  MadeUpSpeech(int train, int test, int most = 4) {
    write_split("train.tsv", train, most, 0);
    write_split("test.tsv", test, most, 1);
  }
  std::string root() const { return folder_.at(""); }
  std::string at(const std::string& name) const { return folder_.at(name); }

  void write_wav(const std::string& name, const std::vector<float>& samples, int channels = 1,
                 int format = SF_FORMAT_WAV | SF_FORMAT_PCM_16) const {
    SF_INFO info{};
    info.samplerate = kSampleRate, info.channels = channels, info.format = format;
    SNDFILE* file = sf_open(folder_.at(name).c_str(), SFM_WRITE, &info);
    TOPKNOT_CHECK(file, "cannot write " + name);
    sf_write_float(file, samples.data(), static_cast<sf_count_t>(samples.size()));
    sf_close(file);
  }

 private:
  void write_split(const std::string& manifest, int count, int most, int salt) const {
    std::ofstream out(folder_.at(manifest));
    for (int i = 0; i < count; ++i) {
      std::string said;
      std::vector<float> samples;
      for (int j = 0; j <= (i * 7 + salt) % most; ++j) {
        const int letter = (i * 5 + j * j * 3 + salt) % 3;
        said += static_cast<char>('A' + letter);
        for (int s = 0; s < kSampleRate * 12 / 100; ++s)
          samples.push_back(
              s < kSampleRate / 10
                  ? 0.4f * std::sin(static_cast<float>(s) * (0.15f + 0.25f * static_cast<float>(letter)))
                  : 0.0f);
      }
      const std::string name = manifest.substr(0, manifest.find('.')) + std::to_string(i) + ".wav";
      write_wav(name, samples);
      out << name << '\t' << said << '\n';
    }
  }
  TempFolder folder_;
};

}  // namespace topknot

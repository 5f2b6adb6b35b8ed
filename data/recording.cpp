#include "data/recording.h"

#include <fmt/format.h>
#include <sndfile.h>

#include <memory>

#include "data/spectrogram.h"
#include "nn/core/base/check.h"
#include "nn/core/base/memory.h"
#include "nn/core/base/regular_file.h"

namespace topknot {
namespace {

struct OpenRecording {
  Fd descriptor;
  SF_INFO info{};
  std::unique_ptr<SNDFILE, int (*)(SNDFILE*)> file{nullptr, sf_close};
};

[[noreturn]] void refuse_recording(const std::string& path, const std::string& why) {
  throw UserError(fmt::format("recording '{}': {}", path, why));
}

OpenRecording open_recording(const std::string& path) {
  OpenRecording recording;
  recording.descriptor = open_regular_file(path);
  SF_INFO& info = recording.info;
  recording.file.reset(sf_open_fd(recording.descriptor.get(), SFM_READ, &info, SF_FALSE));
  if (!recording.file) refuse_recording(path, std::string(sf_strerror(nullptr)));
  if (info.channels != 1)
    refuse_recording(path, fmt::format("{} channels, and speech needs one; make it mono", info.channels));
  if (info.samplerate != kSampleRate)
    refuse_recording(path,
                     fmt::format("{} samples per second, not {}; resample it", info.samplerate, kSampleRate));
  const int kind = info.format & SF_FORMAT_SUBMASK;
  if (kind == SF_FORMAT_PCM_S8 || kind == SF_FORMAT_PCM_U8)
    refuse_recording(path,
                     "8 bits per sample, and 16 are needed; record it again, or convert it if that will do");
  // A damaged header may claim any length.
  constexpr sf_count_t kMostSeconds = 3600;
  if (info.frames < 0 || info.frames > kMostSeconds * kSampleRate)
    refuse_recording(path,
                     fmt::format("{} samples are more than an hour; cut it into sentences", info.frames));
  return recording;
}

}  // namespace

std::vector<float> read_recording(const std::string& path) {
  const OpenRecording recording = open_recording(path);
  const auto samples = static_cast<std::size_t>(recording.info.frames);
  auto values = with_memory("the samples of '" + path + "'", 4.0 * static_cast<double>(samples),
                            [&] { return std::vector<float>(samples); });
  const sf_count_t got = sf_read_float(recording.file.get(), values.data(), recording.info.frames);
  if (got != recording.info.frames)
    refuse_recording(path, fmt::format("cut short: {} of {} samples", got, recording.info.frames));
  return values;
}

std::int64_t recording_samples(const std::string& path) {
  return open_recording(path).info.frames;
}

}  // namespace topknot

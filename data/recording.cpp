// Recordings, read by libsndfile, and their spectrograms.

#include <fmt/format.h>
#include <sndfile.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <memory>
#include <numbers>
#include <optional>
#include <sstream>
#include <string_view>

#include "data/speech.h"
#include "nn/base/check.h"
#include "nn/base/file.h"
#include "nn/base/memory.h"
#include "nn/base/text.h"
#include "nn/core/simd.h"

namespace topknot {
namespace {

constexpr std::int64_t kMostSamples = 3600 * kSampleRate;  // a damaged header may claim any length

[[noreturn]] void refuse_recording(const std::string& path, const std::string& why) {
  throw UserError(fmt::format("recording '{}': {}", path, why));
}

[[noreturn]] void refuse_length(const std::string& path, std::int64_t samples) {
  refuse_recording(path, fmt::format("{} samples are more than an hour; cut it into sentences", samples));
}

// A file without the tag in front of it.
struct Source {
  int descriptor = -1;
  std::int64_t begin = 0, size = 0, at = 0;
  std::string bytes(std::int64_t from, std::size_t count) const {
    std::string bytes(count, '\0');
    const ssize_t got = pread(descriptor, bytes.data(), count, begin + from);
    bytes.resize(static_cast<std::size_t>(std::max<ssize_t>(0, got)));
    return bytes;
  }
};

std::uint64_t number_of(std::string_view bytes, bool big_endian) {
  std::uint64_t number = 0;
  for (std::size_t i = 0; i < bytes.size(); ++i)
    number = number << 8 | static_cast<unsigned char>(bytes[big_endian ? i : bytes.size() - 1 - i]);
  return number;
}

// The length of an ID3v2 tag before the recording: "ID3", version, flags, four digits of 7 bits.
std::int64_t id3_bytes(std::string_view head) {
  constexpr std::size_t kHead = 10;
  if (head.size() < kHead || !head.starts_with("ID3")) return 0;
  std::int64_t length = 0;
  for (std::size_t i = 6; i < kHead; ++i) length = length << 7 | (head[i] & 0x7f);
  return static_cast<std::int64_t>(kHead) + length;
}

// Checks the chunks of "RIFF", "RIFX" or "RF64", whose lengths stand in a chunk of their own. libsndfile
// reads a data chunk that is cut short without an error, and has an internal error for two of them.
void check_wav_chunks(const std::string& path, const Source& source, bool big_endian) {
  constexpr std::int64_t kFirst = 12;  // after "RIFF", a length, "WAVE"
  constexpr std::size_t kHead = 8;
  constexpr std::uint32_t kUnknown = 0x7ffff000;  // and above: the writer could not go back and fill it in
  constexpr int kMostChunks = 1000;
  bool data = false;
  std::uint64_t large = 0;  // the length of the data, as RF64 has it
  std::int64_t at = kFirst;
  for (int chunk = 0;; ++chunk) {
    const std::string head = source.bytes(at, kHead);
    if (head.size() < kHead || (data && (head[0] == 0 || chunk >= kMostChunks))) break;  // zeros fill the end
    if (chunk == kMostChunks)
      refuse_recording(path, fmt::format("damaged: no data among its first {} chunks", kMostChunks));
    std::uint64_t length = number_of(std::string_view(head).substr(4), big_endian);
    at += kHead;
    if (head.starts_with("ds64")) large = number_of(source.bytes(at + 8, 8), false);
    if (head.starts_with("data")) {
      if (data)
        refuse_recording(path, "it has two data chunks, of which one alone would be read; make it one");
      data = true;
      if (length == 0xffffffff && large > 0)
        length = large;
      else if (length >= kUnknown)
        return;
      if (length > static_cast<std::uint64_t>(source.size - at))
        refuse_recording(path, fmt::format("cut short: {} of {} bytes of samples", source.size - at, length));
    }
    at += static_cast<std::int64_t>(length + length % 2);
  }
  if (!data) refuse_recording(path, "cut short or damaged: a WAV file without a data chunk");
}

// sample_count of a SPHERE header ("NIST_1A", the header's length, then lines "KEY -TYPE VALUE" up to
// "end_head"), none if it does not say. libsndfile reads to the end of the file, wherever that is.
std::optional<std::int64_t> sphere_samples(const std::string& path, const Source& source) {
  constexpr std::size_t kLeast = 1024, kMost = 1 << 20;
  std::size_t bytes = 0;  // the greatest number where there are too many digits
  std::istringstream first(source.bytes(0, kLeast));
  std::string word;
  first >> word >> bytes;
  if (bytes > kMost) refuse_recording(path, fmt::format("damaged: a header of {} bytes", bytes));
  std::istringstream lines(source.bytes(0, std::max(bytes, kLeast)));
  for (std::string line; std::getline(lines, line);) {
    std::istringstream words(line);
    std::string key, type;
    words >> key >> type;
    if (key == "end_head") break;
    if (key != "sample_count") continue;
    std::int64_t samples = 0;
    if (type != "-i" || !(words >> samples) || samples < 0)
      refuse_recording(path, "damaged: its sample_count is no count");
    if (samples == 0) return std::nullopt;
    return samples;
  }
  return std::nullopt;
}

std::string format_name(int format) {
  SF_FORMAT_INFO info{format, nullptr, nullptr};
  const bool known = sf_command(nullptr, SFC_GET_FORMAT_INFO, &info, sizeof info) == 0 && info.name;
  return known ? info.name : fmt::format("0x{:x}", format);
}

void check_format(const std::string& path, const SF_INFO& info) {
  const int coding = info.format & SF_FORMAT_SUBMASK;
  const auto is_in = [](int value, std::initializer_list<int> values) {
    return std::find(values.begin(), values.end(), value) != values.end();
  };
  if (info.channels != 1)
    refuse_recording(path, fmt::format("{} channels, and speech needs one; make it mono", info.channels));
  if (info.samplerate != kSampleRate)
    refuse_recording(path,
                     fmt::format("{} samples per second, not {}; resample it", info.samplerate, kSampleRate));
  if (is_in(coding, {SF_FORMAT_PCM_S8, SF_FORMAT_PCM_U8}))
    refuse_recording(path,
                     "8 bits per sample, and 16 are needed; record it again, or convert it if that will do");
  if (!is_in(coding, {SF_FORMAT_PCM_16, SF_FORMAT_PCM_24, SF_FORMAT_PCM_32, SF_FORMAT_FLOAT, SF_FORMAT_DOUBLE,
                      SF_FORMAT_ULAW, SF_FORMAT_ALAW}))
    refuse_recording(
        path, fmt::format("{}, and PCM, floats, mu-law and A-law are read; convert it", format_name(coding)));
}

// Reads a Source; libsndfile's own way with a descriptor closes it after some errors and not after others.
SF_VIRTUAL_IO source_io() {
  SF_VIRTUAL_IO io{};
  io.get_filelen = [](void* source) -> sf_count_t { return static_cast<Source*>(source)->size; };
  io.seek = [](sf_count_t to, int from, void* source) -> sf_count_t {
    auto& s = *static_cast<Source*>(source);
    const sf_count_t base = from == SEEK_SET ? 0 : from == SEEK_CUR ? s.at : s.size;
    return base + to < 0 ? -1 : s.at = base + to;
  };
  io.tell = [](void* source) -> sf_count_t { return static_cast<Source*>(source)->at; };
  io.read = [](void* to, sf_count_t count, void* source) -> sf_count_t {
    auto& s = *static_cast<Source*>(source);
    const ssize_t got = pread(s.descriptor, to, static_cast<std::size_t>(count), s.begin + s.at);
    s.at += std::max<ssize_t>(0, got);
    return std::max<ssize_t>(0, got);
  };
  return io;
}

Fd open_recording(const std::string& path) {
  try {
    return open_regular_file(path);
  } catch (const UserError& error) {
    refuse_recording(path, error.what());
  }
}

struct Recording {
  const std::string path;
  const Fd opened;
  Source source;
  std::unique_ptr<SNDFILE, int (*)(SNDFILE*)> file{nullptr, sf_close};
  std::optional<std::int64_t> samples;  // none if the header does not say

  explicit Recording(const std::string& name) : path(name), opened(open_recording(name)) {
    constexpr std::size_t kHead = 10;
    struct stat status {};
    if (fstat(opened.get(), &status) != 0) refuse_recording(path, "cannot be read: " + errno_text());
    source = {opened.get(), 0, status.st_size, 0};
    source.begin = std::min<std::int64_t>(id3_bytes(source.bytes(0, kHead)), status.st_size);
    source.size -= source.begin;
    const std::string header = source.bytes(0, kHead);
    const bool sphere = header.starts_with("NIST_1A"),
               wav = header.starts_with("RIFF") || header.starts_with("RIFX") || header.starts_with("RF64");
    // libsndfile knows more; some write to standard error, and their length is not checked here.
    if (!wav && !sphere && !header.starts_with("fLaC"))
      refuse_recording(path,
                       status.st_size == 0 ? "it is empty" : "it is no WAV, FLAC or SPHERE file; convert it");
    if (wav) check_wav_chunks(path, source, header[3] == 'X');
    const auto promised = sphere ? sphere_samples(path, source) : std::nullopt;
    SF_VIRTUAL_IO io = source_io();
    SF_INFO info{};
    file.reset(sf_open_virtual(&io, SFM_READ, &info, &source));
    if (!file)
      refuse_recording(
          path, fmt::format("{} (WAV, FLAC and uncompressed SPHERE files are read)", sf_strerror(nullptr)));
    check_format(path, info);
    if (info.frames != SF_COUNT_MAX) samples = info.frames;
    if (promised && *promised > info.frames)
      refuse_recording(path, fmt::format("cut short: {} of {} samples", info.frames, *promised));
    if (promised) samples = promised;
    if (samples && (*samples < 0 || *samples > kMostSamples)) refuse_length(path, *samples);
  }
};

constexpr auto kBins = static_cast<std::size_t>(kSpectrumBins);
constexpr auto kHalf = static_cast<std::size_t>(kWindow / 2);
using Spectrum = std::array<float, kBins>;

// window[n], and cosines and sines of 2 pi n k / kWindow for n up to half a window; the rest mirrors them.
struct SpectrumTables {
  std::array<float, 2 * kHalf> window;
  std::vector<Spectrum> cosine, sine;

  SpectrumTables() : cosine(kHalf + 1), sine(kHalf + 1) {
    constexpr double turn = 2 * std::numbers::pi;
    for (std::size_t n = 0; n < window.size(); ++n)
      window[n] = static_cast<float>(
          0.54 - 0.46 * std::cos(turn * static_cast<double>(n) / static_cast<double>(window.size() - 1)));
    for (std::size_t n = 0; n <= kHalf; ++n)
      for (std::size_t k = 0; k < kBins; ++k) {
        const double angle = turn * static_cast<double>(n * k % (2 * kHalf)) / (2 * kHalf);
        cosine[n][k] = static_cast<float>(std::cos(angle));
        sine[n][k] = static_cast<float>(std::sin(angle));
      }
  }
};

// The real and the imaginary part of the transform of a windowed frame x.
TOPKNOT_MULTIVERSION void transform_frame(const SpectrumTables& tables, const float* x, Spectrum& real,
                                          Spectrum& imaginary) {
  for (std::size_t k = 0; k < kBins; ++k) {
    real[k] = x[0] + x[kHalf] * tables.cosine[kHalf][k];
    imaginary[k] = 0;
  }
  for (std::size_t n = 1; n < kHalf; ++n) {
    const float even = x[n] + x[2 * kHalf - n], odd = x[n] - x[2 * kHalf - n];
    const Spectrum &cosine = tables.cosine[n], &sine = tables.sine[n];
    for (std::size_t k = 0; k < kBins; ++k) {
      real[k] += even * cosine[k];
      imaginary[k] -= odd * sine[k];
    }
  }
}

}  // namespace

std::vector<float> read_recording(const std::string& path) {
  const Recording recording(path);
  const std::int64_t most = recording.samples.value_or(kMostSamples + 1);
  std::vector<float> values;
  with_memory("the samples of '" + path + "'", 4.0 * static_cast<double>(most), [&] {
    constexpr std::int64_t kStep = 60 * kSampleRate;
    for (sf_count_t got = 1; got > 0 && static_cast<std::int64_t>(values.size()) < most;) {
      const std::size_t begin = values.size();
      values.resize(static_cast<std::size_t>(std::min(most, static_cast<std::int64_t>(begin) + kStep)));
      got = sf_read_float(recording.file.get(), values.data() + begin,
                          static_cast<sf_count_t>(values.size() - begin));
      values.resize(begin + static_cast<std::size_t>(std::max<sf_count_t>(0, got)));
    }
  });
  const auto read = static_cast<std::int64_t>(values.size());
  if (sf_error(recording.file.get()) != SF_ERR_NO_ERROR)
    refuse_recording(path, fmt::format("cut short or damaged after {} samples: {}", read,
                                       sf_strerror(recording.file.get())));
  if (recording.samples && read < most)
    refuse_recording(path, fmt::format("cut short: {} of {} samples", read, most));
  if (read > kMostSamples) refuse_length(path, read);
  constexpr float kLoudest = 1 << 15;  // floats in the units of 16 bits pass
  const auto bad =
      std::find_if_not(values.begin(), values.end(), [](float value) { return std::abs(value) <= kLoudest; });
  if (bad != values.end())
    refuse_recording(path, fmt::format("damaged: its sample {} (from 0) is {}", bad - values.begin(), *bad));
  return values;
}

std::int64_t recording_samples(const std::string& path) {
  if (const auto samples = Recording(path).samples) return *samples;
  return static_cast<std::int64_t>(read_recording(path).size());
}

void log_spectrogram(std::span<const float> samples, float* out, std::int64_t stride) {
  static const SpectrumTables tables;
  const auto n = static_cast<std::int64_t>(samples.size());
  TOPKNOT_CHECK(n > kWindow / 2, "a recording of half a window or less");
  const std::int64_t frames = spectrogram_frames(n);
  std::array<float, 2 * kHalf> x;
  Spectrum real, imaginary;
  double sum = 0, squares = 0;
  for (std::int64_t t = 0; t < frames; ++t) {
    for (std::int64_t i = 0; i < kWindow; ++i) {
      std::int64_t at = t * kHop + i - kWindow / 2;
      if (at < 0) at = -at;
      if (at >= n) at = 2 * (n - 1) - at;
      x[static_cast<std::size_t>(i)] =
          samples[static_cast<std::size_t>(at)] * tables.window[static_cast<std::size_t>(i)];
    }
    transform_frame(tables, x.data(), real, imaginary);
    for (std::size_t k = 0; k < kBins; ++k) {
      const float magnitude = std::sqrt(real[k] * real[k] + imaginary[k] * imaginary[k]);
      const float value = std::log1p(magnitude);
      out[static_cast<std::int64_t>(k) * stride + t] = value;
      sum += value;
      squares += static_cast<double>(value) * value;
    }
  }
  const double count = static_cast<double>(frames * kSpectrumBins), mean = sum / count;
  const double deviation = std::sqrt(std::max(squares - sum * mean, 0.0) / (count - 1));
  for (std::int64_t k = 0; k < kSpectrumBins; ++k)
    for (std::int64_t t = 0; t < frames; ++t) {
      float& value = out[k * stride + t];
      value = deviation == 0 ? 0.0f : static_cast<float>((value - mean) / deviation);
    }
}

}  // namespace topknot

#pragma once
// Log spectrograms of speech, as the networks for AN4 and LibriSpeech take them (Deep Speech 2, section 3.1, in the settings
// of its public PyTorch versions): windows of 20 ms every 10 ms, symmetric Hamming, centred on multiples of the hop with the
// signal reflected at its ends; log(1 + |X|), then shifted and scaled to mean 0 and standard deviation 1 over the whole
// utterance.

#include <cstdint>
#include <span>

namespace topknot {

inline constexpr std::int64_t kSampleRate = 16000;              // per second
inline constexpr std::int64_t kWindow = kSampleRate / 50;       // samples
inline constexpr std::int64_t kHop = kSampleRate / 100;         // samples
inline constexpr std::int64_t kSpectrumBins = kWindow / 2 + 1;  // 161

// Frames of so many samples.
constexpr std::int64_t spectrogram_frames(std::int64_t samples) {
  return 1 + samples / kHop;
}

// Samples in [-1, 1], more than half a window of them; `out`: bin k of frame t is out[k * stride + t].
// A silent recording is all zeros.
void log_spectrogram(std::span<const float> samples, float* out, std::int64_t stride);

}  // namespace topknot

#pragma once
// Speech: recordings, their spectrograms, and transcripts as class labels.

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace topknot {

inline constexpr std::int64_t kSampleRate = 16000;              // per second
inline constexpr std::int64_t kWindow = kSampleRate / 50;       // samples
inline constexpr std::int64_t kHop = kSampleRate / 100;         // samples
inline constexpr std::int64_t kSpectrumBins = kWindow / 2 + 1;  // 161

constexpr std::int64_t spectrogram_frames(std::int64_t samples) {
  return 1 + samples / kHop;
}

// The samples of a WAV, FLAC or SPHERE file: PCM, floats, mu-law or A-law, of full scale 1. UserError, naming
// the file: it cannot be read, is no regular file, is cut short or damaged (a sample is not finite, or beyond
// 2^15), is not mono, not of 16,000 samples per second, longer than an hour, or has PCM of fewer than 16
// bits. A header without a length (WAV: from 0x7ffff000 on; FLAC and SPHERE: 0) is no fault: all is read.
std::vector<float> read_recording(const std::string& path);

// How many samples it has, from its header if that says it; UserError as above if that says enough.
std::int64_t recording_samples(const std::string& path);

// The log spectrogram, as the networks for AN4 and LibriSpeech take it (Deep Speech 2, section 3.1, in the
// settings of its public PyTorch versions): windows of 20 ms every 10 ms, symmetric Hamming, centred on
// multiples of the hop with the signal reflected at its ends; log(1 + |X|), then shifted and scaled to mean 0
// and standard deviation 1 over the whole utterance. Samples in [-1, 1], more than half a window of them;
// `out`: bin k of frame t is out[k * stride + t]. A silent recording is all zeros.
void log_spectrogram(std::span<const float> samples, float* out, std::int64_t stride);

// The characters by class; class 0 is the blank of connectionist temporal classification.
inline constexpr std::string_view kAlphabet = "_'ABCDEFGHIJKLMNOPQRSTUVWXYZ ";

// A label per character; small letters count as capitals, runs of blanks as one, and those at the ends go.
// UserError, naming it, for a character that is not in the alphabet.
std::vector<std::int32_t> encode_transcript(std::string_view text);
std::string decode_transcript(std::span<const std::int32_t> labels);

// The best path (Graves et al., ICML 2006, section 3.2): equal neighbours become one, then blanks go.
// `classes`: the likeliest of each frame.
std::vector<std::int32_t> collapse_path(std::span<const std::int32_t> classes);

struct TranscriptErrors {
  std::int64_t word_errors = 0, words = 0, character_errors = 0, characters = 0;
};
// Levenshtein distances of words, and of characters without blanks, and how many the true transcript has.
TranscriptErrors transcript_errors(std::string_view recognised, std::string_view truth);

}  // namespace topknot

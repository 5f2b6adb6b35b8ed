#pragma once
// Recordings of speech, read by libsndfile.

#include <cstdint>
#include <string>
#include <vector>

namespace topknot {

// The samples of a WAV, FLAC or SPHERE file, in [-1, 1]. UserError, naming the file: it cannot be read or is cut short, is not
// mono, not of 16,000 samples per second, longer than an hour, or has fewer than 16 bits per sample.
std::vector<float> read_recording(const std::string& path);

// How many samples it has, from its header; UserError as above where that says enough.
std::int64_t recording_samples(const std::string& path);

}  // namespace topknot

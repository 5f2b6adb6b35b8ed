#pragma once
// Recordings of speech, read by libsndfile.

#include <cstdint>
#include <string>
#include <vector>

namespace topknot {

// The samples of a WAV, FLAC or SPHERE file: PCM, floats, mu-law or A-law, of full scale 1. UserError, naming the file: it
// cannot be read, is no regular file, is cut short or damaged (a sample is not finite, or beyond 2^15), is not mono, not of
// 16,000 samples per second, longer than an hour, or has PCM of fewer than 16 bits. A header that does not know the length
// (WAV: from 0x7ffff000 on; FLAC and SPHERE: 0) is no fault: the file is read to its end.
std::vector<float> read_recording(const std::string& path);

// How many samples it has, from its header where that says it; UserError as above where that says enough.
std::int64_t recording_samples(const std::string& path);

}  // namespace topknot

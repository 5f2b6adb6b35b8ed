#pragma once
// Transcripts of speech as class labels, and how far a recognised one is from the true one.

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace topknot {

// The characters by class; class 0 is the blank of connectionist temporal classification.
inline constexpr std::string_view kAlphabet = "_'ABCDEFGHIJKLMNOPQRSTUVWXYZ ";

// A label per character; small letters count as capitals, runs of blanks as one, and those at the ends go. UserError, naming
// it, for a character that is not in the alphabet.
std::vector<std::int32_t> encode_transcript(std::string_view text);
std::string decode_transcript(std::span<const std::int32_t> labels);

// The best path (Graves et al., ICML 2006, section 3.2): equal neighbours become one, then blanks go. `classes`: the likeliest
// of each frame.
std::vector<std::int32_t> collapse_path(std::span<const std::int32_t> classes);

struct TranscriptErrors {
  std::int64_t word_errors = 0, words = 0, character_errors = 0, characters = 0;
};
// Levenshtein distances of the words, and of the characters without blanks, and how many the true transcript has.
TranscriptErrors transcript_errors(std::string_view recognised, std::string_view truth);

}  // namespace topknot

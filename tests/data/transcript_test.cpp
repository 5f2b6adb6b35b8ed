#include "data/transcript.h"

#include "tests/support/catch.h"
#include "tests/support/error_text.h"

using namespace topknot;

TEST_CASE("a transcript becomes labels and text again; other characters are refused") {
  CHECK((encode_transcript("A'B Z") == std::vector<std::int32_t>{2, 1, 3, 28, 27}));
  CHECK(decode_transcript(encode_transcript("  don't \t stop ")) == "DON'T STOP");
  CHECK(encode_transcript("").empty());
  CHECK(user_error([] { encode_transcript("ROOM 3"); }, {"'3'"}));
  CHECK(user_error([] { encode_transcript("A_B"); }, {"'_'"}));
  CHECK(user_error([] { encode_transcript("caf\xc3\xa9"); }, {"byte 195"}));
}

TEST_CASE("the best path collapses equal neighbours, and a blank keeps two of a kind apart") {
  CHECK((collapse_path(std::vector<std::int32_t>{0, 2, 2, 0, 2, 3, 3, 0, 0}) ==
         std::vector<std::int32_t>{2, 2, 3}));
  CHECK(collapse_path(std::vector<std::int32_t>{0, 0}).empty());
}

TEST_CASE("word and character errors are edit distances") {
  const auto errors = [](const char* heard, const char* said) {
    const TranscriptErrors e = transcript_errors(heard, said);
    return std::vector<std::int64_t>{e.word_errors, e.words, e.character_errors, e.characters};
  };
  CHECK((errors("YES", "YES") == std::vector<std::int64_t>{0, 1, 0, 3}));
  CHECK((errors("", "GO ON") == std::vector<std::int64_t>{2, 2, 4, 4}));
  CHECK((errors("KITTEN ON", "SITTING") ==
         std::vector<std::int64_t>{2, 1, 4, 7}));  // a word replaced, one too many
  CHECK((errors("A C", "A B C") == std::vector<std::int64_t>{1, 3, 1, 3}));
  CHECK((errors("AB", "A B") == std::vector<std::int64_t>{2, 2, 0, 2}));
}

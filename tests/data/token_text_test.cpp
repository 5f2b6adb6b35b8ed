// Texts to tokens and back, as a model that goes on with one needs it.
#include "tests/data/text_folder.h"
#include "tests/support/standard_error.h"

using namespace topknot;

namespace {

std::unique_ptr<Dataset> text_of(const TempFolder& folder, const std::string& tokens,
                                 const std::string& text) {
  for (const char* name : {"train.txt", "valid.txt", "test.txt"}) put(folder, name, text);
  return text_in(folder, tokens, Split::train, 2);
}

std::string decoded(const Dataset& data, const std::vector<std::int32_t>& tokens) {
  std::string text;
  for (const std::int32_t token : tokens) text += data.token_text(token);
  return text;
}

using Ids = std::vector<std::int32_t>;

}  // namespace

TEST_CASE("texts by characters and bytes may have no test file; the Penn Treebank's words have one") {
  const TempFolder folder;
  for (const char* name : {"train.txt", "valid.txt"}) put(folder, name, "one two three\n");
  DatasetOptions options;
  options.root = folder.str(), options.set("sequence_length", 2);
  for (const char* tokens : {"char", "byte"}) {
    options.set("tokens", tokens);
    CHECK_FALSE(make_dataset("text", options, Split::train)->has_held_out());
    CHECK(text_of(TempFolder(), tokens, "one two\n")->has_held_out());
  }
  options.set("tokens", "word");
  CHECK(make_dataset("text", options, Split::train)->has_held_out());
  CHECK(says(error_text([&] { make_dataset("text", options, Split::held_out); }), {"test.txt is missing"}));
}

TEST_CASE("a prompt by words has the training file's ids, <unk> for others, and lines that have an end") {
  const TempFolder folder;
  const auto data = text_of(folder, "word", "one two\nthree one\n");
  CHECK(data->encode("two  one") == Ids{3, 2});
  const testing::StandardError errors;
  CHECK(data->encode("two\nthree four\n") == Ids{3, 0, 4, 1, 0});
  CHECK(says(errors.text(), {"warning", "5 words of the training text", "<unk>: four"}));
  CHECK(data->encode("\n") == Ids{0});
  CHECK(data->encode("").empty());
  CHECK(data->encode("  ").empty());
  CHECK(decoded(*data, {2, 3, 0, 4, 1}) == "one two \nthree <unk> ");
}

TEST_CASE("a prompt by characters has one id for each, of any length in UTF-8; others are refused by name") {
  const TempFolder folder;
  const std::string text = "a\nb\u00e9\u20ac\U0001f600";  // 1 to 4 bytes
  const auto data = text_of(folder, "char", text);
  CHECK(data->classes() == 6);
  CHECK(data->encode("b\na") == Ids{2, 0, 1});
  CHECK(data->encode(text).size() == 6);
  CHECK(decoded(*data, data->encode(text)) == text);
  CHECK(user_error([&] { data->encode("abc"); }, {"the character 'c' (U+0063) at byte 2", "6"}));
  CHECK(user_error([&] { data->encode("a\xff"); }, {"no UTF-8", "byte 1"}));
}

TEST_CASE("a prompt by bytes is its bytes") {
  const TempFolder folder;
  const auto data = text_of(folder, "byte", "abc\n");
  CHECK(data->encode("z\n\xff") == Ids{122, 10, 255});
  CHECK(decoded(*data, {122, 10, 255}) == "z\n\xff");
}

TEST_CASE("tokens of a file that knows no texts are read and written as numbers") {
  const TempFolder folder;
  for (const char* name : {"train.bin", "val.bin"}) folder.write(name, {1, 0, 2, 0, 3, 0, 4, 0});
  DatasetOptions options;
  options.root = folder.str();
  options.set("sequence_length", 2);
  options.set("vocabulary", 10);
  const auto data = make_dataset("tokens", options, Split::train);
  CHECK(data->encode(" 9 0\n7") == Ids{9, 0, 7});
  CHECK(decoded(*data, {9, 0, 7}) == "9 0 7 ");
  for (const char* text : {"10", "-1", "1.5", "word", "1,2", "99999999999"})
    CHECK(user_error([&] { data->encode(text); }, {std::string("'") + text + "'", "0 to 9"}));
}

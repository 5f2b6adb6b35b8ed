// The data set text, the columns that ranks go down, and the batches of both.

#include "data/loader.h"
#include "tests/data/text_folder.h"
#include "tests/support/standard_error.h"

using namespace topknot;

namespace {

std::unique_ptr<Dataset> words_in(const TempFolder& folder, Split split, int window,
                                  std::int64_t train_size = 0) {
  return text_in(folder, "word", split, window, train_size);
}

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

TEST_CASE("a text's vocabulary is its training file's words; lines end with <eos>, other words are <unk>") {
  const TempFolder folder;
  put(folder, "ptb.train.txt", " the cat  sat\n\nthe\tdog <unk> \r\nend");
  put(folder, "ptb.valid.txt", "dog the bird\n");
  put(folder, "ptb.test.txt", "sat\nsat\n");
  const auto train = words_in(folder, Split::train, 3);
  // <eos> 0, <unk> 1, the 2, cat 3, sat 4, dog 5, end 6
  CHECK(train->classes() == 7);
  CHECK((stream_of(*train) == std::vector<std::int32_t>{2, 3, 4, 0, 0, 2, 5, 1, 0, 6, 0}));
  CHECK(train->size() == 8);
  CHECK(train->sample_shape() == Shape({3, 1, 1}));
  CHECK(train->task() == Task::language_model);
  CHECK(train->labels_per_sample() == 3);
  CHECK((stream_of(*words_in(folder, Split::test, 3)) == std::vector<std::int32_t>{5, 2, 1, 0}));
  CHECK((stream_of(*words_in(folder, Split::held_out, 3)) == std::vector<std::int32_t>{4, 0, 4, 0}));
  CHECK(words_in(folder, Split::test, 3)->classes() == 7);
  CHECK((stream_of(*words_in(folder, Split::train, 3, 5)) == std::vector<std::int32_t>{2, 3, 4, 0, 0}));
}

TEST_CASE("a text is read under either name, from the folders that archives unpack to") {
  const TempFolder folder;
  put(folder, "simple-examples/data/train.txt", "a b c\n");
  put(folder, "simple-examples/data/valid.txt", "a b c\n");
  CHECK(words_in(folder, Split::train, 2)->classes() == 5);
  CHECK(words_in(folder, Split::test, 2)->size() == 2);
  CHECK_USER_ERROR(words_in(folder, Split::held_out, 2), "ptb.test.txt or test.txt is missing",
                   "scripts/fetch-data ptb");
}

TEST_CASE("texts that are missing, too short or too small are refused with the file or the key") {
  const TempFolder folder;
  CHECK_USER_ERROR(words_in(folder, Split::train, 2), "no ptb.train.txt or train.txt in it",
                   "simple-examples/data/", "scripts/fetch-data ptb");
  put(folder, "train.txt", "a b c\n");
  CHECK_USER_ERROR(words_in(folder, Split::test, 2), "ptb.valid.txt or valid.txt is missing");
  CHECK_USER_ERROR(words_in(folder, Split::train, 4), "data.sequence_length", "train.txt", "4 words");
  CHECK_USER_ERROR(words_in(folder, Split::train, 0), "data.sequence_length");
  CHECK_USER_ERROR(words_in(folder, Split::train, 2, 5), "data.train_size");
  put(folder, "train.txt", "");
  CHECK_USER_ERROR(words_in(folder, Split::train, 1), "train.txt", "0 words");
}

// The same words and lines, as they leave editors and tools.
TEST_CASE("a text's ends of lines, its last newline and a byte order mark change no word") {
  const std::string plain = "the cat\n\nsat\nthe dog\n\nend\n", bom = "\xef\xbb\xbf";
  std::string windows;
  for (const char c : plain) windows += c == '\n' ? "\r\n" : std::string(1, c);
  const auto read = [](const std::string& train, const std::string& valid) {
    const TempFolder folder;
    put(folder, "train.txt", train);
    put(folder, "valid.txt", valid);
    const auto text = words_in(folder, Split::train, 3);
    return std::tuple(text->classes(), stream_of(*text), stream_of(*words_in(folder, Split::test, 3)));
  };
  const auto expected = read(plain, plain);
  CHECK(std::get<0>(expected) == 7);
  CHECK(std::get<2>(expected) == std::vector<std::int32_t>{2, 3, 0, 0, 4, 0, 2, 5, 0, 0, 6, 0});
  for (const std::string& start : {std::string(), bom})
    for (const std::string& text :
         {plain, windows, plain.substr(0, plain.size() - 1), windows.substr(0, windows.size() - 2)}) {
      CHECK(read(start + text, plain) == expected);
      CHECK(read(plain, start + text) == expected);
    }
  CHECK(read("caf\xc3\xa9 a b c\n", "caf\xc3\xa9 a b\n") ==
        std::tuple(6, std::vector<std::int32_t>{2, 3, 4, 5, 0}, std::vector<std::int32_t>{2, 3, 4, 0}));
}

// A search beyond the end of the line would take an hour.
TEST_CASE("a text of a word per line is read as quickly as one of a few long lines") {
  const TempFolder folder;
  std::string lines;
  for (int i = 0; i < 400'000; ++i) lines += "word" + std::to_string(i % 10) + "\n";
  put(folder, "train.txt", lines);
  CHECK(words_in(folder, Split::train, 5)->size() == 800'000 - 5);
}

TEST_CASE("UTF-16 and binary files are refused as texts by name") {
  const TempFolder folder;
  const std::string little(
      "\xff\xfe"
      "a\0 \0b\0\n\0",
      10),
      big("\xfe\xff\0a\0 \0b\0\n", 10);
  for (const auto& [content, why] : {std::pair{little, "UTF-16"},
                                     {big, "UTF-16"},
                                     {little.substr(2), "its byte 1 (from 0) is 0"},
                                     {std::string("a b c d\n\0", 9), "its byte 8 (from 0) is 0"}}) {
    put(folder, "train.txt", content);
    CHECK_USER_ERROR(words_in(folder, Split::train, 1), "train.txt", "no text", why);
    put(folder, "train.txt", "a b c\n");
    put(folder, "valid.txt", content);
    CHECK_USER_ERROR(words_in(folder, Split::test, 1), "valid.txt", "no text", why);
  }
}

TEST_CASE("in training each row goes down a column of its own, and the columns cover the stream") {
  const std::int64_t tokens = 1003, window = 7, batch = 5;
  for (const int ranks : {1, 2, 3}) {
    const StreamSampler sampler(tokens, window, ranks, batch, true);
    const std::int64_t length = tokens / (ranks * batch);
    std::set<std::int64_t> columns;
    for (int rank = 0; rank < ranks; ++rank) {
      const EpochOrder order = sampler.epoch(0, rank);
      CHECK(sampler.steps(rank) == (length - 1) / window);
      CHECK(sampler.shard_size(rank) == sampler.steps(rank) * batch);
      for (std::int64_t step = 0; step < sampler.steps(rank); ++step) {
        const auto rows = order(step);
        REQUIRE(static_cast<std::int64_t>(rows.size()) == batch);
        for (std::size_t i = 0; i < rows.size(); ++i) {
          CHECK(rows[i] == (rank * batch + static_cast<std::int64_t>(i)) * length + step * window);
          CHECK(rows[i] + window < tokens);
        }
        if (step == 0) columns.insert(rows.begin(), rows.end());
      }
    }
    CHECK(static_cast<std::int64_t>(columns.size()) == ranks * batch);
  }
  CHECK_NOTHROW(StreamSampler(8 * 10, 7, 2, 5, true));
  CHECK_USER_ERROR(StreamSampler(8 * 10 - 1, 7, 2, 5, true), "data.batch_size", "79 tokens", "window of 7");
  CHECK_USER_ERROR(StreamSampler(80, 7, 1, 0, true), "data.batch_size");
}

TEST_CASE("evaluation takes every window of the stream once, down columns that do not depend on the ranks") {
  for (const std::int64_t tokens : {2, 9, 64, 65, 1000})
    for (const std::int64_t batch : {1, 4, 6})
      for (const int ranks : {1, 2, 3, 4}) {
        INFO(tokens << " tokens, batch " << batch << ", " << ranks << " ranks");
        const std::int64_t window = 7;
        const StreamSampler sampler(tokens, window, ranks, batch, false);
        std::vector<std::int64_t> seen, starts;
        std::int64_t least = 1 << 30, most = 0;
        for (int rank = 0; rank < ranks; ++rank) {
          const EpochOrder order = sampler.epoch(0, rank);
          const std::int64_t steps = sampler.steps(rank);
          least = std::min(least, steps), most = std::max(most, steps);
          std::vector<std::int64_t> before;
          for (std::int64_t step = 0; step < steps; ++step) {
            const auto rows = order(step);
            CHECK(!rows.empty());
            CHECK(static_cast<std::int64_t>(rows.size()) <= batch);
            if (step == 0) starts.insert(starts.end(), rows.begin(), rows.end());
            // A row goes on where it was; rows that have ended are the last ones.
            if (step > 0) REQUIRE(rows.size() <= before.size());
            for (std::size_t i = 0; step > 0 && i < rows.size(); ++i) CHECK(rows[i] == before[i] + window);
            seen.insert(seen.end(), rows.begin(), rows.end());
            before = rows;
          }
        }
        CHECK(most - least <= 1);
        CHECK(sampler.steps(0) == most);
        std::sort(seen.begin(), seen.end());
        REQUIRE(static_cast<std::int64_t>(seen.size()) == (tokens - 1 + window - 1) / window);
        for (std::size_t i = 0; i < seen.size(); ++i) CHECK(seen[i] == static_cast<std::int64_t>(i) * window);
        if (ranks <= batch) {
          const StreamSampler alone(tokens, window, 1, batch, false);
          CHECK(starts == alone.epoch(0, 0)(0));
        }
      }
}

TEST_CASE("a batch of windows has whole tokens, and the next ones as labels step by step") {
  const TempFolder folder;
  std::string text;
  for (int i = 0; i < 60; ++i) text += "w" + std::to_string(i * i % 23) + (i % 9 == 8 ? "\n" : " ");
  put(folder, "train.txt", text);
  const auto data = words_in(folder, Split::train, 4);
  const auto tokens = stream_of(*data);
  for (const int workers : {0, 2}) {
    LoaderOptions options;
    options.batch_size = 3, options.rank = 1, options.ranks = 2, options.workers = workers;
    Loader loader(*data, options);
    loader.start_epoch(5, 1);
    std::int64_t steps = 1;
    for (Batch batch; loader.next(batch); ++steps) {
      REQUIRE(batch.images.shape() == Shape({3, 4, 1, 1}));
      REQUIRE(batch.labels.size() == 12);
      CHECK_FALSE(batch.targets.defined());
      const auto ids = batch.images.to_vector();
      for (std::size_t i = 0; i < 3; ++i)
        for (std::size_t t = 0; t < 4; ++t) {
          const auto at = static_cast<std::size_t>(batch.indices[i]) + t;
          CHECK(ids[i * 4 + t] == static_cast<float>(tokens[at]));
          CHECK(batch.labels[t * 3 + i] == tokens[at + 1]);
        }
    }
    CHECK(steps == loader.steps_per_epoch());
    CHECK((loader.weights() == std::vector<float>{1, 1}));
  }
  LoaderOptions uneven;
  uneven.shard = parse_shard_rule("uneven:2");
  CHECK_USER_ERROR(Loader(*data, uneven), "data.shard", "even");
  CHECK_USER_ERROR(resolve_augment("true", *data), "data.augment", "text");
  CHECK_FALSE(resolve_augment("auto", *data));
}

TEST_CASE("an evaluation asks for every word but the first once, and masks what the last window lacks") {
  const TempFolder folder;
  std::string text;
  for (int i = 0; i < 60; ++i) text += "w" + std::to_string(i * i % 23) + " ";
  put(folder, "train.txt", text);
  for (const int window : {1, 4, 7, 60}) {
    const auto data = words_in(folder, Split::train, window);
    std::vector<std::int32_t> words;
    for (std::int64_t i = 0; i < 61; ++i) words.push_back(data->label(i - 1));
    CHECK(words.back() != kNoLabel);
    CHECK(data->label(60) == kNoLabel);
    std::vector<int> asked(61);
    std::int64_t losses = 0;
    for (int rank = 0; rank < 2; ++rank) {
      LoaderOptions options;
      options.batch_size = 3, options.rank = rank, options.ranks = 2, options.train = false;
      Loader loader(*data, options);
      loader.start_epoch(0);
      for (Batch batch; loader.next(batch);) {
        losses += batch.losses();
        const auto ids = batch.images.to_vector();
        const auto rows = static_cast<std::size_t>(batch.size()), steps = static_cast<std::size_t>(window);
        for (std::size_t i = 0; i < rows; ++i)
          for (std::size_t t = 0; t < steps; ++t) {
            const std::size_t at = static_cast<std::size_t>(batch.indices[i]) + t + 1;
            const std::int32_t label = batch.labels[t * rows + i];
            CHECK(label == (at < 61 ? words[at] : kNoLabel));
            if (at < 61) ++asked[at];
            if (at > 61) CHECK(ids[i * steps + t] == 0);
          }
      }
    }
    CHECK(losses == 60);
    asked[0] = 1;
    CHECK(asked == std::vector<int>(61, 1));
  }
}

TEST_CASE("the real Penn Treebank has the published number of words") {
  const char* root = std::getenv("TOPKNOT_DATA");
  if (!root) {
    WARN("skipped: TOPKNOT_DATA does not name a folder with ptb/");
    return;
  }
  DatasetOptions options;
  options.root = std::string(root) + "/ptb";
  options.set("sequence_length", 20);
  for (const auto& [split, words] :
       {std::pair{Split::train, 929589}, {Split::test, 73760}, {Split::held_out, 82430}}) {
    const auto text = make_dataset("text", options, split);
    CHECK(text->size() == words - 20);
    CHECK(text->classes() == 10000);
  }
}

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
  CHECK_ERROR(make_dataset("text", options, Split::held_out), "test.txt is missing");
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

TEST_CASE("a prompt by characters has an id for each, others are refused by name; by bytes it is its bytes") {
  const TempFolder folder;
  const std::string text = "a\nb\u00e9\u20ac\U0001f600";  // 1 to 4 bytes
  const auto data = text_of(folder, "char", text);
  CHECK(data->classes() == 6);
  CHECK(data->encode("b\na") == Ids{2, 0, 1});
  CHECK(data->encode(text).size() == 6);
  CHECK(decoded(*data, data->encode(text)) == text);
  CHECK_USER_ERROR(data->encode("abc"), "the character 'c' (U+0063) at byte 2", "6");
  CHECK_USER_ERROR(data->encode("a\xff"), "no UTF-8", "byte 1");
  const auto bytes = text_of(folder, "byte", "abc\n");
  CHECK(bytes->encode("z\n\xff") == Ids{122, 10, 255});
  CHECK(decoded(*bytes, {122, 10, 255}) == "z\n\xff");
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
    CHECK_USER_ERROR(data->encode(text), std::string("'") + text + "'", "0 to 9");
}

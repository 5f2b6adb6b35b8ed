// The data set tokens, texts by byte and by character, and windows drawn at random.
#include <sys/stat.h>

#include "data/loader.h"
#include "nn/base/checksum.h"
#include "tests/data/text_folder.h"

using namespace topknot;

namespace {

using Bytes = std::vector<std::uint8_t>;

std::unique_ptr<Dataset> tokens_in(const TempFolder& folder, Split split, int window, int vocabulary = 50257,
                                   std::int64_t size = 0, const std::string& type = "auto") {
  DatasetOptions options;
  options.root = folder.str();
  options.set("token_type", type);
  options.set("sequence_length", window);
  options.set("vocabulary", vocabulary);
  options.train_size = options.test_size = size;
  return make_dataset("tokens", options, split);
}

std::vector<std::int32_t> ids_of(const std::string& text) {
  std::vector<std::int32_t> ids;
  for (const char c : text) ids.push_back(static_cast<unsigned char>(c));
  return ids;
}

Bytes little_endian(const std::vector<std::int64_t>& values, int bytes) {
  Bytes result;
  for (const std::int64_t value : values)
    for (int i = 0; i < bytes; ++i) result.push_back(static_cast<std::uint8_t>(value >> 8 * i));
  return result;
}

// As llm.c writes it; `count` as the header has it.
Bytes llmc(const std::vector<std::int64_t>& tokens, int bytes, std::int64_t count, std::int64_t version) {
  std::vector<std::int64_t> header(256);
  header[0] = bytes == 2 ? 20240520 : 20240801, header[1] = version, header[2] = count;
  Bytes file = little_endian(header, 4);
  const Bytes body = little_endian(tokens, bytes);
  file.insert(file.end(), body.begin(), body.end());
  return file;
}
Bytes llmc(const std::vector<std::int64_t>& tokens, int bytes) {
  return llmc(tokens, bytes, static_cast<std::int64_t>(tokens.size()), bytes == 2 ? 1 : 7);
}

std::uint64_t checksum_of(const Dataset& data) {
  Checksum checksum;
  REQUIRE(data.add_to(checksum));
  return checksum.value();
}

}  // namespace

TEST_CASE("a text by characters has its training file's code points in order, by bytes 256 classes") {
  const TempFolder folder;
  put(folder, "train.txt", "\xef\xbb\xbfz\xc3\xa9 \xe2\x82\xac \xf0\x9f\x98\x80\na");  // z é _ € _ 😀 \n a
  put(folder, "valid.txt", "a\xc3\xa9z");
  put(folder, "test.txt", "zz");
  const auto train = text_in(folder, "char", Split::train, 2);
  // \n 0, blank 1, a 2, z 3, é 4, € 5, 😀 6
  CHECK(train->classes() == 7);
  CHECK((stream_of(*train) == std::vector<std::int32_t>{3, 4, 1, 5, 1, 6, 0, 2}));
  CHECK(train->token_name() == "character");
  CHECK(train->bytes_per_token() == Approx(14.0 / 8));
  CHECK(train->has_held_out());
  const auto valid = text_in(folder, "char", Split::test, 1);
  CHECK((stream_of(*valid) == std::vector<std::int32_t>{2, 4, 3}));
  CHECK(valid->classes() == 7);
  CHECK(valid->bytes_per_token() == Approx(4.0 / 3));
  CHECK(valid->class_names_checksum() == train->class_names_checksum());
  CHECK((stream_of(*text_in(folder, "char", Split::held_out, 1)) == std::vector<std::int32_t>{3, 3}));
  // Of the first three characters, with four bytes.
  CHECK(text_in(folder, "char", Split::train, 2, 3)->bytes_per_token() == Approx(4.0 / 3));

  const auto bytes = text_in(folder, "byte", Split::train, 2);
  CHECK(bytes->classes() == 256);
  CHECK(stream_of(*bytes) == ids_of("z\xc3\xa9 \xe2\x82\xac \xf0\x9f\x98\x80\na"));
  CHECK(bytes->bytes_per_token() == 1);
  CHECK(bytes->token_name() == "byte");
  CHECK(text_in(folder, "word", Split::train, 2)->bytes_per_token() == 0);
  put(folder, "train.txt", "z\xc3\xa9 \xe2\x82\xac \xf0\x9f\x98\x80\nb");
  CHECK(text_in(folder, "char", Split::train, 2)->class_names_checksum() != train->class_names_checksum());
}

TEST_CASE("one file, input.txt, is cut where nanoGPT cuts it, with the vocabulary of the whole") {
  const TempFolder folder;
  // 19 characters of two bytes: int(0.9 * 19) = 17; the last one is in the validation part alone.
  std::string text;
  for (int i = 0; i < 18; ++i) text += "\xc3" + std::string(1, static_cast<char>(0xa0 + i % 3));
  text += "\xc3\xa9";
  put(folder, "input.txt", text);
  const auto train = text_in(folder, "char", Split::train, 4),
             valid = text_in(folder, "char", Split::test, 1);
  CHECK(train->size() == 17 - 4);
  CHECK(train->classes() == 4);
  CHECK_FALSE(train->has_held_out());
  CHECK((stream_of(*valid) == std::vector<std::int32_t>{2, 3}));
  CHECK(text_in(folder, "byte", Split::train, 4)->size() == 34 - 4);  // int(0.9 * 38)
  CHECK_USER_ERROR(text_in(folder, "char", Split::test, 2), "data.sequence_length", "validation part",
                   "input.txt", "2 characters");
  CHECK_USER_ERROR(text_in(folder, "word", Split::train, 2), "no ptb.train.txt or train.txt in it");
  put(folder, "train.txt", "abcdef");
  CHECK(text_in(folder, "char", Split::train, 4)->classes() == 6);  // goes before input.txt
  const TempFolder empty;
  CHECK_USER_ERROR(text_in(empty, "char", Split::train, 2), "train.txt or input.txt",
                   "scripts/fetch-data tiny-shakespeare");
}

TEST_CASE("a character that the training text lacks, and what is no UTF-8, are named with their place") {
  const TempFolder folder;
  put(folder, "train.txt", "abc abc");
  put(folder, "valid.txt", "ab\xe2\x82\xac");
  CHECK_USER_ERROR(text_in(folder, "char", Split::test, 1), "valid.txt", "'\xe2\x82\xac' (U+20AC) at byte 2",
                   "train.txt", "data.tokens=byte");
  CHECK(text_in(folder, "byte", Split::test, 1)->size() == 4);
  for (const std::string bad : {"\xe9", "\xc3", "\xc3(", "\xc0\xaf", "\xed\xa0\x80", "\xf4\x90\x80\x80",
                                "\xf8\x88\x80\x80\x80", "\xe2\x82", "\x80", "\xe0\x80\xaf"}) {
    put(folder, "train.txt", "abc" + bad);
    CHECK_USER_ERROR(text_in(folder, "char", Split::train, 1), "train.txt", "no UTF-8", "byte 3",
                     "data.tokens=byte");
  }
  put(folder, "train.txt",
      "\xf4\x8f\xbf\xbf\xef\xbf\xbf\xed\x9f\xbf\xdf\xbf\x7f");  // the greatest of each length
  CHECK(text_in(folder, "char", Split::train, 1)->classes() == 5);
}

TEST_CASE("a text by words is UTF-8 in its files and a prompt; by bytes it need not be") {
  const TempFolder folder;
  const std::string latin = "un caf\xe9 noir\n", utf8 = "un caf\xc3\xa9 noir\n";
  for (const auto& [train, valid, bad] :
       {std::tuple(latin, utf8, "train.txt"), std::tuple(utf8, latin, "valid.txt")}) {
    put(folder, "train.txt", train);
    put(folder, "valid.txt", valid);
    put(folder, "test.txt", utf8);
    CHECK_USER_ERROR(text_in(folder, "word", Split::test, 2), bad, "no UTF-8", "byte 6", "data.tokens=byte");
    CHECK_NOTHROW(text_in(folder, "byte", Split::test, 2));
  }
  const auto words = text_in(folder, "word", Split::train, 2);
  CHECK(words->encode("caf\xc3\xa9").size() == 1);
  CHECK_USER_ERROR(words->encode("caf\xe9"), "no UTF-8", "byte 3");
}

TEST_CASE("token files of nanoGPT and of llm.c, in several shards, are one stream") {
  const TempFolder folder;
  folder.write("train.bin", little_endian({1, 2, 50256, 300}, 2));
  folder.write("val.bin", little_endian({7, 8, 9}, 2));
  put(folder, "meta.pkl", "not read");
  auto train = tokens_in(folder, Split::train, 2);
  CHECK((stream_of(*train) == std::vector<std::int32_t>{1, 2, 50256, 300}));
  CHECK(train->classes() == 50257);
  CHECK(train->size() == 2);
  CHECK(train->task() == Task::language_model);
  CHECK(train->sample_shape() == Shape({2, 1, 1}));
  CHECK_FALSE(train->has_held_out());
  CHECK(train->on_disk());
  CHECK((stream_of(*tokens_in(folder, Split::test, 2)) == std::vector<std::int32_t>{7, 8, 9}));
  CHECK_USER_ERROR(tokens_in(folder, Split::train, 4), "data.sequence_length", "4 tokens");
  CHECK(tokens_in(folder, Split::train, 1, 50257, 3)->size() == 2);

  for (const int bytes : {2, 4}) {
    const TempFolder shards;
    shards.write("set_train_000002.bin", llmc({6, 7}, bytes));
    shards.write("set_train_000001.bin", llmc({3, 4, 5}, bytes));
    shards.write("set_train_000003.bin", llmc({8}, bytes));
    shards.write("set_val_000000.bin", llmc({1, 2}, bytes));
    shards.write("set_test.bin", llmc({9, 9}, bytes));
    const auto all = tokens_in(shards, Split::train, 5, 10);
    CHECK((stream_of(*all) == std::vector<std::int32_t>{3, 4, 5, 6, 7, 8}));
    float window[5];
    all->get(2, window);  // across two shards, and beyond the end
    CHECK((std::vector<float>(window, window + 5) == std::vector<float>{5, 6, 7, 8, 0}));
    CHECK(all->has_held_out());
    CHECK((stream_of(*tokens_in(shards, Split::held_out, 1, 10)) == std::vector<std::int32_t>{9, 9}));
    const std::uint64_t before = checksum_of(*all);
    shards.write("set_train_000003.bin", llmc({9}, bytes));
    CHECK(checksum_of(*tokens_in(shards, Split::train, 5, 10)) != before);
    shards.write("other_train_000001.bin", llmc({1}, bytes));
    CHECK_USER_ERROR(tokens_in(shards, Split::train, 2), "several sets", "other_train_000001.bin",
                     "set_train_000003.bin");
  }
  const TempFolder unpadded;  // in the order of the numbers
  unpadded.write("train_010.bin", little_endian({10}, 2));
  unpadded.write("train_11.bin", little_endian({11}, 2));
  unpadded.write("train_9.bin", little_endian({8, 9}, 2));
  CHECK((stream_of(*tokens_in(unpadded, Split::train, 1)) == std::vector<std::int32_t>{8, 9, 10, 11}));
  unpadded.write("train_10.bin", little_endian({10}, 2));
  CHECK_USER_ERROR(tokens_in(unpadded, Split::train, 1), "train_010.bin", "train_10.bin");
  std::filesystem::remove(unpadded.at("train_10.bin"));
  unpadded.write("train.bin", little_endian({8, 9, 10, 11}, 2));
  CHECK_USER_ERROR(tokens_in(unpadded, Split::train, 1), "train.bin", "train_9.bin");
}

TEST_CASE("token files of a wrong size, header or format are refused by name") {
  const TempFolder folder;
  const auto refused = [&](const Bytes& content, std::initializer_list<std::string> parts) {
    folder.write("train.bin", content);
    UNSCOPED_INFO(content.size() << " bytes");
    return user_error([&] { tokens_in(folder, Split::train, 1); }, {"train.bin"}) &&
           user_error([&] { tokens_in(folder, Split::train, 1); }, parts);
  };
  CHECK(refused({}, {"is empty"}));
  CHECK(refused({1, 0, 2}, {"3 bytes, no multiple of the 2"}));
  CHECK(refused(llmc({1, 2}, 2, 3, 1), {"1028 bytes", "3 tokens", "1030"}));
  CHECK(refused(llmc({1, 2}, 2, 1, 1), {"1028 bytes", "1 tokens", "1026"}));
  CHECK(refused(llmc({1, 2}, 4, 2, 1), {"version 1", "version 7"}));
  CHECK(refused(llmc({1, 2}, 2, 2, 2), {"version 2", "version 1"}));
  CHECK(refused(llmc({}, 2), {"no token"}));
  Bytes cut = llmc({1, 2}, 2);
  cut.resize(1000);
  CHECK(refused(cut, {"1000 bytes", "the header alone has 1024"}));
  for (const std::int64_t magic : {20240522, 20240326, 20240327, 20240328})
    CHECK(refused(little_endian({magic, 1, 2, 0}, 4), {"holds no tokens", std::to_string(magic)}));
  std::filesystem::remove(folder.at("train.bin"));
  CHECK_USER_ERROR(tokens_in(folder, Split::train, 1), "data.root", "no train.bin");
  CHECK_USER_ERROR(tokens_in(folder, Split::test, 1), "data.root", "val.bin");
  REQUIRE(mkdir(folder.at("train.bin").c_str(), 0700) == 0);
  CHECK_USER_ERROR(tokens_in(folder, Split::train, 1), "train.bin", "a folder");
  DatasetOptions nowhere;
  CHECK_USER_ERROR(make_dataset("tokens", nowhere, Split::train), "data.root is not set");
  nowhere.root = folder.at("nowhere");
  CHECK_USER_ERROR(make_dataset("tokens", nowhere, Split::train), "nowhere", "no such folder");
}

TEST_CASE("a token beyond the vocabulary is named with file and place when a batch has it, and not before") {
  const TempFolder folder;
  folder.write("a_train_1.bin", little_endian({1, 2, 3, 4}, 2));
  folder.write("a_train_2.bin", llmc({1, 65000, 3, 4, 5}, 2));
  const auto data = tokens_in(folder, Split::train, 2, 100);
  float window[2];
  CHECK_NOTHROW(data->get(3, window));
  const auto names_it = {std::string("a_train_2.bin"), std::string("token 1 (from 0, at byte 1026) is 65000"),
                         std::string("data.vocabulary has 100")};
  CHECK(user_error([&] { data->get(4, window); }, names_it));
  CHECK(user_error([&] { data->label(4); }, names_it));
  for (const int workers : {0, 2}) {
    LoaderOptions options;
    options.batch_size = 1, options.workers = workers, options.train = false;
    Loader loader(*data, options);
    loader.start_epoch(0);
    Batch batch;
    CHECK(loader.next(batch));  // tokens 0 to 2
    CHECK(user_error(
        [&] {
          while (loader.next(batch))
            ;
        },
        names_it));
  }
  folder.write("a_train_1.bin", llmc({1, 2, 3, 4}, 4));
  folder.write("a_train_2.bin", llmc({70000}, 4));
  CHECK(tokens_in(folder, Split::train, 2, 70001)->label(3) == 70000);
  CHECK_USER_ERROR(tokens_in(folder, Split::train, 2, 70000)->label(3), "is 70000");
}

TEST_CASE("token files that look wider than uint16 are refused unless data.token_type is given") {
  const std::vector<std::int64_t> ids = {7, 50256, 0, 300, 9, 11, 13, 2, 40000, 5, 6, 17, 3, 1, 4, 8};
  const std::vector<std::int32_t> stream(ids.begin(), ids.end());
  const TempFolder folder;
  const auto open = [&](const std::string& type, int vocabulary = 50257) {
    return tokens_in(folder, Split::train, 2, vocabulary, 0, type);
  };
  for (const auto& [bytes, type] :
       {std::pair(4, std::string("uint32")), std::pair(8, std::string("int64"))}) {
    folder.write("train.bin", little_endian(ids, bytes));
    CHECK_USER_ERROR(open("auto"), "train.bin", "looks like tokens of " + type,
                     "data.token_type=" + type + ",");
    CHECK(stream_of(*open(type)) == stream);
    CHECK_NOTHROW(open("uint16"));  // says so itself
    folder.write("train.bin", little_endian({1, 2, -1}, bytes));
    CHECK_USER_ERROR(open(type)->label(1), "token 2",
                     bytes == 4 ? "is 4294967295 as uint32" : "is -1 as int64");
  }
  folder.write("train.bin", little_endian({1, 2, (std::int64_t{1} << 32) + 5}, 8));
  CHECK_USER_ERROR(open("int64")->label(1), "is 4294967301 as int64");
  CHECK(user_error([&] { open("uint32")->label(3); }, {}) == false);  // 5 and 1, as it was told
  folder.write("train.bin", little_endian(ids, 2));
  CHECK(stream_of(*open("auto")) == stream);
  CHECK_USER_ERROR(open("auto", 65537), "data.vocabulary: 65537", "65536", "data.token_type");
  CHECK_NOTHROW(open("auto", 65536));
  CHECK_NOTHROW(open("uint16", 65537));
  CHECK_USER_ERROR(open("int64", 100)->label(0), "as int64", "data.token_type");
  folder.write("train.bin", little_endian(std::vector<std::int64_t>(64), 2));  // padding, of any type
  CHECK_NOTHROW(open("auto"));
  folder.write("train.bin", llmc({1, 2, 3}, 2));
  CHECK_USER_ERROR(open("uint32"), "data.token_type", "says uint16, not uint32");
  CHECK_USER_ERROR(open("auto", 70000), "data.vocabulary: 70000", "train.bin");
  folder.write("train.bin", llmc({1, 2, 3}, 4));
  CHECK_NOTHROW(open("uint32", 70000));
}

TEST_CASE("a shard that is missing in a numbered series is named") {
  const TempFolder folder;
  for (const char* number : {"007", "008", "010"})
    folder.write(std::string("set_train_") + number + ".bin", little_endian({1, 2, 3, 4}, 2));
  CHECK_USER_ERROR(tokens_in(folder, Split::train, 1), "no train file of number 9", "set_train_008.bin",
                   "set_train_010.bin");
  folder.write("set_train_009.bin", little_endian({1, 2, 3, 4}, 2));
  CHECK(tokens_in(folder, Split::train, 1)->size() == 15);
}

TEST_CASE("a token file that becomes shorter, or is gone, while it is read") {
  const TempFolder folder;
  std::vector<std::int64_t> ids;
  for (int i = 0; i < 10000; ++i) ids.push_back(i % 97 + 1);
  folder.write("train.bin", little_endian(ids, 2));
  const auto data = tokens_in(folder, Split::train, 4, 100);
  std::filesystem::resize_file(folder.at("train.bin"), 9000);  // within its third page
  CHECK(data->label(4498) == ids[4499]);
  float window[4];
  for (const std::int64_t index : {4498, 4500, 9000})  // a mapping gives zeros, zeros and SIGBUS
    CHECK_USER_ERROR(data->get(index, window), "train.bin", "become shorter", "20000 bytes");
  CHECK_USER_ERROR(data->label(4499), "train.bin", "ends at byte 9000");
  CHECK_USER_ERROR(data_checksum(*data), "become shorter");
  folder.write("train.bin", little_endian(ids, 2));
  const auto whole = tokens_in(folder, Split::train, 4, 100);
  std::filesystem::remove(folder.at("train.bin"));  // what is open stays
  CHECK(whole->label(9000) == ids[9001]);
}

TEST_CASE("random windows depend on seed, epoch, rank and step, and begin everywhere with equal chance") {
  const std::int64_t starts = 12, window = 4, batch = 6;
  const RandomWindowSampler sampler(starts, window, 2, batch, 7);
  CHECK(sampler.steps(0) == 1);  // at least
  CHECK(RandomWindowSampler(996, 4, 2, 5, 1).steps(1) == 25);
  CHECK(RandomWindowSampler(996, 4, 2, 5, 1).shard_size(1) == 125);
  CHECK(RandomWindowSampler(996, 4, 2, 5, 1, 26).steps(1) == 26);
  std::vector<int> count(starts);
  constexpr int kSteps = 4000;
  std::set<std::vector<std::int64_t>> seen;
  for (const int rank : {0, 1}) {
    const EpochOrder order = sampler.epoch(0, rank);
    for (std::int64_t step = 0; step < kSteps; ++step) {
      const auto rows = order(step);
      REQUIRE(static_cast<std::int64_t>(rows.size()) == batch);
      for (const std::int64_t row : rows) {
        REQUIRE(row >= 0);
        REQUIRE(row < starts);
        ++count[row];
      }
      seen.insert(rows);
    }
    CHECK(order(17) == sampler.epoch(0, rank)(17));
    CHECK(order(17) != sampler.epoch(1, rank)(17));
    CHECK(order(17) != RandomWindowSampler(starts, window, 2, batch, 8).epoch(0, rank)(17));
  }
  CHECK(seen.size() > 0.99 * 2 * kSteps);  // 12^6 possible batches: nearly all differ, by rank and by step
  const double expected = 2.0 * kSteps * batch / static_cast<double>(starts);
  for (const int n : count) CHECK(n == Approx(expected).epsilon(0.07));  // 63 = one deviation of 4000
  // More tokens than 2^32: the whole stream is reached, not its first part or multiples of something.
  const std::int64_t many = std::int64_t{1} << 40;
  const RandomWindowSampler large(many, 1024, 1, 512, 1);
  std::int64_t odd = 0, late = 0;
  for (const std::int64_t row : large.epoch(0, 0)(3)) odd += row % 2, late += row > many / 2;
  CHECK(std::abs(odd - 256) < 64);
  CHECK(std::abs(late - 256) < 64);
}

TEST_CASE("a loader draws windows at random in training only, and goes straight to a step") {
  const TempFolder folder;
  std::vector<std::int64_t> values;
  for (std::int64_t i = 0; i < 500; ++i) values.push_back(i * i % 251);
  folder.write("train.bin", little_endian(values, 2));
  const auto data = tokens_in(folder, Split::train, 5, 256);
  LoaderOptions options;
  options.batch_size = 4, options.rank = 1, options.ranks = 2, options.random_windows = true;
  const auto batches = [&](int workers, std::int64_t first) {
    options.workers = workers;
    Loader loader(*data, options);
    loader.start_epoch(3, first);
    std::vector<std::vector<std::int64_t>> all;
    for (Batch batch; loader.next(batch);) {
      all.push_back(batch.indices);
      const auto ids = batch.images.to_vector();
      for (std::size_t i = 0; i < 4; ++i)
        for (std::size_t t = 0; t < 5; ++t) {
          const auto at = static_cast<std::size_t>(batch.indices[i]) + t;
          CHECK(ids[i * 5 + t] == static_cast<float>(values[at]));
          CHECK(batch.labels[t * 4 + i] == values[at + 1]);  // row t * batch + i
        }
    }
    return all;
  };
  const auto all = batches(0, 0);
  CHECK(all.size() == 500 / (2 * 4 * 5));
  CHECK(all == batches(3, 0));
  CHECK(batches(2, 5) == std::vector(all.begin() + 5, all.end()));
  CHECK(all[0] != std::vector<std::int64_t>{248, 310, 372, 434});  // not columns
  options.train = false, options.workers = 0;
  Loader evaluation(*data, options);
  CHECK_FALSE(evaluation.random_windows());
  evaluation.start_epoch(0);
  Batch batch;
  REQUIRE(evaluation.next(batch));
  CHECK(batch.indices.size() == 2);  // fixed columns, shared by the ranks
  options.train = true;
  options.shard = parse_shard_rule("by_label");
  CHECK_USER_ERROR(Loader(*data, options), "data.shard", "even");
}

TEST_CASE("tiny Shakespeare has nanoGPT's numbers of characters") {
  const char* root = std::getenv("TOPKNOT_DATA");
  const std::string folder = root ? std::string(root) + "/tiny-shakespeare" : "";
  if (!std::filesystem::exists(folder + "/input.txt")) {
    WARN("skipped: TOPKNOT_DATA does not name a folder with tiny-shakespeare/");
    return;
  }
  DatasetOptions options;
  options.root = folder, options.set("tokens", "char"), options.set("sequence_length", 64);
  const auto train = make_dataset("text", options, Split::train);
  CHECK(train->classes() == 65);
  CHECK(train->size() == 1'003'854 - 64);
  CHECK(make_dataset("text", options, Split::test)->size() == 111'540 - 64);
}

#include "train/checkpoint/safetensors.h"

#include <sys/resource.h>

#include <csignal>

#include "tests/support/test.h"
#include "tests/train/model_copy.h"

namespace topknot {
namespace {

std::vector<std::byte> bytes_of(const std::string& text) {
  const auto bytes = std::as_bytes(std::span(text));
  return {bytes.begin(), bytes.end()};
}

// A file by the format's definition: the length, the header as it is given, the data.
std::vector<std::byte> file_of(const std::string& header, const std::string& data = "") {
  std::string text;
  for (int i = 0; i < 8; ++i) text += static_cast<char>((header.size() >> (8 * i)) & 0xFF);
  return bytes_of(text + header + data);
}

SafetensorsFile parsed(const std::string& header, const std::string& data = "") {
  return SafetensorsFile::parse(file_of(header, data), "a.safetensors");
}

bool refused(const std::vector<std::byte>& bytes, std::initializer_list<std::string> parts) {
  const std::string text = error_text<UserError>([&] { SafetensorsFile::parse(bytes, "a.safetensors"); });
  return says(text, {"a.safetensors: "}) && says(text, parts);
}

TensorView view(const std::string& name, const std::string& dtype, std::vector<std::int64_t> shape,
                const std::string& data) {
  return {name, dtype, std::move(shape), std::as_bytes(std::span(data))};
}

// One tensor "w" of four bytes with this description.
std::string one(const std::string& description) {
  return "{\"w\":" + description + "}";
}

const std::string kGood = R"({"dtype":"F32","shape":[1],"data_offsets":[0,4]})";

std::string four() {
  return {"\x00\x00\x80\x3f", 4};
}

bool one_refused(const std::string& description, std::initializer_list<std::string> parts) {
  return refused(file_of(one(description), four()), parts);
}

}  // namespace

TEST_CASE("a safetensors file written by hand from the format's definition is read") {
  const std::string header =
      R"( {"b":{"data_offsets":[4,7],"dtype":"U8","shape":[3]},"__metadata__":{"k":"v"},)"
      R"("a":{"dtype":"F32","shape":[1,1],"data_offsets":[0,4]},"e":{"dtype":"I64","shape":[0,9],)"
      R"("data_offsets":[7,7]},"s":{"dtype":"BF16","shape":[],"data_offsets":[7,9]}}  )";
  const auto file = parsed(header.substr(1), four() + "xyz\x01\x02");
  REQUIRE(file.tensors().size() == 4);
  CHECK(file.tensors()[0].name == "a");
  CHECK(file.tensors()[0].shape == std::vector<std::int64_t>{1, 1});
  float value = 0;
  std::memcpy(&value, file.tensors()[0].data.data(), 4);
  CHECK(value == 1.0f);
  const TensorView* b = file.find("b");
  REQUIRE(b);
  CHECK(b->dtype == "U8");
  CHECK(std::memcmp(b->data.data(), "xyz", 3) == 0);
  CHECK(file.find("e")->data.empty());
  CHECK(file.find("s")->shape.empty());
  CHECK(file.find("s")->data.size() == 2);
  CHECK(file.find("c") == nullptr);
  CHECK(file.metadata() == Metadata{{"k", "v"}});
  CHECK(parsed("{}").tensors().empty());
}

TEST_CASE("the safetensors bytes written are the format's: length, padded header, data in the given order") {
  const std::string w = four(), ids = "abc";
  const std::vector<TensorView> tensors = {view("z", "U8", {3}, ids), view("a.b", "F32", {1}, w)};
  const std::string header =
      R"({"__metadata__":{"format":"pt"},"z":{"dtype":"U8","shape":[3],"data_offsets":[0,3]},)"
      R"("a.b":{"dtype":"F32","shape":[1],"data_offsets":[3,7]}})";
  const std::size_t padded = (header.size() + 7) / 8 * 8;
  const std::string expected = std::string(1, static_cast<char>(padded)) + std::string(7, '\0') + header +
                               std::string(padded - header.size(), ' ') + ids + w;
  CHECK(safetensors_text(tensors, {{"format", "pt"}}) == expected);
  CHECK(safetensors_text({}) == std::string("\x08\0\0\0\0\0\0\0{}      ", 16));
}

TEST_CASE("safetensors files read back as they were written, through a file too") {
  const std::string data(48, 'q');
  std::vector<TensorView> tensors;
  for (const char* dtype : {"BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "I16", "U16", "F16", "BF16",
                            "I32", "U32", "F32", "C64", "F64", "I64", "U64"})
    tensors.push_back({std::string("ü \"\n") + dtype,
                       dtype,
                       {2, static_cast<std::int64_t>(48 / dtype_bytes(dtype) / 2)},
                       std::as_bytes(std::span(data))});
  const Metadata metadata = {{"config", "a: 1\nb: \"\x01\"\n"}, {"", ""}};
  const std::string text = safetensors_text(tensors, metadata);
  const TempFolder temp;
  temp.write("m.safetensors", {text.begin(), text.end()});
  SafetensorsFile file = SafetensorsFile::read(temp.at("m.safetensors"));
  const SafetensorsFile moved = std::move(file);
  CHECK(moved.metadata() == metadata);
  REQUIRE(moved.tensors().size() == tensors.size());
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    CHECK(moved.tensors()[i].name == tensors[i].name);
    CHECK(moved.tensors()[i].dtype == tensors[i].dtype);
    CHECK(moved.tensors()[i].shape == tensors[i].shape);
    CHECK(moved.tensors()[i].data.size() == 48);
    CHECK(std::memcmp(moved.tensors()[i].data.data(), data.data(), 48) == 0);
    CHECK(moved.find(tensors[i].name) == &moved.tensors()[i]);
  }
}

TEST_CASE("a safetensors file of a wrong length is refused") {
  CHECK(refused({}, {"0 bytes"}));
  CHECK(refused(bytes_of("1234567"), {"7 bytes"}));
  CHECK(refused(bytes_of(std::string(8, '\0')), {"does not begin with '{'"}));
  CHECK(refused(bytes_of(std::string("\x03\0\0\0\0\0\0\0{}", 10)), {"truncated", "3 bytes", "2 follow"}));
  CHECK(refused(bytes_of(std::string(8, '\xff')), {"18446744073709551615 bytes", "100 MB"}));
  CHECK(refused(bytes_of(std::string("\x01\xe1\xf5\x05\0\0\0\0{}", 10)), {"100000001 bytes", "100 MB"}));
  CHECK(refused(bytes_of(std::string("\0\xe1\xf5\x05\0\0\0\0{}", 10)), {"truncated", "100000000"}));
  CHECK(refused(file_of(one(kGood), "abc"), {"\"w\"", "truncated", "byte 4 of 3"}));
  CHECK(refused(file_of(one(kGood), "abcde"), {"1 bytes follow"}));
  CHECK(refused(file_of("{}", "x"), {"1 bytes follow"}));
  CHECK(refused(file_of(R"({"__metadata__":{}})", "x"), {"1 bytes follow"}));
}

TEST_CASE("a safetensors header that is no JSON, or not the format's, is refused") {
  CHECK(refused(file_of("{"), {"no JSON"}));
  CHECK(refused(file_of(" {}"), {"does not begin with '{'"}));
  CHECK(refused(file_of("[]"), {"does not begin with '{'"}));
  CHECK(refused(file_of("{} x"), {"no JSON at its byte 4"}));
  CHECK(refused(file_of(std::string("{}\0x", 4)), {"no JSON at its byte 3"}));
  CHECK(refused(file_of("{\"\xff\":{}}"), {"no JSON"}));
  CHECK(refused(file_of("{\"a\":NaN}"), {"no JSON"}));
  CHECK(refused(file_of("{\"a\":1}"), {"\"a\" is 1, not an object"}));
  CHECK(refused(file_of("{\"a\":[1]}"), {"\"a\" is a list, not an object"}));
  CHECK(refused(file_of(one("{}")), {"tensor \"w\": dtype is missing"}));
  CHECK(one_refused(R"({"dtype":"F32","shape":[1]})", {"data_offsets is missing"}));
  CHECK(one_refused(R"({"dtype":"F32","shape":[1],"data_offsets":[0,4],"x":1})", {"unknown field \"x\""}));
  CHECK(one_refused(R"({"dtype":4,"shape":[1],"data_offsets":[0,4]})", {"dtype has 4, where a text"}));
  CHECK(one_refused(R"({"dtype":["F32"],"shape":[1],"data_offsets":[0,4]})",
                    {"dtype has a list, where a text"}));
  CHECK(one_refused(R"({"dtype":"F32","shape":1,"data_offsets":[0,4]})", {"shape has 1, where a list"}));
  CHECK(one_refused(R"({"dtype":"F32","shape":[[1]],"data_offsets":[0,4]})",
                    {"shape has a list, where a whole number"}));
  for (const char* number :
       {"-1", "1.0", "1e0", "18446744073709551616", "9223372036854775808", "\"1\"", "true", "null", "{}"})
    CHECK(one_refused(std::string(R"({"dtype":"F32","shape":[)") + number + R"(],"data_offsets":[0,4]})",
                      {"tensor \"w\": shape has ", "where a whole number is expected"}));
  CHECK(one_refused(R"({"dtype":"F32","shape":[1],"data_offsets":[4]})", {"1 numbers, not 2"}));
  CHECK(one_refused(R"({"dtype":"F32","shape":[1],"data_offsets":[0,4,4]})", {"3 numbers, not 2"}));
  CHECK(refused(file_of(R"({"__metadata__":{"step":3}})"), {"__metadata__: \"step\" is 3, not a text"}));
  CHECK(refused(file_of(R"({"__metadata__":{"step":{}}})"), {"__metadata__: \"step\" is an object"}));
  CHECK(refused(file_of(R"({"__metadata__":"x"})"), {"\"__metadata__\" is a text, not an object"}));
  std::string deep = "{\"a\":";
  for (int i = 0; i < 1'000'000; ++i) deep += '[';
  CHECK(refused(file_of(deep), {"\"a\" is a list"}));
}

TEST_CASE("a key that stands twice in a safetensors header is refused") {
  CHECK(refused(file_of("{\"w\":" + kGood + ",\"w\":" + kGood + "}", four()), {"\"w\" stands twice"}));
  CHECK(one_refused(R"({"dtype":"F32","dtype":"F32","shape":[1],"data_offsets":[0,4]})",
                    {"tensor \"w\": \"dtype\" stands twice"}));
  CHECK(refused(file_of(R"({"__metadata__":{},"__metadata__":{}})"), {"stands twice"}));
  CHECK(refused(file_of(R"({"__metadata__":{"a":"","a":""}})"), {"__metadata__: \"a\" stands twice"}));
}

TEST_CASE("safetensors dtypes, shapes and offsets that do not fit are refused") {
  const auto description = [](const std::string& dtype, const std::string& shape,
                              const std::string& offsets) {
    return R"({"dtype":")" + dtype + R"(","shape":)" + shape + R"(,"data_offsets":)" + offsets + "}";
  };
  CHECK(one_refused(description("f32", "[1]", "[0,4]"), {"unknown dtype \"f32\""}));
  CHECK(one_refused(description("", "[1]", "[0,4]"), {"unknown dtype \"\""}));
  CHECK(one_refused(description("F32", "[2]", "[0,4]"), {"[2] of F32 takes 8 bytes", "for 4"}));
  CHECK(one_refused(description("F64", "[]", "[0,4]"), {"takes 8 bytes"}));
  CHECK(one_refused(description("F32", "[1]", "[4,0]"), {"end before they begin: 4, 0"}));
  CHECK(one_refused(description("F32", "[4294967296,4294967296]", "[0,0]"), {"beyond any memory"}));
  CHECK(one_refused(description("F32", "[4611686018427387904]", "[0,0]"), {"beyond any memory"}));
  CHECK(one_refused(description("F32", "[1]", "[18446744073709551612,18446744073709551615]"),
                    {"takes 4 bytes"}));
  CHECK(one_refused(description("U8", "[9223372036854775807]", "[0,9223372036854775807]"), {"truncated"}));
  const auto pair = [&](const std::string& first, const std::string& second) {
    return "{\"a\":" + description("U8", "[2]", first) + ",\"b\":" + description("U8", "[2]", second) + "}";
  };
  CHECK(parsed(pair("[2,4]", "[0,2]"), four()).tensors()[0].name == "b");
  CHECK(refused(file_of(pair("[0,2]", "[0,2]"), "ab"), {"\"b\"", "overlap"}));
  CHECK(refused(file_of(pair("[0,2]", "[1,3]"), "abc"), {"\"b\"", "overlap", "byte 1"}));
  CHECK(refused(file_of(pair("[0,2]", "[3,5]"), "abcde"), {"\"b\"", "hole", "byte 2 to 3"}));
  CHECK(refused(file_of(pair("[1,3]", "[3,5]"), "abcde"), {"\"a\"", "hole", "byte 0 to 1"}));
}

TEST_CASE("names from a safetensors file reach the terminal escaped and short") {
  const std::string header = "{\"\\u001b[31m\xc2\x9b" + std::string(1000, 'n') + "\":1}";
  const std::string message =
      error_text<UserError>([&] { SafetensorsFile::parse(file_of(header), "a.safetensors"); });
  CHECK(contains(message, "\\u001b[31m\\u009bnnn"));
  CHECK(message.size() < 250);
}

TEST_CASE("a path that is no readable safetensors file is refused with its reason") {
  const TempFolder temp;
  CHECK_USER_ERROR(SafetensorsFile::read(temp.at("no")), temp.at("no"), "No such file");
  CHECK_USER_ERROR(SafetensorsFile::read(temp.str()), temp.str(), "folder");
  CHECK_USER_ERROR(SafetensorsFile::read("/dev/zero"), "/dev/zero", "not a regular file");
}

TEST_CASE("what cannot be written as a safetensors file is a mistake of the caller") {
  const std::string data = four();
  CHECK_THROWS_AS(safetensors_text(std::vector{view("a", "F31", {1}, data)}), Error);
  CHECK_THROWS_AS(safetensors_text(std::vector{view("a", "F32", {2}, data)}), Error);
  CHECK_THROWS_AS(safetensors_text(std::vector{view("a", "F32", {1}, data), view("a", "F32", {1}, data)}),
                  Error);
  CHECK_THROWS_AS(safetensors_text(std::vector{view("__metadata__", "F32", {1}, data)}, {{"a", "b"}}), Error);
  CHECK_THROWS_AS(safetensors_text(std::vector{view("__metadata__", "F32", {1}, data)}), Error);
}

TEST_CASE("another file in place of a safetensors file is named, and what to do about it") {
  CHECK(refused(bytes_of("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"),
                {"git lfs pull"}));
  CHECK(refused(bytes_of("<!DOCTYPE html>\n<html></html>"), {"a web page"}));
  CHECK(refused(bytes_of("<html lang=\"en\"></html>"), {"a web page"}));
  CHECK(refused(bytes_of(std::string("GGUF\x03\0\0\0\x20\0\0\0", 12)), {"a GGUF file"}));
  CHECK(refused(bytes_of(std::string("PK\x03\x04\x14\0\0\0\0\0\0\0", 12)), {"scripts/convert-pth"}));
  CHECK(refused(bytes_of(std::string("\x80\x02\x8a\nl\xfc\x9c\x46\xf9\x20j\xa8P\x19.", 16)), {"a pickle"}));
  CHECK(refused(bytes_of("{\n  \"metadata\": {\"total_size\": 1},\n  \"weight_map\": {}\n}"),
                {"in several files"}));
  // A header of 123 bytes: its length begins with the byte of '{'.
  std::string good =
      "{" + std::string(7, '\0') + "{\"a\":{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[0,0]}}";
  good.resize(8 + 123, ' ');
  CHECK(SafetensorsFile::parse(bytes_of(good), "w").tensors().size() == 1);
}

TEST_CASE("recorded gradients are one tensor, whose header counts the steps when the file is closed") {
  const TempFolder temp;
  const std::string path = temp.at("g.safetensors");
  const std::vector<float> rows = {1.5f, -0.0f, 3e38f, std::numeric_limits<float>::denorm_min(), 5, 6};
  GradientsWriter writer(path, 2);
  for (std::size_t row = 0; row < 3; ++row) writer.append(std::span(rows).subspan(2 * row, 2));
  CHECK_THROWS_AS(writer.append(rows), Error);
  CHECK_FALSE(fs::exists(path));
  writer.close();
  const std::string header = R"({"gradients":{"dtype":"F32","shape":[3,2],"data_offsets":[0,24]}})";
  CHECK(text_of(path) == std::string("\x78\0\0\0\0\0\0\0", 8) + header +
                             std::string(120 - header.size(), ' ') +
                             std::string(reinterpret_cast<const char*>(rows.data()), 24));
  CHECK(SafetensorsFile::read(path).find("gradients")->shape == std::vector<std::int64_t>{3, 2});

  const GradientsReader reader(path);
  CHECK(reader.steps() == 3);
  CHECK(reader.size() == 2);
  std::vector<float> back(6), part(2);
  reader.read(0, back);
  CHECK(std::memcmp(back.data(), rows.data(), 24) == 0);
  reader.read(3, part);
  CHECK(part == std::vector<float>{rows[3], 5});
  CHECK_THROWS_AS(reader.read(5, part), Error);
  fs::resize_file(path, 140);
  CHECK_USER_ERROR(reader.read(3, part), path, "became shorter");

  GradientsWriter(path, 7).close();
  CHECK(GradientsReader(path).steps() == 0);
}

TEST_CASE("a file that holds no recorded gradients, or no whole ones, is refused") {
  const TempFolder temp;
  const auto refused = [&](const std::string& header, const std::string& data, const char* why) {
    const auto bytes = file_of(header, data);
    const auto* begin = reinterpret_cast<const std::uint8_t*>(bytes.data());
    temp.write("g.safetensors", {begin, begin + bytes.size()});
    return user_error([&] { GradientsReader reader(temp.at("g.safetensors")); },
                      {temp.at("g.safetensors"), why});
  };
  const auto recorded = [](const std::string& name, const std::string& dtype, const std::string& shape) {
    return "{\"" + name + R"(":{"dtype":")" + dtype + R"(","shape":)" + shape + R"(,"data_offsets":[0,8]}})";
  };
  const std::string good = recorded("gradients", "F32", "[2,1]"), data(8, '\0'),
                    none = "no recorded gradients";
  CHECK(refused(good, data.substr(1), "truncated"));
  CHECK(refused(good, data + "x", "1 bytes follow"));
  CHECK(refused(good.substr(1), data, "does not begin with '{'"));
  CHECK(refused(recorded("weights", "F32", "[2,1]"), data, none.c_str()));
  CHECK(refused(recorded("gradients", "F64", "[1,1]"), data, none.c_str()));
  CHECK(refused(recorded("gradients", "F32", "[2]"), data, none.c_str()));
  CHECK(refused("{}", "", none.c_str()));
  const std::string more = R"(,"more":{"dtype":"U8","shape":[0],"data_offsets":[8,8]}})";
  CHECK(refused(good.substr(0, good.size() - 1) + more, data, none.c_str()));
  CHECK_FALSE(refused(good, data, ""));
  CHECK_USER_ERROR(GradientsReader reader(temp.at("no")), temp.at("no"), "No such file");
}

TEST_CASE("gradients that were not written whole leave no file") {
  const TempFolder temp;
  GradientsWriter(temp.at("g"), 1).append(std::vector<float>{1});
  CHECK_USER_ERROR(GradientsWriter writer(temp.at("no/g"), 1), temp.at("no/g"), "No such file");
  CHECK_USER_ERROR(GradientsWriter writer(temp.str(), 1), temp.str(), "folder");
  CHECK_USER_ERROR(GradientsWriter("/dev/full", 1).close(), "/dev/full", "No space left");
  // A disk that fills up on the way has room again when the file is closed.
  std::signal(SIGXFSZ, SIG_IGN);
  rlimit limit{};
  getrlimit(RLIMIT_FSIZE, &limit);
  {
    GradientsWriter writer(temp.at("g"), 5000);
    const rlimit small{10000, limit.rlim_max};
    setrlimit(RLIMIT_FSIZE, &small);
    CHECK_USER_ERROR(writer.append(std::vector<float>(5000)), temp.at("g"), "File too large");
    setrlimit(RLIMIT_FSIZE, &limit);
    CHECK_USER_ERROR(writer.close(), temp.at("g"), "File too large");
  }
  CHECK(fs::is_empty(temp.str()));
}

}  // namespace topknot

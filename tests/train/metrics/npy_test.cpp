#include "train/metrics/npy.h"

#include <algorithm>
#include <cstring>
#include <limits>

#include "tests/support/error_text.h"
#include "tests/support/files.h"
#include "tests/support/temp_folder.h"

namespace topknot {
namespace {

// A file as NumPy lays it out: `version`, the dictionary as given, then the elements' bytes.
std::vector<std::uint8_t> npy_bytes(const std::string& dictionary, std::size_t element_bytes, int version = 1,
                                    std::uint8_t fill = 0) {
  std::string text = "\x93NUMPY";
  text += {static_cast<char>(version), '\0'};
  for (int i = 0; i < (version == 1 ? 2 : 4); ++i)
    text += static_cast<char>((dictionary.size() >> (8 * i)) & 0xFF);
  text += dictionary;
  std::vector<std::uint8_t> bytes(text.begin(), text.end());
  bytes.insert(bytes.end(), element_bytes, fill);
  return bytes;
}

std::string dictionary(const std::string& descr, const std::string& shape,
                       const std::string& fortran = "False") {
  return "{'descr': '" + descr + "', 'fortran_order': " + fortran + ", 'shape': " + shape + ", }\n";
}

// Whether opening the file is refused with a message that names it and holds every one of `parts`.
bool refused(const std::vector<std::uint8_t>& bytes, std::vector<std::string> parts) {
  const TempFolder temp;
  temp.write("g.npy", bytes);
  const std::string text = error_text<UserError>([&] { NpyReader reader(temp.at("g.npy")); });
  UNSCOPED_INFO("message: " << text);
  parts.push_back(temp.at("g.npy"));
  return std::all_of(parts.begin(), parts.end(), [&](const auto& part) { return contains(text, part); });
}

}  // namespace

TEST_CASE("arrays read back as they were written, float and double, whole and in part") {
  const TempFolder temp;
  const std::vector<float> floats = {1.5f, -0.0f, 3e38f, std::numeric_limits<float>::denorm_min(), 5, 6};
  write_npy(temp.at("f.npy"), {2, 3}, floats);
  const NpyReader reader(temp.at("f.npy"));
  CHECK(reader.shape() == std::vector<std::size_t>{2, 3});
  CHECK_FALSE(reader.is_double());
  std::vector<float> back(6), part(2);
  reader.read(0, back);
  CHECK(std::memcmp(back.data(), floats.data(), 24) == 0);
  reader.read(3, part);
  CHECK(part == std::vector<float>{floats[3], 5});
  std::vector<double> wide(6);
  reader.read(0, wide);
  for (std::size_t i = 0; i < 6; ++i) CHECK(wide[i] == static_cast<double>(floats[i]));

  const std::vector<double> doubles = {0.1, 1e300, -2};
  write_npy(temp.at("d.npy"), {3}, doubles);
  const NpyReader twice(temp.at("d.npy"));
  CHECK(twice.is_double());
  std::vector<double> same(3);
  twice.read(0, same);
  CHECK(same == doubles);
  std::vector<float> rounded(3);
  twice.read(0, rounded);
  CHECK(rounded == std::vector<float>{0.1f, std::numeric_limits<float>::infinity(), -2});
}

TEST_CASE("a float64 array longer than the conversion buffer is rounded element by element") {
  const TempFolder temp;
  std::vector<double> values(200'001);
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<double>(i) / 3;
  write_npy(temp.at("d.npy"), {values.size()}, values);
  std::vector<float> rounded(values.size() - 1);
  NpyReader(temp.at("d.npy")).read(1, rounded);
  std::size_t wrong = 0;
  for (std::size_t i = 0; i < rounded.size(); ++i) wrong += rounded[i] != static_cast<float>(values[i + 1]);
  CHECK(wrong == 0);
}

TEST_CASE("the bytes written are what NumPy's format says") {
  const TempFolder temp;
  write_npy(temp.at("f.npy"), {2}, std::vector<float>{1, 2});
  const std::string bytes = text_of(temp.at("f.npy"));
  REQUIRE(bytes.size() == 128 + 8);
  CHECK(bytes.substr(0, 8) == std::string("\x93NUMPY\1\0", 8));
  CHECK(bytes.substr(8, 2) == std::string("\x76\0", 2));  // 118 = 128 - 10
  CHECK(bytes.substr(10, 58) ==
        "{'descr': '<f4', 'fortran_order': False, 'shape': (2,), }" + std::string(" "));
  CHECK(bytes[127] == '\n');
  CHECK(bytes.substr(128) == std::string("\0\0\x80\x3f\0\0\0\x40", 8));
}

TEST_CASE("headers of versions 1, 2 and 3 are read, with keys in any order and spacing") {
  const TempFolder temp;
  for (const int version : {1, 2, 3}) {
    temp.write("g.npy", npy_bytes(dictionary("<f4", "(2, 3)"), 24, version));
    CHECK(NpyReader(temp.at("g.npy")).shape() == std::vector<std::size_t>{2, 3});
  }
  temp.write("g.npy", npy_bytes("{\"shape\":(2L,),'fortran_order':False,'descr':'=f8'}", 16));
  CHECK(NpyReader(temp.at("g.npy")).is_double());
  temp.write("g.npy", npy_bytes(dictionary("<f8", "()"), 8));
  CHECK(NpyReader(temp.at("g.npy")).numel() == 1);
  temp.write("g.npy", npy_bytes(dictionary("<f8", "(0, 18446744073709551615)"), 0));
  CHECK(NpyReader(temp.at("g.npy")).numel() == 0);
}

TEST_CASE("other types and orders are refused by name") {
  CHECK(refused(npy_bytes(dictionary("<i8", "(2,)"), 16), {"int64 ('<i8')", "float32"}));
  CHECK(refused(npy_bytes(dictionary("<i444444444", "(2,)"), 16), {"int3555555552 ('<i444444444')"}));
  CHECK(refused(npy_bytes(dictionary("<f2", "(2,)"), 4), {"float16 ('<f2')"}));
  CHECK(refused(npy_bytes(dictionary(">f4", "(2,)"), 8), {"big-endian float32 ('>f4')"}));
  CHECK(refused(npy_bytes(dictionary("<c16", "(2,)"), 32), {"complex128"}));
  CHECK(refused(npy_bytes(dictionary("|b1", "(2,)"), 2), {"bool"}));
  CHECK(refused(npy_bytes(dictionary("|O", "(2,)"), 2), {"Python objects"}));
  CHECK(refused(npy_bytes(dictionary("", "(2,)"), 2), {"''"}));
  CHECK(refused(npy_bytes("{'descr': [('a', '<f4')], 'fortran_order': False, 'shape': (2,), }", 8),
                {"structured"}));
  CHECK(refused(npy_bytes(dictionary("<f4", "(2, 3)", "True"), 24), {"Fortran", "ascontiguousarray"}));
}

TEST_CASE("a file of another length than its header says is refused") {
  CHECK(refused(npy_bytes(dictionary("<f4", "(2, 3)"), 23), {"truncated", "[2, 3]"}));
  CHECK(refused(npy_bytes(dictionary("<f4", "(2, 3)"), 25), {"1 bytes more", "[2, 3]"}));
  CHECK(refused(npy_bytes(dictionary("<f8", "(2, 3)"), 24), {"truncated"}));
  CHECK(refused(npy_bytes(dictionary("<f4", "(4294967296, 4294967296)"), 8), {"beyond any memory"}));
  CHECK(refused(npy_bytes(dictionary("<f8", "(2305843009213693952,)"), 8), {"beyond any memory"}));
  auto cut = npy_bytes(dictionary("<f4", "(2,)"), 8);
  for (const std::size_t size : {1, 5, 6, 9, 11, 40}) {
    cut.resize(std::min(cut.size(), std::size_t{48}));
    CHECK(refused({cut.begin(), cut.begin() + static_cast<std::ptrdiff_t>(size)}, {"truncated"}));
  }
}

TEST_CASE("what is no array is refused") {
  CHECK(refused({}, {"no .npy file"}));
  CHECK(refused({'h', 'e', 'l', 'l', 'o', ' ', 'y', 'o', 'u', '!', '!'}, {"no .npy file"}));
  CHECK(refused({'P', 'K', 3, 4, 0, 0, 0, 0, 0, 0, 0, 0}, {".npz"}));
  CHECK(refused(npy_bytes(dictionary("<f4", "(2,)"), 8, 4), {"version 4.0"}));
  for (const char* wrong :
       {"", "{", "{}", "{'descr': '<f4'}", "{'descr: 1}", "{'shape': (2}", "{'shape': (-2,)}", "{'x': 1}",
        "{'shape': (99999999999999999999,)}", "{'descr': '<f4', 'fortran_order': None, 'shape': (2,), }",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (2,), } x",
        "{'descr': '<f4', 'descr': '<f4', 'fortran_order': False, 'shape': (2,), }"})
    CHECK(refused(npy_bytes(wrong, 8), {"damaged header"}));
  const TempFolder temp;
  CHECK(user_error([&] { NpyReader reader(temp.str()); }, {temp.str(), "folder"}));
  CHECK(user_error([&] { NpyReader reader(temp.at("absent.npy")); }, {"absent.npy", "No such file"}));
  CHECK(user_error([] { NpyReader reader("/dev/null"); }, {"/dev/null", "not a regular file"}));
}

TEST_CASE("rows are appended, and close() counts them in the header") {
  const TempFolder temp;
  NpyWriter writer(temp.at("rows.npy"), {2, 2});
  for (int t = 0; t < 11; ++t) {
    const float x = static_cast<float>(t);
    writer.append(std::vector<float>{x, x + 0.25f, x + 0.5f, x + 0.75f});
  }
  writer.close();
  const NpyReader reader(temp.at("rows.npy"));
  CHECK(reader.shape() == std::vector<std::size_t>{11, 2, 2});
  std::vector<float> row(4);
  reader.read(40, row);
  CHECK(row == std::vector<float>{10, 10.25f, 10.5f, 10.75f});

  NpyWriter(temp.at("none.npy"), {3}).close();
  CHECK(NpyReader(temp.at("none.npy")).shape() == std::vector<std::size_t>{0, 3});
}

TEST_CASE("a recording that was never closed is refused") {
  const TempFolder temp;
  {
    NpyWriter writer(temp.at("rows.npy"), {2});
    writer.append(std::vector<float>{1, 2});
  }
  CHECK(user_error([&] { NpyReader reader(temp.at("rows.npy")); }, {"8 bytes more", "[0, 2]"}));
}

TEST_CASE("an array that cannot be written is refused with path and reason") {
  const TempFolder temp;
  const std::vector<float> values = {1};
  CHECK(user_error([&] { write_npy(temp.at("no/f.npy"), {1}, values); }, {"no/f.npy", "No such file"}));
  CHECK(user_error([&] { NpyWriter writer(temp.str(), {1}); }, {temp.str(), "directory"}));
  CHECK(user_error([&] { write_npy("/dev/full", {1}, values); }, {"/dev/full", "No space left"}));
}

}  // namespace topknot

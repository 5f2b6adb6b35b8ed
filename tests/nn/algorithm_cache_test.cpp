#include "nn/base/algorithm_cache.h"

#include <fmt/format.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include "tests/support/standard_error.h"
#include "tests/support/test.h"

namespace topknot {
namespace {

void append(const std::string& file, const std::string& text) {
  std::ofstream(file, std::ios::app) << text;
}

// Sets a variable of the environment, or none where `value` is null, until the end of the scope.
class Environment {
 public:
  Environment(const char* name, const char* value) : name_(name) {
    if (const char* before = getenv(name)) before_ = before, was_set_ = true;
    value ? setenv(name, value, 1) : unsetenv(name);
  }
  ~Environment() { was_set_ ? setenv(name_, before_.c_str(), 1) : unsetenv(name_); }
  Environment(const Environment&) = delete;

 private:
  const char* name_;
  std::string before_;
  bool was_set_ = false;
};

}  // namespace

TEST_CASE("an algorithm cache gives later processes what was kept first") {
  const TempFolder folder;
  const std::string file = folder.at("made/of need/card.txt");
  {
    AlgorithmCache cache(file);
    CHECK(!cache.find("a convolution of [2, 3]"));
    CHECK(!std::filesystem::exists(file));
    cache.keep("a convolution of [2, 3]", "1 -2 4096");
    CHECK(cache.find("a convolution of [2, 3]") == "1 -2 4096");
    cache.keep("nothing", "");
    cache.keep("a convolution of [2, 3]", "7");  // is kept already
  }
  CHECK(text_of(file) == "a convolution of [2, 3] = 1 -2 4096;\nnothing = ;\n");
  // A second process that read the file before.
  AlgorithmCache early(file);
  append(file, "batch norm = 3;\npooling = 1;\n");
  early.keep("batch norm", "2");
  CHECK(early.find("batch norm") == "2");
  CHECK(early.find("pooling") == "1");
  AlgorithmCache later(file);
  CHECK(later.find("a convolution of [2, 3]") == "1 -2 4096");
  CHECK(later.find("nothing") == "");
  CHECK(later.find("batch norm") == "3");
  CHECK(!later.find("batch"));

  AlgorithmCache none;
  none.keep("a", "1");
  CHECK(!none.find("a"));
}

TEST_CASE("lines of an algorithm cache that are damaged or cut off are passed over") {
  const TempFolder folder;
  const std::string file = folder.at("card.txt");
  append(file, std::string("\n = \nwords\ncut off = 1 2\nmore = 1; 2\n") +
                   "twice = 1 later = 2;\ntwo = 1 = 2;\n\0\xff\n" + "whole = 1 2;\ncut off again = 1");
  {
    AlgorithmCache cache(file);
    for (const char* key : {"", "words", "cut off", "more", "twice", "two", "cut off again"}) {
      INFO(key);
      CHECK(!cache.find(key));
    }
    CHECK(cache.find("whole") == "1 2");
    cache.keep("lost with the line before it", "5");
    cache.keep("next", "6");
  }
  AlgorithmCache later(file);
  CHECK(later.find("next") == "6");
  CHECK(!later.find("cut off again"));
}

TEST_CASE("an algorithm cache that cannot be read or written is one line in the log") {
  const TempFolder folder;
  const testing::StandardError errors;
  const auto lines = [&] {
    std::size_t count = 0;
    const std::string text = errors.text(), part = "timed algorithms are not kept";
    for (auto at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++count;
    return count;
  };
  AlgorithmCache is_folder(folder.str());
  is_folder.keep("a", "1");
  CHECK(lines() == 1);
  CHECK(contains(errors.text(), folder.str() + ": this is a folder"));

  append(folder.at("a file"), "");
  AlgorithmCache below_a_file(folder.at("a file/card.txt"));
  CHECK(lines() == 1);
  below_a_file.keep("a", "1");
  below_a_file.keep("b", "1");
  CHECK(lines() == 2);
  CHECK(contains(errors.text(), "a file/card.txt: cannot be written: Not a directory"));
  CHECK(text_of(folder.at("a file")).empty());
}

TEST_CASE("an algorithm cache is written through no link and waits for no pipe") {
  const TempFolder folder;
  const testing::StandardError errors;
  append(folder.at("victim"), "mine");
  std::filesystem::create_symlink(folder.at("victim"), folder.at("card.txt"));
  AlgorithmCache(folder.at("card.txt")).keep("a", "1");
  CHECK(text_of(folder.at("victim")) == "mine");
  CHECK(contains(errors.text(), "card.txt: cannot be written"));
  std::filesystem::remove(folder.at("card.txt"));
  AlgorithmCache cache(folder.at("card.txt"));
  REQUIRE(mkfifo(folder.at("card.txt").c_str(), 0600) == 0);
  cache.keep("a", "1");
}

TEST_CASE("an algorithm cache never grows beyond what is read") {
  const TempFolder folder;
  const std::string file = folder.at("card.txt");
  constexpr std::size_t kMost = std::size_t{16} << 20;
  append(file, "first = 1;\n");
  append(file, std::string(kMost - 11 - 14, '\n'));
  {
    AlgorithmCache cache(file);
    cache.keep("too long", "123456");
    cache.keep("fits", "12345");
    cache.keep("late", "1");
    CHECK(cache.find("late") == "1");
  }
  CHECK(std::filesystem::file_size(file) == kMost);
  AlgorithmCache later(file);
  CHECK(later.find("first") == "1");
  CHECK(later.find("fits") == "12345");
}

TEST_CASE("processes that keep at once lose nothing") {
  const TempFolder folder;
  const std::string file = folder.at("card.txt");
  constexpr int kProcesses = 4, kEach = 200;
  for (int p = 0; p < kProcesses; ++p)
    if (fork() == 0) {
      AlgorithmCache cache(file);
      for (int i = 0; i < kEach; ++i)
        cache.keep("key " + std::to_string(p) + " " + std::to_string(i), fmt::format("{} {}", p, i));
      _exit(0);
    }
  for (int p = 0; p < kProcesses; ++p) wait(nullptr);
  AlgorithmCache cache(file);
  for (int p = 0; p < kProcesses; ++p)
    for (int i = 0; i < kEach; ++i)
      CHECK(cache.find("key " + std::to_string(p) + " " + std::to_string(i)) == fmt::format("{} {}", p, i));
}

TEST_CASE("the algorithm cache's folder is the user's, none, or the one that is named") {
  const Environment cache("XDG_CACHE_HOME", "/somewhere"), home("HOME", "/home/me");
  CHECK(algorithm_cache_folder("auto") == "/somewhere/topknot");
  CHECK(algorithm_cache_folder("none") == "");
  CHECK(algorithm_cache_folder("here") == "here");
  {
    const Environment relative("XDG_CACHE_HOME", "caches");
    CHECK(algorithm_cache_folder("auto") == "/home/me/.cache/topknot");
    const Environment no_home("HOME", nullptr);
    CHECK(algorithm_cache_folder("auto") == "");
  }
}

}  // namespace topknot

#include "nn/base/text.h"

#include "nn/base/log.h"
#include "tests/support/catch.h"
#include "tests/support/standard_error.h"
#include "tests/support/text.h"

namespace topknot {
namespace {

TEST_CASE("text from outside moves no cursor, and as one line begins no other") {
  const std::string text = "a\x1b[2J\r\xc2\x9b é\xff\tb\nc\x7f";
  CHECK(printable(text) == "a\\x1b[2J\\x0d\\xc2\\x9b é\\xff\tb\nc\\x7f");
  CHECK(one_line(text) == "a\\x1b[2J\\x0d\\xc2\\x9b é\\xff\\tb\\nc\\x7f");
  CHECK(one_line("abc", 2) == "ab...");
}

TEST_CASE("the log escapes what could move a terminal's cursor, in every level") {
  const testing::StandardError errors;
  log_warning("w\x1b[1m");
  log_error("e\x1b[1m\n  second line");
  set_log_level(LogLevel::debug);
  log_info("i\x1b[1m");
  log_debug("d\x1b[1m");
  set_log_level(LogLevel::info);
  const std::string text = errors.text();
  for (const char* line : {"w\\x1b[1m", "e\\x1b[1m\n  second line", "i\\x1b[1m", "d\\x1b[1m"})
    CHECK(contains(text, line));
  CHECK_FALSE(contains(text, "\x1b[1m"));
}

}  // namespace
}  // namespace topknot

// Files of a run directory that are written beside what they replace, and those that are no files.
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>

#include "nn/base/file.h"
#include "tests/support/catch.h"
#include "tests/support/error_text.h"
#include "tests/support/files.h"
#include "tests/support/temp_folder.h"
#include "train/metrics/metrics.h"
#include "train/metrics/npy.h"
#include "train/metrics/output_file.h"
#include "train/metrics/run_config.h"

using namespace topknot;
namespace fs = std::filesystem;

TEST_CASE("a file is written through no link, whatever stands beside it") {
  const TempFolder temp;
  temp.write("victim", {'m', 'y'});
  const std::string target = temp.at("table.csv");
  fs::create_symlink(temp.at("victim"), target + ".part-" + std::to_string(getpid()));
  write_file(target, "new");
  CHECK(text_of(target) == "new");
  CHECK(text_of(temp.at("victim")) == "my");

  const NewFile a = create_part_file(target), b = create_part_file(target);
  REQUIRE((a.fd.valid() && b.fd.valid()));
  CHECK(a.path != b.path);
  CHECK(a.path.starts_with(target + ".part-"));
  CHECK_FALSE(create_part_file(temp.at("absent/table.csv")).fd.valid());
}

TEST_CASE("a pipe, a device and a folder in place of a run's file are refused, and never waited for") {
  const TempFolder temp;
  const std::string pipe = temp.at("pipe");
  REQUIRE(mkfifo(pipe.c_str(), 0600) == 0);
  for (const auto& [path, kind] :
       {std::pair(pipe, "a named pipe"), std::pair(std::string("/dev/zero"), "a device"),
        std::pair(temp.str(), "a folder")}) {
    INFO(path);
    CHECK(user_error([&] { read_metrics(path); }, {path, kind}));
    CHECK(user_error([&] { RunConfig config(path); }, {path, kind}));
    CHECK(user_error([&] { NpyReader reader(path); }, {path, kind}));
  }
}

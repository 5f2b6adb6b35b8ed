// What gpu-check writes: complete after each result.
#include <nlohmann/json.hpp>

#include "tests/support/catch.h"
#include "tests/support/error_text.h"
#include "tests/tools/gpu_check/gpu_check_fakes.h"

using namespace topknot;
using namespace topknot::gpu_check;
using testing::Fakes;

namespace {

nlohmann::json json_in(const Fakes& fakes) {
  return nlohmann::json::parse(fakes.text_of("out/gpu-check.json"));
}

}  // namespace

TEST_CASE("both files are complete from the start and after each result") {
  const Fakes fakes;
  Report report(fakes.path("out"));
  CHECK(json_in(fakes)["results"].empty());
  report.describe("card", "NVIDIA H200");
  report.add({"train", "resnet20", Status::passed, 12.25, {{"images/s", 51234.5}, {"times", 2.5}}, "a note"});
  CHECK(json_in(fakes)["about"]["card"] == "NVIDIA H200");
  CHECK(json_in(fakes)["results"].size() == 1);
  report.add({"nccl", "2 ranks", Status::failed, 1, {}, "rank 1: lost"});
  const auto json = json_in(fakes);
  CHECK(json["results"].size() == 2);
  CHECK(json["results"][0]["figures"]["images/s"] == 51234.5);
  CHECK(json["results"][0]["result"] == "passed");
  CHECK(json["results"][0]["seconds"] == 12.25);
  CHECK(json["results"][1]["result"] == "FAILED");
  CHECK(json["results"][1]["note"] == "rank 1: lost");
  const std::string table = fakes.text_of("out/gpu-check.txt");
  INFO(table);
  CHECK(table.find("card: NVIDIA H200\n") == 0);
  CHECK(table.find("train    passed       12.2  resnet20: 5.123e+04 images/s, 2.5 times (a note)\n") !=
        std::string::npos);
  CHECK(table.find("nccl     FAILED        1.0  2 ranks (rank 1: lost)\n") != std::string::npos);
  CHECK(std::distance(std::filesystem::directory_iterator(fakes.path("out")), {}) == 2);
  CHECK(report.any(Status::failed));
  CHECK_FALSE(report.any(Status::skipped));
}

TEST_CASE("what a program wrote, whatever it is, leaves the table a table and the JSON readable") {
  const Fakes fakes;
  Report report(fakes.path("out"));
  report.add({"tests", "a", Status::failed, 0, {}, "two\nlines\x1b[31m and \xff"});
  CHECK(json_in(fakes)["results"].size() == 1);
  CHECK(lines_of(fakes.text_of("out/gpu-check.txt")).size() == 2);
}

TEST_CASE("a folder that cannot be written is a mistake of whoever named it") {
  const Fakes fakes;
  fakes.write_file("file", "");
  CHECK(user_error([&] { Report report(fakes.path("file")); }, {fakes.path("file"), "--out"}));
  CHECK(user_error([&] { Report report(fakes.path("file") + "/below"); }, {"--out"}));
  CHECK(user_error([] { Report report(""); }, {"--out"}));
}

TEST_CASE("a result goes through a line of JSON and back") {
  Result result{"kernels", "topk, 2^20", Status::skipped, 1.5, {{"ms", 0.25}, {"GB/s", 1234}}, "why"};
  const auto back = result_of(json_line(result));
  REQUIRE(back);
  CHECK(back->stage == "kernels");
  CHECK(back->name == "topk, 2^20");
  CHECK(back->status == Status::skipped);
  CHECK(back->seconds == 1.5);
  CHECK(back->figures == result.figures);
  CHECK(back->note == "why");
  for (const char* other : {"", "hello", "{}", "[1]", "{\"stage\": 1}", "{\"stage\":\"a\",\"name\":\"b\"}"})
    CHECK_FALSE(result_of(other));
}

TEST_CASE("the PyTorch scripts that gpu-check carries come out whole") {
  const Fakes fakes;
  for (const char* name : {"gpu_topk.py", "gpu_train.py"}) {
    const std::string path = write_peer_script(fakes.folder(), name), text = fakes.text_of(name);
    CHECK(path == fakes.path(name));
    CHECK(text.find("#!/usr/bin/env python3\n") == 0);
    CHECK(text.find("sys.exit(main())\n") == text.size() - 17);
  }
  CHECK(user_error([&] { write_peer_script(fakes.path("nothing"), "gpu_topk.py"); },
                   {fakes.path("nothing"), "another place"}));
}

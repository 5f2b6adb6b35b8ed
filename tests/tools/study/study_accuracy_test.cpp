// `study accuracy` draws a summary, and says what is wrong with one.
#include <filesystem>
#include <fstream>

#include "nn/base/check.h"
#include "tests/support/catch.h"
#include "tests/support/error_text.h"
#include "tests/support/temp_folder.h"
#include "tools/study/study.h"

using namespace topknot;

namespace {

void draw(const TempFolder& temp, const std::string& text) {
  std::ofstream(temp.at("summary.csv")) << text;
  const Study& study = studies().find("accuracy");
  study.run(
      StudyArguments("accuracy", study.keys, {"in=" + temp.at("summary.csv"), "out=" + temp.at("out")}));
}

std::string complaint(const std::string& text) {
  const TempFolder temp;
  try {
    draw(temp, text);
  } catch (const UserError& error) {
    return error.what();
  }
  return "accepted";
}

constexpr const char* kHeader =
    "run,seeds,accuracy,spread,ratio_up,sent_per_step,received_per_step,seconds,skipped_steps\n";

}  // namespace

TEST_CASE("study accuracy draws a line a method, and dense as the reference") {
  const TempFolder temp;
  draw(temp, std::string(kHeader) +
                 "dense,3,66.71,0.60,1.00,1,1,1,0\ntopk-d0.001,1,42.65,,724,1,1,1,0\ntopk-d0.01,1,62.49,,79,"
                 "1,1,1,0\n"
                 "randk-d0.01,1,10.08,,80,1,1,1,0\ndgc_full,1,60,,100,1,1,1,0\n");
  std::stringstream svg;
  svg << std::ifstream(temp.at("out/accuracy.svg")).rdbuf();
  for (const char* text : {"topk", "randk", "dense", "test accuracy, %"})
    CHECK(svg.str().find(text) != std::string::npos);
  CHECK(svg.str().find("dgc_full") == std::string::npos);
}

TEST_CASE("study accuracy refuses what is no summary") {
  CHECK(complaint("a,b\n").find("not a summary.csv") != std::string::npos);
  CHECK(complaint(kHeader).find("no row is named") != std::string::npos);
  CHECK(complaint(std::string(kHeader) + "topk-d0.1,1,x,,1,1,1,1,0\n").find("holds no number") !=
        std::string::npos);
  CHECK(complaint(std::string(kHeader) + "topk-dx,1,3,,1,1,1,1,0\n").find("holds no number") !=
        std::string::npos);
}

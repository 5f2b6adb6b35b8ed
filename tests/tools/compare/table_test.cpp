#include <sys/stat.h>

#include <filesystem>
#include <fstream>
#include <set>
#include <tuple>

#include "tests/support/error_text.h"
#include "tests/support/text.h"
#include "tests/tools/compare/made_runs.h"
#include "tools/compare/report_charts.h"

using namespace topknot::testing;

namespace topknot {
namespace {

namespace fs = std::filesystem;

const std::string kHeader =
    "run,seed,commit,metric,value,held_out,checksum,steps,sent_per_step,received_per_step,dense_per_step,"
    "seconds,skipped_steps,config,keys\n";

// `value` in percent, as a table has it.
std::string row(const std::string& name, int seed, const std::string& value, int sent,
                const std::string& keys) {
  return name + "," + std::to_string(seed) + ",abc1234,accuracy," + value + ",,00000000deadbeef,10," +
         std::to_string(sent) + "," + std::to_string(3 * sent) + ",4000,12.5,0,configs/a.yaml," + keys + "\n";
}

struct MadeTable {
  explicit MadeTable(const std::string& text) { std::ofstream(path, std::ios::binary) << text; }
  TempFolder temp;
  std::string path = temp.at("runs.csv");
};

}  // namespace

TEST_CASE("a table of runs is read alike as a spreadsheet writes it") {
  const std::string rows = row("dense", 1, "90.00", 4000, "compress.name=dense");
  const auto read = [](const std::string& text) {
    const MadeTable table(text);
    const std::vector<Run> runs = read_runs({table.path});
    return std::tuple(runs.size(), runs.at(0).last, runs.at(0).config.text("compress.name"));
  };
  std::string windows = "\xef\xbb\xbf";
  for (const char c : kHeader + "\n" + rows) windows += c == '\n' ? "\r\n" : std::string(1, c);
  CHECK(read(windows) == read(kHeader + rows));
  CHECK(read((kHeader + rows).substr(0, (kHeader + rows).size() - 1)) == read(kHeader + rows));
}

TEST_CASE("the rows of a table of runs are compared by their last value and their bytes") {
  const MadeTable table(
      kHeader + row("dense", 1, "90.00", 4000, "dist.ranks=4 compress.name=dense") +
      row("topk", 1, "88.00", 40, "compress.codec=auto compress.name=topk") +
      row("dense", 2, "92.00", 4000, "dist.ranks=4 compress.name=dense") +
      row("topk-d0.01", 1, "89.00", 400,
          "\"compress.codec=auto compress.name=topk compress.density=0.01 compress.warmup=[0.5,0.25,0.1]\"") +
      row("topk_int8", 1, "87.50", 10, "compress.codec=auto compress.name=topk compress.values=int8"));
  const Comparison c = compare_runs(read_runs({table.path}), {});
  REQUIRE(c.methods.size() == 4);
  CHECK(c.methods[0].name == "dense");
  CHECK(c.methods[1].name == "topk");
  CHECK(c.methods[2].name == "topk-d0.01");
  CHECK(c.methods[3].name == "topk_int8");
  CHECK(c.methods[0].last.mean == Approx(0.91));
  CHECK(c.methods[0].last.count == 2);
  CHECK(c.methods[1].bytes_per_step.mean == Approx(40));
  CHECK(c.methods[1].received_per_step.mean == Approx(120));
  CHECK(c.methods[3].dense_ratio == Approx(400));
  CHECK(c.methods[2].config.at("compress.warmup") == "[0.5,0.25,0.1]");

  const std::string text = comparison_text(c);
  for (const char* part : {"configs/a.yaml", "91.0 ± 1.4 %", "400×"}) CHECK(contains(text, part));
  for (const char* part : {"best accuracy", "images/s", "ms per step", "nan", "network"}) {
    INFO(part);
    CHECK_FALSE(contains(text, part));
  }
  const std::string page = report_html(c);
  CHECK(contains(page, "configs/a.yaml · 4 methods, 5 runs<"));
  CHECK(contains(page, "<strong>91.0 %</strong><small>final test accuracy"));
  for (const char* part : {"nan", "How training went"}) CHECK_FALSE(contains(page, part));

  const std::string svg = bits_svg(c);
  for (const char* name : {">dense<", ">topk<", ">topk values=int8<"}) CHECK(count_of(svg, name) == 1);
  CHECK(contains(svg, "\ntopk: 88 % at 0.32\n"));
  CHECK(contains(svg, "\ntopk: 89 % at 3.2\n"));
  CHECK(user_error([&] { quality_svg(c); }, {"--out", ".bits.svg"}));
  CHECK(user_error([&] { compare_runs(read_runs({table.path}), 0.5); }, {"--target", "no evaluations"}));
}

TEST_CASE("the last value of a key counts, as train takes it, and a list may have spaces") {
  const MadeTable table(kHeader + row("a", 1, "90.00", 400, "compress.name=topk") +
                        row("b", 1, "80.00", 400,
                            "\"compress.name=dense compress.warmup=[0.5, 0.1] compress.name=topk seed=7\"") +
                        row(std::string(60000, '1'), 1, "80.00", 4000, "compress.name=dense"));
  const std::vector<Run> runs = read_runs({table.path});
  CHECK(runs[1].config.text("compress.name") == "topk");
  CHECK(runs[1].config.text("compress.warmup") == "[0.5, 0.1]");
  CHECK(runs[1].config.text("seed") == "1");
  CHECK(compare_runs(runs, {}).methods.size() == 3);
}

TEST_CASE("a table stands beside no run directory, and a folder may be called as one") {
  const MadeTable table(kHeader + row("a", 1, "90.00", 400, "compress.name=topk"));
  const Folder folder;
  const std::string run = folder.add("run.csv", {});
  CHECK(read_runs({run}).size() == 1);
  CHECK(user_error([&] { read_runs({run, table.path}); }, {run, "side by side"}));
}

TEST_CASE("a table's run that diverged leaves its method without a value") {
  const MadeTable table(kHeader + row("dense", 1, "90.00", 4000, "compress.name=dense") +
                        row("dense", 2, "nan", 4000, "compress.name=dense"));
  const Comparison c = compare_runs(read_runs({table.path}), {});
  CHECK(c.methods[0].last.count == 0);
  CHECK(contains(comparison_text(c), "/runs.csv/dense-s2 is not finite"));
}

TEST_CASE("what is no table of runs is refused with its line") {
  const std::string good = row("dense", 1, "90.00", 4000, "compress.name=dense");
  const auto refused = [](const std::string& text, std::initializer_list<std::string> parts) {
    const MadeTable table(text);
    return user_error([&] { read_runs({table.path}); }, parts);
  };
  CHECK(user_error([] { read_runs({"none.csv"}); }, {"'none.csv'", "No such file"}));
  const TempFolder temp;
  REQUIRE(mkfifo(temp.at("pipe.csv").c_str(), 0600) == 0);
  CHECK(user_error([&] { read_runs({temp.at("pipe.csv")}); }, {"pipe.csv", "a named pipe"}));
  CHECK(refused("", {"empty"}));
  CHECK(refused(kHeader, {"no run in it"}));
  CHECK(refused(kHeader + good + "dense,2\n", {"runs.csv:3: 2 cells, and the header has 15"}));
  CHECK(refused("method,runs\ntopk,3\n", {"runs.csv:2", "no column", "study-runs"}));
  CHECK(refused(kHeader + row("dense", 1, "high", 4000, "compress.name=dense"),
                {"value is 'high', no number"}));
  CHECK(refused(kHeader + row("dense", 1, "", 4000, "compress.name=dense"), {"value is '', no number"}));
  CHECK(refused(kHeader + row("a", 1, "90.00", 4000, "seed=1"), {"no compress.name"}));
  for (const char* value : {"-1", "100.1", "1e300"})
    CHECK(
        refused(kHeader + row("dense", 1, value, 4000, "compress.name=dense"), {"no number from 0 to 100"}));
  CHECK(
      refused(kHeader + row("dense", 1, "90.00", -1, "compress.name=dense"), {"sent_per_step", "no number"}));
  CHECK(refused(kHeader + row("a", 1, "90.00", 4000, "\"compress.name=topk compress.warmup=[0.5,"),
                {"inside quotes"}));
  CHECK(refused(kHeader + row("a", 1, "90.00", 4000, "dense"), {"expected KEY=VALUE, not 'dense'"}));
  std::string other = good;
  other.replace(other.find("accuracy"), 8, "speed");
  CHECK(refused(kHeader + other, {"the metric 'speed' is not known"}));
}

TEST_CASE("every published table can be compared") {
  int tables = 0;
  for (const auto& entry : fs::directory_iterator(TOPKNOT_SOURCE_DIR "/docs/results"))
    if (entry.path().extension() == ".csv") {
      const std::string path = entry.path().string();
      INFO(path);
      std::set<std::string> names;
      std::ifstream file(path);
      std::string line;
      std::getline(file, line);
      while (std::getline(file, line)) names.insert(line.substr(0, line.find(',')));
      const Comparison c = compare_runs(read_runs({path, path}), {});
      CHECK(c.methods.size() == names.size());
      for (const std::string& warning : c.warnings) CHECK_FALSE(contains(warning, "more than once"));
      CHECK(bits_svg(c).starts_with("<svg"));
      ++tables;
    }
  CHECK(tables > 5);
}

}  // namespace topknot

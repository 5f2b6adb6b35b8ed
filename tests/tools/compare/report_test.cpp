// The page and the pictures.
#include <sys/stat.h>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <functional>
#include <set>
#include <tuple>

#include "tests/support/error_text.h"
#include "tests/support/files.h"
#include "tests/tools/compare/made_runs.h"
#include "tools/common/chart.h"
#include "train/recorder.h"

namespace topknot {

using namespace testing;
namespace fs = std::filesystem;

namespace {

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

TEST_CASE("the report is one page without network or script, with every chart on three axes") {
  const Folder folder;
  folder.add("d", {});
  folder.add("t<b>", {.overrides = kTopk, .bytes = 40});
  const std::string html = report_html(folder.compare({"d", "t<b>"}));
  CHECK(contains(html, "76.0 % after 1.50 s"));
  for (const char* part :
       {"http:", "https:", "<script", "src=", "url(\"", "@import", "t<b>", "nan", "inf<"}) {
    INFO(part);
    CHECK_FALSE(contains(html, part));
  }
  CHECK(contains(html, "t&lt;b&gt;"));
  for (const char* label : {">step</text>", ">epoch</text>", ">training time (s)</text>"})
    CHECK(count_of(html, label) == 3);
  for (const char* title :
       {"Test accuracy", "Train loss", "Bytes sent", "Where the time of a step goes", "What differs"})
    CHECK(contains(html, title));
  CHECK(count_of(html, "<svg viewBox") == 9 + 1);
  CHECK(count_of(html, "<svg") == count_of(html, "</svg>"));
  CHECK(count_of(html, "class=\"legend\"") == 3);  // of the methods, of the bits and of the parts of a step
  CHECK(contains(html, "00000000deadbeef"));
}

TEST_CASE("axes with ends that are equal, far apart or no numbers have few ticks") {
  const double nan = std::numeric_limits<double>::quiet_NaN(), inf = std::numeric_limits<double>::infinity();
  for (const double lo : {0.0, 1.0, 1e16, 9e18, 1e300, -1e308, -inf, nan})
    for (const double hi : {0.0, 1.0, 1e16 + 2, 9e18 + 2048, std::nextafter(1e300, inf), 1e308, inf, nan}) {
      INFO(lo << " to " << hi);
      CHECK(linear_ticks(lo, hi, 8, Unit::plain).size() <= 18);
      CHECK(log_ticks(lo, hi, Unit::plain).size() <= 40);
      Scale scale;
      scale.lo = lo, scale.hi = hi, scale.from = 0, scale.to = 100;
      for (const double value : {0.0, 1e308, -inf, nan}) {
        CHECK(std::fabs(scale(value)) <= 10000);
        scale.logarithmic = true;
        CHECK(std::fabs(scale(value)) <= 10000);
        scale.logarithmic = false;
      }
    }
}

TEST_CASE("records with numbers that no run has make a page of a page's size without NaN, or are refused") {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  std::vector<float> u(1000);
  for (std::size_t i = 0; i < u.size(); ++i) u[i] = static_cast<float>(i % 17) - 8;
  for (const double bad : {nan, 0.0, -1.0, 1e16, 1e308, -1e308, 4e-324}) {
    INFO(bad);
    const Folder folder;
    const std::string run = folder.add("d", {});
    MetricsWriter writer(run + "/metrics.jsonl");
    for (std::int64_t step : {5, 10, 20}) {
      DistributionRecord record = distribution_of(u, 0.01);
      record.step = step, record.deviation = record.mean = record.median = record.laplace_scale = bad;
      record.contraction = record.bound = record.bell_bound = step == 5 ? 0.5 : bad;
      writer.write(record);
      StepRecord line;
      line.step = 20 + step;
      line.epoch = line.time_s = line.loss = line.lr = line.density = line.selected = line.bytes_sent = bad;
      line.data_s = line.forward_s = line.communicate_s = line.exposed_s = line.images_per_second = bad;
      writer.write(line);
      writer.write(
          EvalRecord{20 + step, bad, bad, {.loss = bad, .accuracy = bad, .top5_accuracy = bad}, bad});
    }
    EndRecord end;
    end.steps = 40;
    end.wall_seconds = end.eval_seconds = end.startup_seconds = end.images_per_second = end.bytes_sent = bad;
    end.bytes_dense = end.step_p50_s = end.step_p95_s = bad;
    writer.write(end);
    const Comparison c = folder.compare({"d"});
    const std::string all = report_html(c) + comparison_text(c) + comparison_csv(c);
    CHECK(all.size() < 1000000);
    std::string lower;
    for (const char letter : all) lower += static_cast<char>(std::tolower(letter));
    for (const char* word : {"nan", "inf"})
      for (auto at = lower.find(word); at != std::string::npos; at = lower.find(word, at + 1)) {
        INFO(lower.substr(at < 60 ? 0 : at - 60, 120));
        const bool part_of_a_word = std::isalpha(lower[at - 1]) || std::isalpha(lower[at + 3]);
        CHECK(part_of_a_word);
      }
  }
  const Folder folder;
  const std::string run = folder.add("d", {});
  std::ofstream(run + "/metrics.jsonl", std::ios::app)
      << R"({"event":"distribution","step":1,"size":0,"histogram":[1]})"
      << "\n{}\n";
  CHECK(user_error([&] { read_run(run); }, {"damaged line"}));
}

TEST_CASE("an environment that is nested without end, or no UTF-8, is read as far as it makes sense") {
  const Folder folder;
  const std::string run = folder.add("d", {});
  for (const std::string& text :
       {std::string(300000, '['), std::string(300000, '[') + std::string(300000, ']'),
        std::string("[\"\xff\"]")}) {
    std::ofstream(run + "/environment.json") << R"({"host":"node1","deep":)" << text << "}";
    CHECK_NOTHROW(comparison_text(folder.compare({"d"})));
  }
}

TEST_CASE("an environment that is a pipe is refused, not waited for") {
  const Folder folder;
  const std::string run = folder.add("d", {});
  std::filesystem::remove(run + "/environment.json");
  REQUIRE(mkfifo((run + "/environment.json").c_str(), 0600) == 0);
  CHECK(user_error([&] { read_run(run); }, {"environment.json", "a named pipe"}));
}

TEST_CASE("words of the runs' files move no cursor and begin no line, on the terminal and on the page") {
  const Folder folder;
  folder.add("d", {});
  Comparison c = folder.compare({"d"});
  c.task = "pictures\x1b[2J\nNote: all is well";
  c.warnings = {"first\nNote: second\x1b[2J"};
  c.methods[0].name = "dense\n\x1b[2J";
  const std::string text = comparison_text(c), page = report_html(c);
  CHECK(says(text, {"task: pictures\\x1b[2J\\nNote: all is well\n", "Note: first\\nNote: second\\x1b[2J.",
                    "dense\\n\\x1b[2J"}));
  CHECK_FALSE(contains(text + page, "\x1b"));
}

TEST_CASE("the report draws recorded distributions, of each method that has some") {
  const Folder folder;
  folder.add("d", {});
  const auto run = folder.add("t", {.overrides = kTopk});
  CHECK_FALSE(contains(report_html(folder.compare({"d", "t"})), "accumulated gradient"));
  MetricsWriter writer(run + "/metrics.jsonl");
  for (const int step : {5, 10, 15, 20}) {
    std::vector<float> u(1000);
    for (std::size_t i = 0; i < u.size(); ++i)
      u[i] = static_cast<float>(std::sin(1.0 + static_cast<double>(i)));
    DistributionRecord record = distribution_of(u, 0.01);
    record.step = step;
    writer.write(record);
  }
  const std::string html = report_html(folder.compare({"d", "t"}));
  CHECK(says(html, {"The accumulated gradient", "Contraction of top-k"}));
  for (const char* label : {">step 5: ", ">step 15: ", ">step 20: "}) CHECK(contains(html, label));
  CHECK_FALSE(contains(html, ">step 10: "));
  CHECK(count_of(html, "<svg viewBox") == 9 + 1 + 3 + 2);
  CHECK_FALSE(contains(html, "nan"));
}

TEST_CASE("pointing at a chart shows each method's value there") {
  const Folder folder;
  folder.add("d", {.best = 0.8});
  folder.add("t", {.overrides = kTopk, .step_seconds = 0.2, .best = 0.6, .bytes = 40});
  const std::string html = report_html(folder.compare({"d", "t"}));
  CHECK(says(html, {"<title>step\ndense: 80 % at 15\ntopk: 60 % at 15</title>",
                    "<title>training time (s)\ndense: 79 % at 2\ntopk: 40 % at 2</title>",
                    "dense: 80 kB at 20\ntopk: 800 B at 20</title>"}));
}

TEST_CASE("the metric over time is one picture, in which a method's own choice of a key stays unnamed") {
  const Folder folder;
  folder.add("d", {});
  folder.add("own", {.overrides = {"compress.name=topk"}, .bytes = 40});
  folder.add("int8", {.overrides = {"compress.name=topk", "compress.values=int8"}, .bytes = 20});
  const Comparison c = folder.compare({"d", "own", "int8"});
  CHECK(c.methods[1].name == "topk");
  CHECK(c.methods[2].name == "topk values=int8");
  const std::string svg = quality_svg(c);
  CHECK(svg.rfind("<svg", 0) == 0);
  for (const char* part : {">dense<", ">topk<", ">topk values=int8<", "test accuracy", "training time (s)"}) {
    INFO(part);
    CHECK(contains(svg, part));
  }
  const std::string epochs = epochs_svg(folder.compare({"d", "own"}, 0.5));
  CHECK(epochs.rfind("<svg", 0) == 0);
  for (const char* part : {">dense<", ">topk<", "test accuracy", ">epoch<"}) {
    INFO(part);
    CHECK(contains(epochs, part));
  }
  for (const char* part : {"training time", ">step<"}) CHECK_FALSE(contains(epochs, part));
}

TEST_CASE(
    "the last value of the metric over the bits sent: methods that differ in how much they send are one "
    "line") {
  const Folder folder;
  folder.add("d", {.best = 0.8});
  folder.add("d2", {.overrides = {"seed=2"}, .best = 0.9});
  folder.add("a", {.overrides = {"compress.name=topk", "compress.density=0.01"}, .best = 0.7, .bytes = 40});
  folder.add("b", {.overrides = {"compress.name=topk", "compress.density=0.1"}, .best = 0.75, .bytes = 400});
  folder.add("c", {.overrides = {"compress.name=topk", "compress.values=int8"}, .best = 0.6, .bytes = 20});
  folder.add("none", {.overrides = {"compress.name=randk"}, .bytes = 0});
  folder.add("half", {.overrides = {"compress.name=dgc"}, .bytes = 40, .complete = false});
  const Comparison c = folder.compare({"d", "d2", "a", "b", "c", "none", "half"});
  const std::string svg = bits_svg(c);
  CHECK(svg.rfind("<svg", 0) == 0);
  for (const char* name : {">dense<", ">topk<", ">topk values=int8<"}) CHECK(count_of(svg, name) == 1);
  for (const char* name : {">randk<", ">dgc<"}) CHECK_FALSE(contains(svg, name));
  CHECK(says(svg, {"\ndense: 84 % at 32\n", "\ntopk: 69 % at 0.32\n", "\ntopk: 74 % at 3.2\n",
                   "\ntopk values=int8: 59 % at 0.16<"}));
  CHECK(count_of(svg, "a4.2 4.2") == 2 * 5);         // circles: three points and two entries of the legend
  CHECK(count_of(svg, "h7.6v7.6") == 2);             // a second family of a compressor has squares
  CHECK(count_of(svg, "<path fill=\"none\"") == 4);  // three lines, and the spread of dense's two seeds
  const std::string page = report_html(c);
  CHECK(contains(page, "The last test accuracy for the bits sent"));
  CHECK(count_of(page, "h7.6v7.6") == 2);
  CHECK(user_error([&] { bits_svg(folder.compare({"none"})); }, {"--out", "nothing to draw"}));
}

TEST_CASE("ticks are round, inside their range, and labelled with as many digits as they need") {
  const auto labels = [](const std::vector<Tick>& ticks) {
    std::string text;
    for (const auto& tick : ticks) text += tick.label + "|";
    return text;
  };
  CHECK(labels(linear_ticks(0, 2.3, 5, Unit::plain)) == "0.0|0.5|1.0|1.5|2.0|");
  CHECK(labels(linear_ticks(0.05, 0.83, 4, Unit::percent)) == "20 %|40 %|60 %|80 %|");
  CHECK(labels(linear_ticks(0, 55000, 5, Unit::plain)) == "0|20k|40k|");
  CHECK(labels(linear_ticks(1, 1, 5, Unit::plain)) == "1|");
  CHECK(labels(log_ticks(900, 2e6, Unit::bytes)) == "1 kB|10 kB|100 kB|1 MB|");
  CHECK(labels(log_ticks(0.015, 0.3, Unit::plain)) == "0.02|0.05|0.1|0.2|");
  CHECK(labels(log_ticks(0.2, 40, Unit::plain)) == "0.3|1|3|10|30|");
}

TEST_CASE("smoothing and thinning keep the mean of what they cover and pass over gaps") {
  const std::vector<Point> points = {{0, 1}, {1, 2}, {2, 3}, {3, kAbsent}, {4, 5}, {5, 6}};
  const auto thin = thin_out(points, 3);
  REQUIRE(thin.size() == 4);
  CHECK(thin[0].y == Approx(1.5));
  CHECK(thin[1].y == Approx(3));
  CHECK(thin[3].x == 5);
  CHECK(smooth(points, 3)[1].y == Approx(2));
  CHECK(smooth(points, 3)[3].y == Approx(4));
  CHECK(smooth(points, 1)[0].y == 1);
}

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
  CHECK(says(page,
             {"configs/a.yaml · 4 methods, 5 runs<", "<strong>91.0 %</strong><small>final test accuracy"}));
  for (const char* part : {"nan", "How training went"}) CHECK_FALSE(contains(page, part));

  const std::string svg = bits_svg(c);
  for (const char* name : {">dense<", ">topk<", ">topk values=int8<"}) CHECK(count_of(svg, name) == 1);
  CHECK(says(svg, {"\ntopk: 88 % at 0.32\n", "\ntopk: 89 % at 3.2\n"}));
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
  CHECK(refused("method,runs\ntopk,3\n", {"runs.csv:2", "no column", "train-runs"}));
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
  for (const auto& entry : fs::directory_iterator(TOPKNOT_SOURCE_DIR "/lab/records"))
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

// The page and the pictures.
#include <sys/stat.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <functional>

#include "tests/support/error_text.h"
#include "tests/support/files.h"
#include "tests/tools/compare/made_runs.h"
#include "tools/common/chart.h"
#include "tools/compare/report_charts.h"
#include "train/recorder.h"

namespace topknot {

using namespace testing;
namespace fs = std::filesystem;

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
  CHECK(contains(text, "task: pictures\\x1b[2J\\nNote: all is well\n"));
  CHECK(contains(text, "Note: first\\nNote: second\\x1b[2J."));
  CHECK(contains(text, "dense\\n\\x1b[2J"));
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
  CHECK(contains(html, "The accumulated gradient"));
  CHECK(contains(html, "Contraction of top-k"));
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
  CHECK(contains(html, "<title>step\ndense: 80 % at 15\ntopk: 60 % at 15</title>"));
  CHECK(contains(html, "<title>training time (s)\ndense: 79 % at 2\ntopk: 40 % at 2</title>"));
  CHECK(contains(html, "dense: 80 kB at 20\ntopk: 800 B at 20</title>"));
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
  CHECK(contains(svg, "\ndense: 84 % at 32\n"));
  CHECK(contains(svg, "\ntopk: 69 % at 0.32\n"));
  CHECK(contains(svg, "\ntopk: 74 % at 3.2\n"));
  CHECK(contains(svg, "\ntopk values=int8: 59 % at 0.16<"));
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

}  // namespace topknot

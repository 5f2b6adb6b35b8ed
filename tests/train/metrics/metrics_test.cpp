#include "train/metrics/metrics.h"

#include "nn/base/text.h"
#include "tests/support/standard_error.h"
#include "tests/support/test.h"
#include "train/config/config.h"
#include "train/metrics/output_file.h"
#include "train/metrics/run_config.h"
#include "train/reporter.h"
#include "train/run_directory.h"

namespace topknot {

namespace {

StepRecord step_record() {
  StepRecord step;
  step.step = 3, step.epoch = 0.25, step.time_s = 1.5, step.loss = 0.1 + 0.2, step.lr = 0.1,
  step.density = 0.001;
  step.selected = 269, step.threshold = 0.5, step.bytes_sent = 2160, step.bytes_dense = 1078888;
  step.data_s = 0.01, step.forward_s = 0.02, step.backward_s = 0.03, step.encode_s = 0.04,
  step.communicate_s = 0.05;
  step.decode_s = 0.06, step.update_s = 0.07, step.exposed_s = 0.08, step.makespan_s = 0.09;
  step.images_per_second = 900;
  return step;
}

struct MetricsFile : TempFolder {
  const std::string path = at("metrics.jsonl");
  void append(const std::string& line) const { std::ofstream(path, std::ios::app) << line; }
};

}  // namespace

TEST_CASE("a metrics.jsonl that lost its end with the machine goes on at the beginning of a line") {
  const MetricsFile file;
  MetricsWriter(file.path).write(StartRecord{});
  const auto first = fs::file_size(file.path);
  StepRecord step;
  step.step = 1;
  MetricsWriter(file.path).write(step);
  const auto whole = fs::file_size(file.path);
  fs::resize_file(file.path, whole - 5);
  truncate_metrics(file.path, whole);
  CHECK(fs::file_size(file.path) == first);
  step.step = 2;
  MetricsWriter(file.path).write(step);
  const Metrics metrics = read_metrics(file.path);
  CHECK(metrics.starts.size() == 1);
  REQUIRE(metrics.steps.size() == 1);
  CHECK(metrics.steps[0].step == 2);
  truncate_metrics(file.path,
                   first + 5);  // inside a line, as a checkpoint of another course of the run counts
  CHECK(fs::file_size(file.path) == first);
  fs::resize_file(file.path, first - 5);
  truncate_metrics(file.path, whole);
  CHECK(fs::file_size(file.path) == 0);
}

TEST_CASE("a metrics.jsonl that is gone begins anew, a damaged one is kept under another name") {
  const MetricsFile file;
  truncate_metrics(file.path, 1000);
  CHECK(fs::file_size(file.path) == 0);
  for (const char* kept : {".damaged", ".damaged-2"}) {
    file.write("metrics.jsonl", {'{', '}', '\n', '?', '\n', '{', '}', '\n'});
    truncate_metrics(file.path, 8);
    CHECK(fs::file_size(file.path) == 0);
    CHECK(fs::file_size(file.path + kept) == 8);
  }
}

TEST_CASE("metrics read back as they were written, to the last bit") {
  const MetricsFile file, again;
  EndRecord end;
  end.test.accuracy = 0.25, end.best_test_accuracy = 0.5, end.bytes_sent = 1e15, end.steps = 3;
  end.parameter_checksum = "0123456789abcdef";
  end.model_tflops = 0.7, end.flops_utilisation = 0.35;
  end.makespan_p50_s = 0.1 + 0.2, end.modelled_makespan_s = 0.3, end.decode_p50_s = 0.4;
  DistributionRecord distribution = distribution_of(std::vector<float>{1, -2, 3, -4}, 0.25);
  distribution.step = 7, distribution.epoch = 0.5;
  {
    MetricsWriter writer(file.path);
    writer.write(step_record());
    writer.write(EpochRecord{.epoch = 1, .step = 3, .time_s = 2, .train_loss = 0.5});
    writer.write(EvalRecord{
        .step = 3, .epoch = 1, .time_s = 2, .test = {.loss = 1, .accuracy = 0.25}, .eval_seconds = 4});
    writer.write(distribution);
    writer.write(end);
  }
  const Metrics metrics = read_metrics(file.path);
  CHECK_FALSE((metrics.truncated || metrics.steps.at(0).skipped || metrics.evals.at(0).test.perplexity));
  REQUIRE(metrics.end);
  {
    MetricsWriter writer(again.path);
    writer.write(metrics.steps[0]), writer.write(metrics.epochs.at(0)), writer.write(metrics.evals[0]);
    writer.write(metrics.distributions.at(0)), writer.write(*metrics.end);
  }
  CHECK(text_of(again.path) == text_of(file.path));
  // One list of fields serves writer and reader: each is there.
  for (const std::string field :
       {R"("loss":0.30000000000000004)", R"("step":3)", R"("exposed_s":0.08)", R"("makespan_s":0.09)",
        R"("images_per_second":900)", R"("train_loss":0.5)", R"("test_accuracy":0.25)",
        R"("parameter_checksum":"0123456789abcdef")", R"("bytes_sent":1)", R"("model_tflops":0.7)",
        R"("flops_utilisation":0.35)", R"("makespan_p50_s":0.30000000000000004)",
        R"("modelled_makespan_s":0.3)", R"("decode_p50_s":0.4)", R"("step":7)", R"("laplace_scale":2.5)"}) {
    INFO(field);
    CHECK(contains(text_of(file.path), field));
  }
}

TEST_CASE("every event is on disk when write returns, and a second writer appends") {
  const MetricsFile file;
  MetricsWriter first(file.path);
  first.write(step_record());
  CHECK(read_metrics(file.path).steps.size() == 1);
  MetricsWriter second(file.path);
  second.write(step_record());
  CHECK(read_metrics(file.path).steps.size() == 2);
}

TEST_CASE("every record has the rank that wrote it") {
  const MetricsFile file;
  MetricsWriter writer(file.path, 3);
  std::apply([&](const auto&... records) { (writer.write(records), ...); },
             std::tuple<StartRecord, StepRecord, EpochRecord, EvalRecord, DistributionRecord, StopRecord,
                        EndRecord>());
  const auto lines = json_lines_of(file.path);
  CHECK(lines.size() == 7);
  for (const auto& line : lines) CHECK(line.at("rank") == 3);
}

TEST_CASE("a loss that is not a number is written as null and read as not a number") {
  const MetricsFile file;
  StepRecord step = step_record();
  step.loss = std::numeric_limits<double>::infinity();
  step.skipped = true;
  MetricsWriter(file.path).write(step);
  CHECK(text_of(file.path).find("\"loss\":null") != std::string::npos);
  CHECK(std::isnan(read_metrics(file.path).steps.at(0).loss));
  CHECK(read_metrics(file.path).steps.at(0).skipped);
}

TEST_CASE("a cut-off last line is tolerated, a damaged line before it is named") {
  const MetricsFile file;
  MetricsWriter(file.path).write(step_record());
  file.append(R"({"event":"step","st)");
  const Metrics cut = read_metrics(file.path);
  CHECK(cut.steps.size() == 1);
  CHECK(cut.truncated);
  CHECK_FALSE(cut.end);
  file.append(
      "\n"
      R"({"event":"step","step":4})"
      "\n");
  CHECK_USER_ERROR(read_metrics(file.path), ":2: damaged line");
  CHECK_USER_ERROR(read_metrics(file.at("none")), "No such file");
}

TEST_CASE("a wrong type in a field is a damaged line, an unknown event or field is passed over") {
  const MetricsFile file;
  file.append(R"({"event":"later"})"
              "\n"
              R"({"event":"step","step":4,"new":1})"
              "\n");
  CHECK(read_metrics(file.path).steps.at(0).step == 4);
  for (const char* line : {R"({"event":"step","step":"x"})", R"({"event":"eval","step":1e300})",
                           R"({"event":"distribution","histogram":[1,1e300]})"}) {
    std::ofstream(file.path) << line << "\n";
    CHECK_USER_ERROR(read_metrics(file.path), ":1: damaged line");
  }
}

TEST_CASE("a full disk ends in a message with path and reason") {
  if (!fs::exists("/dev/full")) return;
  const auto text = error_text<UserError>([] { MetricsWriter("/dev/full").write(step_record()); });
  CHECK(says(text, {"/dev/full", "No space left"}));
  CHECK_USER_ERROR(write_file("/dev/full", "x"), "No space left");
}

TEST_CASE("metrics.csv has one header, a row per step, and evaluations on their step") {
  const TempFolder temp;
  {
    MetricsWriter metrics(temp.at("metrics.jsonl"));
    StepRecord step = step_record();
    metrics.write(step);
    step.step = 4;
    metrics.write(step);
    metrics.write(EvalRecord{
        .step = 4, .test = {.loss = 1.5, .perplexity = 4.5, .bits_per_byte = 2.2}, .eval_seconds = 2});
  }
  const std::string path = temp.at("metrics.csv");
  write_metrics_csv(temp.at("metrics.jsonl"), path);
  std::istringstream lines(text_of(path));
  std::string header, first, second, rest;
  std::getline(lines, header), std::getline(lines, first), std::getline(lines, second);
  CHECK(header.rfind("step,epoch,time_s,loss,", 0) == 0);
  CHECK(first.rfind("3,0.25,1.5,", 0) == 0);
  CHECK(
      header.ends_with(",test_loss,test_accuracy,test_top5_accuracy,test_perplexity,test_bits_per_byte,"
                       "test_word_error_rate,test_character_error_rate,eval_seconds"));
  CHECK(first.ends_with(",,,,,,,,"));
  CHECK(second.ends_with(",1.5,,,4.5,2.2,,,2"));
  const auto commas = [](const std::string& s) { return std::count(s.begin(), s.end(), ','); };
  CHECK(commas(header) == commas(first));
  CHECK(commas(header) == commas(second));
  CHECK_FALSE(std::getline(lines, rest));
}

TEST_CASE("the last steps of a long run are read without the others") {
  const MetricsFile file;
  {
    MetricsWriter metrics(file.path);
    StepRecord step = step_record();
    for (step.step = 1; step.step <= 1000; ++step.step) metrics.write(step);
    metrics.write(EvalRecord{.step = 1});
  }
  const Metrics last = read_metrics(file.path, 30);
  CHECK(last.steps.size() >= 30);
  CHECK(last.steps.size() < 60);
  CHECK(last.steps.back().step == 1000);
  CHECK(last.evals.size() == 1);
  CHECK(read_metrics(file.path).steps.size() == 1000);
}

TEST_CASE("the files of a run name its configuration and machine; a folder that cannot be is refused") {
  const TempFolder temp;
  const std::string dir = temp.at("a/run");
  create_run_directory(load_config("", {"output.dir=" + dir, "seed=5", "output.overwrite=true"}),
                       {"train", "seed=5"}, {{"blas", "1.0"}});
  const auto again = load_config(dir + "/config.yaml", {});
  REQUIRE(again.problems.empty());
  CHECK(again.config.seed == 5);
  CHECK(again.config.output.dir == dir);
  CHECK(!again.config.output.overwrite);
  CHECK(contains(text_of(dir + "/environment.json"), "\"threads_per_rank\""));

  std::ofstream(temp.at("file")) << "x";  // where a folder should be
  for (const char* name : {"/file", "/file/run"}) {
    const auto no_folder = load_config("", {"output.dir=" + temp.str() + name});
    CHECK(error_text<UserError>([&] { create_run_directory(no_folder, {}); }).find("output.dir: ") == 0);
  }
}

TEST_CASE("quantiles lie between neighbours") {
  CHECK(quantile({}, 0.5) == 0);
  CHECK(quantile({3, 1, 2}, 0.5) == 2);
  CHECK(quantile({4, 1, 2, 3}, 0.5) == 2.5);
  CHECK(quantile({1, 2}, 1) == 2);
}

TEST_CASE("durations, bytes and the progress line as text") {
  CHECK(format_duration(5) == "0:05");
  CHECK(format_duration(3723) == "1:02:03");
  CHECK(format_bytes(12) == "12 B");
  CHECK(format_bytes(1078888) == "1.08 MB");
  CHECK(format_bytes(999.7) == "1 kB");
  CHECK(format_bytes(345678) == "346 kB");
  const auto fields = step_fields(3, 10, 0.5, 1.25, 0.1, 823.4, 62);
  CHECK(progress_line(fields) == "step 3/10  epoch 0.50  loss 1.2500  lr 0.1  823 images/s  left 1:02");
  CHECK(progress_line(step_fields(3, 0, 0.5, 1.25, 0.1, 12.34, -1)) ==
        "step 3  epoch 0.50  loss 1.2500  lr 0.1  12.3 images/s");
  CHECK(progress_line(fields, 79, 0.5) ==
        "[====     ] step 3/10  epoch 0.50  loss 1.2500  lr 0.1  823 images/s  left 1:02");
  CHECK(progress_line(fields, 66, 0.5) == "step 3/10  epoch 0.50  loss 1.2500  823 images/s  left 1:02");
  CHECK(progress_line(fields, 40, 0.5) == "step 3/10  loss 1.2500  left 1:02");
  CHECK(progress_line(fields, 44, 0.5) == "[====    ] step 3/10  loss 1.2500  left 1:02");
  for (int columns = 1; columns < 120; ++columns)
    CHECK(progress_line(fields, columns, 1.0).size() <= static_cast<std::size_t>(columns));
}

TEST_CASE("with local steps progress averages over whole rounds") {
  const testing::StandardError standard_error;
  Progress progress({.total_steps = 24, .log_every = 1, .every = 4});
  for (std::int64_t step = 1; step <= 12;
       ++step)  // 10 images each: a round takes 1 s, 0.97 of it in its exchange
    progress.step(step, 0, 1, 0.1, 10, step % 4 == 0 ? 0.97 : 0.01, 0);
  std::istringstream lines(standard_error.text());
  for (std::string line; std::getline(lines, line);) {
    CAPTURE(line);
    std::int64_t step = 0;
    REQUIRE(std::sscanf(line.substr(line.find("step ")).c_str(), "step %ld/", &step) == 1);
    CHECK((line.find("left") != std::string::npos) == (step >= 4));  // before, the exchange is not known
    if (step >= 4) CHECK(line.find("40 images/s") != std::string::npos);
    if (step == 8) CHECK(line.ends_with("left 0:04"));
  }
}

TEST_CASE("evaluations that are left: every so many epochs, and one at the end") {
  const Plan plan{10, 45};
  CHECK(evaluations_left(plan, 1, 0) == 5);
  CHECK(evaluations_left(plan, 1, 10) == 4);
  CHECK(evaluations_left(plan, 1, 40) == 1);
  CHECK(evaluations_left(plan, 1, 45) == 0);
  CHECK(evaluations_left({10, 40}, 1, 0) == 4);
  CHECK(evaluations_left(plan, 0.25, 0) == 18);
  CHECK(evaluations_left(plan, 0, 44) == 1);
  CHECK(evaluations_left(plan, 0, 45) == 0);
  CHECK(evaluations_left(plan, 0.05, 40) == 5);  // no more than one after each step
}

TEST_CASE("a run's configuration reads as the texts of its file, in order, with the values that were given") {
  const TempFolder temp;
  std::ofstream(temp.at("config.yaml"))
      << "# The effective configuration\nseed: 5  # command line\n\nmodel:\n"
         "  name: mlp\n  hidden: [5, 6]  # file\ndata:\n"
         "  root: \"a #b\\\"c\\\\\"  # file\n  noise: none\n";
  const RunConfig config(temp.at("config.yaml"));
  REQUIRE(config.entries().size() == 5);
  CHECK(config.entries()[0].key == "seed");
  CHECK(config.entries()[0].given);
  CHECK(config.find("model.name")->text == "mlp");
  CHECK_FALSE(config.find("model.name")->given);
  CHECK(config.find("model.hidden")->text == "[5, 6]");
  CHECK(config.find("data.root")->text == R"("a #b\"c\\")");
  CHECK(config.find("data.root")->given);
  CHECK(config.find("data.size") == nullptr);
  CHECK(config.text("data.root") == R"(a #b"c\)");
  CHECK(config.text("data.size").empty());
  CHECK(config.number("seed") == 5);
  CHECK(config.numbers("model.hidden") == std::vector<double>{5, 6});
  CHECK_USER_ERROR(config.number("data.noise"), "config.yaml", "data.noise", "none");
}

TEST_CASE("every key of a configuration reads as it was written") {
  const TempFolder temp;
  const LoadedConfig loaded =
      load_config("", {"data.root=a b: #c", "exchange.merge=size:4000", "exchange.groups=[2,1]"});
  std::ofstream(temp.at("config.yaml")) << dump_yaml(loaded.config, false, loaded.origins);
  const RunConfig config(temp.at("config.yaml"));
  CHECK(config.text("data.root") == "a b: #c");
  CHECK(config.text("exchange.merge") == "size:4000");
  CHECK(config.numbers("exchange.groups") == std::vector<double>{2, 1});
  for (const auto& entry : config.entries()) {
    INFO(entry.key);
    const Key* key = find_key(entry.key);
    REQUIRE(key);
    CHECK(entry.text == key_value(*key, loaded.config));
    CHECK(entry.given == (loaded.origins.count(entry.key) > 0));
  }
}

TEST_CASE("a file that no run wrote is refused with its line") {
  const TempFolder temp;
  std::ofstream(temp.at("config.yaml")) << "seed: 1\nhello\n";
  CHECK_USER_ERROR(RunConfig config(temp.at("config.yaml")), "config.yaml:2", "key: value");
  CHECK_USER_ERROR(RunConfig config(temp.at("absent.yaml")), "absent.yaml");
}

TEST_CASE("figures without the warm-up: by step, or with local steps by whole rounds behind it") {
  std::vector<double> steps;
  for (int i = 1; i <= 15; ++i) steps.push_back(i % 4 == 0 ? 13 : i);
  CHECK(without_warm_up(steps, 0) == std::vector<double>(steps.begin() + 5, steps.end()));
  CHECK(without_warm_up({1, 2, 3}, 0) == std::vector<double>{1, 2, 3});
  CHECK(without_warm_up(steps, 4) == std::vector<double>{(9 + 10 + 11 + 13) / 4.0});
  CHECK(without_warm_up(steps, 5) ==
        std::vector<double>{(6 + 7 + 13 + 9 + 10) / 5.0, (11 + 13 + 13 + 14 + 15) / 5.0});
  CHECK(without_warm_up({1, 2, 3}, 4) == std::vector<double>{2});
  CHECK(without_warm_up({}, 4).empty());
  CHECK(without_warm_up({}, 0).empty());
  // A GPU does not measure every step.
  const double none = std::numeric_limits<double>::quiet_NaN();
  CHECK(without_warm_up({1, 2, 3, 4, 5, none, 7, none}, 0) == std::vector<double>{7});
  CHECK(steady_median({9, 9, 9, 9, 9, 1, none, 3, 2}, 0) == 2);
  CHECK(std::isnan(steady_median({none, none}, 0)));
  CHECK(steady_median({}, 0) == 0);
}

}  // namespace topknot

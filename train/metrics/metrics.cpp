#include "train/metrics/metrics.h"

#include <fmt/format.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>
#include <numeric>
#include <type_traits>
#include <utility>

#include "nn/base/check.h"
#include "nn/base/file.h"
#include "nn/base/log.h"
#include "nn/base/text.h"
#include "train/metrics/output_file.h"

namespace topknot {
namespace {

using Json = nlohmann::ordered_json;

void test_fields(auto& test, auto&& visit) {
  visit("test_loss", test.loss), visit("test_accuracy", test.accuracy);
  visit("test_top5_accuracy", test.top5_accuracy), visit("test_perplexity", test.perplexity);
  visit("test_bits_per_byte", test.bits_per_byte);
  visit("test_word_error_rate", test.word_error_rate);
  visit("test_character_error_rate", test.character_error_rate);
}
// Columns that metrics.csv has in addition to a step's.
void evaluation_fields(auto& r, auto&& visit) {
  test_fields(r.test, visit), visit("eval_seconds", r.eval_seconds);
}

// In the order of MetricsRecord.
constexpr const char* kEvents[] = {"step", "epoch", "eval", "distribution", "end", "start", "stop"};
static_assert(std::size(kEvents) == std::variant_size_v<MetricsRecord>);

// visit("step", r.step) for `step`.
#define FIELD(name) visit(#name, r.name)

// Each record's fields once, for writing and for reading.
template <class Record, class Visit>
void fields(Record& r, Visit&& visit) {
  using Plain = std::remove_const_t<Record>;
  if constexpr (std::is_same_v<Plain, StepRecord>) {
    FIELD(step), FIELD(epoch), FIELD(time_s), FIELD(loss), FIELD(lr), FIELD(density), FIELD(selected);
    FIELD(threshold), FIELD(bytes_sent), FIELD(bytes_received), FIELD(bytes_dense), FIELD(bytes_ratio);
    FIELD(data_s), FIELD(forward_s), FIELD(backward_s), FIELD(encode_s), FIELD(communicate_s);
    FIELD(decode_s), FIELD(update_s), FIELD(exposed_s), FIELD(makespan_s), FIELD(skipped);
    FIELD(images_per_second);
  } else if constexpr (std::is_same_v<Plain, EpochRecord>) {
    FIELD(epoch), FIELD(step), FIELD(time_s), FIELD(train_loss);
  } else if constexpr (std::is_same_v<Plain, EvalRecord>) {
    FIELD(step), FIELD(epoch), FIELD(time_s), evaluation_fields(r, visit);
  } else if constexpr (std::is_same_v<Plain, DistributionRecord>) {
    FIELD(step), FIELD(epoch), FIELD(density), FIELD(size), FIELD(k), FIELD(mean), FIELD(deviation);
    FIELD(median), FIELD(laplace_scale), FIELD(contraction), FIELD(bound), FIELD(bell_bound), FIELD(below);
    FIELD(above), FIELD(histogram), FIELD(zeros), FIELD(least_exponent), FIELD(magnitudes);
  } else if constexpr (std::is_same_v<Plain, StartRecord>) {
    FIELD(step), FIELD(total_steps), FIELD(steps_per_epoch), FIELD(time), FIELD(backend), FIELD(task);
    visit("metric", r.metric.name), visit("metric_unit", r.metric.unit);
    visit("higher_is_better", r.metric.higher_is_better), visit("metric_set", r.metric.set), FIELD(revision);
    FIELD(view);
  } else if constexpr (std::is_same_v<Plain, StopRecord>) {
    FIELD(step), FIELD(failed), FIELD(reason), FIELD(time);
  } else {
    test_fields(r.test, visit), FIELD(best_test_accuracy), FIELD(held_out_loss), FIELD(held_out_perplexity);
    FIELD(wall_seconds), FIELD(eval_seconds), FIELD(startup_seconds), FIELD(images_per_second);
    FIELD(bytes_sent), FIELD(model_tflops), FIELD(flops_utilisation), FIELD(bytes_received);
    FIELD(bytes_dense), FIELD(bytes_ratio), FIELD(bits_per_parameter_step), FIELD(parameter_checksum);
    FIELD(steps), FIELD(skipped_steps), FIELD(failed), FIELD(reason), FIELD(step_p50_s), FIELD(step_p95_s);
    FIELD(encode_p50_s), FIELD(communicate_p50_s), FIELD(exposed_p50_s), FIELD(decode_p50_s);
    FIELD(makespan_p50_s), FIELD(modelled_makespan_s);
  }
}
#undef FIELD

std::string to_json(const char* event, int rank, const auto& record) {
  // The destructor of a Json allocates and may not throw: if memory has run out, say so before.
  constexpr std::size_t kRoom = 64 << 10;
  ::operator delete(::operator new(kRoom));
  Json json;
  json["event"] = event;
  json["rank"] = rank;
  fields(record, [&](const char* name, const auto& value) {
    using T = std::decay_t<decltype(value)>;
    if constexpr (std::is_same_v<T, std::optional<double>>) {
      if (value) json[name] = json_number(*value);
    } else if constexpr (std::is_same_v<T, double>) {
      json[name] = json_number(value);
    } else {
      json[name] = value;
    }
  });
  return json.dump(-1, ' ', false, Json::error_handler_t::replace);  // a reason need not be valid UTF-8
}

void check_integer(const Json& json) {
  if (!whole_number(json)) throw UserError("no integer");
}

template <class Record>
Record from_json(const Json& json) {
  Record record;
  fields(record, [&](const char* name, auto& value) {
    using Field = std::decay_t<decltype(value)>;
    using T = std::conditional_t<std::is_same_v<Field, std::optional<double>>, double, Field>;
    const auto it = json.find(name);
    if (it == json.end()) return;
    if (it->is_null()) {
      if constexpr (std::is_same_v<T, double>) value = std::numeric_limits<double>::quiet_NaN();
      return;
    }
    if constexpr (std::is_same_v<T, std::int64_t>) check_integer(*it);
    if constexpr (std::is_same_v<T, std::vector<std::int64_t>>)
      for (const Json& item : *it) check_integer(item);
    value = it->template get<T>();
  });
  return record;
}

// Throws if the counts are none.
DistributionRecord checked(DistributionRecord record) {
  const auto negative = [](std::int64_t count) { return count < 0; };
  constexpr std::size_t kMostBins = 10000;
  if (record.size <= 0 || record.below < 0 || record.above < 0 || record.zeros < 0 ||
      record.histogram.size() > kMostBins || record.magnitudes.size() > kMostBins ||
      std::any_of(record.histogram.begin(), record.histogram.end(), negative) ||
      std::any_of(record.magnitudes.begin(), record.magnitudes.end(), negative))
    throw UserError("no distribution");
  return record;
}

void add_line(const Json& json, Metrics& metrics) {
  const std::string event = json.value("event", "");
  if (event == "step") {
    metrics.steps.push_back(from_json<StepRecord>(json));
  } else if (event == "epoch") {
    metrics.epochs.push_back(from_json<EpochRecord>(json));
  } else if (event == "eval") {
    metrics.evals.push_back(from_json<EvalRecord>(json));
  } else if (event == "distribution") {
    metrics.distributions.push_back(checked(from_json<DistributionRecord>(json)));
  } else if (event == "start") {
    metrics.starts.push_back(from_json<StartRecord>(json));
    metrics.stop.reset();
  } else if (event == "stop") {
    metrics.stop = from_json<StopRecord>(json);
  } else if (event == "end") {
    metrics.end = from_json<EndRecord>(json);
  }
}

std::string csv_number(double value) {
  return std::isfinite(value) ? json_number(value).dump() : "";
}

}  // namespace

std::vector<double> without_warm_up(const std::vector<double>& by_step, std::int64_t every) {
  const std::size_t count = by_step.size(), warm_up = count > kWarmUpSteps ? kWarmUpSteps : 0;
  const auto begin = by_step.begin();
  const auto at = [&](std::size_t i) { return begin + static_cast<std::ptrdiff_t>(i); };
  const auto measured = [](std::vector<double> values) {
    std::erase_if(values, [](double value) { return std::isnan(value); });
    return values;
  };
  if (every <= 0) return measured({at(warm_up), by_step.end()});
  const auto length = static_cast<std::size_t>(every);
  const auto mean = [&](std::size_t from, std::size_t to) {
    return std::accumulate(at(from), at(to), 0.0) / static_cast<double>(to - from);
  };
  std::vector<double> rounds;
  for (std::size_t from = (warm_up + length - 1) / length * length; from + length <= count; from += length)
    rounds.push_back(mean(from, from + length));
  if (rounds.empty() && count > 0) rounds.push_back(mean(0, count));
  return measured(std::move(rounds));
}

double steady_median(const std::vector<double>& by_step, std::int64_t every) {
  std::vector<double> values = without_warm_up(by_step, every);
  if (values.empty() && !by_step.empty()) return std::numeric_limits<double>::quiet_NaN();
  return quantile(std::move(values), 0.5);
}

double Metric::value(double loss, double accuracy) const {
  if (name == "word error rate") return 1 - accuracy;
  return name == "accuracy" ? accuracy : name == "perplexity" ? std::exp(loss) : loss;
}

const char* Metric::second() const {
  return name == "accuracy"          ? "top-5 accuracy"
         : name == "word error rate" ? "character error rate"
         : name == "perplexity"      ? "bits per byte"
                                     : "";
}

std::optional<double> Metric::second_value(const TestFigures& test) const {
  return name == "accuracy"     ? test.top5_accuracy
         : name == "perplexity" ? test.bits_per_byte
                                : test.character_error_rate;
}

std::string Metric::text(double value) const {
  if (unit == "share") return fmt::format("{:.2f} %", 100 * value);
  if (name != "perplexity") return fmt::format("{:.6g}", value);
  constexpr double kFewChoices = 10;  // of characters, or bits of a byte: two digits would tell too little
  return value < kFewChoices ? fmt::format("{:.4f}", value) : fmt::format("{:.2f}", value);
}

MetricsWriter::MetricsWriter(const std::string& path, int rank, std::function<void()> check)
    : path_(path), rank_(rank), check_(std::move(check)), file_(std::fopen(path.c_str(), "ae")) {
  if (!file_)
    throw UserError(path_ + ": cannot be written: " + errno_text() +
                    "; choose another folder with output.dir");
  struct stat status {};
  if (fstat(fileno(file_), &status) == 0) device_ = status.st_dev, inode_ = status.st_ino;
}

MetricsWriter::~MetricsWriter() {
  if (file_) std::fclose(file_);
}

std::uint64_t MetricsWriter::bytes() const {
  struct stat status {};
  if (stat(path_.c_str(), &status) != 0 || status.st_dev != device_ || status.st_ino != inode_)
    throw UserError(
        path_ +
        ": the file is gone: deleted, moved or replaced while the run was writing it, perhaps with its "
        "folder; the run ends, since nothing of it would be kept");
  if (check_) check_();
  return static_cast<std::uint64_t>(status.st_size);
}

void MetricsWriter::write(const MetricsRecord& record) {
  bytes();  // the file is there
  errno = 0;
  const std::string text =
      std::visit([&](const auto& r) { return to_json(kEvents[record.index()], rank_, r); }, record) + "\n";
  if (std::fwrite(text.data(), 1, text.size(), file_) != text.size() || std::fflush(file_) != 0)
    throw UserError(path_ + ": writing failed: " + errno_text() +
                    "; what was written before is kept. Free space or choose another folder with output.dir");
}

void truncate_metrics(const std::string& path, std::uint64_t bytes) {
  std::error_code error;
  if (!std::filesystem::exists(path, error) && !error) {
    log_warning(fmt::format("{}: is gone, and with it the records of the steps before the checkpoint", path));
    return write_file(path, "");
  }
  const std::uintmax_t size = std::filesystem::file_size(path, error);
  if (!error && size > bytes) std::filesystem::resize_file(path, bytes, error);
  if (error) throw UserError(fmt::format("{}: cannot be shortened: {}", path, error.message()));
  std::ifstream file(path, std::ios::binary);
  const bool whole = bytes == 0 || (file.seekg(-1, std::ios::end) && file.get() == '\n');
  if (size < bytes || !whole) {
    log_warning(fmt::format("{}: the records of some steps before the checkpoint are lost", path));
    const std::string text = read_text_file(path, bytes);
    std::filesystem::resize_file(path, text.find_last_of('\n') + 1, error);  // the next record begins a line
    if (error) throw UserError(fmt::format("{}: cannot be shortened: {}", path, error.message()));
  }
  try {
    read_metrics(path);
  } catch (const UserError& damage) {
    std::string kept = path + ".damaged";
    for (int start = 2; std::filesystem::exists(kept, error); ++start)  // of an earlier start
      kept = fmt::format("{}.damaged-{}", path, start);
    std::filesystem::rename(path, kept, error);
    if (error) throw UserError(fmt::format("{}: cannot be renamed to {}: {}", path, kept, error.message()));
    log_warning(fmt::format("{}; kept as {}, and a new file begins", damage.what(), kept));
    write_file(path, "");
  }
}

namespace {

// Calls `take` with each line, whatever its event. Returns whether the last line was cut off.
bool for_each_line(const std::string& path, auto&& take) {
  std::ifstream stream = open_stream(path);
  std::string text;
  for (int line = 1; std::getline(stream, text); ++line) {
    if (text.empty()) continue;
    // A killed run leaves its last line without a newline at the end.
    const bool last = stream.eof();
    try {
      const Json json = Json::parse(text);
      if (!json.is_object()) throw UserError("not an object");
      take(json);
    } catch (const std::exception&) {
      if (last) return true;
      throw UserError(
          fmt::format("{}:{}: damaged line, not a JSON object of a run; remove it or the run", path, line));
    }
  }
  return false;
}

}  // namespace

Metrics read_metrics(const std::string& path, std::size_t last_steps) {
  Metrics metrics;
  metrics.truncated = for_each_line(path, [&](const Json& json) {
    add_line(json, metrics);
    if (last_steps == kAllSteps) return;
    metrics.distributions.clear();
    keep_last(metrics.steps, last_steps);
  });
  return metrics;
}

void write_metrics_csv(const std::string& jsonl, const std::string& path) {
  std::string text;
  const StepRecord columns;
  fields(columns,
         [&](const char* name, const auto&) { text += (text.empty() ? "" : ",") + std::string(name); });
  const EvalRecord evaluation_columns;
  evaluation_fields(evaluation_columns,
                    [&](const char* name, const auto&) { text += "," + std::string(name); });
  OutputFile file(path);
  file.write(text + "\n");
  std::optional<StepRecord> step;  // whose row waits for its evaluation
  const auto write_row = [&](const EvalRecord* evaluation) {
    if (!step) return;
    std::string row;
    const auto add = [&](const std::string& value) { row += (row.empty() ? "" : ",") + value; };
    fields(*step, [&](const char*, const auto& value) { add(csv_number(static_cast<double>(value))); });
    evaluation_fields(evaluation ? *evaluation : evaluation_columns,
                      [&](const char*, const std::optional<double>& value) {
                        add(evaluation && value ? csv_number(*value) : "");
                      });
    file.write(row + "\n");
    step.reset();
  };
  for_each_line(jsonl, [&](const Json& json) {
    const std::string event = json.value("event", "");
    if (event == "step") {
      write_row(nullptr);
      step = from_json<StepRecord>(json);
    } else if (event == "eval") {
      const auto evaluation = from_json<EvalRecord>(json);
      if (step && evaluation.step == step->step) write_row(&evaluation);
    }
  });
  write_row(nullptr);
  file.close();
}

}  // namespace topknot

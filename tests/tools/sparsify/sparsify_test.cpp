#include "tools/sparsify/sparsify.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <limits>
#include <numeric>
#include <utility>

#include "nn/core/rng.h"
#include "tests/support/error_text.h"
#include "tests/support/files.h"
#include "tests/support/temp_folder.h"
#include "train/metrics/npy.h"

namespace topknot {
namespace {

using Json = nlohmann::json;
using Shape = std::vector<std::size_t>;
using Doubles = std::vector<double>;

// Runs sparsify on an array and reads its lines.
std::vector<Json> lines_of(const Shape& shape, const Doubles& values, SparsifyOptions options,
                           SparsifySummary* summary = nullptr) {
  const TempFolder temp;
  options.input = temp.at("g.npy");
  options.out = temp.at("out.jsonl");
  write_npy(options.input, shape, values);
  const SparsifySummary result = sparsify(options);
  if (summary) *summary = result;
  CHECK(std::distance(std::filesystem::directory_iterator(temp.str()), {}) == 2);  // nothing else is left
  return json_lines_of(options.out);
}

SparsifyOptions options_of(const std::string& compressor, std::vector<std::string> settings) {
  SparsifyOptions options;
  options.compressor = compressor;
  options.settings = std::move(settings);
  return options;
}

Doubles random_values(std::size_t count) {
  const CounterRng rng(5, RngUse::test, 3, 9);
  Doubles values(count);
  for (std::size_t i = 0; i < count; ++i) values[i] = rng.normal(i);
  return values;
}

// Positions of the k largest magnitudes, ties to the lower index, ascending.
std::vector<std::size_t> largest(const Doubles& u, std::size_t k) {
  std::vector<std::size_t> order(u.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](std::size_t a, std::size_t b) { return std::abs(u[a]) > std::abs(u[b]); });
  order.resize(k);
  std::sort(order.begin(), order.end());
  return order;
}

// Two ranks, four elements, four steps: ten times (((3t + 5p + 7j) mod 11) - 5) / 10, which are integers.
Doubles trace_gradients() {
  Doubles values;
  for (int t = 0; t < 4; ++t)
    for (int p = 0; p < 2; ++p)
      for (int j = 0; j < 4; ++j) values.push_back((3 * t + 5 * p + 7 * j) % 11 - 5);
  return values;
}

struct Sent {
  int index;
  double value;
};
void check_trace(const std::vector<Json>& lines, const std::vector<Sent>& expected) {
  REQUIRE(lines.size() == 12);
  for (std::size_t step = 0; step < 4; ++step)
    for (std::size_t rank = 0; rank < 2; ++rank) {
      const Json& line = lines[3 * step + rank];
      INFO(line.dump());
      CHECK(line["step"] == step);
      CHECK(line["rank"] == rank);
      CHECK(line["count"] == 1);
      CHECK(line["indices"] == Json{expected[2 * step + rank].index});
      CHECK(line["values"][0].get<double>() == Approx(expected[2 * step + rank].value).epsilon(1e-6));
    }
}

}  // namespace

TEST_CASE("sparsify: the golden trace of top-k with error feedback, and its averages") {
  // Golden values: ties by lower index.
  const auto lines = lines_of({4, 2, 4}, trace_gradients(), options_of("topk", {"density=0.25"}));
  check_trace(lines, {{0, -5}, {1, -4}, {1, 7}, {0, 3}, {1, -3}, {3, 6}, {3, 5}, {0, -7}});
  const std::vector<std::string> averages = {
      R"({"indices":[0,1],"values":[-2.5,-2]})", R"({"indices":[0,1],"values":[1.5,3.5]})",
      R"({"indices":[1,3],"values":[-1.5,3]})", R"({"indices":[0,3],"values":[-3.5,2.5]})"};
  for (std::size_t step = 0; step < 4; ++step) {
    const Json& line = lines[3 * step + 2];
    const Json expected = Json::parse(averages[step]);
    CHECK(line["aggregate"] == true);
    CHECK(line["indices"] == expected["indices"]);
    CHECK(line["values"] == expected["values"]);
    CHECK(line["dense_bytes"] == 16);
    CHECK(line["bytes_down"] == Json{24, 24});  // header 16, position 4, value 4
  }
  CHECK(lines[0]["bytes_up"] == 24);
  CHECK(lines[0]["threshold"] == 5);
}

TEST_CASE("sparsify: the golden trace of DGC carries its velocities from step to step") {
  const auto lines = lines_of({4, 2, 4}, trace_gradients(),
                              options_of("topk", {"density=0.25", "memory=dgc", "momentum=0.9"}));
  check_trace(lines, {{0, -5}, {1, -4}, {1, 8.8}, {0, 3}, {3, 7.85}, {3, 6.09}, {1, -5.7}, {0, -11.5}});
  const auto nesterov = lines_of({4, 2, 4}, trace_gradients(),
                                 options_of("topk", {"density=0.25", "memory=dgc", "nesterov=true"}));
  check_trace(nesterov,
              {{0, -9.5}, {1, -7.6}, {1, 14.92}, {0, 5.7}, {3, 9.065}, {3, 11.481}, {1, -8.13}, {0, -17.35}});
}

TEST_CASE("sparsify: uneven weights equal a naive loop to the last digit") {
  constexpr std::size_t steps = 5, ranks = 3, d = 1000, k = 10;
  const Doubles gradients = random_values(steps * ranks * d);
  SparsifyOptions options = options_of("topk", {"density=0.01"});
  options.weights = "1,2,2";
  const auto lines = lines_of({steps, ranks, d}, gradients, options);
  REQUIRE(lines.size() == steps * (ranks + 1));
  std::vector<std::vector<float>> residual(ranks, std::vector<float>(d));
  for (std::size_t t = 0; t < steps; ++t) {
    std::vector<float> average(d);
    std::vector<bool> sent(d);
    for (std::size_t r = 0; r < ranks; ++r) {
      std::vector<float>& u = residual[r];
      for (std::size_t i = 0; i < d; ++i)
        u[i] = static_cast<float>(gradients[(t * ranks + r) * d + i]) + u[i];
      const auto chosen = largest(Doubles(u.begin(), u.end()), k);
      const auto weight = static_cast<float>((r == 0 ? 1.0 : 2.0) * 3.0 / 5.0);
      std::vector<float> values;
      float least = std::numeric_limits<float>::infinity();
      for (const std::size_t i : chosen) {
        least = std::min(least, std::abs(u[i]));
        values.push_back(u[i]);
        average[i] += weight * u[i];
        sent[i] = true;
        u[i] = 0;
      }
      const Json& line = lines[t * (ranks + 1) + r];
      CHECK(line["indices"] == Json(chosen));
      CHECK(line["values"] == Json(values));
      CHECK(line["threshold"] == least);
    }
    std::vector<std::size_t> indices;
    std::vector<float> values;
    for (std::size_t i = 0; i < d; ++i)
      if (sent[i]) {
        indices.push_back(i);
        values.push_back(average[i] * (1.0f / 3.0f));
      }
    const Json& line = lines[t * (ranks + 1) + ranks];
    CHECK(line["indices"] == Json(indices));
    CHECK(line["values"] == Json(values));
  }
}

TEST_CASE("sparsify: float32 rounds the input and equals a naive loop in float") {
  constexpr std::size_t steps = 3, d = 500, k = 5;
  const Doubles gradients = random_values(steps * d);
  SparsifyOptions options;
  options.compressor = "topk";
  options.settings = {"compress.density=0.01"};
  const auto lines = lines_of({steps, d}, gradients, options);
  std::vector<float> residual(d);
  for (std::size_t t = 0; t < steps; ++t) {
    for (std::size_t i = 0; i < d; ++i) residual[i] = static_cast<float>(gradients[t * d + i]) + residual[i];
    const auto chosen = largest(Doubles(residual.begin(), residual.end()), k);
    std::vector<float> values;
    for (const std::size_t i : chosen) values.push_back(std::exchange(residual[i], 0.0f));
    CHECK(lines[2 * t]["indices"] == Json(chosen));
    CHECK(lines[2 * t]["values"] == Json(values));
    CHECK(lines[2 * t]["bytes_up"] == 16 + 8 * k);
    CHECK(lines[2 * t + 1]["values"] == Json(values));  // one rank: the average is what it sent
    CHECK(lines[2 * t + 1]["bytes_down"] == Json{0});
    CHECK(lines[2 * t + 1]["dense_bytes"] == 4 * d);
  }
}

TEST_CASE("sparsify: a step with a NaN is skipped on all ranks and changes nothing") {
  constexpr std::size_t ranks = 2, d = 50;
  Doubles gradients = random_values(3 * ranks * d), without;
  gradients[(ranks + 1) * d + 7] = std::numeric_limits<double>::quiet_NaN();
  without.assign(gradients.begin(), gradients.begin() + ranks * d);
  without.insert(without.end(), gradients.begin() + 2 * ranks * d, gradients.end());
  SparsifyOptions options = options_of("topk", {"density=0.1", "memory=dgc"});
  SparsifySummary summary;
  const auto lines = lines_of({3, ranks, d}, gradients, options, &summary);
  const auto shorter = lines_of({2, ranks, d}, without, options);
  CHECK(summary.skipped == 1);
  REQUIRE(lines.size() == 9);
  for (std::size_t i = 3; i < 6; ++i) {
    CHECK(lines[i]["skipped"] == true);
    CHECK(lines[i]["indices"].empty());
    CHECK(lines[i]["values"].empty());
  }
  CHECK(lines[3]["count"] == 0);
  for (std::size_t i = 6; i < 9; ++i) {
    CHECK_FALSE(lines[i].contains("skipped"));
    CHECK(lines[i]["indices"] == shorter[i - 3]["indices"]);
    CHECK(lines[i]["values"] == shorter[i - 3]["values"]);
  }
}

TEST_CASE("sparsify: a step whose average overflows is skipped") {
  const double huge = 3e38;
  SparsifyOptions options = options_of("topk", {"density=0.5"});
  SparsifySummary summary;
  // Step 0 overflows in its second element, step 1 does not.
  const auto lines = lines_of({2, 2, 2}, {1, huge, 1, huge, 1, huge, 1, 2}, options, &summary);
  CHECK(summary.skipped == 1);
  REQUIRE(lines.size() == 6);
  CHECK(lines[2]["skipped"] == true);
  CHECK(lines[2]["values"].empty());
}

TEST_CASE("sparsify: dense sums its messages, weighted, and its ranks' lines are their gradients") {
  SparsifyOptions options;
  options.compressor = "dense";
  options.weights = "1,3";
  SparsifySummary summary;
  const auto lines = lines_of({1, 2, 3}, {1, 0, 2, 5, 0, -2}, options, &summary);
  REQUIRE(lines.size() == 3);
  CHECK(lines[0]["indices"] == Json{0, 2});
  CHECK(lines[0]["values"] == Json{1, 2});
  CHECK(lines[1]["values"] == Json{5, -2});
  CHECK(lines[0]["count"] == 3);
  CHECK(lines[0]["bytes_up"] == 12);
  CHECK(lines[2]["indices"] == Json{0, 2});
  CHECK(lines[2]["values"] == Json{(0.5 * 1 + 1.5 * 5) / 2, (0.5 * 2 - 1.5 * 2) / 2});
  CHECK(lines[2]["bytes_down"] == Json{12, 12});
  CHECK(summary.mean_ratio == 1);
}

TEST_CASE("sparsify: dense in bf16 is rounded before and after it is summed, in half the bytes") {
  SparsifyOptions options;
  options.compressor = "dense";
  options.settings = {"values=bf16"};
  SparsifySummary summary;
  // 1.00390625 lies half-way between 1 and the next bfloat16; 257 between 256 and 258. Both go to the even
  // one.
  const auto lines = lines_of({1, 2, 3}, {1.00390625, 256, 3, 1.5, 257, -3}, options, &summary);
  REQUIRE(lines.size() == 3);
  CHECK(lines[2]["indices"] == Json{0, 1});
  CHECK(lines[2]["values"] == Json{1.25, 256});
  CHECK(lines[0]["bytes_up"] == 6);
  CHECK(lines[2]["bytes_down"] == Json{6, 6});
}

TEST_CASE("sparsify: a quantiser's ranks show what they contributed, and it is what is averaged") {
  constexpr std::size_t d = 40;
  for (const std::string name : {"signsgd", "qsgd", "terngrad"}) {
    SparsifyOptions options;
    options.compressor = name;
    const auto lines = lines_of({2, 2, d}, random_values(4 * d), options);
    for (std::size_t first = 0; first < 6; first += 3) {
      std::vector<float> sum(d), average(d);
      for (std::size_t r = 0; r < 2; ++r)
        for (std::size_t i = 0; i < lines[first + r]["indices"].size(); ++i)
          sum[lines[first + r]["indices"][i]] += lines[first + r]["values"][i].get<float>();
      for (std::size_t i = 0; i < lines[first + 2]["indices"].size(); ++i)
        average[lines[first + 2]["indices"][i]] = lines[first + 2]["values"][i].get<float>();
      for (float& x : sum) x *= 0.5f;
      CHECK(average == sum);
      CHECK(std::count(average.begin(), average.end(), 0.0f) < static_cast<int>(d));
    }
  }
}

TEST_CASE("sparsify: entries that cancel stay in the aggregate's list") {
  const auto lines = lines_of({1, 2, 2}, {3, 1, -3, 1}, options_of("topk", {"density=0.5"}));
  CHECK(lines[2]["indices"] == Json{0});
  CHECK(lines[2]["values"] == Json{0});
}

TEST_CASE("sparsify: scope=tensor selects in each of the tensors") {
  const auto lines = lines_of({9}, {9, 8, 7, 6, 1, 2, 0.5, 0.25, 0.125},
                              options_of("topk", {"density=0.01", "tensors=2x2,2,3x1x1", "scope=tensor"}));
  CHECK(lines[0]["indices"] == Json{0, 5, 6});
}

TEST_CASE("sparsify: clip and lr change the gradient before it is compressed") {
  // Two ranks: the norm 5 is clipped to sqrt(2) * 2.
  const auto clipped = lines_of({1, 2, 2}, {3, 4, 0, 0}, options_of("topk", {"density=1", "clip=2"}));
  CHECK(clipped[0]["values"][1].get<double>() == Approx(4 * std::sqrt(2.0) * 2 / 5).epsilon(1e-7));
  const auto scaled = lines_of({2}, {3, 4}, options_of("topk", {"density=1", "lr_inside=true", "lr=0.5"}));
  CHECK(scaled[0]["values"] == Json{1.5, 2});
}

TEST_CASE("sparsify: an empty tensor and an array of no steps give what there is") {
  SparsifyOptions options = options_of("topk", {});
  const auto lines = lines_of({2, 1, 0}, {}, options);
  REQUIRE(lines.size() == 4);
  CHECK(lines[0]["count"] == 0);
  CHECK(lines[0]["indices"].empty());
  CHECK(lines[0]["bytes_up"] == 16);
  CHECK(lines_of({0, 5}, {}, options).empty());
}

TEST_CASE("sparsify: validates options and input, and leaves no output") {
  const TempFolder temp;
  write_npy(temp.at("g.npy"), {2, 3, 4}, Doubles(24, 1.0));
  const auto refused = [&](std::vector<std::string> settings, const std::string& weights,
                           std::initializer_list<std::string> parts, const std::string& name = "topk") {
    SparsifyOptions options{temp.at("g.npy"), name, temp.at("out.jsonl"), std::move(settings), weights};
    const bool named = user_error([&] { sparsify(options); }, parts);
    return named && std::distance(std::filesystem::directory_iterator(temp.str()), {}) == 1;
  };
  CHECK(refused({}, "", {"top_k", "did you mean", "topk"}, "top_k"));
  CHECK(refused({"capcity=2"}, "", {"capcity", "did you mean", "capacity"}));
  CHECK(refused({"density=0"}, "", {"compress.density"}));
  CHECK(refused({"density=1.5"}, "", {"compress.density", "1.5"}));
  CHECK(refused({"density=0.1", "mu=x"}, "", {"compress.mu", "x"}));
  CHECK(refused({"train.epochs=3"}, "", {"train.epochs", "training"}));
  CHECK(refused({"compress.warmup=0.1"}, "", {"compress.warmup", "epochs"}));
  CHECK(refused({"name=topk"}, "", {"--compressor"}));
  CHECK(refused({"g.npy"}, "", {"key=value"}));
  CHECK(refused({}, "1,2", {"--weights", "2 weights", "3 ranks"}));
  CHECK(refused({}, "1,-2,1", {"--weights", "-2"}));
  CHECK(refused({}, "1,nan,1", {"--weights", "nan"}));
  CHECK(refused({}, "1,2,", {"--weights"}));
  CHECK(refused({"tensors=2x3"}, "", {"--tensors", "6 elements", "4"}));
  CHECK(refused({"tensors=2xx2"}, "", {"--tensors", "2xx2"}));
  CHECK(refused({"tensors=2x2x"}, "", {"--tensors", "2x2x"}));
  CHECK(refused({"tensors=0x4,4"}, "", {"--tensors", "0x4"}));
  CHECK(refused({"tensors=99999999x99999999"}, "", {"--tensors", "99999999x99999999"}));
  write_npy(temp.at("g.npy"), {2, 1025, 1}, Doubles(2050, 1.0));
  CHECK(refused({}, "", {"[2, 1025, 1]", "1025 ranks", "1024"}));
  write_npy(temp.at("g.npy"), {1, 1, 2, 2}, Doubles(4, 1.0));
  CHECK(refused({}, "", {"[1, 1, 2, 2]", "[steps, ranks, d]"}));
  write_npy(temp.at("g.npy"), {2, 0, 2}, Doubles());
  CHECK(refused({}, "", {"no ranks"}));
}

}  // namespace topknot

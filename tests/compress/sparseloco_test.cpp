// The pieces of SparseLoCo: selection by chunk, values by centroids, decayed error feedback, the mean over the ranks that
// sent an entry.
#include "compress/select/selector.h"
#include "compress/sparse.h"
#include "compress/transform.h"
#include "tests/compress/codec/through.h"
#include "tests/support/any_threads.h"
#include "tests/support/generated.h"

namespace topknot::testing {
namespace {

struct Sums {
  double plain = 0, weighted = 0, norm = 0;
};
Sums sums_of(std::span<const float> values) {
  Sums sums;
  for (std::size_t i = 0; i < values.size(); ++i) {
    const double x = values[i];
    sums.plain += x, sums.weighted += (1.0 + double(i % 13)) * x, sums.norm += x * x;
  }
  sums.norm = std::sqrt(sums.norm);
  return sums;
}

void check_sums(std::span<const float> values, const Sums& golden) {
  const Sums sums = sums_of(values);
  const double within = 2e-5 * golden.norm * 100;  // of sums over 8,192 elements
  CHECK(sums.plain == Approx(golden.plain).margin(within));
  CHECK(sums.weighted == Approx(golden.weighted).margin(10 * within));
  CHECK(sums.norm == Approx(golden.norm).epsilon(2e-5));
}

constexpr std::size_t kSize = 128 * 64;
constexpr std::int64_t kSeed = 5;

// theta after each sync, of two ranks, by rate 1; pseudo-gradients are 0.1 x^power.
std::vector<std::vector<float>> thetas(CompressOptions options, int power, int syncs,
                                       std::vector<std::vector<float>>* errors = nullptr) {
  SimulatedRanks ranks(options, whole_group(kSize, 2));
  std::vector<std::vector<float>> all;
  std::vector<float> theta;
  for (const double x : generated(kSize, kSeed)) theta.push_back(float(x));
  for (int t = 0; t < syncs; ++t) {
    for (int r = 0; r < 2; ++r) {
      const std::vector<double> x = generated(kSize, kSeed + 1 + 10 * t + r);
      for (std::size_t i = 0; i < kSize; ++i) {
        double product = 1;
        for (int p = 0; p < power; ++p) product *= x[i];
        ranks[std::size_t(r)].gradient[i] = float(0.1 * product);
      }
    }
    REQUIRE(ranks.step(t, 64.0 / 4096));
    for (std::size_t i = 0; i < kSize; ++i) theta[i] -= ranks[0].average[i];
    all.push_back(theta);
    if (errors)
      for (std::size_t r = 0; r < 2; ++r) errors->push_back(ranks[r].residual);
  }
  return all;
}

Selection chunk_topk(std::vector<float>& u, double density, int chunk) {
  Selection selected;
  make_selector("chunk_topk", named("topk", {"chunk=" + std::to_string(chunk)}))
      ->select(u, FeedbackInput(), {.density = density}, selected);
  return selected;
}

}  // namespace

// Golden values: a reference in float64, equal to the released code run by PyTorch to 1e-7.
TEST_CASE("SparseLoCo over three syncs, as released: the mean over the ranks that sent an entry") {
  std::vector<std::vector<float>> errors;
  const auto theta = thetas(named("sparseloco"), 1, 3, &errors);
  check_sums(theta[0], {0.6964575242, 67.39916757, 44.99684474});
  check_sums(theta[1], {-1.544856244, 50.3458875, 45.09374648});
  check_sums(theta[2], {-0.1923148518, 61.67990708, 45.26211661});
  // The residuals are kept times 0.95, ready for the next sync.
  const auto check_error = [&](std::size_t i, Sums golden) {
    golden.plain *= 0.95, golden.weighted *= 0.95, golden.norm *= 0.95;
    check_sums(errors[i], golden);
  };
  check_error(0, {0.001368782353, 0.6332351731, 4.194400957});
  check_error(1, {-0.8153300975, -11.56263842, 4.194772389});
  check_error(2, {0.3259984997, 1.590840064, 5.550424932});
  check_error(5, {-1.697129965, -15.15644057, 6.422220003});
}

TEST_CASE(
    "SparseLoCo as in the paper, the mean over all ranks; and with heavy tails, which use the middle bin") {
  const auto paper = thetas(named("sparseloco", {"aggregate=ranks"}), 1, 3);
  check_sums(paper[0], {0.9632041547, 71.27359225, 44.97959539});
  check_sums(paper[1], {0.04470921224, 63.57095168, 44.98960682});
  check_sums(paper[2], {0.9321294971, 71.04794515, 45.02457203});
  const auto tails = thetas(named("sparseloco"), 7, 2);
  check_sums(tails[0], {-1.520792654, 121.9331179, 48.69858495});
  check_sums(tails[1], {18.0745153, 185.8031442, 52.50386069});
}

// Golden values: a reference in float64, equal to the released code. theta by the optimizer's rule.
TEST_CASE("DeMo over three steps, of a vector and of a matrix") {
  struct Golden {
    std::array<double, 2> theta[3], decoded[3], momentum[3];  // by step, the weighted sum and the norm
    std::array<double, 3> first;                              // decoded[0]
  };
  const auto check = [](const GroupSpec& group, int k, double decay, const Golden& golden) {
    const int chunk = group.tensors[0].cols > 1 ? 4096 : 64;
    SimulatedRanks ranks(named("demo", {"chunk=" + std::to_string(chunk), "lr_inside=true"}), group);
    std::vector<double> theta = generated(group.numel, 7);
    for (int t = 0; t < 3; ++t) {
      for (int r = 0; r < 2; ++r) {
        const std::vector<double> g = generated(group.numel, 7 + 1 + 10 * t + r);
        std::copy(g.begin(), g.end(), ranks[std::size_t(r)].gradient.begin());
      }
      REQUIRE(ranks.step(t, k / double(chunk), {}, true, 0.01));
      const std::span<const float> decoded = ranks[0].average;
      CHECK(double(decoded[0]) == Approx(golden.first[t]).margin(1e-6));
      CHECK(sums_of(decoded).norm == Approx(golden.decoded[t][1]).epsilon(2e-5));
      CHECK(sums_of(decoded).weighted == Approx(golden.decoded[t][0]).margin(1e-4));
      std::vector<float> momentum = ranks[0].residual;  // coefficients, times beta
      CHECK(sums_of(momentum).norm == Approx(0.999 * golden.momentum[t][1]).epsilon(2e-5));
      BlockTransform(group, true).inverse(momentum);
      CHECK(sums_of(momentum).weighted == Approx(0.999 * golden.momentum[t][0]).margin(1e-4));
      std::vector<float> after;
      for (std::size_t i = 0; i < theta.size(); ++i) {
        const double sign = (decoded[i] > 0) - (decoded[i] < 0);
        theta[i] = (1 - 0.01 * decay) * theta[i] - 0.01 * sign;
        after.push_back(float(theta[i]));
      }
      CHECK(sums_of(after).norm == Approx(golden.theta[t][1]).epsilon(2e-5));
      CHECK(sums_of(after).weighted == Approx(golden.theta[t][0]).margin(0.2));  // a sign or two of 8,192
    }
  };
  GroupSpec vector = whole_group(128, 2), matrix = whole_group(64 * 128, 2);
  vector.tensors = {{0, 128, 1}}, matrix.tensors = {{0, 64, 128}};
  check(vector, 4, 0,
        {{{22.55163527, 5.588817427}, {21.50163527, 5.594994432}, {20.57163527, 5.600215233}},
         {{-0.1979690165, 0.05651376092}, {0.099597635, 0.05831952087}, {-0.008226233094, 0.06743940243}},
         {{-0.004848483985, 0.04127879185}, {-0.04775700203, 0.05424737247}, {-0.6958558924, 0.05568627173}},
         {0.000245553618, 0.007366012004, 0.001035014623}});
  check(matrix, 32, 0.1,
        {{{-42.53255531, 44.97252837}, {-32.14002276, 44.94571191}, {-36.31788274, 44.90851317}},
         {{0.1173872212, 0.4926396885}, {0.09488389199, 0.500512755}, {0.8404786782, 0.5105284001}},
         {{-0.4796536982, 0.2849219189}, {-0.6766095771, 0.3941834526}, {-1.445979795, 0.4759546343}},
         {0.003124361379, 0.004799408878, -0.001429487928}});
}

TEST_CASE("the cosine transform is orthonormal by block, at the edges too, and the same for any threads") {
  GroupSpec group = whole_group(100 * 130 + 70, 1);
  group.tensors = {{0, 100, 130}, {13000, 70, 1}};
  std::vector<float> values;
  for (const double x : generated(group.numel, 2)) values.push_back(float(x));
  std::vector<float> there = values;
  BlockTransform transform(group, true);
  transform.forward(there);
  CHECK(sums_of(there).norm == Approx(sums_of(values).norm).epsilon(1e-6));
  CHECK_FALSE(same_bits(there, values));
  // The first coefficient of the first block, of 50 x 26, is its sum over the root of its size.
  double sum = 0;
  for (std::size_t r = 0; r < 50; ++r)
    for (std::size_t c = 0; c < 26; ++c) sum += double(values[r * 130 + c]);
  CHECK(double(there[0]) == Approx(sum / std::sqrt(50.0 * 26)).epsilon(1e-5));
  std::vector<float> again = values;
  {
    const Threads three(3);
    transform.forward(again);
  }
  CHECK(same_bits(again, there));
  transform.inverse(there);
  for (std::size_t i = 0; i < values.size(); ++i) CHECK(there[i] == Approx(values[i]).margin(1e-5));
}

TEST_CASE("transform block: chunk_topk sends the largest of each block of 64 x 64, in the matrix's places") {
  GroupSpec group = whole_group(128 * 192 + 64, 1);
  group.tensors = {{0, 128, 192}, {128 * 192, 64, 1}};
  SimulatedRanks ranks(named("chunk_topk", {"transform=block"}), group);
  std::vector<float>& g = ranks[0].gradient;
  std::fill(g.begin(), g.end(), 0.5f);
  // Chunks of 4,096 neighbours have 64 columns of three blocks each.
  std::vector<std::size_t> sent;
  for (std::size_t row = 0; row < 128; row += 64)
    for (std::size_t col = 0; col < 192; col += 64) sent.push_back((row + 63) * 192 + col + 1);
  for (const std::size_t i : sent) g[i] = float(i);
  g[5] = 70000, g[128 * 192 + 9] = 2;  // in the first block, and the vector's own chunk of 64
  REQUIRE(ranks.step(0, 1.0 / 4096));
  sent[0] = 5, sent.push_back(128 * 192 + 9);
  std::vector<std::size_t> found;
  for (std::size_t i = 0; i < group.numel; ++i)
    if (ranks[0].average[i] != 0) found.push_back(i);
  CHECK(found == sent);
  CHECK(ranks[0].average[5] == 70000);
}

TEST_CASE("transform block: k of each block, which divides the matrix, and of each tensor of a group") {
  // 128 x 10, so that a chunk of 4,096 neighbours would go on in the next tensor; then blocks of 48 x 50, and of 35.
  GroupSpec group = whole_group(1280 + 96 * 100 + 70, 1);
  group.tensors = {{0, 128, 10}, {1280, 96, 100}, {1280 + 9600, 70, 1}};
  for (const char* transform : {"transform=block", "transform=dct"}) {
    const auto made = make_compressor(named("chunk_topk", {transform}), group);
    std::vector<float> gradient, residual(group.numel);
    for (const double x : generated(group.numel, 2)) gradient.push_back(float(x));
    for (std::size_t i = 0; i < 1280; ++i) gradient[i] *= 1000;
    Message message = made->encode({gradient, residual}, {.density = 1.0 / 64});
    const std::vector<std::span<const std::byte>> blocks = {message.block};
    REQUIRE_FALSE(made->decode({.blocks = blocks}));
    std::vector<std::size_t> sent(8);  // of the blocks of 64 x 10, 48 x 50 and 35
    const std::vector<std::size_t> ends = {640, 1280, 3680, 6080, 8480, 10880, 10915, 10950};
    const SparseView contributed = made->contributed().value();
    for (const std::uint32_t i : contributed.indices)
      ++sent[std::size_t(std::upper_bound(ends.begin(), ends.end(), i) - ends.begin())];
    CHECK(sent == std::vector<std::size_t>{10, 10, 38, 38, 38, 38, 1, 1});
    CHECK(made->diagnostics().target == 174);
    made->discard();
  }
}

TEST_CASE("centroid2 puts the mean of its bin in each value's place") {
  const std::vector<float> values = {-9, -1.2f, -1, -0.9f, 0.8f, 1, 1.1f, 1.3f, -1.4f, 0.2f, -4, 5};
  const std::vector<float> back = through("centroid2", values);
  for (std::size_t i = 0; i < values.size(); ++i) {
    const double golden = values[i] == -9 ? -9 : values[i] == -4 ? -4 : values[i] == 5 ? 5 : -0.01111111111;
    CHECK(double(back[i]) == Approx(golden).epsilon(1e-6));
  }
  CHECK(through("centroid2", {2.5f, 2.5f, 2.5f}) == std::vector<float>{2.5f, 2.5f, 2.5f});
  CHECK(through("centroid2", {-3}) == std::vector<float>{-3});
  CHECK(through("centroid2", {4, 1, 3, 2, 1}) == std::vector<float>{4, 1, 3, 2, 1});  // four values stay
}

TEST_CASE("centroid2_ans has centroid2's values, in what their codes' entropy says") {
  // What a selection by magnitude leaves of normal values, one value alone, and values of which each is there once.
  std::vector<float> large;
  for (const float value : normal_values(400000, 1, 5))
    if (std::abs(value) > 2) large.push_back(value);
  for (const std::vector<float>& values : {large, std::vector<float>(5000, 0.5f),
                                           std::vector<float>{4, 1, 3, 2}, normal_values(20000, 1e-3, 6)}) {
    const std::vector<float> back = through("centroid2_ans", values);
    CHECK(same_bits(back, through("centroid2", values)));
    std::map<float, double> counts;
    for (const float value : back) counts[value] += 1;
    double bits = 0;
    for (const auto& [value, count] : counts) bits -= count * std::log2(count / double(back.size()));
    std::vector<std::byte> coded;
    value_codecs().find("centroid2_ans").encode(values, coded);
    CHECK(double(coded.size()) <= 36 + 2 + 1.02 * bits / 8 + 1e-3 * double(values.size()) / 8);
  }
  std::vector<std::byte> coded;
  value_codecs().find("centroid2_ans").encode(large, coded);
  CHECK(8 * coded.size() < 1.15 * double(large.size()));
  CHECK(std::abs(double(value_codecs().find("centroid2_ans").bytes(large.size())) / double(coded.size()) -
                 1) < 0.1);
  coded.resize(31);
  CHECK(says(error_text([&] { value_codecs().find("centroid2_ans").decode(coded, large); }),
             {"centroids are cut off"}));
}

TEST_CASE("centroid1 sends the means of what is below 0 and of what is not") {
  CHECK(through("centroid1", {-1, 3, -2, 5, 1, -3}) == std::vector<float>{-2, 3, -2, 3, 3, -2});
  CHECK(through("centroid1", {1, 2, 3}) == std::vector<float>{2, 2, 2});
  CHECK(through("centroid1", {7, 8}) == std::vector<float>{7, 8});
}

TEST_CASE("centroids keep the sum of the values, and take a bit or two each") {
  const std::vector<float> values = fixture("cubic");
  double sum = 0;
  for (const float value : values) sum += double(value);
  for (const auto& [code, bits] : {std::pair("centroid1", 1), std::pair("centroid2", 2)}) {
    double sent = 0;
    for (const float value : through(code, values)) sent += double(value);
    CHECK(sent == Approx(sum).margin(1e-3));
    CHECK(value_codecs().find(code).bytes(4096) == std::size_t(4 * (1 << bits) + 512 * bits));
  }
}

TEST_CASE("chunk_topk takes the k largest of each chunk, of a short last one its part, ties to the lower") {
  for (const auto& [n, chunk, density] :
       {std::tuple(10007, 4096, 1.0 / 64), std::tuple(10007, 100, 0.035), std::tuple(100, 100, 0.5),
        std::tuple(5, 100, 0.001), std::tuple(7, 1, 0.1)}) {
    INFO(n << " in chunks of " << chunk << " at " << density);
    std::vector<float> u = fixture("p9");
    u.resize(std::size_t(n));
    for (std::size_t i = 0; i < u.size(); i += 3) u[i] = 0.25f;
    std::vector<std::uint32_t> expected;
    for (std::size_t begin = 0; begin < u.size(); begin += std::size_t(chunk)) {
      const std::size_t end = std::min(u.size(), begin + std::size_t(chunk));
      const double k = std::nearbyint(density * double(end - begin));
      for (const std::uint32_t i :
           plain_topk({u.begin() + std::ptrdiff_t(begin), u.begin() + std::ptrdiff_t(end)},
                      std::max<std::size_t>(1, std::size_t(k))))
        expected.push_back(i + std::uint32_t(begin));
    }
    const Selection selected = chunk_topk(u, density, chunk);
    CHECK(selected.indices == expected);
    for (std::size_t i = 0; i < expected.size(); ++i) CHECK(selected.values[i] == u[expected[i]]);
    const CompressOptions options = named("topk", {"chunk=" + std::to_string(chunk)});
    CHECK(selectors().find("chunk_topk").traits.target(density, u.size(), options) == expected.size());
  }
}

TEST_CASE("feedback decays by its factor, and not at all where a step is discarded") {
  SimulatedRanks ranks(named("topk", {"feedback_decay=0.5"}), whole_group(4, 1));
  ranks[0].gradient = {4, 3, 2, 1};
  REQUIRE(ranks.step(0, 0.25));
  CHECK(ranks[0].residual == std::vector<float>{0, 1.5f, 1, 0.5f});
  ranks[0].gradient = {0, 0, 0, 0};
  CHECK_FALSE(ranks.step(1, 0.25, {}, false));
  CHECK(ranks[0].residual == std::vector<float>{0, 1.5f, 1, 0.5f});
  ranks[0].gradient = {1, 1, 1, 1};
  REQUIRE(ranks.step(2, 0.25));
  CHECK(ranks[0].gradient == std::vector<float>{0, 2.5f, 0, 0});
  CHECK(ranks[0].residual == std::vector<float>{0.5f, 0, 1, 0.75f});
}

TEST_CASE("the mean over contributors divides by the weights of those that sent an entry, for any threads") {
  const std::size_t n = 200000;
  std::vector<SparseVector> sent(5);
  const std::vector<float> weights = {1, 0.5f, 2, 1, 0.5f};
  for (std::size_t r = 0; r < sent.size(); ++r) {
    const CounterRng rng(1, RngUse::test, std::uint32_t(r));
    for (std::uint32_t i = 0; i < n; ++i)
      if (rng.uniform(i) < 0.02f) sent[r].indices.push_back(i), sent[r].values.push_back(rng.normal(n + i));
  }
  std::vector<SparseView> views;
  for (std::size_t r = 0; r < sent.size(); ++r) views.emplace_back(sent[r], weights[r]);
  std::vector<float> average(n, 7.0f);
  std::vector<std::size_t> room = averaging_room(views.size(), n);
  average_contributors(views, average, room);
  std::map<std::uint32_t, std::pair<double, double>> expected;
  for (std::size_t r = 0; r < sent.size(); ++r)
    for (std::size_t i = 0; i < sent[r].indices.size(); ++i) {
      auto& [sum, weight] = expected[sent[r].indices[i]];
      sum += double(weights[r]) * double(sent[r].values[i]);
      weight += double(weights[r]);
    }
  std::size_t zeros = 0;
  for (std::uint32_t i = 0; i < n; ++i) {
    const auto at = expected.find(i);
    if (at == expected.end())
      zeros += average[i] == 0;
    else
      CHECK(double(average[i]) == Approx(at->second.first / at->second.second).margin(1e-6));
  }
  CHECK(zeros == n - expected.size());
  check_any_threads([&] {
    std::vector<float> again(n);
    average_contributors(views, again, room);
    return again;
  });
}

TEST_CASE("contributors and decay are refused where they mean nothing") {
  const auto refused = [](const CompressOptions& options, std::initializer_list<std::string> parts) {
    return user_error([&] { make_compressor(options, whole_group(16, 2)); }, parts);
  };
  CHECK(refused(named("topk", {"aggregate=contributors", "memory=ef21"}), {"compress.aggregate", "ef21"}));
  CHECK(refused(named("regtopk", {"aggregate=contributors"}), {"compress.aggregate", "regtopk"}));
  CHECK(refused(named("topk", {"memory=none", "feedback_decay=0.5"}), {"compress.feedback_decay", "none"}));
  // The preset's decay is of its memory.
  CHECK_NOTHROW(make_compressor(named("sparseloco", {"memory=none"}), whole_group(16, 2)));
}

}  // namespace topknot::testing

// DGC's sampled selection: its geometry, its rule against a plain loop, its counts, and vectors that would
// trap a careless loop.
#include "compress/select/dgc_rule.h"

#include "tests/compress/select/select_once.h"

using namespace topknot;
using namespace topknot::testing;

namespace {

const auto by_ceiling = [](double density, std::size_t d, const CompressOptions&) {
  return dgc::selected_count(density, d);
};

std::vector<float> normal_vector(std::uint32_t stream, std::size_t n) {
  const CounterRng rng(41, RngUse::test, stream);
  std::vector<float> x(n);
  for (std::size_t i = 0; i < n; ++i) x[i] = float(rng.normal(i));
  return x;
}

struct Case {
  std::vector<float> u, addend;
  CompressOptions options;
  double density = 0.01;
  std::int64_t step = 0;
  int rank = 0;
  std::size_t position = 0;

  Selection select(std::vector<float>* sum = nullptr) const {
    const auto selector = make_selector("dgc_sampled", options);
    std::vector<float> x = u;
    const Selection selected = select_once(*selector, x, addend, {density, step, rank, position, by_ceiling});
    if (sum) *sum = x;
    return selected;
  }
};

// The rule as the authors' code has it, loop by loop and with sorting, in float as theirs is in tensors of T.
std::vector<std::uint32_t> plain_rule(const Case& c, float& t) {
  std::vector<float> u = c.u;
  for (std::size_t i = 0; i < c.addend.size(); ++i) u[i] += c.addend[i];
  const std::size_t d = u.size(), k = std::size_t(std::ceil(c.density * double(d)));
  const SampleGeometry g = sample_geometry(d, c.density, dgc_sampled_options(c.options).sample_ratio);
  std::vector<float> samples;
  const CounterRng rng(c.options.seed, RngUse::compress, std::uint32_t(c.step), std::uint32_t(c.rank));
  std::size_t start = 0;
  if (g.stride > 1) start = rng.below(c.position, std::uint32_t(g.stride));
  for (std::size_t i = start; i < d; i += g.stride) samples.push_back(std::abs(u[i]));
  std::sort(samples.begin(), samples.end(), std::greater<>());
  t = samples[g.top_samples - 1];
  std::vector<std::uint32_t> chosen;
  const auto choose = [&] {
    chosen.clear();
    for (std::uint32_t i = 0; i < d; ++i)
      if (std::abs(u[i]) >= t) chosen.push_back(i);
  };
  choose();
  for (int loop = 0; loop < 10 && d > g.samples; ++loop) {
    const double n = double(chosen.size());
    if (n > 1.3 * double(k)) {
      if (dgc_sampled_options(c.options).resample) return plain_topk(u, k);
      t *= float(1.3);
    } else if (n < 0.8 * double(k)) {
      t *= float(0.8);
    } else {
      break;
    }
    choose();
  }
  if (chosen.size() > k) {
    if (!dgc_sampled_options(c.options).lowest) return plain_topk(u, k);
    chosen.resize(k);
  }
  return chosen;
}

}  // namespace

TEST_CASE("the sample's geometry is that of the authors' code") {
  // numel -> stride, samples, top samples, selected
  const auto check = [](double density, std::size_t numel, SampleGeometry expected) {
    INFO(numel << " elements at density " << density);
    const SampleGeometry g = sample_geometry(numel, density, 0.01);
    CHECK(g.stride == expected.stride);
    CHECK(g.samples == expected.samples);
    CHECK(g.top_samples == expected.top_samples);
    CHECK(g.selects == expected.selects);
  };
  check(.001, 100, {1, 100, 1, 1});
  check(.001, 2000, {1, 2000, 2, 2});
  check(.001, 2001, {1, 2001, 3, 3});
  check(.001, 9408, {1, 9408, 10, 10});
  check(.001, 36864, {17, 2168, 3, 37});
  check(.001, 147456, {73, 2019, 3, 148});
  check(.001, 589824, {97, 6080, 7, 590});
  check(.001, 1048576, {97, 10810, 11, 1049});
  check(.001, 2048000, {97, 21113, 22, 2048});
  check(.001, 2359296, {97, 24322, 25, 2360});
  check(.001, 16777216, {97, 172960, 173, 16778});
  check(.001, 102760448, {97, 1059386, 1060, 102761});
  check(.25, 100, {9, 11, 3, 25});
  check(.25, 9408, {97, 96, 24, 2352});
  check(.25, 36864, {97, 380, 95, 9216});
  check(.015625, 2304, {17, 135, 3, 36});
  check(.015625, 9216, {65, 141, 3, 144});
  check(.015625, 36864, {97, 380, 6, 576});
  check(.00390625, 9216, {17, 542, 3, 36});
  check(.00390625, 36864, {65, 567, 3, 144});
  // The smallest there are, and a sample of everything.
  check(.001, 1, {1, 1, 1, 1});
  check(1, 3, {1, 3, 3, 3});
  CHECK(sample_geometry(100000, 0.001, 1).samples == 100000);
}

TEST_CASE("the selection asks for ceil(density * d) entries") {
  const auto target = [](double density, std::size_t d) {
    return selectors().find("dgc_sampled").traits.target(density, d, {});
  };
  CHECK(target(0.001, 432) == 1);
  CHECK(target(0.001, 2001) == 3);
  CHECK(target(0.25, 4) == 1);
  CHECK(target(0.3, 10) == 3);
  CHECK(target(1.0, 7) == 7);
}

TEST_CASE("selection, values and threshold are those of the plain rule, for all options") {
  Case c;
  c.options.set("resample", GENERATE(true, false));
  c.options.set("truncate", GENERATE(as<std::string>{}, "lowest", "largest"));
  c.options.set("sample_ratio", GENERATE(0.01, 0.1, 1.0));
  std::size_t full = 0, fewer = 0;
  for (std::uint32_t draw = 0; draw < 6; ++draw)
    for (const std::size_t d : {20011u, 1000u, 300u})
      for (const double density : {0.001, 0.01, 0.2}) {
        c.u = normal_vector(draw, d);
        c.addend.clear();
        if (draw % 2) c.addend = normal_vector(draw + 100, d);
        if (draw % 3 == 1)  // far too many, or far too few, exceed what the sample says
          for (std::size_t i = 0; i < d; ++i) c.u[i] = std::pow(c.u[i], 9.0f);
        c.density = density;
        c.step = draw;
        c.rank = int(draw % 4);
        c.position = 7 * draw;
        INFO("d " << d << ", density " << density << ", draw " << draw);
        float t{};
        const std::vector<std::uint32_t> expected = plain_rule(c, t);
        std::vector<float> sum;
        const Selection selected = c.select(&sum);
        REQUIRE(selected.finite);
        REQUIRE(selected.indices == expected);
        REQUIRE(selected.indices.size() <= std::size_t(std::ceil(density * d)));
        for (std::size_t i = 0; i < d; ++i) REQUIRE(sum[i] == c.u[i] + (c.addend.empty() ? 0 : c.addend[i]));
        for (std::size_t i = 0; i < selected.indices.size(); ++i)
          REQUIRE(selected.values[i] == sum[selected.indices[i]]);
        for (const float v : selected.values) REQUIRE(std::abs(double(v)) >= selected.threshold);
        (selected.indices.size() == std::ceil(density * d) ? full : fewer) += 1;
      }
  CHECK(full > 10);  // the cases cover both ends
  if (dgc_sampled_options(c.options).sample_ratio < 1) CHECK(fewer > 5);
}

TEST_CASE("after ten changes of the threshold the first k are sent, however many reach it") {
  Case c;
  c.density = 0.001;
  const std::size_t d = 36864, k = 37;
  const SampleGeometry geometry = sample_geometry(d, c.density, dgc_sampled_options(c.options).sample_ratio);
  const CounterRng rng(c.options.seed, RngUse::compress, 0, 0);
  const std::size_t start = rng.below(0, std::uint32_t(geometry.stride));
  // The sample sees only ones; 0.8^10 < 0.12 < 0.8^9, and twice as many of those as may be sent.
  c.u.assign(d, 0.0f);
  for (std::size_t i = 0; i < 2 * k; ++i) c.u[start + i * geometry.stride + 1] = 0.12f + 0.0001f * float(i);
  for (std::size_t i = 0; i < geometry.top_samples; ++i)
    c.u[start + (d / geometry.stride - 1 - i) * geometry.stride] = 1.0f;
  float t = 0;
  const std::vector<std::uint32_t> expected = plain_rule(c, t);
  REQUIRE(t < 0.12f);
  REQUIRE(expected.size() == k);
  REQUIRE(expected != plain_topk(c.u, k));
  CHECK(c.select().indices == expected);
}

TEST_CASE("the sample's start follows step, rank and position, and nothing else") {
  Case c;
  c.u = normal_vector(1, 50000);
  const Selection first = c.select();
  CHECK(c.select().indices == first.indices);
  const auto differs = [&](const std::function<void(Case&, int)>& change) {
    bool any = false;
    for (int i = 1; i < 20; ++i) {  // where the selection ends exact, the start does not show
      Case other = c;
      change(other, i);
      any |= other.select().threshold != first.threshold;
    }
    return any;
  };
  CHECK(differs([](Case& x, int i) { x.step = i; }));
  CHECK(differs([](Case& x, int i) { x.rank = i; }));
  CHECK(differs([](Case& x, int i) { x.position = std::size_t(1000 * i); }));
  CHECK(differs([](Case& x, int i) { x.options.seed = std::uint64_t(i); }));
}

TEST_CASE("a few entries among zeros all are sent, wherever they stand") {
  Case c;
  c.options.set("resample", GENERATE(true, false));
  c.u.assign(100000, 0);
  const std::vector<std::uint32_t> at = {5, 50001, 99990, 99999};
  for (const std::uint32_t i : at) c.u[i] = -1e-20f;
  const Selection selected = c.select();
  for (const std::uint32_t i : at)
    CHECK(std::binary_search(selected.indices.begin(), selected.indices.end(), i));
}

TEST_CASE("dgc_sampled validates its options") {
  for (const char* key : {"truncate=middle", "sample_ratio=0"})
    CHECK_THROWS_AS(make_selector("dgc_sampled", named("dgc_sampled", {key})), UserError);
}

TEST_CASE("the sampled threshold is the least of the sample where nearly all of it counts") {
  for (int step = 0; step < 20; ++step) {
    Case c{normal_vector(7, 1000), {}, {}, 0.99, step};
    float t = 0;
    CHECK(c.select().indices == plain_rule(c, t));
  }
}

TEST_CASE("the sampled selection keeps its threshold where just k entries reach it") {
  // 50 entries of 2 at every 9th position: whoever samples these falls from 2 to 1.6, which 100 reach.
  Case c;
  c.u.assign(10000, 0.1f);
  for (std::size_t i = 0; i < 50; ++i) c.u[9 * i] = 2.0f, c.u[9000 + i] = 1.7f;
  c.options = named("dgc_sampled", {"sample_ratio=0.1", "truncate=largest"});
  REQUIRE(sample_geometry(10000, 0.01, 0.1).stride == 9);
  int met = 0;
  for (c.step = 0; c.step < 60; ++c.step) {
    const Selection selected = c.select();
    if (selected.indices.size() != 100 || selected.indices[1] != 9) continue;
    met += selected.threshold == double(2.0f * 0.8f);
  }
  CHECK(met > 0);
}

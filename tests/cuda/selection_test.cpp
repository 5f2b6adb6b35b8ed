// Every selection on a GPU is the CPU's, entry by entry, over steps that are committed, refused and replayed;
// so is the state that it saves. Then what topk, DGC's sample and RegTop-k each carry from step to step. Over
// the emulator tanh is the CPU's; a GPU's may differ in the last bit of a double, which these data do not
// show.
#include "compress/select/dgc_rule.h"
#include "compress/select/passes/passes.h"
#include "nn/core/cuda/trial.h"
#include "tests/cuda/selectors.h"

namespace topknot::testing {
namespace {

struct Method {
  std::string name;
  CompressOptions options;
  double density;
  std::string trial = {};  // of the selectors that are made next
  std::string str() const { return name + trial + ", capacity " + std::to_string(options.capacity); }
};

std::vector<Method> methods() {
  std::vector<Method> all{{"topk", {}, 0.25}, {"topk", {}, 0.25, "topk=one block"}};
  const auto add = [&](const std::string& name, double density, const auto& set) {
    CompressOptions options;
    options.seed = 0x123456789abcull;
    set(options);
    all.push_back({name, options, density});
  };
  for (const double capacity : {0.0, 1.0, 2.5})
    add("threshold", 0.02, [&](CompressOptions& o) {
      o.set("threshold", 0.7);
      o.capacity = capacity;
    });
  for (const double capacity : {0.0, 1.0, 1.5, 4.0})
    add("gaussiank", 0.02, [&](CompressOptions& o) { o.capacity = capacity; });
  for (const auto& [resample, truncate, ratio] :
       std::vector<std::tuple<bool, std::string, double>>{{true, "lowest", 0.01},
                                                          {true, "largest", 0.01},
                                                          {false, "lowest", 0.01},
                                                          {false, "largest", 0.01},
                                                          {true, "lowest", 1.0}})  // a sample of everything
    add("dgc_sampled", 0.2, [&, resample = resample, truncate = truncate, ratio = ratio](CompressOptions& o) {
      o.set("resample", resample);
      o.set("truncate", truncate);
      o.set("sample_ratio", ratio);
    });
  for (const auto& [mu, variant, q] : std::vector<std::tuple<double, std::string, double>>{
           {4, "A", 1e8}, {0.5, "B", 1e8}, {1, "A", 0.3}, {20, "B", 1e-3}})
    add("regtopk", 0.1, [&, mu = mu, variant = variant, q = q](CompressOptions& o) {
      o.set("mu", mu);
      o.set("variant", variant);
      o.set("q", q);
    });
  return all;
}

TEST_CASE("selections on a GPU are the CPU's with error feedback, of any gradient, length and density") {
  const OnGpu gpu;
  std::size_t fewer = 0, full = 0;
  for (const Method& method : methods())
    for (const std::size_t n : {1u, 2u, 3u, 31u, 257u, 2048u, 4097u}) {
      cuda::Trial::force(method.trial);
      SelectPair pair(method.name, method.options, n);
      pair.set_density(method.density);
      for (std::uint32_t t = 0; t < 26; ++t) {
        INFO(method.str() << ", " << n << " elements, step " << t);
        const int kind = t % 2 ? int(t / 2) % kGradients : 0;
        const double density = method.density / (t % 5 == 4 ? 8 : t % 5 == 3 ? 100 : 1);
        const Selection selected = pair.step(gradient_of_kind(kind, n, t), density, t % 7 != 3);
        CHECK(selected.finite == (kind < kFiniteGradients));
        if (method.name == "dgc_sampled" && selected.finite)
          (selected.indices.size() < dgc::selected_count(density, n) ? fewer : full) += 1;
      }
    }
  CHECK(full > 10);  // the cases cover both ends
  CHECK(fewer > 5);
}

TEST_CASE("selections on a GPU follow densities that change, and a density of 1") {
  const OnGpu gpu;
  const std::size_t n = 4500;
  for (const Method& method : methods()) {
    cuda::Trial::force(method.trial);
    SelectPair pair(method.name, method.options, n);
    std::uint32_t t = 0;
    const auto steps = [&](double density) {
      for (int i = 0; i < 3; ++i, ++t) {
        INFO(method.str() << ", density " << density << ", step " << t);
        const std::size_t count =
            pair.step(gradient_of_kind(t % 4 == 3 ? 2 : 0, n, t), density, t % 5 != 2).indices.size();
        if (density == 1 && method.name == "topk") CHECK(count == n);  // zeros too
      }
    };
    for (const double density : {1.0, 0.25, 1.0, 0.05, 0.01}) {
      pair.set_density(density);
      steps(density);
    }
    for (const double density : {0.001, 0.0001, 0.01}) steps(density);  // less than what memory was made for
  }
}

TEST_CASE("selections on a GPU find their entries where too many exceed the last bound, in any order") {
  const auto order = GENERATE(from_range(orders()))();
  const OnGpu gpu;
  const std::size_t n = 16400;  // more than a list holds, and five tiles
  const double density = 0.001;
  for (const Method& method : methods()) {
    cuda::Trial::force(method.trial);
    SelectPair pair(method.name, method.options, n);
    pair.set_density(density);
    for (std::uint32_t t = 0; t < 7; ++t) {
      INFO(method.str() << ", step " << t);
      std::vector<float> u = gradient_of_kind(0, n, t);
      if (t == 0) u.assign(n, 0.0f), u[n / 2] = u[n - 1] = -1e-20f;  // fewer than k among zeros
      if (t >= 3)
        for (float& x : u) x *= 1000;
      const std::size_t count = pair.step(u, density, t != 4).indices.size();
      if (method.name == "threshold" && method.options.capacity == 0 && t >= 3)
        CHECK(count > list_limit(target_count(density, n)));  // so the others' lists are too short too
    }
  }
}

TEST_CASE("a NaN or an Inf anywhere, or a sum beyond float, selects nothing on a GPU and leaves no trace") {
  const OnGpu gpu;
  using Limits = std::numeric_limits<float>;
  for (const Method& method : methods())
    for (const std::size_t n : {1u, 50u, 9000u}) {
      cuda::Trial::force(method.trial);
      BothSelectors both(method.name, method.options, n);
      std::uint32_t step = 0;
      const auto select = [&](const std::vector<float>& u, const std::vector<float>& addend, bool finite) {
        INFO(method.str() << ", " << n << " elements, step " << step);
        both.select(gpu.stream(), u, addend, {step % 2 ? 1.0 : 0.01, step});
        CHECK(both.expected.finite == finite);
        both.commit(gpu.stream(), !finite, 1, 2, step++);
      };
      // A tile has 4096.
      for (const auto& [bad, at] : {std::pair<float, std::size_t>{Limits::quiet_NaN(), 0},
                                    {-Limits::quiet_NaN(), 4095 % n},
                                    {Limits::infinity(), 4096 % n},
                                    {-Limits::infinity(), n - 1},
                                    {Limits::quiet_NaN(), n / 2}}) {
        const std::vector<float> good = noise(n, step);
        std::vector<float> spoilt = good;
        spoilt[at] = bad;
        select(spoilt, {}, false);
        select(good, spoilt, false);
        select(good, {}, true);
      }
      const std::vector<float> largest(n, Limits::max());
      select(largest, largest, false);  // finite in both, not in the sum
      select(noise(n, 5), {}, true);
    }
}

TEST_CASE("selections that were captured once are replayed with other numbers, in any order of blocks") {
  const auto order = GENERATE(from_range(orders()))();
  const OnGpu gpu;
  const std::size_t n = 5000;
  for (const Method& method : methods()) {
    cuda::Trial::force(method.trial);
    SelectPair pair(method.name, method.options, n, true);
    pair.set_density(method.density);
    for (std::uint32_t t = 0; t < 14; ++t) {
      INFO(method.str() << ", step " << t);
      pair.step(gradient_of_kind(t % 3 == 2 ? int(t) % kGradients : 0, n, t),
                method.density / (t % 4 == 3 ? 10 : 1), t % 5 != 2);
    }
  }
}

TEST_CASE("topk on a GPU carries the CPU's bound and gets along with the list in steady state") {
  const OnGpu gpu(cuda::Precision::fp32, false);
  cuda::Trial::force(GENERATE("topk=many blocks", "topk=one block", ""));  // a trial has a bound of its own
  const std::size_t n = 20000;
  SelectPair pair("topk", {}, n);
  pair.set_density(0.01);
  int good_lists = 0, long_lists = 0;
  for (std::uint32_t t = 0; t < 40; ++t) {
    std::vector<float> u = gradient_of_kind(t == 30 ? 7 : t == 31 ? kNaN : 0, n, t);
    if (t >= 15 && t < 20)  // more above the bound than the list holds
      for (float& x : u) x *= 1e4f;
    if (t >= 36) {  // just k above the bound
      for (std::size_t i = 0; i < n; ++i) u[i] = i % 100 == 0 ? 10.0f : 0.0f;
      pair.clear_residual();
    }
    INFO("step " << t);
    const Selection selected = pair.step(u, 0.01, t % 6 != 5);
    const cuda::DeviceDiagnostics now = pair.both().gpu->diagnostics(0);
    const SelectDiagnostics cpu = pair.both().cpu->diagnostics();
    CHECK(now.carried.kth == cpu.carried.kth);
    CHECK(now.carried.margin == cpu.carried.margin);
    if (!selected.finite) continue;
    CHECK((now.list == ListState::good) == !cpu.exact);
    CHECK(to_host(pair.both().memory.ranges().choices, 1)[0].whole == cpu.exact);
    good_lists += now.list == ListState::good;
    long_lists += now.list == ListState::too_many;
  }
  CHECK(good_lists > 20);
  CHECK(long_lists > 0);
}

// Tiles with more entries than slots, and lists that have no room for all that must be looked at.
TEST_CASE("topk by one block is the CPU's, whatever its tiles hold") {
  const auto order = GENERATE(from_range(orders()))();
  const bool graph = GENERATE(false, true);
  const OnGpu gpu;
  cuda::Trial::force("topk=one block");
  for (const std::size_t n : {4095u, 4097u, 100'003u}) {
    SelectPair pair("topk", {}, n, graph);
    pair.set_density(0.01);
    const cuda::SelectRange& range = pair.both().range;
    int full = 0, incomplete = 0;
    for (std::uint32_t t = 0; t < 2 * kGradients; ++t) {
      const int kind = t % 2 ? int(t / 2) : 0;
      INFO(n << " elements, step " << t << ", gradient " << kind);
      if (t % 4 == 3) pair.clear_residual();
      pair.step(gradient_of_kind(kind, n, t), 0.01 / (t % 5 == 4 ? 10 : t % 5 == 3 ? 1e5 : 1), t % 7 != 4);
      const std::uint32_t listed = to_host(range.list.stats, 1)[0].count;
      incomplete += listed > range.list.limit && kind < kNaN;
      for (const std::uint32_t count : to_host(range.tiles.counts, (n + 4095) / 4096))
        full += count > range.tiles.slots && listed <= range.list.limit && kind < kNaN;
    }
    CHECK(full > 0);
    CHECK((incomplete > 0) == (n > 4097));
  }
}

TEST_CASE("topk finds the k-th among thousands of equal magnitudes, and far beyond the last bound") {
  const OnGpu gpu;
  cuda::Trial::force(GENERATE("topk=many blocks", "topk=one block"));
  const std::size_t n = 40'000;
  SelectPair pair("topk", {}, n);
  pair.set_density(0.05);  // 2000
  std::vector<float> u(n);
  for (std::uint32_t t = 0; t < 12; ++t) {
    for (std::size_t i = 0; i < n; ++i) {
      const bool large = (i * 7919 + t) % 16 == 0;  // 2500
      u[i] = !large ? 1e-3f : t % 3 == 0 ? -1.0f : t % 3 == 1 ? 1.0f + 1e-4f * float(i % 3) : 1e6f;
      if (t % 3 == 2 && large) u[i] += float(i % 977);
    }
    pair.clear_residual();
    INFO("step " << t);
    CHECK(pair.step(u, 0.05).indices.size() == 2000);
  }
}

TEST_CASE("a step that takes everything teaches topk on a GPU no bound") {
  const OnGpu gpu;
  cuda::Trial::force(GENERATE("topk=many blocks", "topk=one block"));
  SelectPair pair("topk", {}, 300);
  pair.set_density(1.0);
  pair.step(gradient_of_kind(0, 300, 1), 1.0);
  CHECK(pair.both().gpu->diagnostics(0).carried.kth == -1);
}

CompressOptions dgc_options(bool resample, const std::string& truncate, double ratio = 0.01) {
  CompressOptions options;
  options.set("resample", resample);
  options.set("truncate", truncate);
  options.set("sample_ratio", ratio);
  options.seed = 0x123456789abcull;
  return options;
}

TEST_CASE("after ten changes of the threshold the GPU, too, sends the first k") {
  const OnGpu gpu;
  const double density = 0.001;
  const std::size_t n = 18432, k = 19;
  const SampleGeometry geometry = dgc::geometry_of(n, density, 0.01);
  const CompressOptions options = dgc_options(GENERATE(true, false), "lowest");
  // The sample sees only ones; 0.8^10 < 0.12 < 0.8^9, and twice as many of those as may be sent. Then a
  // sample of little, so that the threshold rises and falls again.
  const CounterRng rng(options.seed, RngUse::compress, 0, 0);
  const std::size_t start = rng.below(0, std::uint32_t(geometry.stride));
  std::vector<float> u(n, 0);
  for (std::size_t i = 0; i < 2 * k; ++i) u[start + i * geometry.stride + 1] = 0.12f + 0.0001f * float(i);
  for (std::size_t i = 0; i < geometry.top_samples; ++i)
    u[start + (n / geometry.stride - 1 - i) * geometry.stride] = 1;
  BothSelectors both("dgc_sampled", options, n, 0, density);
  const Asked asked{density};
  both.select(gpu.stream(), u, {}, asked);
  CHECK(both.expected.indices.size() == k);
  CHECK(both.expected.threshold < 0.12);
  for (std::size_t i = 0; i < geometry.top_samples; ++i)
    u[start + (n / geometry.stride - 1 - i) * geometry.stride] = 0.0900f;
  both.select(gpu.stream(), u, {}, asked);
  for (std::size_t i = 0; i < n; i += 2)
    if (u[i] == 0) u[i] = 0.05f;
  both.select(gpu.stream(), u, {}, asked);
  u.assign(n, 0.5f);
  for (std::size_t i = 0; i < n; i += 3) u[i] = 0.52f;
  both.select(gpu.stream(), u, {}, asked);
}

TEST_CASE("the sample sees what momentum makes of the gradient") {
  const OnGpu gpu;
  const std::size_t n = 20000;
  const bool nesterov = GENERATE(false, true);
  BothSelectors both("dgc_sampled", dgc_options(true, "lowest"), n, 0, 0.001);
  const std::vector<float> g = noise(n, 1), r = noise(n, 2), v = noise(n, 3, 3);
  std::vector<float> u(n), next(n);
  for (std::size_t i = 0; i < n; ++i) {
    next[i] = nesterov ? 0.9f * (v[i] + g[i]) : 0.9f * v[i] + g[i];
    u[i] = r[i] + (nesterov ? next[i] + g[i] : next[i]);
  }
  DeviceVector<float> velocity(v), next_velocity(n);
  const Asked asked{0.001};
  both.set_inputs(g, r, asked);
  cuda::Accumulate accumulate;
  accumulate.u = both.u.data();
  accumulate.residual = both.residual.data();
  accumulate.velocity = velocity.data();
  accumulate.next_velocity = next_velocity.data();
  accumulate.momentum = 0.9f;
  accumulate.nesterov = nesterov;
  both.gpu->select(gpu.stream(), both.memory.ranges(), accumulate, both.parameters.data());
  both.compare(u, {}, asked);
  CHECK(same_bits(next_velocity.host(), next));
  CHECK(same_bits(velocity.host(), v));
}

TEST_CASE("the GPU, too, keeps the sampled threshold where just k entries reach it") {
  const OnGpu gpu;
  // 50 entries of 2 at every 9th position: whoever samples these falls from 2 to 1.6, which 100 reach.
  std::vector<float> u(10000, 0.1f);
  for (std::size_t i = 0; i < 50; ++i) u[9 * i] = 2.0f, u[9000 + i] = 1.7f;
  BothSelectors both("dgc_sampled", dgc_options(true, "largest", 0.1), u.size(), 0, 0.01);
  int met = 0;
  for (std::int64_t step = 0; step < 60; ++step) {
    both.select(gpu.stream(), u, {}, {0.01, step});
    met += both.expected.threshold == double(2.0f * 0.8f);
  }
  CHECK(met > 0);
}

// A gradient that moves slowly, so that the carried bound holds now and then.
std::vector<float> drifting(std::size_t n, std::uint32_t step) {
  std::vector<float> x = noise(n, 1, 2);
  const std::vector<float> change = noise(n, 100 + step);
  for (std::size_t i = 0; i < n; ++i) x[i] += 0.2f * change[i];
  return x;
}

TEST_CASE("RegTop-k on the GPU lists what a common factor below 1 lets rise above the bound") {
  const OnGpu gpu;
  const CompressOptions options = regtopk_options(1, "A", 0.3);  // tanh(1.3) is 0.86
  BothSelectors both("regtopk", options, 200, 0, 0.01);
  std::vector<float> u(200, 0.01f), average(200);
  u[3] = 1, u[50] = 0.9f;
  both.select(gpu.stream(), u, {}, {0.01});
  REQUIRE(both.expected.indices == std::vector<std::uint32_t>{3, 50});
  average[3] = 50, average[50] = 0.9f;  // entry 3 survived many times over, entry 50 just so
  both.set_outcome(false, both.expected.values, average, 1, 1);
  both.put_commit(gpu.stream(), 1);
  both.commit_cpu(false);
  u[3] = 0.88f;  // below the bound of 0.98 * 0.9; its score is 1.02
  u[50] = 0.95f, u[60] = 0.93f, u[70] = 0.9f;
  both.select(gpu.stream(), u, {}, {0.01});
  CHECK(both.expected.indices == std::vector<std::uint32_t>{3, 60});
}

TEST_CASE("RegTop-k on the GPU keeps its last entries where a higher density needs more room") {
  const OnGpu gpu;
  const std::size_t n = 3000;
  BothSelectors both("regtopk", regtopk_options(), n, 0, 0.01);
  std::uint32_t step = 0;
  for (const double density : {0.01, 0.01, 0.1, 0.1}) {
    both.set_density(density);
    both.select(gpu.stream(), drifting(n, step), {}, {density, step});
    both.commit(gpu.stream(), false, 1, 2, step);
    ++step;
  }
}

TEST_CASE("RegTop-k saved on either device goes on on the other") {
  const OnGpu gpu;
  const std::size_t n = 2000;
  BothSelectors first("regtopk", regtopk_options(1), n, 0, 0.05);
  for (std::uint32_t step = 0; step < 3; ++step) {
    first.select(gpu.stream(), drifting(n, step), {}, {0.05, step});
    first.commit(gpu.stream(), false, 1, 2, step);
  }
  const std::vector<std::byte> of_gpu = saved(*first.gpu), of_cpu = saved(*first.cpu);
  BothSelectors second("regtopk", regtopk_options(1), n, 0, 0.01);  // room for fewer than were sent
  StateReader to_cpu(of_gpu), to_gpu(of_cpu);
  second.cpu->load(to_cpu);
  second.gpu->load(to_gpu);
  CHECK(saved(*second.gpu) == of_gpu);
  for (std::uint32_t step = 3; step < 6; ++step) {
    second.select(gpu.stream(), drifting(n, step), {}, {0.01, step});
    second.commit(gpu.stream(), false, 1, 2, step);
  }
}

TEST_CASE("states of RegTop-k that name wrong entries, and options out of range, are refused by the GPU") {
  const OnGpu gpu;
  const auto load = [&](const std::vector<std::uint32_t>& indices) {
    StateWriter writer;
    writer.put_list(indices);
    writer.put_list(std::vector<double>(indices.size()));
    writer.put_list(std::vector<double>(indices.size()));
    writer.put(1.0);
    const std::vector<std::byte> bytes = writer.take();
    StateReader reader(bytes);
    cuda::make_device_selector("regtopk", regtopk_options(), {{0, 10}})->load(reader);
  };
  load({1, 9});
  CHECK_THROWS_AS(load({9, 1}), Error);
  CHECK_THROWS_AS(load({1, 10}), Error);
  CHECK_THROWS_AS(cuda::make_device_selector("regtopk", regtopk_options(-1), {{0, 10}}), UserError);
  CHECK_THROWS_AS(cuda::make_device_selector("dgc_sampled", dgc_options(true, "middle"), {{0, 10}}),
                  UserError);
}

}  // namespace
}  // namespace topknot::testing

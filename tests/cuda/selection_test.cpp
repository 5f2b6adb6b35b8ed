// Every selection on a GPU is the CPU's, entry by entry, over steps that are committed, refused and replayed; so is the
// state that it saves. Over the emulator tanh is the CPU's; a GPU's may differ in the last bit of a double, which these
// data do not show.
#include "compress/select/dgc_rule.h"
#include "tests/cuda/selectors.h"

namespace topknot::testing {
namespace {

struct Method {
  std::string name;
  CompressOptions options;
  double density;
  std::string str() const { return name + ", capacity " + std::to_string(options.capacity); }
};

std::vector<Method> methods() {
  std::vector<Method> all{{"topk", {}, 0.25}};
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

TEST_CASE(
    "selections on a GPU are the CPU's over steps of error feedback, of any gradient, length and density") {
  const OnGpu gpu;
  std::size_t fewer = 0, full = 0;
  for (const Method& method : methods())
    for (const std::size_t n : {1u, 2u, 3u, 31u, 257u, 2048u, 4097u}) {
      SelectPair pair(method.name, method.options, n);
      pair.set_density(method.density);
      for (std::uint32_t t = 0; t < 26; ++t) {
        INFO(method.str() << ", " << n << " elements, step " << t);
        const int kind = t % 2 ? static_cast<int>(t / 2) % kGradients : 0;
        const double density = method.density / (t % 5 == 4 ? 8 : t % 5 == 3 ? 100 : 1);
        const Selection selected = pair.step(gradient_of(kind, n, t), density, t % 7 != 3);
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
    SelectPair pair(method.name, method.options, n);
    std::uint32_t t = 0;
    const auto steps = [&](double density) {
      for (int i = 0; i < 3; ++i, ++t) {
        INFO(method.str() << ", density " << density << ", step " << t);
        const std::size_t count =
            pair.step(gradient_of(t % 4 == 3 ? 2 : 0, n, t), density, t % 5 != 2).indices.size();
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

TEST_CASE("selections that were captured once are replayed with other numbers") {
  const OnGpu gpu;
  const std::size_t n = 5000;
  for (const Method& method : methods()) {
    SelectPair pair(method.name, method.options, n, true);
    pair.set_density(method.density);
    for (std::uint32_t t = 0; t < 14; ++t) {
      INFO(method.str() << ", step " << t);
      pair.step(gradient_of(t % 3 == 2 ? static_cast<int>(t) % kGradients : 0, n, t),
                method.density / (t % 4 == 3 ? 10 : 1), t % 5 != 2);
    }
  }
}

TEST_CASE("gaussiank on a GPU has room for what compress.capacity lets through") {
  const OnGpu gpu;
  for (const double capacity : {0.0, 1.0, 1.5, 4.0}) {
    CompressOptions options;
    options.capacity = capacity;
    SelectPair pair("gaussiank", options, 9000);
    pair.set_density(0.01);
    CHECK(pair.capacity() == (capacity == 0 ? 9000 : static_cast<std::size_t>(90 * capacity)));
  }
}

}  // namespace
}  // namespace topknot::testing

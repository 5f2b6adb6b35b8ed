// The pieces of selection on a GPU, against their definitions and against the CPU's numbers.
#include <bit>

#include "compress/memory/accumulate.h"
#include "compress/select/passes/keys.h"
#include "tests/cuda/selectors.h"

namespace topknot::testing {
namespace {

using cuda::Accumulate;
using cuda::Choice;

// Elements behind a start that is `shift` elements off.
struct Shifted {
  Shifted(const std::vector<float>& values, std::size_t off) : shift(off) {
    std::vector<float> padded(off, -1e30f);
    padded.insert(padded.end(), values.begin(), values.end());
    memory = DeviceVector<float>(padded);
  }
  float* data() const { return memory.data() + shift; }
  std::vector<float> host() const {
    const std::vector<float> padded = memory.host();
    return {padded.begin() + std::ptrdiff_t(shift), padded.end()};
  }
  std::size_t shift;
  DeviceVector<float> memory;
};
template <class T>
DeviceVector<T> word(const T& value) {
  return DeviceVector<T>(std::vector<T>{value});
}

const std::vector<std::size_t> kSizes = {1, 2, 31, 255, 4095, 4096, 4097, 20000};

struct Listed {
  cuda::ListStats stats;
  std::vector<std::uint32_t> indices;
  std::vector<float> values;
};
// Makes u and lists what of it exceeds the bound.
void list_above(const OnGpu& gpu, const OneRange& one, const Accumulate& accumulate, MagnitudeKey above) {
  to_device(one.ranges().above, std::vector<MagnitudeKey>{above});
  cuda::accumulate_and_list(gpu.stream(), one.ranges(), accumulate);
}
void list_above(const OnGpu& gpu, const OneRange& one, float* u, MagnitudeKey above) {
  Accumulate plain;
  plain.u = u;
  list_above(gpu, one, plain, above);
}
Listed read(const OneRange& one) {
  const cuda::EntryList& list = one.range.list;
  Listed listed;
  listed.stats = to_host(list.stats, 1)[0];
  if (listed.stats.count > list.limit) return listed;
  listed.indices = to_host(list.indices, listed.stats.count);
  listed.values = to_host(list.values, listed.stats.count);
  return listed;
}

void check_list(const Listed& listed, const std::vector<float>& u, MagnitudeKey above, std::size_t limit) {
  std::vector<std::uint32_t> indices;
  std::vector<float> values;
  bool finite = true;
  for (std::uint32_t i = 0; i < u.size(); ++i) {
    if (key_of(u[i]) > above) indices.push_back(i), values.push_back(u[i]);
    finite &= std::isfinite(u[i]);
  }
  CHECK(listed.stats.count == indices.size());
  CHECK(listed.stats.finite == finite);
  if (indices.size() > limit) return;
  CHECK(listed.indices == indices);
  CHECK(same_bits(listed.values, values));
}

// By the definition of key_below().
std::int32_t below(double t) {
  if (t < 0) return -1;
  float x = float(t);
  if (double(x) > t) x = std::nextafter(x, 0.0f);
  return std::min(std::bit_cast<std::int32_t>(x),
                  std::bit_cast<std::int32_t>(std::numeric_limits<float>::max()));
}

TEST_CASE("keys, bounds and counts of kernels and CPU follow their definitions") {
  const double numbers[] = {-1,  0,        1e-46,  1e-45,  1e-40, 0.1,
                            0.5, 1 + 1e-9, 3.4e38, 3.5e38, 1e300, std::numeric_limits<double>::infinity()};
  for (const double t : numbers) CHECK(key_below(t) == below(t));
  for (const float x : {0.0f, -0.0f, 1e-45f, -2.5f, std::numeric_limits<float>::infinity()})
    CHECK(key_of(x) == std::bit_cast<std::int32_t>(std::abs(x)));
  for (const double density : {1e-9, 0.001, 0.01, 0.1, 0.3, 0.999999, 1.0})
    for (const std::size_t n : {std::size_t{1}, std::size_t{7}, std::size_t{1000}, std::size_t{123456789}}) {
      const double asked = density < 1 ? std::floor(density * double(n)) : double(n);
      CHECK(density_count(density, n) == std::size_t(std::max(1.0, asked)));
      CHECK(density_count(density, n) == target_count(density, n));
    }
  CarriedBound bound;
  double margin = bound.margin;
  float kth = -1;
  const CounterRng rng(3, RngUse::test);
  for (std::uint32_t step = 0; step < 200; ++step) {
    const auto largest = kLargestFinite;
    CHECK(bound.above(true) == largest);
    CHECK(bound.above(false) == (kth < 0 ? largest : std::min(largest, below((1.0 - margin) * double(kth)))));
    const float now =
        step % 50 == 49 ? 0.0f : std::abs(rng.normal(step)) * (step < 100 ? 1.0f : 1.0f + rng.uniform(step));
    const auto how = int(rng.below(500 + step, 5));
    const auto list = how > 2 ? ListState::good : static_cast<ListState>(how);
    bound = bound.after(key_of(now), list);
    if (kth > 0) {
      const double fall = 1.0 - double(now) / double(kth);
      const double wanted = list == ListState::good ? std::max(0.9 * margin, 3.0 * fall)
                                                    : margin * (list == ListState::too_many ? 0.5 : 2.0);
      margin = std::clamp(wanted, 0.004, 0.1);
    }
    kth = now;
    CHECK(bound.kth == key_of(now));
    CHECK(bound.margin == margin);
  }
}

TEST_CASE("a pass over a vector lists what exceeds a bound, in order") {
  const OnGpu gpu;
  for (const std::size_t n : kSizes)
    for (const std::size_t shift : {0u, 1u})
      for (const float t : {0.0f, 0.5f, 2.0f, 9.0f}) {
        INFO(n << " elements, shift " << shift << ", above " << t);
        std::vector<float> u = noise(n, std::uint32_t(n));
        if (n > 5000 && t > 1)  // a hot tile: more candidates than it has slots
          for (std::size_t i = 4096; i < 6000; ++i) u[i] += 100;
        const std::size_t limit = std::max<std::size_t>(1, n / 2);
        const OneRange one(n, limit, 1);
        const MagnitudeKey above = key_of(t);
        const Shifted on_gpu(u, shift);
        list_above(gpu, one, on_gpu.data(), above);
        check_list(read(one), u, above, limit);
        CHECK(on_gpu.host() == u);
      }
}

TEST_CASE("the pass that lists makes what the memory's formulas make, bit for bit") {
  const OnGpu gpu;
  StepParameters parameters;
  parameters.lr = 0.3;
  const DeviceVector<StepParameters> parameters_on_gpu = word(parameters);
  for (const std::size_t n : {std::size_t{1}, std::size_t{4095}, std::size_t{8192}, std::size_t{9001}})
    for (int form = 0; form < 8; ++form) {
      const std::size_t shift = n % 2 == 0 && form == 3 ? 2 : 0;
      const bool residual = form & 1, velocity = form & 2, nesterov = form & 4;
      INFO(n << " elements, form " << form);
      std::vector<float> u = noise(n, 1), r = noise(n, 2), v = noise(n, 3);
      const Shifted u_gpu(u, shift), r_gpu(r, shift), v_gpu(v, shift), next_gpu(std::vector<float>(n), shift);
      Accumulate a;
      a.momentum = 0.9f, a.nesterov = nesterov;
      Accumulate on_cpu = a;
      std::vector<float> next(n);
      on_cpu.u = u.data(), a.u = u_gpu.data();
      if (residual) on_cpu.residual = r.data(), a.residual = r_gpu.data();
      if (velocity) {
        on_cpu.velocity = v.data(), a.velocity = v_gpu.data();
        on_cpu.next_velocity = next.data(), a.next_velocity = next_gpu.data();
      }
      if (form % 3 == 0) on_cpu.times_lr = &parameters, a.times_lr = parameters_on_gpu.data();
      for (std::size_t i = 0; i < n; ++i) on_cpu(i);
      const OneRange one(n, n, 1);
      const MagnitudeKey above = key_of(1.5f);
      list_above(gpu, one, a, above);
      check_list(read(one), u, above, n);
      CHECK(same_bits(u_gpu.host(), u));
      CHECK(same_bits(next_gpu.host(), next));
    }
}

// What take_largest() takes of u, or of a list of what exceeds `above`.
std::vector<std::uint32_t> take(const OnGpu& gpu, const std::vector<float>& u, Choice choice,
                                MagnitudeKey above, std::size_t count, std::size_t slack = 3) {
  const OneRange one(u.size(), u.size(), count + slack);
  const DeviceVector<float> on_gpu(u);
  list_above(gpu, one, on_gpu.data(), above);
  to_device(one.ranges().choices, std::vector<Choice>{choice});
  cuda::take_largest(gpu.stream(), one.ranges(), on_gpu.data());
  auto taken = one.indices();
  auto taken_values = one.values();
  CHECK(std::vector(taken.end() - std::ptrdiff_t(slack), taken.end()) ==
        std::vector<std::uint32_t>(slack, 77));
  taken.resize(count), taken_values.resize(count);
  float least = std::numeric_limits<float>::infinity();
  std::vector<float> expected(count, -7);
  for (std::size_t i = 0; i < count && !choice.skip; ++i) {
    expected[i] = u.at(taken[i]);
    least = std::min(least, std::abs(expected[i]));
  }
  CHECK(same_bits(taken_values, expected));
  if (!choice.known && !choice.skip && count == choice.k) CHECK(one.stats().threshold == least);
  CHECK(to_host(one.range.largest.digits, cuda::kDigitCounts) ==
        std::vector<std::uint32_t>(cuda::kDigitCounts));
  return taken;
}

std::vector<float> vector_of(int kind, std::size_t n) {
  std::vector<float> u = noise(n, 9, 3);
  const CounterRng rng(5, RngUse::test);
  for (std::size_t i = 0; i < n; ++i) {
    if (kind == 1) u[i] = 0;
    if (kind == 2) u[i] = i % 3 ? 0.25f : -0.25f;
    if (kind == 3) u[i] = float(rng.below(i, 5)) - 2;
    if (kind == 4) u[i] *= 1e-42f;
    if (kind == 5) u[i] = std::copysign(3.4e38f, u[i]) * (i % 7 ? 1.0f : 0.5f);
    if (kind == 6 && i % 2) u[i] = -0.0f;
  }
  return u;
}

TEST_CASE("the k largest are the definition's, ties to the lower index") {
  const OnGpu gpu;
  for (const std::size_t n : kSizes)
    for (int kind = 0; kind < 7; ++kind) {
      if (n > 5000 && kind != 0 && kind != 3) continue;
      const std::vector<float> u = vector_of(kind, n);
      for (const std::size_t k : {std::size_t{1}, (n + 9) / 10, n}) {
        INFO(k << " of " << n << ", kind " << kind);
        const auto expected = plain_topk(u, k);
        Choice choice;
        choice.k = std::uint32_t(k);
        choice.whole = 1;
        CHECK(take(gpu, u, choice, kLargestFinite, k) == expected);
        choice.whole = 0;  // from a list that holds the k largest and more
        MagnitudeKey least = kLargestFinite;
        for (const std::uint32_t i : expected) least = std::min(least, key_of(u[i]));
        CHECK(take(gpu, u, choice, static_cast<MagnitudeKey>(least - 1 - least / 50), k) == expected);
      }
    }
}

TEST_CASE("all above a known bound are taken, as far as there is room, and nothing where nothing is wanted") {
  const OnGpu gpu;
  for (const std::size_t n : kSizes) {
    const std::vector<float> u = noise(n, 11);
    for (const double t : {-1.0, 0.0, 0.8, 100.0}) {
      const auto expected = t < 0 ? plain_topk(u, n) : positions_above(u, t);
      Choice choice;
      choice.known = 1, choice.bound = key_below(t);
      for (const std::uint32_t whole : {0u, 1u}) {
        choice.whole = whole;
        CHECK(take(gpu, u, choice, key_below(t / 2), expected.size()) == expected);
        const std::vector<std::uint32_t> first(expected.begin(),
                                               expected.begin() + std::ptrdiff_t(expected.size() / 2));
        CHECK(take(gpu, u, choice, key_below(t / 2), first.size(), 0) == first);
      }
    }
    Choice nothing;
    nothing.skip = 1, nothing.k = 1;
    CHECK(take(gpu, u, nothing, 0, 3) == std::vector<std::uint32_t>(3, 77));
  }
}

TEST_CASE("the k-th key and how many exceed it can be had alone, again and again") {
  const OnGpu gpu;
  const std::vector<float> u = vector_of(3, 9000);
  const DeviceVector<float> on_gpu(u);
  const OneRange one(u.size(), 1, 1);
  for (const std::uint32_t k : {1u, 3000u, 6500u, 9000u, 17u}) {
    Choice choice;
    choice.k = k, choice.whole = 1;
    const DeviceVector<Choice> choices = word(choice);
    cuda::find_kth(gpu.stream(), one.ranges(), nullptr, on_gpu.data(), choices.data());
    const Choice found = choices.host()[0];
    const auto largest = plain_topk(u, k);
    MagnitudeKey kth = kLargestFinite;
    for (const std::uint32_t i : largest) kth = std::min(kth, key_of(u[i]));
    CHECK(found.kth == kth);
    CHECK(found.greater == positions_above(u, magnitude_of(kth)).size());
  }
}

TEST_CASE("a capacity keeps the floor of its multiple of k, and says what it kept back") {
  Choice choice;
  std::uint32_t kept, over;
  cuda::choose_within(1.5, 7, 10, 5, choice, kept, over);
  CHECK((kept == 10 && over == 0 && choice.known == 1 && choice.bound == 5));
  cuda::choose_within(1.5, 7, 11, 5, choice, kept, over);
  CHECK((kept == 10 && over == 1 && choice.known == 0 && choice.k == 10));
  cuda::choose_within(0, 7, 1000, 5, choice, kept, over);
  CHECK((kept == 1000 && over == 0 && choice.known == 1 && choice.skip == 0));
  cuda::choose_within(0, 7, 0, 5, choice, kept, over);
  CHECK(choice.skip == 1);
}

}  // namespace
}  // namespace topknot::testing
